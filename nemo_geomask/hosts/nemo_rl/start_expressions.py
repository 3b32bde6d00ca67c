"""Expressions of NeMo-RL's source, evaluated as far as they follow from the recipe."""

from __future__ import annotations

import ast
import contextlib
import math
import operator
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nemo_geomask.hosts.nemo_rl.start_sections import StartSections
from nemo_geomask.hosts.nemo_rl.start_values import (
    NO_KEYS,
    UNKNOWN,
    Names,
    RecipeSection,
    SourceClass,
    SourceFunction,
    SourceModule,
    SourceObject,
    Traced,
    Unknown,
    is_known,
    keys_of,
    text_of,
    truth,
)

_MAX_ITEMS = 256  # that a loop goes through
_MAX_SIZE = 10**5  # of a text or a list that the source computes
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{each.__name__: each for each in (abs, all, any, float, int, len, list, max, min, range, round)},
    **{each.__name__: each for each in (set, frozenset, sorted, str, sum, tuple)},
    **{f"math.{each.__name__}": each for each in (math.ceil, math.floor, math.gcd, math.prod)},
}
_TYPES = {each.__name__: each for each in (str, int, float, bool, list, tuple, dict)} | {"Mapping": dict, "Dict": dict}
_METHODS = {
    str: "lower upper strip startswith endswith split rsplit removeprefix removesuffix replace join partition isdigit",
    list: "index count copy",
    set: "union issubset difference intersection copy",
}
CHANGES = ("append", "extend", "add", "update", "insert", "remove", "clear", "setdefault", "pop")
"""Methods that change what they are called on."""
_OPERATORS: Mapping[type, Callable[..., Any]] = {
    getattr(ast, kind): getattr(operator, function)
    for kind, function in (
        *(
            ("Add", "add"),
            ("Sub", "sub"),
            ("Mult", "mul"),
            ("Div", "truediv"),
            ("FloorDiv", "floordiv"),
            ("Mod", "mod"),
        ),
        *(("BitOr", "or_"), ("BitAnd", "and_"), ("Not", "not_"), ("USub", "neg"), ("UAdd", "pos")),
        *(("Eq", "eq"), ("NotEq", "ne"), ("Lt", "lt"), ("LtE", "le"), ("Gt", "gt"), ("GtE", "ge")),
        *(("Is", "is_"), ("IsNot", "is_not")),
    )
} | {ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items}
_PASSED_ON = ("parse_hydra_overrides", "model_validate", "model_dump", "deepcopy")
"""Functions that return their first argument, or what they are a method of, as far as a refusal depends on it."""


