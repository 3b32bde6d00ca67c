"""Strict pydantic models whose errors name the key, what was found and what is allowed."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from nemo_geomask.errors import ConfigError

__all__ = ["Problem", "StrictModel", "as_yaml", "conflicting", "dotted", "nearest", "parse", "problems", "repeated"]

M = TypeVar("M", bound=BaseModel)
S = TypeVar("S", bound="StrictModel")

# What YAML reads as a word, and people mean as null.
_NULLS = ("none", "nil", "null", "")


def as_yaml(value: Any) -> str:
    """A scalar as a recipe writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


class StrictModel(BaseModel):
    """Frozen, refuses unknown keys (with the nearest known one) and non-finite numbers.

    Unknown keys and bad values of known ones are reported together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_unknown_keys(cls: type[S], data: Any, validate: ModelWrapValidatorHandler[S]) -> S:
        if not isinstance(data, Mapping):
            return validate(data)
        known = {key: value for key, value in data.items() if key in cls.model_fields}
        errors = [_unknown_key(str(key), data[key], cls.model_fields) for key in data if key not in known]
        meant = {nearest(str(key), cls.model_fields) for key in data if key not in known}
        try:
            made = validate(known)
        except ValidationError as error:
            # What is missing only since it is misspelt is no second problem.
            items = (item for item in error.errors() if item["type"] != "missing" or item["loc"][0] not in meant)
            errors += [_detail(cls, dict(item)) for item in items]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return made


def _unknown_key(key: str, value: Any, known: Collection[str]) -> InitErrorDetails:
    guess = nearest(key, known)
    if guess:
        hint = f"did you mean '{guess}'?"
    else:
        hint = "known keys: " + ", ".join(sorted(known)) if known else "there are none here"
    error = PydanticCustomError("unknown_key", "unknown key; {hint}", {"hint": hint, "meant": guess or ""})
    return InitErrorDetails(type=error, loc=(key,), input=value)


def _detail(model: type[BaseModel], item: Mapping[str, Any]) -> InitErrorDetails:
    """A pydantic error to be raised again; it says where null is allowed, which pydantic's own leaves out."""
    message, value = item["msg"], item["input"]
    name = item["loc"][0] if len(item["loc"]) == 1 else None
    if name in model.model_fields and _takes_none(model.model_fields[name].annotation):
        message += ", or null"
        if isinstance(value, str) and value.strip().lower() in _NULLS:
            message += f"; in YAML {value!r} is a word, write null"
    return repeated({**item, "msg": message}, item["loc"])


def repeated(item: Mapping[str, Any], location: tuple[int | str, ...]) -> InitErrorDetails:
    """One of ``ValidationError.errors()`` to be raised again, at ``location``."""
    context = {**item.get("ctx", {}), "message": item["msg"]}
    error = PydanticCustomError(item["type"], "{message}", context)
    return InitErrorDetails(type=error, loc=location, input=item["input"])


def _takes_none(annotation: Any) -> bool:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return union and type(None) in typing.get_args(annotation)


def conflicting(keys: Collection[str], message: str) -> InitErrorDetails:
    """The error of settings that contradict each other, for a validator of their model to raise.

    Args:
        keys: the settings, as the model's fields are called.
        message: their values, and the way out.
    """
    error = PydanticCustomError("conflict", "{message}", {"message": message, "keys": tuple(keys)})
    return InitErrorDetails(type=error, loc=(), input=None)


@dataclass(frozen=True)
class Problem:
    """What is wrong with a setting, or between several.

    Attributes:
        keys: dotted; of a contradiction all that it is between.
        message: what is wrong, the value found, the way out.
        fields: fields of the model that can't be relied on because of it, also the one that a misspelt key means.
    """

    keys: tuple[str, ...]
    message: str
    fields: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """One line, which begins with the dotted keys."""
        return f"{', '.join(self.keys)}: {self.message}"


def problems(error: ValidationError, *, prefix: str) -> tuple[Problem, ...]:
    """What a pydantic error says, in the words of the user's file, in which the model stands under ``prefix``."""
    return tuple(_problem(dict(item), prefix) for item in error.errors())


def _problem(item: Mapping[str, Any], prefix: str) -> Problem:
    location, context = item["loc"], item.get("ctx", {})
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "conflict":
        keys = tuple(dotted((*location, key), prefix) for key in context["keys"])
        return Problem(keys, message, frozenset(map(str, location[:1])))
    found = f" (found {item['input']!r})" if location and not isinstance(item["input"], Mapping) else ""
    fields = {str(location[0]), str(context.get("meant", location[0]))} if location else set()
    return Problem((dotted(location, prefix) or prefix,), message + found, frozenset(fields))


def dotted(location: tuple[int | str, ...], prefix: str = "") -> str:
    """A pydantic error location as a user would write it: ``loss_fn.masks[0].min``."""
    text = prefix
    previous: int | str = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not isinstance(previous, int) or not part.startswith("preset:"):
            # After a list index pydantic inserts the tag of the union's chosen member, which no user wrote.
            text += f".{part}" if text else part
        previous = part
    return text


def parse(model: type[M], data: Mapping[str, Any], *, prefix: str) -> M:
    """Validate ``data``, turning pydantic's error into one :class:`ConfigError` that lists every problem.

    Args:
        model: the pydantic class.
        data: a mapping, as read from YAML.
        prefix: what the keys stand under in the user's file, such as ``loss_fn``.

    Raises:
        ConfigError: with a line a problem: dotted key (keys, where settings contradict each other), what is wrong,
            value found.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError("\n".join(map(str, problems(error, prefix=prefix)))) from None
