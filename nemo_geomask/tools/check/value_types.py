"""Types of values in a recipe, and the comparison of a value with its type as pydantic makes it for NeMo-RL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nemo_geomask.config.strict import as_yaml

__all__ = ["ANYTHING", "AnyOf", "ListOf", "OneOf", "Open", "RefusedValue", "Scalar", "Section", "ValueType"]


class RefusedValue(NamedTuple):
    """Value that its type refuses.

    Attributes:
        key: dotted key.
        expected: description of what is allowed.
        is_missing: True if the key is required, and the section lacks it.
    """

    key: str
    expected: str
    is_missing: bool = False


@dataclass(frozen=True)
class ValueType:
    """Type that accepts every value; the base class of all others."""

    def describe(self) -> str:
        """Return a description of what the type accepts, for error messages."""
        return "any value"

    def mismatches(self, value: Any, key: str) -> Iterator[RefusedValue]:
        """Yield what the type refuses in a value at ``key``."""
        yield from ()


ANYTHING = ValueType()

_SCALAR_NAMES = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
_BOOLEAN_TEXTS = {"true", "false", "yes", "no", "on", "off", "0", "1", "t", "f", "y", "n"}


@dataclass(frozen=True)
class Scalar(ValueType):
    """Number, text or switch: ``int``, ``float``, ``str`` or ``bool``."""

    name: str

    def describe(self) -> str:
        """Return a description of what the type accepts, for error messages."""
        return _SCALAR_NAMES[self.name]

    def mismatches(self, value: Any, key: str) -> Iterator[RefusedValue]:
        """Yield what the type refuses in a value at ``key``."""
        if not self._accepts(value):
            yield RefusedValue(key, self.describe())

    def _accepts(self, value: Any) -> bool:
        """Return True if pydantic takes the value, as it is or converted without loss."""
        if self.name == "str":
            return isinstance(value, str)
        if self.name == "bool":
            return value in (0, 1) if isinstance(value, int | float) else str(value).lower() in _BOOLEAN_TEXTS
        if not isinstance(value, int | float | str):
            return False
        if self.name == "int" and isinstance(value, int):
            return True
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return False
        return self.name == "float" or number.is_integer()


@dataclass(frozen=True)
class OneOf(ValueType):
    """One of several given values; null is ``None``."""

    values: tuple[Any, ...]

    def describe(self) -> str:
        """Return a description of what the type accepts, for error messages."""
        return " or ".join("null" if value is None else as_yaml(value) for value in self.values)

    def mismatches(self, value: Any, key: str) -> Iterator[RefusedValue]:
        """Yield what the type refuses in a value at ``key``."""
        if not any(type(value) is type(allowed) and value == allowed for allowed in self.values):
            yield RefusedValue(key, self.describe())


@dataclass(frozen=True)
class ListOf(ValueType):
    """List of items of one type."""

    item: ValueType

    def describe(self) -> str:
        """Return a description of what the type accepts, for error messages."""
        return "a list"

    def mismatches(self, value: Any, key: str) -> Iterator[RefusedValue]:
        """Yield what the type refuses in a value at ``key``."""
        if not isinstance(value, list):
            yield RefusedValue(key, self.describe())
            return
        for index, item in enumerate(value):
            yield from self.item.mismatches(item, f"{key}[{index}]")


@dataclass(frozen=True)
class Open(ValueType):
    """Mapping with any keys, whose values have one type."""

    item: ValueType

    def describe(self) -> str:
        """Return a description of what the type accepts, for error messages."""
        return "a section"

    def mismatches(self, value: Any, key: str) -> Iterator[RefusedValue]:
        """Yield what the type refuses in a value at ``key``."""
        if not isinstance(value, Mapping):
            yield RefusedValue(key, self.describe())
            return
        for name, item in value.items():
            yield from self.item.mismatches(item, f"{key}.{name}")


@dataclass(frozen=True)
class Section(ValueType):
    """Mapping with declared keys; others are accepted and ignored.

    Attributes:
        name: name of the class.
        fields: type of each declared key.
        required: keys that must be present.
        is_model: True for a pydantic model, False for a ``TypedDict``.
    """

    name: str
    fields: Mapping[str, ValueType]
    required: frozenset[str] = frozenset()
    is_model: bool = False

    def describe(self) -> str:
        """Return a description of what the type accepts, for error messages."""
        return "a section"

    def mismatches(self, value: Any, key: str) -> Iterator[RefusedValue]:
        """Yield what the type refuses in a value at ``key``."""
        if not isinstance(value, Mapping):
            yield RefusedValue(key, self.describe())
            return
        prefix = f"{key}." if key else ""
        for name, field in self.fields.items():
            if name in value:
                yield from field.mismatches(value[name], f"{prefix}{name}")
            elif name in self.required:
                yield RefusedValue(f"{prefix}{name}", field.describe(), is_missing=True)


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

    def describe(self) -> str:
        """Return a description of what the type accepts, for error messages."""
        return " or ".join(dict.fromkeys(member.describe() for member in self.members))

    def mismatches(self, value: Any, key: str) -> Iterator[RefusedValue]:
        """Yield what the type refuses in a value at ``key``."""
        by_member = [list(member.mismatches(value, key)) for member in self._candidates(value)]
        if any(not refused_values for refused_values in by_member):
            return
        if len(by_member) == 1:
            yield from by_member[0]
        elif by_member and isinstance(value, Mapping | list):
            yield from min(by_member, key=len)
        else:
            yield RefusedValue(key, self.describe())

    def _candidates(self, value: Any) -> list[ValueType]:
        """Return the members that a value may be meant to be; for a mapping, the sections that take its ``enabled``."""
        if not isinstance(value, Mapping):
            return list(self.members)
        sections: list[ValueType] = [member for member in self.members if isinstance(member, Section | Open)]
        enabled: list[ValueType] = [
            section
            for section in sections
            if isinstance(section, Section)
            and (switch := section.fields.get("enabled"))
            and not any(switch.mismatches(value.get("enabled"), ""))
        ]
        return enabled or sections or list(self.members)
