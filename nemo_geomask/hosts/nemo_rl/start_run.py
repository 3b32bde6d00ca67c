"""NeMo-RL's start, run over its syntax trees with a recipe's settings, to learn what it refuses.

The settings are concrete values; whatever else a run has, such as data, a cluster or a model, is unknown. What depends
on something unknown is not run, so that each refusal is one that NeMo-RL is certain to make. Nothing of NeMo-RL is
imported.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nemo_geomask.hosts.nemo_rl.start_expressions import CHANGES, StartExpressions
from nemo_geomask.hosts.nemo_rl.start_values import (
    NO_KEYS,
    UNKNOWN,
    Names,
    RecipeSection,
    SourceClass,
    SourceFunction,
    SourceObject,
    Traced,
    Unknown,
    bound_names,
    kinds_in,
    source_module,
    text_of,
    truth,
)

_MAX_STEPS = 20_000  # statements; of the recipes of main, the longest start has 6,464
_MAX_DEPTH = 40  # of calls
_TRAINERS = "nemo_rl.algorithms"
_SCRIPTS = {"async_rl": "grpo_single_controller", "teachers": "xtoken_off_policy_distillation"}
"""Sections with a start script of their own."""


class StartRefusal(NamedTuple):
    """Statement of NeMo-RL's source that ends a run with an error."""

    keys: frozenset[str]  # dotted keys that its own test depends on
    around: frozenset[str]  # those of the tests around it
    message: str  # NeMo-RL's own words; … for what is unknown
    place: str  # file below the checkout, and line


class _Return(Exception):
    def __init__(self, value: Traced, *, is_certain: bool = True) -> None:
        self.value, self.is_certain = value, is_certain


class _Raised(Exception):
    """NeMo-RL's source has raised an error."""


class _LeftLoop(Exception):
    """The source has left the turn of a loop, or may have left it."""


def start_refusals(checkout: Path, data: Mapping[str, Any], algorithm: str) -> tuple[StartRefusal, ...]:
    """Return what NeMo-RL is certain to refuse in a recipe, from its start to its first step.

    Args:
        checkout: folder of NeMo-RL's source.
        data: merged settings of the recipe.
        algorithm: section of the recipe's algorithm, such as ``grpo``; it selects the start script.
    """
    run = _StartRun(checkout, data)
    for script in _scripts(data, algorithm):
        module = source_module(checkout, f"examples.{script}")
        main = run.global_value(module, "main").value if module else None
        if isinstance(main, SourceFunction):
            with contextlib.suppress(RecursionError):  # of source that is nested too deeply; what was found stays
                run.call(main, [], {})
            break
    return tuple(run.refusals)


def _scripts(data: Mapping[str, Any], algorithm: str) -> Iterator[str]:
    """Yield the names of the scripts that start a recipe, the most special one first."""
    env, data_settings = data.get("env"), data.get("data")
    name = next((name for section, name in _SCRIPTS.items() if section in data), algorithm)
    if isinstance(env, Mapping) and env.get("should_use_nemo_gym") is True:
        yield f"nemo_gym.run_{name}_nemo_gym"
    default = data_settings.get("default") if isinstance(data_settings, Mapping) else None
    if isinstance(default, Mapping) and str(default.get("processor")).startswith("vlm"):
        yield f"run_vlm_{name}"
    yield f"run_{name}"


