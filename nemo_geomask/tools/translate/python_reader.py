"""Reader of Python code: the settings of configuration classes, as the statements of a file leave them.

Nothing is executed. Statements are followed in order, and functions of the file where they are called. A value is
either computed, or unknown and named with its line. What is set in a branch or a loop is known within it alone.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import operator
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from nemo_geomask.recipe.input_limits import check_values
from nemo_geomask.tools.translate.python_objects import DELETED, Bound, ProgramState, Thing, dotted_name, shown_code
from nemo_geomask.tools.translate.setting_values import ExpansionBudget
from nemo_geomask.tools.translate.shell_reader import ProgramRun, docstring_run

_PARSERS = ("TrlParser", "HfArgumentParser")
"""Classes that make an object of a configuration class from a command line."""
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    getattr(ast, node): getattr(operator, name)
    for node, name in (pair.split() for pair in ("Add add", "Sub sub", "Mult mul", "Div truediv", "USub neg", "Eq eq"))
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
    tree = ast.parse(text)
    reader = _Reader(constructors, ExpansionBudget(source), ast.get_docstring(tree) or "")
    reader.run(tree.body)
    while reader.uncalled:  # functions that no line of the file calls
        reader.call(next(iter(reader.uncalled.values())), None, [], {})
    runs = [reader.program_run(thing) for thing in reader.things if thing.kind in constructors]
    if not runs:
        runs = [reader.program_run(thing) for thing in reader.things]
        # A dict that is the value of an entry is itself among them.
        settings = {name: value for run in runs for name, value in run.settings.items() if not isinstance(value, dict)}
        runs = [ProgramRun("", settings, tuple(word for run in runs for word in run.unread))] if settings else []
    runs = [replace(run, unread=(*run.unread, *reader.unread)) for run in runs]
    for run in runs:
        check_values(run.settings, source)
    return runs


class _Reader(ProgramState):
    """Follows the statements of a program."""

    def __init__(self, constructors: Sequence[str], budget: ExpansionBudget, docstring: str) -> None:
        super().__init__(constructors, budget)
        self.docstring = docstring
        self.open_functions: set[ast.AST] = set()
        self.uncalled: dict[ast.AST, Thing] = {}
        self.returned: list[Any] = []

    def run(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements in order."""
        for statement in statements:
            self.budget.add("steps", 1)
            self.line = statement.lineno
            match statement:
                case ast.Assign(targets=targets, value=value):
                    result = self.value(value)
                    for target in targets:
                        self._store(target, result)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._store(target, self.value(value))
                case ast.AugAssign(target=target, op=op, value=value):
                    before, other = self.value(target), self.value(value)
                    if isinstance(before, Thing) and isinstance(op, ast.BitOr):
                        self.update(before, other, value)
                    else:
                        self._store(target, self._computed(op, [before, other], target))
                case ast.Delete(targets=targets):
                    for target in targets:
                        self._store(target, DELETED)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    made = self.uncalled[statement] = Thing(statement, kind="function", may_be=self.scope.maps)
                    self.bind(self.scope.maps[0], name, made)
                    for decorator in statement.decorator_list:
                        owner = self.value(decorator)
                        if isinstance(owner, Thing) and owner.kind == "function":
                            self.call(owner, decorator, [made], {})
                case ast.ClassDef(name=name, body=body):
                    self.scope = self.scope.new_child({"self": Bound(Thing(statement), (), self.line)})
                    self.run(body)
                    members, self.scope = self.scope.maps[0], self.scope.parents
                    self.bind(self.scope.maps[0], name, Thing(statement, parts={**members}))
                case ast.Global(names=names) | ast.Nonlocal(names=names):
                    for name in names:  # which of its values is read depends on the order of calls
                        values = [scope[name].value for scope in self.scope.maps if name in scope]
                        self.bind(self.scope.maps[-1], name, Thing(ast.Name(name, lineno=self.line), may_be=values))
                case ast.Import(names=names) | ast.ImportFrom(names=names):
                    for alias in names:
                        imported = Thing(ast.Name(alias.name, lineno=self.line))
                        self.bind(self.scope.maps[0], alias.asname or alias.name, imported)
                case ast.Return(value=value):
                    self.returned.append(None if value is None else self.value(value))
                case _:
                    self._run_blocks(statement)

    def _run_blocks(self, statement: ast.stmt) -> None:
        """Follow the expressions and the blocks of any other statement."""
        values = [self.value(node) for node in ast.iter_child_nodes(statement) if _is_read(node)]
        for item in getattr(statement, "items", ()):
            manager = self.value(item.context_expr)
            if item.optional_vars is not None:
                self._store(item.optional_vars, manager)
        for pattern in (part for case in getattr(statement, "cases", ()) for part in ast.walk(case.pattern)):
            if name := getattr(pattern, "name", None) or getattr(pattern, "rest", None):
                self.bind(self.scope.maps[0], name, Thing(pattern, may_be=self.reachable(values)))
        is_decided = isinstance(statement, ast.If) and not isinstance(values[0], Thing)
        for block, always in _blocks(statement, bool(values[0]) if is_decided else None):
            outer = self.branches
            self.branches = outer if always else (*outer, id(block))
            for _ in range(2 if isinstance(statement, (ast.For, ast.AsyncFor, ast.While)) else 1):
                # A value of the second pass may come from the first.
                if isinstance(statement, (ast.For, ast.AsyncFor)):
                    self._store(statement.target, Thing(statement.target, may_be=_among(values[0])))
                self.run(block)
            self.branches = outer

    def _store(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self.bind(self.scope.maps[0], name, value)
            case ast.Attribute(value=owner, attr=name):
                self.write(self.value(owner), name, value, target)
            case ast.Subscript(value=owner, slice=index):
                self.write(self.value(owner), self.value(index), value, target)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                values = value[: len(targets)] if isinstance(value, list) else []
                unknown: Any = Thing(target, may_be=_among(value))
                for inner, item in itertools.zip_longest(targets, values, fillvalue=unknown):
                    self._store(inner, item)
            case ast.Starred(value=inner):
                self._store(inner, Thing(target))

    def value(self, node: ast.expr) -> Any:
        """Return what an expression evaluates to; an unknown object if that can't be computed."""
        self.budget.add("steps", 1)
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.read(self.scope[name]) if name in self.scope else Thing(node)
            case ast.Dict(keys=keys, values=values):
                mapping = self.made(node, "dict")
                for key, item in zip(keys, values, strict=True):
                    if key is None:
                        self.update(mapping, self.value(item), item)
                    else:
                        self.write(mapping, self.value(key), self.value(item), key)
                return mapping
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                self.budget.add("items", len(items))
                return [self.value(item) for item in items]
            case ast.Attribute(value=owner, attr=name):
                return self.part(self.value(owner), name, node)
            case ast.Subscript(value=owner, slice=index):
                return self.part(self.value(owner), self.value(index), node)
            case ast.Call():
                return self._called(node)
            case ast.Yield(value=inner) | ast.YieldFrom(value=inner):
                self.returned += [None, None if inner is None else self.value(inner)]
                return Thing(node)
            case ast.NamedExpr(target=target, value=inner):
                self._store(target, result := self.value(inner))
                return result
        self.scope = self.scope.new_child()  # for the variables of a comprehension or a lambda
        iterated = [self.value(comprehension.iter) for comprehension in getattr(node, "generators", ())]
        for child in ast.walk(node):
            self.budget.add("steps", 1)
            if isinstance(child, ast.arg) or (isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)):
                name = child.arg if isinstance(child, ast.arg) else child.id
                self.bind(self.scope.maps[0], name, Thing(child, may_be=self.reachable(iterated)))
        values = [self.value(child) for child in ast.iter_child_nodes(node) if _is_read(child)]
        self.scope = self.scope.parents
        ops = [node.op] if isinstance(node, (ast.BinOp, ast.UnaryOp)) else getattr(node, "ops", [])
        return self._computed(ops[0], values, node) if len(ops) == 1 else Thing(node, may_be=self.reachable(values))

    def _computed(self, op: ast.AST, values: list[Any], code: ast.expr) -> Any:
        """Return the value of an operation on numbers, text or dicts."""
        if isinstance(op, ast.BitOr) and isinstance(values[0], Thing) and values[0].kind == "dict":
            united = self.made(code, "dict")
            for value in values:
                self.update(united, value, code)
            return united
        is_number = all(isinstance(value, (int, float)) and abs(value) < _MAX_NUMBER for value in values)
        if type(op) in _OPERATORS and (is_number or (isinstance(op, ast.Eq) and isinstance(values[0], str))):
            with contextlib.suppress(ArithmeticError):
                return _OPERATORS[type(op)](*values)
        return Thing(code)

    def _called(self, node: ast.Call) -> Any:
        owner = self.value(node.func.value if isinstance(node.func, ast.Attribute) else node.func)
        is_alias = isinstance(node.func, ast.Name) and isinstance(owner, Thing) and isinstance(owner.code, ast.Name)
        names = dotted_name(owner.code if is_alias else node.func)
        name = names[-1] if names else ""
        arguments = [self.value(argument) for argument in node.args]
        keywords = Thing(node, self.branches, "dict")
        for keyword in node.keywords:
            if keyword.arg is None:
                self.update(keywords, self.value(keyword.value), keyword.value)
            else:
                self.bind(keywords.parts, keyword.arg, self.value(keyword.value))
        constructor = next((item for item in names if item in self.constructors), None)
        if constructor is None and isinstance(owner, Thing) and isinstance(owner.code, ast.ClassDef):
            bases = [(dotted_name(base) or [""])[-1] for base in owner.code.bases]
            constructor = name = next((base for base in bases if base in self.constructors), None) or name
            constructor = constructor if constructor in self.constructors else None
            keywords.hidden_by = keywords.hidden_by or (shown_code(node) if constructor else "")
        if constructor is not None:
            made = self.made(node, constructor, keywords.parts, keywords.hidden_by)
            if name != constructor:  # a factory method, such as Config.decoupled_seq_is(…)
                self.bind(made.parts, "preset", name)
            return made
        values = [*arguments, *(bound.value for bound in keywords.parts.values())]
        if name in _PARSERS:
            return self._parser(node, values)
        if isinstance(owner, Thing) and owner.kind == "function":
            return self.call(owner, node, arguments, keywords.parts)
        if isinstance(owner, Thing) and owner.kind == "parser" and name.startswith("parse_"):
            return list(owner.may_be)
        match name, [owner, *arguments]:
            case "update", [Thing(kind="dict") as mapping, *others]:
                for other in (*others, keywords):
                    self.update(mapping, other, node)
            case "pop", [Thing(kind="dict") as mapping, key, *_]:
                value = self.part(mapping, key, node)
                self.write(mapping, key, DELETED, node)
                return value
            case ("get", [Thing(kind="dict") as thing, key, *_]) | ("getattr", [_, Thing() as thing, key, *_]):
                return self.part(thing, key, node)
            case "setattr", [_, Thing() as thing, key, value]:
                self.write(thing, key, value, node)
            case "vars", [_, Thing() as thing]:
                return thing
            case "dict", [_, *others] if isinstance(node.func, ast.Name):
                mapping = self.made(node, "dict")
                for other in (*others, keywords):
                    self.update(mapping, other, node)
                return mapping
            case "SimpleNamespace" | "Namespace", _:
                return Thing(node, parts=keywords.parts)
            case "replace" | "copy" | "deepcopy", [*_, Thing() as thing]:
                self.supersede(thing)
                twin = self.made(node, thing.kind, thing.parts, thing.hidden_by)
                self.update(twin, keywords, node)
                return twin
            case _:
                return self.called_elsewhere(node, name, owner, values)
        return None

    def _parser(self, node: ast.Call, values: list[Any]) -> Thing:
        """Return a parser of the command line, which gives a configuration the settings of the file's docstring."""
        results: list[Any] = []
        for item in (item for value in values for item in (value if isinstance(value, list) else [value])):
            name = (dotted_name(item.code) or [""])[-1] if isinstance(item, Thing) else ""
            # The settings of a class are those of the file, however often it is parsed.
            made = next(
                (thing for thing in self.things if thing.kind == name and isinstance(thing.code, ast.Name)), None
            )
            if made is None and name in self.constructors:
                run = docstring_run(self.docstring)
                made = self.made(ast.Name(name, lineno=self.line), name, hidden_by=", ".join(run.unread))
                made.is_from_docstring = run.is_from_docstring
                for key, value in run.settings.items():
                    self.bind(made.parts, key, value)
            results.append(made or item)
        return Thing(node, kind="parser", may_be=results)

    def call(self, function: Thing, node: ast.AST | None, arguments: list[Any], keywords: dict[str, Bound]) -> Any:
        """Follow a function of the file, and return its value; without ``node``, for any arguments."""
        definition: Any = function.code
        self.uncalled.pop(definition, None)
        spec = definition.args
        names = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
        defaults = [*zip(reversed([*spec.posonlyargs, *spec.args]), reversed(spec.defaults), strict=False)]
        defaults += zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
        values = {item.arg: self.value(default) for item, default in defaults if default is not None}
        others = [*arguments, *keywords.values()]
        possible = [(item, [values.get(item.arg)]) for item in names]
        possible += [(item, others) for item in (spec.vararg, spec.kwarg) if item is not None]
        variables: dict[str, Any] = {item.arg: Thing(item, may_be=self.reachable(may_be)) for item, may_be in possible}
        if "self" in variables and "self" in function.may_be[0]:  # one object for all methods of a class
            variables["self"] = function.may_be[0]["self"].value
        if node is not None and not definition.decorator_list:
            variables |= values
        variables |= {item.arg: value for item, value in zip(names, arguments, strict=False)}
        variables |= {name: bound.value for name, bound in keywords.items() if name in variables}
        if definition not in self.open_functions:
            caller = self.scope, self.returned, self.branches
            bound = {name: Bound(value, self.branches, self.line) for name, value in variables.items()}
            self.scope, self.returned = ChainMap(bound, *function.may_be), []
            self.open_functions.add(definition)
            self.run(definition.body)
            self.open_functions.remove(definition)
            results = self.returned
            self.scope, self.returned, self.branches = caller
            if len(results) == 1:
                return results[0]
            return Thing(node or definition, may_be=results)
        return Thing(node or definition)


def _among(value: Any) -> Sequence[Any]:
    """Return the objects that an item of a value may be."""
    return value if isinstance(value, list) else value.may_be if isinstance(value, Thing) else ()


def _is_read(node: ast.AST) -> TypeGuard[ast.expr]:
    return isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))


def _blocks(statement: ast.stmt, truth: bool | None) -> Iterator[tuple[list[ast.stmt], bool]]:
    """Yield the blocks of a statement, each with whether it always runs; ``truth`` is that of its test, if known."""
    always = truth is not None or isinstance(statement, (ast.With, ast.AsyncWith, ast.Try))
    for name in ("body", "orelse", "finalbody"):
        if truth is None or truth == (name == "body"):
            yield getattr(statement, name, []), always
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body, False
