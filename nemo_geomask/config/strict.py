"""Strict pydantic models whose errors name the key, what was found and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from nemo_geomask.errors import ConfigError

__all__ = ["StrictModel", "dotted", "nearest", "parse"]

M = TypeVar("M", bound=BaseModel)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


class StrictModel(BaseModel):
    """Frozen, refuses unknown keys (with the nearest known one) and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        unknown = [key for key in data if key not in cls.model_fields]
        if unknown:
            raise ValidationError.from_exception_data(
                cls.__name__, [_unknown_key(str(key), data[key], cls.model_fields) for key in unknown]
            )
        return data


def _unknown_key(key: str, value: Any, known: Collection[str]) -> InitErrorDetails:
    guess = nearest(key, known)
    if guess:
        hint = f"did you mean '{guess}'?"
    else:
        hint = "known keys: " + ", ".join(sorted(known)) if known else "there are none here"
    error = PydanticCustomError("unknown_key", "unknown key; {hint}", {"hint": hint})
    return InitErrorDetails(type=error, loc=(key,), input=value)


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
        ConfigError: with a line a problem: dotted key, what is wrong, value found.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        lines = [
            f"{dotted(item['loc'], prefix) or prefix}: {item['msg'].removeprefix('Value error, ')}"
            + (f" (found {item['input']!r})" if item["loc"] and not isinstance(item["input"], Mapping) else "")
            for item in error.errors()
        ]
        raise ConfigError("\n".join(lines)) from None
