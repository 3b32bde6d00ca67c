"""Strict pydantic models whose errors name the key, what was found and what is allowed."""

from __future__ import annotations

import difflib
import json
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from nemo_geomask.errors import ConfigError, Problem

__all__ = [
    "StrictModel",
    "as_yaml",
    "conflicting",
    "dotted",
    "inline_yaml",
    "nearest",
    "parse",
    "plain",
    "problems",
    "repeated",
]

M = TypeVar("M", bound=BaseModel)
S = TypeVar("S", bound="StrictModel")

# What YAML reads as a word, and people mean as null.
_NULLS = ("none", "nil", "null", "")
# float32's smallest normal number and its largest one.
_SMALLEST, _LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


def as_yaml(value: Any) -> str:
    """A scalar as a recipe writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# What YAML 1.1 takes for something else than text.
_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan")


def inline_yaml(value: Any) -> str:
    """A value of any kind on one line of a recipe; texts that could be anything else are quoted."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{inline_yaml(key)}: {inline_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(inline_yaml, value)) + "]"
    if isinstance(value, float):
        digits, power, exponent = repr(value).partition("e")
        # YAML 1.1 takes a number with an exponent for text unless it has a dot.
        return digits + (".0" if power and "." not in digits else "") + power + exponent
    if isinstance(value, str) and (value.lower() in _WORDS or not re.fullmatch(r"[A-Za-z_][\w-]*", value)):
        return json.dumps(value, ensure_ascii=False)
    return as_yaml(value)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, whatever its capitals and dashes, or None when nothing is close."""
    spelt = {_bare(other): other for other in known}
    matches = difflib.get_close_matches(_bare(name), spelt, n=3, cutoff=0.6)
    # What it is the beginning of, before what only looks like it: dppo is dppo_tv and not cppo.
    matches.sort(key=lambda other: not other.startswith(_bare(name)))
    return spelt[matches[0]] if matches else None


def _bare(name: str) -> str:
    return name.casefold().replace("-", "_")


class StrictModel(BaseModel):
    """Frozen, refuses unknown keys (with the nearest known one) and what only looks like the right type.

    A number is no truth value, a truth value or a text no number, and a float must be one of float32, in which losses
    are computed: finite, and 0 or at least its smallest normal number. Mappings and sequences may be of any kind,
    OmegaConf's among them. Unknown keys and bad values of known ones are reported together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_unknown_keys(cls: type[S], data: Any, validate: ModelWrapValidatorHandler[S]) -> S:
        if isinstance(data, cls):
            return validate(data)
        if not isinstance(data, Mapping):
            needed = [name for name, field in cls.model_fields.items() if field.is_required()]
            number = isinstance(data, int | float) and not isinstance(data, bool)
            hint = f"write {{{needed[0]}: {data}}}" if len(needed) == 1 and number else ""
            raise PydanticCustomError("mapping", "must be a mapping", {"hint": hint})
        given = plain(data)
        known = {key: value for key, value in given.items() if key in cls.model_fields}
        errors = [cls._unknown_key(str(key), given[key]) for key in given if key not in known]
        meant = {nearest(str(key), cls.model_fields) for key in given if key not in known}
        try:
            made = validate(known)
        except ValidationError as error:
            # What is missing only since it is misspelt is no second problem.
            items = (item for item in error.errors() if item["type"] != "missing" or item["loc"][0] not in meant)
            errors += [_detail(cls, dict(item)) for item in items]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return made

    @classmethod
    def _answer(cls, key: str, value: Any) -> str:
        """What is known of a key that is none of the model's."""
        return ""

    @classmethod
    def _unknown_key(cls, key: str, value: Any) -> InitErrorDetails:
        answer, known = cls._answer(key, value), cls.model_fields
        guess = None if answer else nearest(key, known)
        if guess:
            answer = f"did you mean '{guess}'?"
        elif not answer:
            answer = "known keys: " + ", ".join(sorted(known)) if known else "there are none here"
        context = {"message": f"unknown key; {answer}", "meant": guess or ""}
        error = PydanticCustomError("unknown_key", "{message}", context)
        return InitErrorDetails(type=error, loc=(key,), input=value)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_look_alikes(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = set(_members(cls.model_fields[str(info.field_name)].annotation)) - {type(None)}
        if kinds == {bool} and isinstance(value, int | float | str) and not isinstance(value, bool):
            raise PydanticCustomError("truth", "must be true or false")
        if kinds and kinds <= {int, float} and isinstance(value, bool | str):
            raise PydanticCustomError("number", "must be a number", {"hint": _as_number(value)})
        # Infinity is named by pydantic.
        if kinds == {float} and isinstance(value, int | float) and _LARGEST < abs(value) < math.inf:
            raise PydanticCustomError("float32", "must fit float32, which ends at 3.4e+38")
        if kinds == {float} and isinstance(value, float) and 0 < abs(value) < _SMALLEST:
            raise PydanticCustomError("float32", "must fit float32, where next to 0 stands 1.2e-38")
        return value


def _members(annotation: Any) -> Iterator[Any]:
    """The types of a union; the one type of what is none."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    yield from typing.get_args(annotation) if union else (annotation,)


def _as_number(value: bool | str) -> str:
    """How to write a text that is meant as a number, if it is."""
    if isinstance(value, bool):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    digits, _, power = value.strip().lower().partition("e")
    if not power:
        return f"{value!r} is text, write it without quotes"
    # YAML 1.1 wants a dot and a sign.
    written = f"{digits if '.' in digits else f'{digits}.0'}e{int(power):+d}"
    return f"to YAML 1.1 {value} is text, write {written}"


def plain(value: Any) -> Any:
    """OmegaConf's containers, and whatever else is a mapping or a sequence, as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def _detail(model: type[BaseModel], item: Mapping[str, Any]) -> InitErrorDetails:
    """A pydantic error to be raised again, with what pydantic's own leaves out: where null is allowed, the nearest of
    several values, and how to write what was meant."""
    context = dict(item.get("ctx", {}))
    message, value, hint = _message(item), item["input"], context.pop("hint", "")
    context.pop("error", None)
    name = item["loc"][0] if len(item["loc"]) == 1 else None
    if name in model.model_fields:
        kinds = set(_members(model.model_fields[name].annotation))
        if type(None) in kinds and message.startswith(("Input should", "must be")):
            message += ", or null"
        if isinstance(value, str) and type(None) in kinds and value.strip().lower() in _NULLS:
            hint = f"in YAML {value!r} is a word, write null"
        elif isinstance(value, str) and item["type"] == "literal_error":
            choices = [choice for kind in kinds for choice in typing.get_args(kind)]
            guess = nearest(value, choices)
            hint = f"did you mean '{guess}'?" if guess else ""
    return repeated({**item, "msg": message + (f"; {hint}" if hint else ""), "ctx": context}, item["loc"])


def repeated(item: Mapping[str, Any], location: tuple[int | str, ...]) -> InitErrorDetails:
    """One of ``ValidationError.errors()`` to be raised again, at ``location``."""
    context = {**item.get("ctx", {}), "message": _message(item)}
    error = PydanticCustomError(item["type"], "{message}", context)
    return InitErrorDetails(type=error, loc=location, input=item["input"])


def _message(item: Mapping[str, Any]) -> str:
    # Of an error that a validator raised, pydantic's own message says so first.
    return str(item.get("ctx", {}).get("error", item["msg"]))


def conflicting(keys: Collection[str], message: str) -> InitErrorDetails:
    """The error of a model's fields that contradict each other, for its validator to raise."""
    error = PydanticCustomError("conflict", "{message}", {"message": message, "keys": tuple(keys)})
    return InitErrorDetails(type=error, loc=(), input=None)


def problems(error: ValidationError, *, prefix: str) -> tuple[Problem, ...]:
    """What a pydantic error says, in the words of the user's file, in which the model stands under ``prefix``."""
    return tuple(_problem(dict(item), prefix) for item in error.errors())


def _problem(item: Mapping[str, Any], prefix: str) -> Problem:
    location, context, message, found = item["loc"], item.get("ctx", {}), _message(item), item["input"]
    if item["type"] == "conflict":
        keys = tuple(dotted((*location, key), prefix) for key in context["keys"])
        return Problem(keys, message, frozenset(map(str, location[:1])))
    if location and not isinstance(found, Mapping):
        message += f" (found {found!r})" if isinstance(found, str) else f" (found {as_yaml(found)})"
    fields = {str(location[0]), str(context.get("meant", location[0]))} if location else set()
    key = dotted(location, prefix)
    return Problem((key,) if key else (), message, frozenset(fields))


def dotted(location: tuple[int | str, ...], prefix: str = "") -> str:
    """A pydantic error location as a user would write it: ``loss_fn.masks[0].min``."""
    text = prefix
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse(model: type[M], data: Mapping[str, Any], *, prefix: str) -> M:
    """Validate ``data``, turning pydantic's error into one :class:`ConfigError` that lists every problem.

    Args:
        model: the pydantic class.
        data: a mapping, as read from YAML.
        prefix: what the keys stand under in the user's file, such as ``loss_fn``.

    Raises: ConfigError: with a problem for each key, or for the keys that contradict each other.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(*problems(error, prefix=prefix)) from None
