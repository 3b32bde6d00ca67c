"""Strict pydantic models, whose errors name the key, its value and what is allowed."""

from __future__ import annotations

import difflib
import functools
import math
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
from nemo_geomask.yaml_text import as_yaml

M = TypeVar("M", bound=BaseModel)
S = TypeVar("S", bound="StrictModel")

# Texts (in YAML, the words or quoted) that people write where they mean null.
_NULL_WORDS = ("none", "nil", "null", "")
# float32's smallest normal number and its largest one.
_FLOAT32_TINY, _FLOAT32_MAX = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to ``name``, ignoring case and dashes; None if none is similar."""
    return _nearest(name, tuple(candidates))


@functools.lru_cache(maxsize=4096)
def _nearest(name: str, candidates: tuple[str, ...]) -> str | None:
    by_normalized = {_normalize_name(candidate): candidate for candidate in candidates}
    normalized = _normalize_name(name)
    matches = difflib.get_close_matches(normalized, by_normalized, n=3, cutoff=0.6)
    # A candidate that begins with the name comes first: dppo suggests dppo_tv, not cppo.
    matches.sort(key=lambda match: not match.startswith(normalized))
    return by_normalized[matches[0]] if matches else None


def _normalize_name(name: str) -> str:
    return name.casefold().replace("-", "_")


class StrictModel(BaseModel):
    """Frozen model that refuses unknown keys (naming the nearest known one) and values of a look-alike type.

    A number is not accepted as a boolean, nor a boolean or a text as a number. A float must fit float32, the precision
    of the losses: finite, and 0 or at least the smallest normal number. Mappings and sequences may be of any type,
    OmegaConf's included. Unknown keys and bad values of known keys are reported together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_unknown_keys(cls: type[S], data: Any, validate: ModelWrapValidatorHandler[S]) -> S:
        if isinstance(data, cls):
            return validate(data)
        if not isinstance(data, Mapping):
            required = [name for name, field in cls.model_fields.items() if field.is_required()]
            is_number = isinstance(data, int | float) and not isinstance(data, bool)
            hint = f"write {{{required[0]}: {data}}}" if len(required) == 1 and is_number else ""
            raise PydanticCustomError("mapping", "must be a mapping", {"hint": hint})
        settings = to_builtins(data)
        known_keys = {key: value for key, value in settings.items() if key in cls.model_fields}
        unknown_keys = {str(key): value for key, value in settings.items() if key not in known_keys}
        guesses = {key: nearest(key, cls.model_fields) for key in unknown_keys}
        errors = [cls._unknown_key_error(key, unknown_keys[key], guess) for key, guess in guesses.items()]
        misspelt_fields = set(guesses.values())
        try:
            model = validate(known_keys)
        except ValidationError as error:
            # A required field that is probably misspelt is not reported as missing, too.
            errors += [
                _explained(cls, dict(item))
                for item in error.errors()
                if item["type"] != "missing" or item["loc"][0] not in misspelt_fields
            ]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return model

    @classmethod
    def _explain_unknown_key(cls, key: str, guess: str | None) -> str:
        """Return what the error of an unknown key says; ``guess`` is the nearest field, if any is similar."""
        if guess:
            return f"did you mean '{guess}'?"
        fields = cls.model_fields
        return "known keys: " + ", ".join(sorted(fields)) if fields else "no keys are allowed here"

    @classmethod
    def _unknown_key_error(cls, key: str, value: Any, guess: str | None) -> InitErrorDetails:
        context = {"message": f"unknown key; {cls._explain_unknown_key(key, guess)}", "misspelt_field": guess or ""}
        error = PydanticCustomError("unknown_key", "{message}", context)
        return InitErrorDetails(type=error, loc=(key,), input=value)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_look_alikes(cls, value: Any, info: ValidationInfo) -> Any:
        allowed = set(_union_members(cls.model_fields[str(info.field_name)].annotation)) - {type(None)}
        if allowed == {bool} and isinstance(value, int | float | str) and not isinstance(value, bool):
            raise PydanticCustomError("truth", "must be true or false")
        if allowed and allowed <= {int, float} and isinstance(value, bool | str):
            raise PydanticCustomError("number", "must be a number", {"hint": _number_hint(value)})
        # pydantic itself reports an infinity.
        if allowed == {float} and isinstance(value, int | float) and _FLOAT32_MAX < abs(value) < math.inf:
            raise PydanticCustomError("float32", "must fit float32, whose largest number is 3.4e+38")
        if allowed == {float} and isinstance(value, float) and 0 < abs(value) < _FLOAT32_TINY:
            raise PydanticCustomError("float32", "must fit float32, whose smallest normal number is 1.2e-38")
        return value


