"""Reader of Python code: the settings that a file gives to configuration classes.

Nothing is executed. A variable has a value if the file binds it once, to an expression that can be computed. A
configuration has the settings of its construction, and those that the same block assigns before it is handed on.
Other code that may change a configuration, such as a function that gets it, is named with its line.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from nemo_geomask.recipe.input_limits import check_values
from nemo_geomask.tools.translate.peer_table import LOSS_WORDS
from nemo_geomask.tools.translate.setting_values import UNRESOLVED, ExpansionBudget
from nemo_geomask.tools.translate.shell_reader import ProgramRun, docstring_run

_PARSERS = ("TrlParser", "HfArgumentParser")
"""Classes that make an object of a configuration class from a command line."""
_READERS = re.compile("asdict|debug|dumps?|info|init|isinstance|items|keys|len|log|print|repr|to_dict|type|values")
"""Functions that change none of their arguments; classes of other modules, in CamelCase, are taken to change none."""
_USES = re.compile("train|evaluate|predict|add_callback|(save|push|log|print|create_model)[a-z_]*|[A-Z].*")
"""Methods of a trainer that leave its settings as they are."""
_NAMESPACES = ("exec", "eval", "globals", "locals")
_CONFIGURATIONS = re.compile(".*(actor|algo|correction|grpo|loss|policy|ppo|train).*config", re.IGNORECASE)
"""Classes that are no constructors, and that may hold settings of a loss."""
_LIBRARY = re.compile("trl|trainer", re.IGNORECASE)
"""Names of modules, classes and objects of a system, which code must not change."""
_BINDING_FIELDS = ("id", "arg", "name", "asname", "rest")
"""Fields of the nodes that bind a name."""
_FUNCTIONS = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
"""Nodes with variables of their own; a class has some that only its body sees."""
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_MAX_NUMBER = 2.0**64


def constructions(text: str, constructors: Sequence[str], source: object = "the code") -> list[ProgramRun]:
    """Return the settings of each object of a configuration class, as a run of a program of that name.

    A class that is handed to a parser of the command line has the settings of the command in the file's docstring, and
    those that the file assigns afterwards. Without any such class, the items of all dicts are returned, as one program
    without a name.

    Args:
        text: Python code.
        constructors: names of configuration classes.
        source: name of the file, for errors.

    Raises:
        SyntaxError: the text is not Python.
        InputLimitError: the values are too large.
    """
    reader = _Reader(ast.parse(text), constructors, ExpansionBudget(source))
    runs = [*reader.constructed(), *reader.parsed()]
    if not runs and (settings := reader.items_of_dicts()):
        runs = [ProgramRun("", settings)]
    changes = tuple(reader.changes_of_library())
    for run in runs:
        check_values(run.settings, source)
    return [replace(run, unread=(*run.unread, *changes)) for run in runs]


class _UnknownError(Exception):
    """An expression can't be computed; the argument is the code that hides its value."""


