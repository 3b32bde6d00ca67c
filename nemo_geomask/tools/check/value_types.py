"""Types of values in a recipe, and the comparison of a value with its type as pydantic makes it for NeMo-RL."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nemo_geomask.yaml_text import as_yaml


class RefusedValue(NamedTuple):
    """Value that its type refuses."""

    key: str  # dotted key
    expected: str  # description of what is allowed
    is_missing: bool = False  # True if the key is required, and the section lacks it


@dataclass(frozen=True)
class ValueType:
    """Type that accepts every value; the base class of all others."""


ANYTHING = ValueType()

BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
"""Bounds of pydantic's ``Field``, in words."""
_SCALAR_NAMES = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
_BOOLEAN_TEXTS = {"true", "false", "yes", "no", "on", "off", "0", "1", "t", "f", "y", "n"}


@dataclass(frozen=True)
class Scalar(ValueType):
    """Number, text or switch: ``int``, ``float``, ``str`` or ``bool``."""

    name: str
    bounds: tuple[tuple[str, float], ...] = ()  # pydantic's name of a comparison, such as ``gt``, and its number


@dataclass(frozen=True)
class OneOf(ValueType):
    """One of several given values; null is ``None``."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class ListOf(ValueType):
    """List of items of one type."""

    item: ValueType


@dataclass(frozen=True)
class Open(ValueType):
    """Mapping with any keys, whose values have one type."""

    item: ValueType


@dataclass(frozen=True)
class Section(ValueType):
    """Mapping with declared keys; others are accepted and ignored."""

    name: str  # name of the class
    fields: Mapping[str, ValueType]  # type of each declared key
    required: frozenset[str] = frozenset()  # keys that must be present
    is_model: bool = False  # True for a pydantic model, False for a ``TypedDict``


@dataclass(frozen=True)
class AnyOf(ValueType):
    """Value of one of several types."""

    members: tuple[ValueType, ...]

    @classmethod
    def of(cls, *members: ValueType) -> ValueType:
        """Return the union of types; unions among them are flattened."""
        flat: list[ValueType] = []
        for member in members:
            flat += member.members if isinstance(member, AnyOf) else [member]
        return ANYTHING if any(type(member) is ValueType for member in flat) else cls(tuple(flat))


def mismatches(expected: ValueType, value: Any, key: str) -> Iterator[RefusedValue]:
    """Yield what a type refuses in a value at a dotted key."""
    match expected:
        case Scalar(name, bounds) if not (
            _is_scalar(name, value) and all(getattr(operator, test)(float(value), bound) for test, bound in bounds)
        ):
            yield RefusedValue(key, _describe(expected))
        case OneOf(values) if not any(type(value) is type(allowed) and value == allowed for allowed in values):
            yield RefusedValue(key, _describe(expected))
        case ListOf(item) if isinstance(value, list):
            for index, inner in enumerate(value):
                yield from mismatches(item, inner, f"{key}[{index}]")
        case Open(item) if isinstance(value, Mapping):
            for name, inner in value.items():
                yield from mismatches(item, inner, f"{key}.{name}")
        case Section(fields=fields, required=required) if isinstance(value, Mapping):
            prefix = f"{key}." if key else ""
            for name, field in fields.items():
                if name in value:
                    yield from mismatches(field, value[name], f"{prefix}{name}")
                elif name in required:
                    yield RefusedValue(f"{prefix}{name}", _describe(field), is_missing=True)
        case ListOf() | Open() | Section():
            yield RefusedValue(key, _describe(expected))
        case AnyOf():
            by_member = [list(mismatches(member, value, key)) for member in _candidates(expected, value)]
            if all(by_member):
                if len(by_member) == 1 or (by_member and isinstance(value, Mapping | list)):
                    yield from _of_all(by_member) or min(by_member, key=len)
                else:
                    yield RefusedValue(key, _describe(expected))


def _of_all(by_member: list[list[RefusedValue]]) -> list[RefusedValue]:
    """Return what every member of a union refuses, such as a name that each takes for its own word alone."""
    expected = [{each.key: each for each in refused} for refused in by_member]
    common = [key for key in expected[0] if len(by_member) > 1 and all(key in each for each in expected)]
    words = {key: dict.fromkeys(each[key].expected for each in expected) for key in common}
    return [expected[0][key]._replace(expected=" or ".join(words[key])) for key in common[:1]]


def _describe(expected: ValueType) -> str:
    """Return a description of what a type accepts, for error messages."""
    match expected:
        case Scalar(name, bounds):
            return _SCALAR_NAMES[name] + " and".join(f" {BOUNDS[test]} {bound:g}" for test, bound in bounds)
        case OneOf(values):
            return " or ".join("null" if value is None else as_yaml(value) for value in values)
        case AnyOf(members):
            return " or ".join(dict.fromkeys(map(_describe, members)))
        case ListOf():
            return "a list"
    return "a section" if isinstance(expected, Open | Section) else "any value"


def _is_scalar(name: str, value: Any) -> bool:
    """Return True if pydantic takes the value as a scalar, as it is or converted without loss."""
    if name == "str":
        return isinstance(value, str)
    if name == "bool":
        return value in (0, 1) if isinstance(value, int | float) else str(value).lower() in _BOOLEAN_TEXTS
    if not isinstance(value, int | float | str):
        return False
    if name == "int" and isinstance(value, int):
        return True
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return False
    return name == "float" or number.is_integer()


def _candidates(union: AnyOf, value: Any) -> list[ValueType]:
    """Return the members that a value may be meant to be; for a mapping, the sections that take its ``enabled``."""
    if not isinstance(value, Mapping):
        return list(union.members)
    sections: list[ValueType] = [member for member in union.members if isinstance(member, Section | Open)]
    enabled: list[ValueType] = [
        section
        for section in sections
        if isinstance(section, Section)
        and (switch := section.fields.get("enabled"))
        and not any(mismatches(switch, value.get("enabled"), ""))
    ]
    return enabled or sections or list(union.members)