class _StartRun(StartExpressions):
    """One run of a start script."""

    def __init__(self, checkout: Path, data: Mapping[str, Any]) -> None:
        super().__init__(checkout)
        self.recipe = _traced(data, "")
        self.refusals: list[StartRefusal] = []
        self.steps = self.depth = self.catching = 0

    # --- statements

    def run(self, statements: Iterable[ast.stmt], names: Names) -> None:
        rest = [*statements]
        while rest:
            self.steps += 1
            if self.steps > _MAX_STEPS:
                raise _Return(UNKNOWN)
            try:
                self._statement(rest.pop(0), names)
            except _Return as result:
                if not result.is_certain:
                    self._forget(rest, names)
                raise

    def _statement(self, statement: ast.stmt, names: Names) -> None:
        match statement:
            case ast.Expr(value):
                self.value(value, names)
            case ast.Assign(targets, value):
                result = self.value(value, names)
                for target in targets:
                    self.assign(target, result, names)
            case ast.AnnAssign(target, _, ast.expr() as value):
                self.assign(target, self.value(value, names), names)
            case ast.AugAssign(target, operation, value):
                self.assign(target, self.value(ast.BinOp(target, operation, value), names), names)
            case ast.Return(value):
                raise _Return(self._result(self.value(value, names) if value else Traced(None), names))
            case ast.If():
                self._if(statement, names)
            case ast.Assert(test, message):
                result = self.value(test, names)
                if truth(result.value) is False:
                    self._refuse(result.keys, message, statement, names)
            case ast.Raise(error):
                words = error.args[0] if isinstance(error, ast.Call) and error.args else None
                self._refuse(names.conditions[-1] if names.conditions else NO_KEYS, words, statement, names)
                raise _Raised
            case ast.With(items, body) | ast.AsyncWith(items, body):
                for item in items:
                    entered = self.value(item.context_expr, names)
                    if item.optional_vars:
                        self.assign(item.optional_vars, entered, names)
                self.run(body, names)
            case ast.Try():
                self._try(statement, names)
            case ast.For(target, iterable, body) | ast.AsyncFor(target, iterable, body):
                self._for(target, self.items(self.value(iterable, names)), body, names)
            case ast.While(test, body):
                if truth(self.value(test, names).value) is not False:
                    self._first_turn(body, names)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                names.values[name] = Traced(SourceFunction(statement, names))
            case ast.ClassDef(name):
                names.values[name] = Traced(SourceClass(statement, names.module))
            case ast.Import() | ast.ImportFrom():
                for name in bound_names(statement):
                    names.values[name] = self.imported(statement, name, names.module)
            case ast.Break() | ast.Continue():
                raise _LeftLoop
            case ast.Match() | ast.Delete():
                self._skip([statement], names)

    def _result(self, result: Traced, names: Names) -> Traced:
        """Return a function's result, with the keys of the tests by which it is returned."""
        if isinstance(result.value, RecipeSection | SourceObject):
            return result
        return Traced(result.value, result.keys.union(names.decided_by, *names.conditions))

    def _if(self, statement: ast.If, names: Names) -> None:
        test = self.value(statement.test, names)
        is_true = truth(test.value)
        if is_true is None:
            self._skip([*statement.body, *statement.orelse], names)
            return
        if ast.Return in kinds_in(statement):
            names.decided_by |= test.keys
        names.conditions.append(test.keys)
        try:
            self.run(statement.body if is_true else statement.orelse, names)
        except _Raised:
            if self.catching:
                raise
            # Go on as if it had been mended, so that one run finds several refusals.
        finally:
            names.conditions.pop()

    def _try(self, statement: ast.Try, names: Names) -> None:
        catches = [each for each in statement.handlers if not isinstance(each.body[-1], ast.Raise)]
        self.catching += bool(catches)
        try:
            self.run(statement.body, names)
        except _Raised:
            if not catches:
                raise
            self._forget(statement.body, names)
        finally:
            self.catching -= bool(catches)
        self._skip([each for handler in catches for each in handler.body], names)
        self.run([*statement.orelse, *statement.finalbody], names)

    def _for(self, target: ast.expr, items: Sequence[Traced] | None, body: list[ast.stmt], names: Names) -> None:
        if items is None:
            self.assign(target, UNKNOWN, names)
            self._first_turn(body, names)
            return
        for item in items:
            self.assign(target, item, names)
            try:
                self.run(body, names)
            except _LeftLoop:
                if any(ast.Break in kinds_in(each) for each in body):
                    self._forget(body, names)
                    return

    def _first_turn(self, body: list[ast.stmt], names: Names) -> None:
        """Run the first turn of a trainer's loop, which has data; another loop may have none."""
        try:
            if names.module.name.startswith(_TRAINERS):
                self.run(body, names)
            self._skip(body, names)
        except _LeftLoop:
            self._forget(body, names)

    def _skip(self, statements: Sequence[ast.stmt], names: Names) -> None:
        """Forget what statements change that may or may not run; leave the function or the loop if they may."""
        self._forget(statements, names)
        kinds = NO_KEYS.union(*map(kinds_in, statements))
        if ast.Return in kinds:
            raise _Return(UNKNOWN, is_certain=False)
        if ast.Break in kinds or ast.Continue in kinds:
            raise _LeftLoop

    def _forget(self, statements: Iterable[ast.AST], names: Names) -> None:
        """Make unknown what statements may change."""
        pending = [*statements]
        while pending:
            match node := pending.pop():
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
                    names.values.update(dict.fromkeys(bound_names(node), UNKNOWN))
                    continue
                case ast.Lambda():
                    continue
                case (
                    ast.Name(_, ast.Store() | ast.Del())
                    | ast.Attribute(_, _, ast.Store() | ast.Del())
                    | ast.Subscript(_, _, ast.Store() | ast.Del())
                ):
                    self.assign(node, UNKNOWN, names)
                case ast.Call(ast.Attribute(changed, method)) if method in CHANGES:
                    self.assign(changed, UNKNOWN, names)
            pending += ast.iter_child_nodes(node)

    def assign(self, target: ast.expr, value: Traced, names: Names) -> None:
        """Give a value to what an assignment names; a constant follows from the tests around it."""
        if not value.keys and not isinstance(value.value, RecipeSection | SourceObject | Unknown):
            value = Traced(value.value, NO_KEYS.union(*names.conditions))
        match target:
            case ast.Name(name):
                names.values[name] = Traced(Unknown()) if value is UNKNOWN else value
            case ast.Tuple(parts) | ast.List(parts):
                items = self.items(value) if isinstance(value.value, tuple | list) else None
                is_whole = items is not None and len(items) == len(parts)
                for index, part in enumerate(parts):
                    self.assign(part, items[index] if is_whole and items else UNKNOWN, names)
            case ast.Subscript(container, index):
                owner, name = self.value(container, names).value, self.value(index, names).value
                if text_of(container) == "os.environ" and isinstance(name, str):
                    self.environment[name] = value
                elif isinstance(owner, RecipeSection) and isinstance(name, str | int):
                    owner[name] = value
                elif isinstance(owner, RecipeSection):
                    owner.is_open = True
                    owner.update(dict.fromkeys(owner, UNKNOWN))
                elif isinstance(owner, list):
                    self.assign(container, UNKNOWN, names)
            case ast.Attribute(container, name):
                owner = self.value(container, names).value
                if isinstance(owner, RecipeSection):
                    owner[name] = value
                elif isinstance(owner, SourceObject | Unknown) and owner is not UNKNOWN.value:
                    owner.attributes[name] = value
            case ast.Starred(part):
                self.assign(part, UNKNOWN, names)

    def _refuse(self, keys: frozenset[str], words: ast.expr | None, statement: ast.stmt, names: Names) -> None:
        if self.catching:
            raise _Raised
        text = str(self.value(words, names).value if words else text_of(getattr(statement, "test", statement)))
        place = f"{names.module.path.relative_to(self.checkout)}:{statement.lineno}"
        # An error that depends on no setting would meet every recipe: it is one of this run alone.
        if keys and all(place != each.place for each in self.refusals):
            around = NO_KEYS.union(*names.conditions) - keys
            self.refusals.append(StartRefusal(keys, around, " ".join(text.strip("- \n").split()), place))

    # --- calls

    def read_recipe(self, of: object) -> Traced:
        """Return the recipe; with its class, once the validators of its sections have run."""
        if isinstance(of, SourceClass):
            self.recipe.declared_by = of
            self._validate(self.recipe)
        return Traced(self.recipe)

    def _validate(self, section: RecipeSection) -> None:
        for name in [*section]:
            inner = self.item(section, name).value
            if isinstance(inner, RecipeSection):
                self._validate(inner)
        for each in self.bases(section.declared_by) if section.declared_by else ():
            for statement in (each for each in each.node.body if isinstance(each, ast.FunctionDef)):
                decorators = " ".join(map(text_of, statement.decorator_list))
                if "model_validator" in decorators and "'after'" in decorators:
                    self.call(SourceFunction(statement, Names(each.module), Traced(section)), [], {})

    def make(self, of: SourceClass, arguments: list[Traced], named: dict[str, Traced], *, elsewhere: bool) -> Traced:
        """Return a new instance of a class; one elsewhere gets what is known only there in place of its defaults."""
        made = Traced(SourceObject(of))
        start = self.member(of, "__init__", made).value
        if isinstance(start, SourceFunction):
            self.call(start, arguments, named, elsewhere=elsewhere)
        else:
            bodies = [statement for base in self.bases(of) for statement in base.node.body]
            fields = [text_of(each.target) for each in bodies if isinstance(each, ast.AnnAssign)]
            made.value.attributes.update({**dict(zip(fields, arguments, strict=False)), **named})
            if isinstance(after := self.member(of, "__post_init__", made).value, SourceFunction):
                self.call(after, [], {})
        return made

    def call(
        self, function: SourceFunction, arguments: list[Traced], named: dict[str, Traced], *, elsewhere: bool = False
    ) -> Traced:
        """Run a function and return its result."""
        node, is_too_deep = function.node, self.depth >= _MAX_DEPTH
        if is_too_deep or (not isinstance(node, ast.Lambda) and {ast.Yield, ast.YieldFrom} & kinds_in(node)):
            return UNKNOWN
        parameters = self._parameters(function, arguments, named, elsewhere)
        names = Names(function.names.module, parameters, function.names, function=function)
        self.depth += 1
        try:
            if isinstance(node, ast.Lambda):
                return self.value(node.body, names)
            self.run(node.body, names)
            return Traced(None)
        except _Return as result:
            return result.value
        except _Raised:
            if self.catching:
                raise
            return UNKNOWN
        except _LeftLoop:
            return UNKNOWN
        finally:
            self.depth -= 1

    def _parameters(
        self, function: SourceFunction, arguments: list[Traced], named: dict[str, Traced], elsewhere: bool
    ) -> dict[str, Traced]:
        signature = function.node.args
        positional = [each.arg for each in (*signature.posonlyargs, *signature.args)]
        parameters = [*positional, *(each.arg for each in signature.kwonlyargs)]
        defaults = dict(zip(positional[::-1], signature.defaults[::-1], strict=False))
        defaults |= {
            each.arg: value for each, value in zip(signature.kwonlyargs, signature.kw_defaults, strict=True) if value
        }
        given = dict(zip(positional, [function.bound_to, *arguments] if function.bound_to else arguments, strict=False))
        given |= {name: value for name, value in named.items() if name in parameters}
        for name in (each for each in parameters if each not in given):
            is_known_here = name in defaults and not elsewhere
            given[name] = self.value(defaults[name], function.names) if is_known_here else Traced(Unknown())
        if signature.kwarg:
            others = {name: value for name, value in named.items() if name not in parameters}
            given[signature.kwarg.arg] = Traced(RecipeSection(others))
        if signature.vararg:
            given[signature.vararg.arg] = UNKNOWN
        return given


def _traced(value: Any, path: str) -> Any:
    """Return a recipe's value with the keys of all values in it."""
    if isinstance(value, list):
        return [_traced(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    section = RecipeSection()
    section.path = path
    for name, item in value.items():
        keys = section.keys_of(name)
        section[name] = Traced(_traced(item, *keys), NO_KEYS if isinstance(item, Mapping) else keys)
    return section