class _Reader:
    """The variables that a file binds, and the calls that it makes.

    A variable is the scope that binds it, by id, with its name.

    Attributes:
        bindings: for each variable, the nodes that bind it.
        mentions: for each variable, the nodes that read it, in the order of lines.
        parents: the node that holds each node, by id.
        blocks: id of the list that each statement stands in, by id.
    """

    def __init__(self, tree: ast.Module, constructors: Sequence[str], budget: ExpansionBudget) -> None:
        self.tree, self.constructors, self.budget = tree, constructors, budget
        self.bindings: dict[tuple[int, str], list[ast.AST]] = defaultdict(list)
        self.mentions: dict[tuple[int, str], list[ast.Name]] = defaultdict(list)
        self.parents: dict[int, ast.AST] = {}
        self.blocks: dict[int, int] = {}
        self.imported: dict[str, str] = {}  # name in its module, by name in the file
        self.open_variables: set[tuple[int, str]] = set()  # those whose value is being computed
        self.nodes = list(ast.walk(tree))
        budget.add("steps", len(self.nodes))
        for node in self.nodes:
            self.parents |= {id(child): node for child in ast.iter_child_nodes(node)}
            for _, block in ast.iter_fields(node):
                if isinstance(block, list):
                    self.blocks |= {id(child): id(block) for child in block}
        for node in self.nodes:
            if isinstance(node, ast.alias):
                self.imported[node.asname or node.name] = node.name
            is_read = isinstance(node, ast.keyword) or isinstance(getattr(node, "ctx", None), ast.Load)
            for name in () if is_read else (getattr(node, field, None) for field in _BINDING_FIELDS):
                if isinstance(name, str):
                    self.bindings[id(self.scopes(node)[0]), name].append(node)
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.mentions[self.variable(node, node.id)].append(node)
            for name in getattr(node, "names", ()) if isinstance(node, (ast.Global, ast.Nonlocal)) else ():
                self.bindings[self.variable(self.scopes(node)[0], name)].append(node)
        for mentions in self.mentions.values():
            mentions.sort(key=lambda node: node.lineno)
        self.classes = {node.name for node in self.nodes if isinstance(node, ast.ClassDef)}
        self.trainers = {
            name
            for (_, name), nodes in self.bindings.items()
            for node in nodes
            if self.called(getattr(self.parents[id(node)], "value", None)).endswith("Trainer")
        }

    def scopes(self, node: ast.AST) -> list[ast.AST]:
        """Return the scopes around a node, the innermost first."""
        scopes: list[ast.AST] = []
        while node is not self.tree:
            node = self.parents[id(node)]
            if isinstance(node, _FUNCTIONS) or (isinstance(node, ast.ClassDef) and not scopes) or node is self.tree:
                scopes.append(node)
        return scopes or [self.tree]

    def variable(self, node: ast.AST, name: str) -> tuple[int, str]:
        """Return the variable that a name stands for at a node."""
        scopes = self.scopes(node)
        return next(
            ((id(scope), name) for scope in scopes if (id(scope), name) in self.bindings), (id(self.tree), name)
        )

    def constructed(self) -> Iterator[ProgramRun]:
        """Yield the settings of each call of a configuration class, and of its subclasses what hides theirs."""
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if (name := self.dotted_name(base)[-1]) in self.constructors:
                        yield ProgramRun(name, {}, (f"class {node.name}({name}) (line {node.lineno})",))
            if not isinstance(node, ast.Call):
                continue
            names = self.dotted_name(node.func)
            if constructor := next((name for name in names if name in self.constructors), None):
                settings: dict[str, Any] = {}
                unread: list[str] = []
                for keyword in node.keywords:
                    try:
                        settings |= self.items([(keyword.arg, keyword.value)])
                    except _UnknownError as error:
                        unread.append(self.shown(error.args[0]))
                if names[-1] != constructor:  # a factory method, such as Config.decoupled_seq_is(…)
                    settings["preset"] = names[-1]
                yield self.with_changes(ProgramRun(constructor, settings, tuple(unread)), node)

    def parsed(self) -> Iterator[ProgramRun]:
        """Yield the settings of each configuration class that the file hands to a parser of the command line."""
        for constructor in self.constructors:
            positions = [
                position
                for call in self.nodes
                if isinstance(call, ast.Call) and self.called(call) in _PARSERS
                for argument in (*call.args, *(keyword.value for keyword in call.keywords))
                for position, item in enumerate(getattr(self.bound_code(argument), "elts", (argument,)))
                if self.dotted_name(item)[-1] == constructor
            ]
            if not positions:
                continue
            run = replace(docstring_run(ast.get_docstring(self.tree) or ""), program=constructor)
            for node in self.nodes:
                match node:
                    case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                        if self.called(value).startswith("parse_") and len(targets) > positions[0]:
                            run = self.with_changes(run, targets[positions[0]])
            yield run

    def items_of_dicts(self) -> dict[str, Any]:
        """Return the items of all dicts of the file; of several with one name, the last."""
        settings: dict[str, Any] = {}
        for node in self.nodes:
            if isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and self.called(node) == "dict"):
                items = self.value_or_code(node)
                settings |= items if isinstance(items, dict) else {}
        return {name: value for name, value in settings.items() if not isinstance(value, dict)}

    def with_changes(self, run: ProgramRun, node: ast.AST) -> ProgramRun:
        """Return a run with what the file does to its configuration, which ``node`` makes or binds."""
        statement = node if isinstance(node, ast.Call) else self.parents[id(node)]
        statement = self.parents[id(statement)]
        match statement:
            case ast.Assign(targets=[ast.Name() as target]) | ast.AnnAssign(target=ast.Name() as target):
                pass
            case ast.Assign() if isinstance(node, ast.Name):
                target = node
            case _:
                return run if self.is_use(node) else replace(run, unread=(*run.unread, self.shown(node)))
        settings, hidden = self.changed(self.variable(target, target.id), statement, run.settings)
        return replace(run, settings=settings, unread=(*run.unread, *map(self.shown, hidden)))

    def changed(
        self, variable: tuple[int, str], statement: ast.AST, parts: dict[str, Any]
    ) -> tuple[dict[str, Any], list[ast.AST]]:
        """Return the parts of a configuration or dict as the file changes them, and code that may change them, too.

        Args:
            variable: the only one that stands for it.
            statement: statement that binds it to the variable.
            parts: its attributes or items then.
        """
        parts, hidden = {**parts}, list[ast.AST]()
        is_late = len(self.bindings[variable]) > 1
        for mention in self.mentions[variable]:
            parent = self.parents[id(mention)]
            assignment = self.parents[id(parent)]
            match parent:
                case ast.Attribute(attr=key, ctx=ast.Store()) | ast.Subscript(slice=ast.Constant(key), ctx=ast.Store()):
                    if isinstance(assignment, ast.Assign) and parent in assignment.targets:
                        is_next = not is_late and self.blocks[id(assignment)] == self.blocks[id(statement)]
                        value = self.value_or_code(assignment.value) if is_next else UNRESOLVED + self.shown(assignment)
                        parts[str(key)] = value
                        continue
            if not self.is_use(mention):
                hidden.append(parent)
            is_late |= not isinstance(parent, ast.Attribute)
        return parts, hidden

    def is_use(self, node: ast.AST) -> bool:
        """Return True if the code around an object reads it, or hands it on to what does not change it."""
        parent = self.parents[id(node)]
        above = self.parents[id(parent)]
        match parent:
            case ast.Expr() | ast.FormattedValue() | ast.Compare():
                return True
            case ast.Attribute(ctx=ast.Load()) | ast.Subscript(ctx=ast.Load()):
                is_method = isinstance(above, ast.Call) and above.func is parent
                return not is_method or _READERS.fullmatch(self.called(above)) is not None
            case ast.Dict(keys=keys, values=values):  # {**c}
                return any(key is None and value is node for key, value in zip(keys, values, strict=True))
            case ast.keyword():
                return parent.arg is None or self.changes_nothing(above)
        return self.changes_nothing(parent)

    def changes_nothing(self, node: ast.AST) -> bool:
        """Return True for a call of a class of another module or of a function that only reads."""
        name = self.called(node)
        return (name[:1].isupper() and name not in self.classes) or _READERS.fullmatch(name) is not None

    def changes_of_library(self) -> Iterator[str]:
        """Yield code that may change what every configuration does."""
        for node in self.nodes:
            name = self.called(node)
            match node:
                case ast.Attribute(value=owner, ctx=ast.Store()) | ast.Subscript(value=owner, ctx=ast.Store()):
                    is_change = self.is_of_library(owner)
                case ast.Assign(value=value) if self.dotted_name(value)[-1] in self.constructors:
                    is_change = True
                case ast.Call(func=ast.Name()) if name in _NAMESPACES:
                    is_change = True
                case ast.Call(func=ast.Attribute(value=ast.Name(id=owner))) if owner in self.trainers:
                    is_change = not (_READERS.fullmatch(name) or _USES.fullmatch(name))
                case ast.Call(args=arguments, keywords=keywords):
                    is_change = not self.changes_nothing(node) and any(
                        isinstance(argument, ast.Name) and self.is_of_library(argument) for argument in arguments
                    )
                    if _CONFIGURATIONS.fullmatch(name) and name not in self.constructors:
                        is_change |= any(LOSS_WORDS.search(keyword.arg or "") for keyword in keywords)
                case _:
                    is_change = False
            if is_change:
                yield self.shown(node)

    def is_of_library(self, code: ast.AST) -> bool:
        """Return True if the code names a class or module of a system, or a trainer."""
        names = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
        return not names.isdisjoint({*self.trainers, *self.constructors}) or any(map(_LIBRARY.search, names))

    def dotted_name(self, node: ast.AST) -> list[str]:
        """Return the parts of ``a.b.c``, ``a`` with its name in its module; of other code, one empty part."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            parts.append(self.imported.get(node.id, node.id))
        return parts[::-1] or [""]

    def called(self, node: ast.AST | None) -> str:
        """Return the last part of the name that a call calls; empty for other code."""
        return self.dotted_name(node.func)[-1] if isinstance(node, ast.Call) else ""

    def value_or_code(self, node: ast.expr) -> Any:
        """Return what an expression evaluates to; if that can't be computed, text that is marked as unresolved."""
        try:
            return self.value(node)
        except _UnknownError as error:
            return UNRESOLVED + self.shown(error.args[0])

    def value(self, node: ast.expr) -> Any:
        """Return what an expression evaluates to.

        Raises: _UnknownError: that can't be computed.
        """
        self.budget.add("steps", 1)
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                self.budget.add("items", len(items))
                return [self.value_or_code(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                names = [None if key is None else str(self.value(key)) for key in keys]
                return self.items(zip(names, values, strict=True))
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                return self.items((keyword.arg, keyword.value) for keyword in keywords)
            case ast.UnaryOp(op=op, operand=operand):
                return self.computed(node, op, operand)
            case ast.BinOp(left=left, op=op, right=right):
                return self.computed(node, op, left, right)
            case ast.Name(id=name) if (variable := self.variable(node, name)) not in self.open_variables:
                if variable not in self.bindings:
                    raise _UnknownError(node)
                self.open_variables.add(variable)
                try:
                    return self.bound(variable)
                finally:
                    self.open_variables.remove(variable)
        raise _UnknownError(node)

    def items(self, pairs: Iterable[tuple[str | None, ast.expr]]) -> dict[str, Any]:
        """Return the items of a dict: pairs of a name and a value, or of None and another dict."""
        settings: dict[str, Any] = {}
        for name, node in pairs:
            if name is not None:
                settings[name] = self.value_or_code(node)
                continue
            other = self.value(node)
            if not isinstance(other, dict):
                raise _UnknownError(node)
            settings |= other
        return settings

    def computed(self, node: ast.expr, op: ast.AST, *operands: ast.expr) -> Any:
        """Return the value of an operation on numbers."""
        values = [self.value(operand) for operand in operands]
        is_number = all(isinstance(value, (int, float)) and abs(value) < _MAX_NUMBER for value in values)
        if not is_number or type(op) not in _OPERATORS:
            raise _UnknownError(node)
        try:
            return _OPERATORS[type(op)](*values)
        except ArithmeticError:
            raise _UnknownError(node) from None

    def bound(self, variable: tuple[int, str]) -> Any:
        """Return the value of a variable that is bound once."""
        *earlier, binding = self.bindings[variable]
        statement = self.parents[id(binding)]
        match statement:
            case ast.Assign(targets=[ast.Name()], value=code) | ast.AnnAssign(value=ast.expr() as code) if not earlier:
                value = self.value(code)
            case _:
                is_assigned = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign))
                raise _UnknownError(statement if is_assigned else binding)
        if isinstance(value, list | dict):
            parts, hidden = self.changed(variable, statement, value if isinstance(value, dict) else {})
            if hidden:
                raise _UnknownError(hidden[0])
            return parts if isinstance(value, dict) else value
        return value

    def bound_code(self, node: ast.expr) -> ast.AST:
        """Return the code that a variable is bound to; other code, and a variable that is bound twice, as it is."""
        bindings = self.bindings[self.variable(node, node.id)] if isinstance(node, ast.Name) else []
        return getattr(self.parents[id(bindings[0])], "value", node) if len(bindings) == 1 else node

    def shown(self, code: ast.AST) -> str:
        """Return code with its line, for messages."""
        text = f"{ast.unparse(code)} (line {getattr(code, 'lineno', 1)})"
        self.budget.add("characters", len(text))  # an expression may hold others that are shown, too
        return text
