"""Words that NeMo-RL's source compares the value of a key with, and the words and numbers that its recipes use.

``config["generation"]["backend"] == "vllm"``, ``name in REGISTRY``, ``REGISTRY[name]``, a ``Literal`` and an ``Enum``
each tell words of a key. The set is closed if the source refuses all others: by a ``raise`` at the end of a chain of
comparisons, an ``assert``, or a look-up in a mapping that no function adds to.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from nemo_geomask.recipe.input_limits import parse_python, read_source

_GENERIC_KEYS = ("name", "type", "mode", "format", "backend")
"""Keys that say little without their section, so that only comparisons within a section of that name count."""
_ANY_SECTION = re.compile(r"(master_|data_|policy_|base_)?(config|cfg|self|kwargs|args|settings|s|c)s?")
_MODULES = re.compile(r"/(grpo|ppo|dpo|rm|sft|distillation|run_eval|evals|\w+_datasets)\b")
"""Modules of one algorithm, or of the data that some take, which have registries of their own under the same names."""
_EVALUATION = ("evals", "run_eval")
_DATASETS = {"dpo": "preference_datasets", "rm": "preference_datasets", "eval": "eval_datasets"}
"""Modules of the data of algorithms that take others than prompts and their answers."""
# A key that an expression reads at its end, and the section before it: x["key"], x.get("key"), x.key.
_READ = re.compile(r"""\['([^']+)'\]|\.(?:get|pop)\('(\w+)'[^()]*\)|(?:^|\.)([A-Za-z_]\w*)(?=$|[.\[])""")
_FORM = re.compile(r"'\W' not in .*")
_SETTING = re.compile(r"""^([ \t-]*)(\w+):[ \t]*["']?([\w.:+-]+|\$\{.*?\})?["']?[ \t]*(?:#.*)?$""", re.MULTILINE)
_DEFINITION = re.compile(r"^ *(?:class )?([A-Z]\w+)\b[^\n]*[=:]", re.MULTILINE)
_ADDITION = re.compile(r"\b([A-Z]\w+)\[\w+\] =")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


class WordComparison(NamedTuple):
    """Words that one place of the source compares a key with."""

    section: str  # name of the section, or of the variable that holds it; empty if unknown
    key: str
    words: tuple[str, ...]
    is_closed: bool  # True if the source refuses other words
    is_fixed: bool = True  # False if a function adds words to those that it compares with


class SourceWords(NamedTuple):
    """Words of a key."""

    compared: frozenset[str]  # all that the source compares the key with
    accepted: Collection[str]  # those that are all it accepts; empty if open
    registered: Collection[str]  # those of a registry to which start scripts may add; empty if there is none


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
def is_read_without_default(checkout: Path, key: str) -> bool:
    """Return True if NeMo-RL reads a key as ``config["key"]``, and sets it nowhere."""
    return is_in_source(checkout, f'["{key}"]') and not is_in_source(checkout, f'["{key}"] = ')


@functools.cache
def words_in_source(checkout: Path, section: str, key: str, algorithm: str) -> SourceWords:
    """Return the words that NeMo-RL compares a key with.

    Args:
        checkout: folder of NeMo-RL's source.
        section: name of the section that the key is in, without those around it.
        key: name of the key.
        algorithm: name of the recipe's algorithm; the trainers and the data of others are left out.
    """
    modules = {algorithm, _DATASETS.get(algorithm, "response_datasets"), *(_EVALUATION if algorithm == "eval" else ())}
    keys = {key, *(() if key in _GENERIC_KEYS else _parameters(checkout, key))}
    words: set[str] = set()
    of_section: list[WordComparison] = []
    for path, text in source_texts(checkout).items():
        if not any(each in text for each in keys) or (key in _GENERIC_KEYS and section not in text):
            continue
        module = _MODULES.search(path.relative_to(checkout).as_posix())
        if module and module[1] not in modules:
            continue
        for comparison in _comparisons(checkout, path):
            has_own_name = key not in _GENERIC_KEYS and not comparison.section
            is_of_section = has_own_name or (comparison.section and _overlap(comparison.section, section))
            is_key = comparison.key == key or (comparison.key in keys and not comparison.section)
            if is_key and (is_of_section or key not in _GENERIC_KEYS):
                words.update(comparison.words)
                of_section += [comparison] if is_of_section else []
    # A section may be compared in several places, of which one refuses what belongs to another section of its name.
    # Where it refuses words itself, a mere name elsewhere is that of another key's parameter.
    owned = [each for each in of_section if each.section]
    decisive = owned if any(each.is_closed and each.is_fixed for each in owned) else of_section
    closed = [each for each in decisive if each.is_closed]
    accepted = frozenset(word for each in decisive for word in each.words)
    is_fixed, none = any(each.is_fixed for each in closed), frozenset[str]()
    return SourceWords(frozenset(words), accepted if is_fixed else none, none if is_fixed or not closed else accepted)


