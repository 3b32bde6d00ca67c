"""Words that NeMo-RL's source compares the value of a key with, and those that its recipes use.

``config["generation"]["backend"] == "vllm"``, ``name in REGISTRY``, ``REGISTRY[name]``, a ``Literal`` and an ``Enum``
each tell words of a key. The set is closed if the source refuses all others: by a ``raise`` at the end of a chain of
comparisons, an ``assert``, or a look-up in a mapping that no function adds to.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from nemo_geomask.recipe.input_limits import parse_python, read_source

_GENERIC_KEYS = ("name", "type", "mode", "format", "backend")
"""Keys that say little without their section, so that only comparisons within a section of that name count."""
_ANY_SECTION = re.compile(r"(master_|data_|policy_|base_)?(config|cfg|self|kwargs|args|settings|s|c)s?")
_OTHER_MODULES = re.compile(r"/(dpo|rm|sft|distillation|run_eval|evals|eval_datasets|preference_datasets)\b")
"""Modules that train no policy loss, which have registries of their own under the same names."""
_SETTING = re.compile(r"""^[ \t-]*(\w+):[ \t]*["']?([A-Za-z][\w.:-]*)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)


class WordComparison(NamedTuple):
    """Words that one place of the source compares a key with."""

    section: str  # name of the section, or of the variable that holds it; empty if unknown
    key: str
    words: tuple[str, ...]
    is_closed: bool  # True if the source refuses other words


class _Key(NamedTuple):
    section: str
    name: str


@functools.cache
def source_texts(checkout: Path) -> Mapping[Path, str]:
    """Return the text of each module of NeMo-RL and of its start scripts."""
    files = (*(checkout / "nemo_rl").rglob("*.py"), *(checkout / "examples").rglob("*.py"))
    return {path: read_source(path) for path in sorted(files) if path.is_file()}


@functools.cache
def is_in_source(checkout: Path, text: str) -> bool:
    """Return True if a module of NeMo-RL contains a text."""
    return any(text in source for source in source_texts(checkout).values())


@functools.cache
def words_in_source(checkout: Path, section: str, key: str, algorithm: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the words that NeMo-RL compares a key with, and those that are all it accepts; empty if open.

    Args:
        checkout: folder of NeMo-RL's source.
        section: name of the section that the key is in, without those around it.
        key: name of the key.
        algorithm: ``grpo`` or ``ppo``, for which the trainers of others are left out; or another algorithm.
    """
    other = checkout / "nemo_rl/algorithms" / ("ppo.py" if algorithm == "grpo" else "grpo.py")
    trains_policy_loss = algorithm in ("grpo", "ppo")
    words: set[str] = set()
    accepted: set[str] = set()
    is_closed = False
    for path, text in source_texts(checkout).items():
        if key not in text or path == other or (key in _GENERIC_KEYS and section not in text):
            continue
        if trains_policy_loss and _OTHER_MODULES.search(path.relative_to(checkout).as_posix()):
            continue
        for comparison in _comparisons(checkout, path):
            has_own_name = key not in _GENERIC_KEYS and not comparison.section
            is_here = has_own_name or (comparison.section and _overlap(comparison.section, section))
            if comparison.key == key and (is_here or key not in _GENERIC_KEYS):
                words.update(comparison.words)
                accepted.update(comparison.words if is_here else ())
                is_closed = is_closed or bool(comparison.is_closed and is_here)
    # A section may be compared in several places, of which one refuses what belongs to another section of its name.
    return frozenset(words), frozenset(accepted if is_closed else ())


def _overlap(first: str, second: str) -> bool:
    first, second = first.replace("_", ""), second.replace("_", "")
    return first in second or second in first


@functools.cache
def words_in_recipes(checkout: Path) -> Mapping[str, frozenset[str]]:
    """Return the words that NeMo-RL's recipes set each key to, by the key's name alone."""
    words: dict[str, set[str]] = {}
    for path in (checkout / "examples").rglob("*.yaml"):
        for key, word in _SETTING.findall(read_source(path)):
            words.setdefault(key, set()).add(word)
    return {key: frozenset(values) for key, values in words.items()}


@functools.cache
def _comparisons(checkout: Path, path: Path) -> tuple[WordComparison, ...]:
    return tuple(_SourceModule(checkout, path).comparisons())


def _parsed(text: str) -> ast.Module:
    """Return the tree of a module; an empty one if Python can't parse it."""
    try:
        tree: ast.Module = parse_python(text)
    except (SyntaxError, RecursionError):
        tree = ast.Module([], [])
    return tree


@functools.cache
def _constant(checkout: Path, path: Path, name: str) -> tuple[tuple[str, ...], bool]:
    """Return the words of a constant or an ``Enum`` that a module uses, and True if no function adds to it."""
    definition = re.compile(rf"^ *(class )?{name}\b[^\n]*[=:]", re.MULTILINE)
    own_text = source_texts(checkout)[path]
    texts = [text for text in source_texts(checkout).values() if name in text]
    texts = [own_text] if definition.search(own_text) else texts
    trees = [_parsed(text) for text in texts if definition.search(text)]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    words = tuple(word for node in nodes for word in _words_of_definition(node, name))
    return words, not any(re.search(rf"\b{name}\[\w+\] =", text) for text in texts)


def _words_of_definition(node: ast.stmt, name: str) -> list[str]:
    if isinstance(node, ast.ClassDef) and node.name == name and any("Enum" in ast.unparse(base) for base in node.bases):
        assigned = [statement for statement in node.body if isinstance(statement, ast.Assign)]
        names = [target.id for statement in assigned for target in statement.targets if isinstance(target, ast.Name)]
        return [*names, *(word for statement in assigned for word in _literal_words(statement.value))]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    is_named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return _literal_words(node.value) if is_named else []  # type: ignore[attr-defined]


def _literal_words(node: ast.expr | None) -> list[str]:
    """Return the texts in a literal, and the keys of a mapping; of a call such as ``frozenset(…)``, its arguments'."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [word for item in node.elts for word in _literal_words(item)]
    if isinstance(node, ast.Dict):
        return [word for item in node.keys for word in _literal_words(item)]
    if isinstance(node, ast.Call):
        return [word for item in node.args if not isinstance(item, ast.Constant) for word in _literal_words(item)]
    return []


class _SourceModule:
    """Comparisons in one module."""

    def __init__(self, checkout: Path, path: Path) -> None:
        self.checkout, self.path = checkout, path
        self.tree = _parsed(source_texts(checkout)[path])
        # Of the function at hand: keys of its variables, variables of its loops, which read no key although they may be
        # named like one, its constants, and its class if that holds settings.
        self.keys: dict[str, _Key] = {}
        self.loops: set[str] = set()
        self.constants: dict[str, ast.expr] = {}
        self.owner = ""

    def comparisons(self) -> Iterator[WordComparison]:
        functions = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        classes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]
        owners: dict[ast.AST, str] = {
            item: each.name.lower() for each in classes if each.name.endswith("Config") for item in each.body
        }
        for function in (self.tree, *functions):
            nodes, self.owner = list(_own_nodes(function)), owners.get(function, "")
            self.keys, self.constants = {}, {}
            targets = [node.target for node in nodes if isinstance(node, ast.For | ast.comprehension)]
            self.loops = {part.id for each in targets for part in ast.walk(each) if isinstance(part, ast.Name)}
            for node in nodes:
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                    self._assign(node)
            for node in nodes:
                yield from self._comparisons_of(node)
        for each in classes:
            for field in each.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    for part in ast.walk(field.annotation):
                        if isinstance(part, ast.Subscript) and ast.unparse(part.value).endswith("Literal"):
                            words = tuple(_literal_words(part.slice))
                            yield WordComparison(each.name.lower(), field.target.id, words, is_closed=False)

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and node.value is not None:
                if key := self._key(node.value):
                    self.keys.setdefault(target.id, key)
                elif _literal_words(node.value) and not isinstance(node.value, ast.Constant):
                    self.constants[target.id] = node.value

    def _comparisons_of(self, node: ast.AST) -> Iterator[WordComparison]:
        if isinstance(node, ast.If):
            yield from self._chain(node)
        elif isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            yield from self._compared(node.test, is_closed=isinstance(node.test.ops[0], ast.In))
        elif isinstance(node, ast.Compare):
            yield from self._compared(node, is_closed=False)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            yield from self._looked_up(node.slice, node.value, is_closed=True)

    def _chain(self, node: ast.If) -> Iterator[WordComparison]:
        """Yield closed comparisons of ``if … elif … else: raise``, all with one key, or of ``if … not in …: raise``."""
        tests, last = [node.test], node.orelse
        while len(last) == 1 and isinstance(last[0], ast.If):
            tests.append(last[0].test)
            last = last[0].orelse
        comparisons = [comparison for test in tests for comparison in self._compared(test, is_closed=True)]
        is_one_key = len(comparisons) == len(tests) and len({comparison.key for comparison in comparisons}) == 1
        # One word alone is what some other setting needs.
        is_one_key &= len({word for comparison in comparisons for word in comparison.words}) > 1
        refuses_rest = bool(last) and isinstance(last[-1], ast.Raise)
        is_negative = isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.NotIn)
        if is_one_key and (refuses_rest or (is_negative and isinstance(node.body[-1], ast.Raise))):
            yield from comparisons

    def _compared(self, node: ast.expr, *, is_closed: bool) -> Iterator[WordComparison]:
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            return
        left, right = node.left, node.comparators[0]
        if isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            yield from self._looked_up(left, right, is_closed=is_closed)
        if isinstance(node.ops[0], ast.Eq | ast.NotEq):
            yield from self._looked_up(right, left, is_closed=is_closed)

    def _looked_up(self, node: ast.expr, container: ast.expr, *, is_closed: bool) -> Iterator[WordComparison]:
        key = self._key(node)
        words, is_fixed = self._words(container) if key else ((), False)
        if key and words:
            yield WordComparison(key.section, key.name, words, is_closed and is_fixed)

    def _words(self, node: ast.expr) -> tuple[tuple[str, ...], bool]:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys":
            node = node.func.value
        if isinstance(node, ast.Attribute):
            node = ast.Name(node.attr)
        if isinstance(node, ast.Name) and node.id not in self.constants:
            is_constant = node.id[:1].isupper() and len(node.id) > 1
            return _constant(self.checkout, self.path, node.id) if is_constant else ((), False)
        return tuple(_literal_words(self.constants[node.id] if isinstance(node, ast.Name) else node)), True

    def _key(self, node: ast.expr) -> _Key | None:
        """Return the key that an expression reads: ``x["key"]``, ``x.get("key")``, ``x.key``, or a variable for one."""
        if isinstance(node, ast.Name):
            return self.keys.get(node.id) or (
                _Key("", node.id) if node.id.islower() and node.id not in self.loops else None
            )
        if isinstance(node, ast.BoolOp):
            return next((key for value in node.values if (key := self._key(value))), None)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("lower", "upper", "strip"):
                return self._key(node.func.value)
            is_read = node.func.attr in ("get", "pop") and node.args
            return self._inside(node.func.value, _text(node.args[0])) if is_read else None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("str", "getattr") and node.args:
            is_attribute = len(node.args) > 1
            return self._inside(node.args[0], _text(node.args[1])) if is_attribute else self._key(node.args[0])
        if isinstance(node, ast.Subscript):
            return self._inside(node.value, _text(node.slice))
        return self._inside(node.value, node.attr) if isinstance(node, ast.Attribute) else None

    def _inside(self, section: ast.expr, name: str | None) -> _Key | None:
        if name is None:
            return None
        outer = self._key(section)
        section_name = outer.name if outer else ""
        if section_name == "self" and self.owner:
            return _Key(self.owner, name)
        return _Key("" if _ANY_SECTION.fullmatch(section_name) else section_name, name)


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module, without those of the functions in it."""
    nodes = list(ast.iter_child_nodes(function))
    for node in nodes:  # grows while it is read
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)