class StartExpressions(StartSections):
    """Evaluator of expressions; the subclass runs statements."""

    def __init__(self, checkout: Path) -> None:
        super().__init__(checkout)
        self.environment: dict[str, Traced] = {}  # variables that the source has set

    @abstractmethod
    def assign(self, target: ast.expr, value: Traced, names: Names) -> None:
        """Give a value to what an assignment names."""

    @abstractmethod
    def make(self, of: SourceClass, arguments: list[Traced], named: dict[str, Traced], *, elsewhere: bool) -> Traced:
        """Return a new instance of a class."""

    @abstractmethod
    def read_recipe(self, of: object) -> Traced:
        """Return the recipe, validated by its class."""

    def value(self, node: ast.expr, names: Names) -> Traced:
        """Return the value of an expression."""
        match node:
            case ast.Constant(value):
                return Traced(value)
            case ast.Name(name):
                return self._name(name, names)
            case ast.Attribute(ast.Call(ast.Name("super")), name):
                return self.inherited(name, names)
            case ast.Attribute(owner, name):
                return self._attribute(self.value(owner, names), name)
            case ast.Subscript():
                return self._subscript(node, names)
            case ast.Call():
                return self._call(node, names)
            case ast.BoolOp(operation, values):
                return self._any_or_all(isinstance(operation, ast.Or), (self.value(each, names) for each in values))
            case ast.UnaryOp(operation, operand):
                return self._operate(operation, self.value(operand, names))
            case ast.BinOp(left, operation, right):
                return self._operate(operation, self.value(left, names), self.value(right, names))
            case ast.Compare(left, tests, others):
                operands = [self.value(each, names) for each in (left, *others)]
                pairs = zip(tests, operands, operands[1:], strict=False)
                return self._any_or_all(False, (self._compare(test, *pair) for test, *pair in pairs))
            case ast.IfExp(test, body, orelse):
                return self._choice(self.value(test, names), body, orelse, names)
            case ast.NamedExpr(target, inner):
                self.assign(target, result := self.value(inner, names), names)
                return result
            case ast.Await(inner):
                return self.value(inner, names)
            case ast.FormattedValue(inner, conversion):
                shown = self.value(inner, names)
                return Traced((repr if conversion == ord("r") else str)(_plain(shown.value)), shown.keys)
            case ast.Lambda():
                return Traced(SourceFunction(node, names))
            case ast.JoinedStr(parts):
                words = [self.value(each, names) for each in parts]
                return Traced("".join(str(each.value) for each in words), keys_of(*words))
            case ast.List(items) | ast.Tuple(items) | ast.Set(items):
                return self._collection(type(node), [self.value(each, names) for each in items], items)
            case ast.Dict(keys, items):
                return self._mapping(keys, [self.value(each, names) for each in items], names)
            case ast.ListComp(_, [generator]) | ast.SetComp(_, [generator]) | ast.GeneratorExp(_, [generator]):
                return self._comprehension(node, generator, names)
            case ast.Slice():
                bounds = [
                    self.value(each, names).value if each else None for each in (node.lower, node.upper, node.step)
                ]
                return Traced(slice(*bounds)) if all(map(is_known, bounds)) else UNKNOWN
        return UNKNOWN

    def items(self, value: Traced) -> list[Traced] | None:
        """Return the items of what a loop goes through; None if they are unknown, or too many."""
        items = [*value.value] if isinstance(value.value, RecipeSection) and not value.value.is_open else value.value
        if not isinstance(items, list | tuple | set | frozenset | range) or len(items) > _MAX_ITEMS:
            return None
        return [item if isinstance(item, Traced) else Traced(item, value.keys) for item in items]

    def _name(self, name: str, names: Names) -> Traced:
        inner: Names | None = names
        while inner is not None:
            if name in inner.values:
                return inner.values[name]
            inner = inner.outer
        return self.global_value(names.module, name)

    def _attribute(self, owner: Traced, name: str) -> Traced:
        match owner.value:
            case RecipeSection() as section:
                return self.item(section, name, is_attribute=True)
            case SourceObject() as instance:
                found = instance.attributes.get(name)
                return found or self.member(instance.of, name, owner)
            case SourceClass() | SourceFunction() if name == "remote":
                return owner
            case SourceClass() as of:
                return self.member(of, name, owner)
            case SourceModule() as module:
                return self.global_value(module, name)
            case Unknown() as unknown:
                return UNKNOWN if owner is UNKNOWN else unknown.attributes.setdefault(name, Traced(Unknown()))
        return UNKNOWN

    def _subscript(self, node: ast.Subscript, names: Names) -> Traced:
        owner, index = self.value(node.value, names), self.value(node.slice, names)
        if text_of(node.value) == "Literal":
            return index if isinstance(index.value, tuple) else Traced((index.value,))
        if text_of(node.value) == "os.environ":
            return self.environment.get(index.value, UNKNOWN) if isinstance(index.value, str) else UNKNOWN
        if not is_known(index.value):
            return UNKNOWN
        if isinstance(owner.value, RecipeSection):
            return self.item(owner.value, index.value)
        try:
            found = owner.value[index.value]
        except (LookupError, TypeError):
            return UNKNOWN
        return found if isinstance(found, Traced) else Traced(found, owner.keys | index.keys)

    def _any_or_all(self, stops_at: bool, values: Iterable[Traced]) -> Traced:
        """Return the first value that decides ``or`` (True) or ``and`` (False), or else the last one."""
        keys, has_unknown, last = NO_KEYS, False, UNKNOWN
        for last in values:
            is_true = truth(last.value)
            if is_true is stops_at:
                return Traced(is_true, last.keys) if has_unknown else last
            has_unknown |= is_true is None
            keys |= last.keys
        return UNKNOWN if has_unknown else Traced(last.value, keys)

    def _compare(self, test: ast.cmpop, left: Traced, right: Traced) -> Traced:
        if isinstance(test, ast.In | ast.NotIn) and isinstance(right.value, RecipeSection):
            if right.value.is_open or not is_known(left.value):
                return UNKNOWN
            is_in = left.value in right.value
            return Traced(is_in is isinstance(test, ast.In), left.keys | right.value.keys_of(left.value))
        if isinstance(test, ast.Is | ast.IsNot) and None in (left.value, right.value):
            other = left if right.value is None else right
            is_same = other.value is None
            return (
                UNKNOWN if isinstance(other.value, Unknown) else Traced(is_same is isinstance(test, ast.Is), other.keys)
            )
        return self._operate(test, left, right)

    def _operate(self, operation: ast.AST, *operands: Traced) -> Traced:
        return self._apply(_OPERATORS.get(type(operation)), operands)

    def _apply(self, function: Callable[..., Any] | None, arguments: Iterable[Traced]) -> Traced:
        """Return the result of a function of Python; unknown if an argument is, or if Python refuses it."""
        values = [each.value for each in arguments]
        is_huge = any(isinstance(each, int | float) and abs(each) > _MAX_SIZE**3 for each in values)
        if function is None or is_huge or not all(map(is_known, values)):
            return UNKNOWN
        try:
            size = max((len(each) for each in values if isinstance(each, str | list | tuple | range)), default=0)
            repeated = max((each for each in values if isinstance(each, int)), default=1)
            if size * (repeated if function is operator.mul else 1) > _MAX_SIZE:
                return UNKNOWN
            return Traced(function(*values), keys_of(*arguments))
        except (TypeError, ValueError, ArithmeticError, LookupError, MemoryError):
            return UNKNOWN

    def _choice(self, test: Traced, body: ast.expr, orelse: ast.expr, names: Names) -> Traced:
        is_true = truth(test.value)
        if is_true is None:
            return UNKNOWN
        chosen = self.value(body if is_true else orelse, names)
        return chosen if isinstance(chosen.value, RecipeSection) else Traced(chosen.value, chosen.keys | test.keys)

    def _collection(self, kind: type, values: list[Traced], nodes: list[ast.expr]) -> Traced:
        if any(isinstance(each, ast.Starred) for each in nodes):
            return UNKNOWN
        try:
            make = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[kind]
            return Traced(make(each.value for each in values), keys_of(*values))
        except TypeError:  # a list in a set
            return UNKNOWN

    def _mapping(self, keys: list[ast.expr | None], items: list[Traced], names: Names) -> Traced:
        made = RecipeSection()
        for key, item in zip(keys, items, strict=True):
            name = self.value(key, names).value if key else None
            if key is None and isinstance(item.value, RecipeSection):
                made.update(item.value)
                made.is_open |= item.value.is_open
            elif key is None or not isinstance(name, str | int | None):
                made.is_open = True
            else:
                made[name] = item
        return Traced(made)

    def _comprehension(self, node: Any, generator: ast.comprehension, names: Names) -> Traced:
        items = self.items(self.value(generator.iter, names))
        if items is None:
            return UNKNOWN
        results: list[Traced] = []
        for item in items:
            inner = Names(names.module, outer=names)
            self.assign(generator.target, item, inner)
            tests = [truth(self.value(test, inner).value) for test in generator.ifs]
            if None in tests:
                return UNKNOWN
            results += [self.value(node.elt, inner)] if all(tests) else []
        return self._collection(ast.Set if isinstance(node, ast.SetComp) else ast.List, results, [])

    # --- calls

    def _call(self, node: ast.Call, names: Names) -> Traced:
        name = text_of(node.func)
        short = name.rpartition(".")[2]
        arguments = [self.value(each, names) for each in node.args]
        named = {each.arg: self.value(each.value, names) for each in node.keywords if each.arg}
        for spread in (self.value(each.value, names).value for each in node.keywords if not each.arg):
            named = {**spread, **named} if isinstance(spread, RecipeSection) else named
        owner = self.value(node.func.value, names) if isinstance(node.func, ast.Attribute) else UNKNOWN
        if any(isinstance(each, ast.Starred) for each in node.args):
            return UNKNOWN
        match short, arguments:
            case ("load_config" | "MasterConfig" | "to_container", _):
                return self.read_recipe(self._name(short, names).value)
            case ("cast", [_, result]):
                return result
            case ("getenv" | "get", [variable, *default]) if name in ("os.getenv", "os.environ.get"):
                return self.environment.get(str(variable.value), next(iter(default), Traced(None)))
            case ("RayWorkerBuilder", [path, *others]):
                of = self.named(path.value).value
                # What the worker gets there is unknown.
                return self.make(of, others, named, elsewhere=True) if isinstance(of, SourceClass) else UNKNOWN
            case ("get_args", [arguments_of_type]):
                return arguments_of_type
            case ("options", _) if isinstance(owner.value, SourceClass | SourceFunction):  # of Ray
                return owner
            case ("get_object", [path]):
                return self.named(path.value)
            case ("submit", [Traced(SourceFunction() as function), *others]):
                self.call(function, others, named)
                return UNKNOWN
            case ("dict", [Traced(RecipeSection() as section)]):
                return Traced(section.shallow_copy())
            case ("bool", [value]):
                is_true = truth(value.value)
                return UNKNOWN if is_true is None else Traced(is_true, value.keys)
            case ("isinstance", [value, _]):
                return self._is_instance(value, text_of(node.args[1]))
            case (
                "hasattr" | "getattr",
                [Traced(RecipeSection() as section), Traced(str() as attribute), *default],
            ):
                found = self.item(section, attribute, is_attribute=True)
                if short == "hasattr":
                    return UNKNOWN if isinstance(found.value, Unknown) else Traced(True, found.keys)
                return default[0] if default and isinstance(found.value, Unknown) and not section.is_open else found
        if short in _PASSED_ON:
            return next(iter(arguments), owner)
        if isinstance(owner.value, RecipeSection) and (done := self._section_method(owner.value, short, arguments)):
            return done
        if name in ("zip", "enumerate", "len"):
            columns = [items for each in arguments if (items := self.items(each)) is not None]
            if len(columns) == len(arguments) > 0:
                counts = [[Traced(index) for index in range(len(columns[0]))]] if name == "enumerate" else []
                rows = [*zip(*counts, *columns, strict=False)]
                return Traced(len(rows) if name == "len" else rows, keys_of(*arguments))
        if name in _FUNCTIONS:
            return UNKNOWN if named else self._apply(_FUNCTIONS[name], arguments)
        if isinstance(owner.value, tuple(_METHODS)):
            return self._plain_method(node.func, owner, short, arguments, names)
        function = self.value(node.func, names).value
        if isinstance(function, SourceClass):
            return self.make(function, arguments, named, elsewhere=False)
        if isinstance(function, SourceFunction):
            return self.call(function, arguments, named)
        for each in (*arguments, *named.values()):
            if isinstance(each.value, Unknown):  # which the unknown function may change
                each.value.attributes.clear()
        return Traced(Unknown())

    def _is_instance(self, value: Traced, types: str) -> Traced:
        words = set(re.findall(r"\w+", types))
        if isinstance(value.value, RecipeSection):
            is_one = "BaseModel" in words if self.is_model(value.value) else bool(words & {"dict", "Dict", "Mapping"})
            return Traced(is_one)
        if isinstance(value.value, Unknown) or not words <= {*_TYPES}:
            return UNKNOWN
        return Traced(isinstance(value.value, tuple(_TYPES[word] for word in words)), value.keys)

    def _plain_method(self, node: Any, owner: Traced, name: str, arguments: list[Traced], names: Names) -> Traced:
        """Return the result of a method of a text, a list or a set."""
        allowed = next(methods for kind, methods in _METHODS.items() if isinstance(owner.value, kind))
        if name in allowed.split():
            return self._apply(
                getattr(owner.value, name), [Traced(each.value, each.keys | owner.keys) for each in arguments]
            )
        if name in CHANGES:
            changed = UNKNOWN
            if name in ("append", "add", "extend", "update"):
                with contextlib.suppress(TypeError):  # of what is added, nothing is known
                    getattr(owner.value, name)(*(each.value for each in arguments))
                    changed = Traced(owner.value, keys_of(owner, *arguments))
            self.assign(node.value, changed, names)
        return UNKNOWN

    def _section_method(self, section: RecipeSection, method: str, arguments: list[Traced]) -> Traced | None:
        """Return the result of a method of a mapping; None if it has no such method."""
        match method, arguments:
            case ("get" | "pop" | "setdefault", [Traced(name), *default]):
                if not is_known(name):
                    return UNKNOWN
                missing = next(iter(default), Traced(None))
                if method == "setdefault":
                    section.setdefault(name, missing)
                if name not in section and not section.is_open:
                    keys = missing.keys | section.keys_of(name)
                    return (
                        missing if isinstance(missing.value, RecipeSection | Unknown) else Traced(missing.value, keys)
                    )
                found = self.item(section, name)
                if method == "pop":
                    section.pop(name, None)
                return found
            case ("items", []):
                return UNKNOWN if section.is_open else Traced([*section.items()])
            case ("keys" | "values", []):
                return UNKNOWN if section.is_open else Traced([*(section if method == "keys" else section.values())])
            case ("update", [Traced(RecipeSection() as other)]):
                section.update(other)
                return Traced(None)
            case ("copy", []):
                return Traced(section.shallow_copy())
        return None


def _plain(value: object) -> object:
    """Return a value as NeMo-RL would print it."""
    return {name: _plain(item.value) for name, item in value.items()} if isinstance(value, RecipeSection) else value