@functools.cache
def _parameters(checkout: Path, key: str) -> frozenset[str]:
    """Return the parameters that NeMo-RL passes a setting to, as in ``calculate_kl(kl_type=self.loss_kl_type)``."""
    passed = re.compile(rf"""\b(\w+)=[\w.]*(?:\.|\[["']){key}(?:["']\])?[,)\n]""")
    names = {name for text in source_texts(checkout).values() if key in text for name in passed.findall(text)}
    return frozenset(name for name in names if name not in _GENERIC_KEYS and key.endswith(name))


def _overlap(first: str, second: str) -> bool:
    first, second = first.replace("_", ""), second.replace("_", "")
    return first in second or second in first


@functools.cache
def settings_in_recipes(checkout: Path) -> Mapping[tuple[str, str], list[str]]:
    """Return the values that NeMo-RL's recipes set each key to, by the names of its section and of itself."""
    values: dict[tuple[str, str], list[str]] = {}
    for path in (checkout / "examples").rglob("*.yaml"):
        sections = [(-1, "")]
        for indent, key, value in _SETTING.findall(read_source(path)):
            while sections[-1][0] >= len(indent):
                sections.pop()
            if value:
                values.setdefault((sections[-1][1], key), []).append(value)
            else:
                sections.append((len(indent), key))
    return values


def words_in_recipes(checkout: Path, section: str, key: str) -> frozenset[str]:
    """Return the words that NeMo-RL's recipes set a key to, in sections of a name."""
    return frozenset(value for value in settings_in_recipes(checkout).get((section, key), ()) if value[0].isalpha())


@functools.cache
def numbers_in_recipes(checkout: Path, section: str, key: str) -> tuple[float, ...]:
    """Return the numbers that NeMo-RL's recipes set a key to, in sections of a name; one for each setting.

    Where one of them takes the value from other settings, numbers alone don't tell what is usual; then there are none.
    """
    texts = settings_in_recipes(checkout).get((section, key), ())
    follows = any(text.startswith("$") for text in texts)
    return () if follows else tuple(float(text) for text in texts if _NUMBER.fullmatch(text))