def _union_members(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, or the annotation itself if it is not a union."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    yield from typing.get_args(annotation) if is_union else (annotation,)


def _number_hint(value: bool | str) -> str:
    """Return how to write the number that a text spells; empty if it spells none."""
    if isinstance(value, bool):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    digits, _, exponent = value.strip().lower().partition("e")
    if not exponent:
        return f"{value!r} is text, write it without quotes"
    # YAML 1.1 requires a dot before the exponent and a sign in it.
    number = f"{digits if '.' in digits else f'{digits}.0'}e{int(exponent):+d}"
    return f"YAML 1.1 reads {value} as text, write {number}"


def to_builtins(value: Any) -> Any:
    """Return OmegaConf's containers, and any other mapping or sequence, as dicts, lists and tuples."""
    if isinstance(value, Mapping):
        return {key: to_builtins(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(to_builtins, value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_builtins(item) for item in value]
    return value


def _explained(model: type[BaseModel], item: Mapping[str, Any]) -> InitErrorDetails:
    """Return a pydantic error, to be raised again, with hints that pydantic's own message leaves out.

    The hints: that null is allowed, which of several allowed values is nearest, and how to write what was meant.

    Args:
        model: the model that refused the value.
        item: an entry of ``ValidationError.errors()``.
    """
    context = dict(item.get("ctx", {}))
    message, value, hint = _message(item), item["input"], context.pop("hint", "")
    context.pop("error", None)
    name = item["loc"][0] if len(item["loc"]) == 1 else None
    if name in model.model_fields:
        allowed = set(_union_members(model.model_fields[name].annotation))
        if type(None) in allowed and message.startswith(("Input should", "must be")):
            message += ", or null"
        if isinstance(value, str) and type(None) in allowed and value.strip().lower() in _NULL_WORDS:
            hint = f"in YAML {value!r} is a word, write null"
        elif isinstance(value, str) and item["type"] == "literal_error":
            guess = nearest(value, [choice for literal in allowed for choice in typing.get_args(literal)])
            hint = f"did you mean '{guess}'?" if guess else ""
    return relocated({**item, "msg": message + (f"; {hint}" if hint else ""), "ctx": context}, item["loc"])


def relocated(item: Mapping[str, Any], location: tuple[int | str, ...]) -> InitErrorDetails:
    """Return an entry of ``ValidationError.errors()`` as an error to be raised again, at another location."""
    context = {**item.get("ctx", {}), "message": _message(item)}
    error = PydanticCustomError(item["type"], "{message}", context)
    return InitErrorDetails(type=error, loc=location, input=item["input"])


def _message(item: Mapping[str, Any]) -> str:
    # Pydantic prefixes the message of an exception that a validator raised; the context has the exception itself.
    return str(item.get("ctx", {}).get("error", item["msg"]))


def conflict_error(keys: Collection[str], message: str, fix: Mapping[str, Any] | None = None) -> InitErrorDetails:
    """Return the error of fields that contradict each other, for a model's validator to raise; ``fix`` is a way out."""
    error = PydanticCustomError("conflict", "{message}", {"message": message, "keys": tuple(keys), "fix": fix or {}})
    return InitErrorDetails(type=error, loc=(), input=None)


def problems(error: ValidationError, *, prefix: str) -> tuple[Problem, ...]:
    """Return the problems that a pydantic error reports, with keys as the user's file has them.

    Args:
        error: pydantic's error.
        prefix: section of the file that the model describes, such as ``loss_fn``.
    """
    return tuple(_to_problem(dict(item), prefix) for item in error.errors())


def _to_problem(item: Mapping[str, Any], prefix: str) -> Problem:
    """Return an entry of ``ValidationError.errors()`` as a problem; see :func:`problems`."""
    location, context, message, value = item["loc"], item.get("ctx", {}), _message(item), item["input"]
    if item["type"] == "conflict":
        keys = tuple(_dotted_key((*location, key), prefix) for key in context["keys"])
        fix = {_dotted_key((*location, key), prefix): setting for key, setting in context["fix"].items()}
        return Problem(keys, message, frozenset(map(str, location[:1])), fix=fix)
    if location and not isinstance(value, Mapping):
        message += f" (found {value!r})" if isinstance(value, str) else f" (found {as_yaml(value)})"
    fields = {str(location[0]), str(context.get("misspelt_field", location[0]))} if location else set()
    key = _dotted_key(location, prefix)
    return Problem((key,) if key else (), message, frozenset(fields))


def _dotted_key(location: tuple[int | str, ...], prefix: str) -> str:
    """Return a pydantic error location as a user would write it: ``loss_fn.masks[0].min``."""
    key = prefix
    for part in location:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
    return key


def parse(model: type[M], data: Mapping[str, Any], *, prefix: str) -> M:
    """Validate ``data``, turning pydantic's error into one :class:`ConfigError` that lists every problem.

    Args:
        model: the pydantic class.
        data: a mapping, as read from YAML.
        prefix: section of the user's file that the data come from, such as ``loss_fn``.

    Raises: ConfigError: with a problem for each key, or for the keys that contradict each other.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(*problems(error, prefix=prefix)) from None