@functools.cache
def _comparisons(checkout: Path, path: Path) -> tuple[WordComparison, ...]:
    """Return the comparisons in one module, and the words of the ``Literal`` types of its classes."""
    tree = parsed(source_texts(checkout)[path])
    comparisons: list[WordComparison] = []
    owners: dict[ast.AST, str] = {}
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef):
            owners |= {item: each.name.lower() for item in each.body if each.name.endswith(("Config", "LossFn"))}
            for field in (item for item in each.body if isinstance(item, ast.AnnAssign)):
                _, literal, content = ast.unparse(field.annotation).partition("Literal[")
                if literal:
                    words = tuple(re.findall(r"'([^']+)'", content))
                    comparisons.append(WordComparison(each.name.lower(), ast.unparse(field.target), words, False))
    for each in (tree, *ast.walk(tree)):
        if isinstance(each, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            comparisons += _Scope(checkout, path, each, owners.get(each, "")).comparisons()
    return tuple(comparisons)


def parsed(text: str) -> ast.Module:
    """Return the tree of a module; an empty one if Python can't parse it."""
    try:
        tree: ast.Module = parse_python(text)
    except (SyntaxError, RecursionError):
        tree = ast.Module([], [])
    return tree


@functools.cache
def _constant(checkout: Path, path: Path, name: str) -> tuple[tuple[str, ...], bool]:
    """Return the words of a constant or an ``Enum`` that a module uses, and True if no function adds to it."""
    modules, added = _definitions(checkout)
    paths = [path] if path in modules.get(name, ()) else modules.get(name, ())
    return tuple(word for each in paths for word in _constants(checkout, each).get(name, ())), name not in added


@functools.cache
def _definitions(checkout: Path) -> tuple[Mapping[str, list[Path]], frozenset[str]]:
    """Return the modules that define each constant or class, and the names to which a statement adds items."""
    modules: dict[str, list[Path]] = {}
    for path, text in source_texts(checkout).items():
        for name in dict.fromkeys(_DEFINITION.findall(text)):
            modules.setdefault(name, []).append(path)
    added = (name for text in source_texts(checkout).values() for name in _ADDITION.findall(text))
    return modules, frozenset(added)


@functools.cache
def _constants(checkout: Path, path: Path) -> Mapping[str, list[str]]:
    """Return the words of each constant and ``Enum`` that a module defines."""
    words: dict[str, list[str]] = defaultdict(list)
    for node in ast.walk(parsed(source_texts(checkout)[path])):
        match node:
            case ast.ClassDef(name) if any("Enum" in ast.unparse(base) for base in node.bases):
                for member in (each for each in node.body if isinstance(each, ast.Assign)):
                    words[name] += [*map(ast.unparse, member.targets), *_literal_words(member.value)]
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)) if name[:1].isupper():
                words[name] += _literal_words(node.value)
    return words


def _literal_words(node: ast.expr | None) -> list[str]:
    """Return the texts in a literal, and the keys of a mapping; of a call such as ``frozenset(…)``, its arguments'."""
    match node:
        case ast.Constant(str(word)):
            return [word]
        case ast.Tuple(items) | ast.List(items) | ast.Set(items) | ast.Dict(items):
            return [word for item in items for word in _literal_words(item)]
        case ast.Subscript(ast.Name("Literal"), items):
            return _literal_words(items)
        case ast.Call(_, items):
            return [word for item in items if not isinstance(item, ast.Constant) for word in _literal_words(item)]
    return []


class _Scope:
    """A function, or a module without its functions."""

    def __init__(self, checkout: Path, path: Path, function: ast.AST, owner: str) -> None:
        self.checkout, self.path = checkout, path
        self.owner = owner  # the function's class if that holds settings
        self.nodes = list(ast.iter_child_nodes(function))
        for node in self.nodes:  # grows while it is read
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.nodes += ast.iter_child_nodes(node)
        targets = [node.target for node in self.nodes if isinstance(node, ast.For | ast.comprehension)]
        # Variables of loops read no key, although they may be named like one.
        self.loops = {part.id: "" for each in targets for part in ast.walk(each) if isinstance(part, ast.Name)}
        self.keys: dict[str, tuple[str, str]] = {}
        self.constants: dict[str, ast.expr] = {}
        for node in self.nodes:
            if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and (key := self._key(node.iter)):
                self.loops[node.target.id] = key[1]  # an item of a list of sections
        for node in self.nodes:
            match node:
                case (
                    ast.Assign([ast.Name(name)], value)
                    | ast.NamedExpr(ast.Name(name), value)
                    | ast.AnnAssign(ast.Name(name), _, ast.expr() as value)
                ):
                    if key := self._key(value):
                        self.keys.setdefault(name, key)
                    elif _literal_words(value) and not isinstance(value, ast.Constant):
                        self.constants[name] = value

    def comparisons(self) -> Iterator[WordComparison]:
        for node in self.nodes:
            match node:
                case ast.If():
                    yield from self._chain(node)
                case ast.Assert(ast.Compare() as test):
                    yield from self._compared(test, is_closed=isinstance(test.ops[0], ast.In))
                case ast.Compare():
                    yield from self._compared(node, is_closed=False)
                case ast.Subscript(container, index, ast.Load()):
                    yield from self._looked_up(index, container, is_closed=True)

    def _chain(self, node: ast.If) -> Iterator[WordComparison]:
        """Yield closed comparisons of ``if … elif … else: raise``, all with one key, or of ``if … not in …: raise``."""
        # A further form of the word, as in `name not in NAMES and ":" not in name`, is no word of a recipe's own.
        tests: list[ast.expr] = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        is_form = all(_FORM.fullmatch(ast.unparse(each)) for each in tests[1:])
        tests, last = [tests[0] if is_form else node.test], node.orelse
        while len(last) == 1 and isinstance(last[0], ast.If):
            tests.append(last[0].test)
            last = last[0].orelse
        comparisons = [comparison for test in tests for comparison in self._compared(test, is_closed=True)]
        is_one_key = len(comparisons) == len(tests) and len({comparison.key for comparison in comparisons}) == 1
        # One word alone is what some other setting needs.
        is_one_key &= len({word for comparison in comparisons for word in comparison.words}) > 1
        refuses_rest = bool(last) and isinstance(last[-1], ast.Raise)
        is_negative = isinstance(tests[0], ast.Compare) and isinstance(tests[0].ops[0], ast.NotIn)
        if is_one_key and (refuses_rest or (is_negative and isinstance(node.body[-1], ast.Raise))):
            yield from comparisons

    def _compared(self, node: ast.expr, *, is_closed: bool) -> Iterator[WordComparison]:
        match node:
            case ast.Compare(left, [ast.Eq() | ast.NotEq()], [right]):
                yield from self._looked_up(left, right, is_closed=is_closed)
                yield from self._looked_up(right, left, is_closed=is_closed)
            case ast.Compare(left, [ast.In() | ast.NotIn()], [right]):
                yield from self._looked_up(left, right, is_closed=is_closed)

    def _looked_up(self, node: ast.expr, container: ast.expr, *, is_closed: bool) -> Iterator[WordComparison]:
        key = self._key(node)
        words, is_fixed = self._words(container) if key else ((), False)
        if key and words:
            yield WordComparison(*key, words, is_closed, is_fixed)

    def _words(self, node: ast.expr) -> tuple[tuple[str, ...], bool]:
        name = re.sub(r"^get_args\((.+)\)$", r"\1", ast.unparse(node)).removesuffix(".keys()").rpartition(".")[2]
        if name.isidentifier() and name not in self.constants:
            is_constant = name[:1].isupper() and len(name) > 1
            return _constant(self.checkout, self.path, name) if is_constant else ((), False)
        return tuple(_literal_words(self.constants.get(name, node))), True

    def _key(self, node: ast.expr) -> tuple[str, str] | None:
        """Return section and name of the key that an expression reads, or that its variable was read from."""
        if isinstance(node, ast.BoolOp):
            return next((key for value in node.values if (key := self._key(value))), None)
        text = re.sub(r"\.(lower|upper|strip)\(\)", "", ast.unparse(node))
        text = re.sub(r"^getattr\((.+?), ('\w+')(, [^()]*)?\)$", r"\1[\2]", re.sub(r"^str\((.*)\)$", r"\1", text))
        if text.isidentifier():
            return self.keys.get(text) or (("", text) if text.islower() and text not in self.loops else None)
        *_, section, last = [None, None, *_READ.finditer(text)]
        if last is None or last.end() != len(text):
            return None
        before = section[section.lastindex or 0] if section and section.end() == last.start() else ""
        before = self.loops[before] if before in self.loops else self.keys.get(before, ("", before))[1]
        is_owner = before == "self" and self.owner
        before = "" if _ANY_SECTION.fullmatch(before) else before
        return self.owner if is_owner else before, last[last.lastindex or 0]
