"""The probe's files, read as what a stranger may have written: held to a size, and to the types that a probe writes.

Their hashes only tell what was cut or changed by accident: whoever writes a file can compute them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nemo_geomask.errors import DataError
from nemo_geomask.recipe.input_limits import open_regular_file

__all__ = ["Content", "Frozen", "read_json_file", "validate"]

_MAX_BYTES = 2**30
"""Of one file. The scores of 64 prompts with 8,000 tokens each take 400 MB under thirty requests."""
_MAX_TEXT = 5000  # characters of an error, of a name, or of a token

_Text = Annotated[str, Field(max_length=_MAX_TEXT)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Model = TypeVar("_Model", bound=BaseModel)


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of the probe.

    Raises:
        InputLimitError: it is no regular file.
        DataError: it can't be read, is larger than 1 GiB, or is not JSON.
    """
    try:
        with open_regular_file(path) as file:
            if os.fstat(file.fileno()).st_size > _MAX_BYTES:
                raise DataError(f"{path}: has more than {_MAX_BYTES:,} bytes, so no probe wrote it; remove it")
            # Every file of a probe is an object. A hole in a file begins with null characters, and is not read.
            text = b"{" + file.read() if file.read(1) == b"{" else b""
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from None
    try:
        content: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error)[:200] if isinstance(error, ValueError) else type(error).__name__
        raise DataError(f"{path}: not JSON: {reason}; remove it, or give another folder to --out") from None
    return content


def validate(model: type[_Model], value: Any, path: Path) -> None:
    """Hold a file's value to a model.

    Raises: DataError: it does not fit; the message names the first place and what is wrong there.
    """
    try:
        model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "".join(f"{part}." for part in first["loc"])[:200]
        reason = f"{place.removesuffix('.')}: {first['msg']}"[:400].removeprefix(": ")
        raise DataError(
            f"{path}: is no file that a probe wrote: {reason}; remove it, or give another folder to --out"
        ) from None


class _StoredModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Request(_StoredModel):
    logprobs: list[list[float]]
    seconds: _Seconds
    settings: dict[_Text, str] = {}


class _Layers(_StoredModel):
    error: _Text
    own: dict[_Text, float] = {}
    replayed: dict[_Text, float] = {}
    head: list[list[float]] = []


class _Adapters(_StoredModel):
    count: int
    is_delivered: bool


class _Scores(_StoredModel):
    decode: dict[_Text, _Request]
    trainer: dict[_Text, _Request]
    prefill: _Request
    engine_settings: dict[_Text, str]
    layers: _Layers | None = None
    adapters: _Adapters | None = None

    @model_validator(mode="after")
    def _heads_fit_prefill(self) -> _Scores:
        for head, logprobs in zip(self.layers.head if self.layers else (), self.prefill.logprobs, strict=False):
            if len(head) != len(logprobs):
                raise ValueError("layers.head has other lengths than prefill.logprobs")
        return self


class Content(_StoredModel):
    """Content of a stored start: its error, or its scores."""

    error: _Text
    scores: dict[str, Any]
    frozen: _Text
    weights: list[_Text] | None
    sent: _Text
    seconds: _Seconds

    @model_validator(mode="after")
    def _scores_or_error(self) -> Content:
        if not self.error:
            _Scores.model_validate(self.scores)
        return self


class Frozen(_StoredModel):
    """The frozen sequences."""

    sequences: list[list[Annotated[int, Field(ge=0, lt=2**31)]]] = Field(min_length=1)
    prompt_lengths: list[Annotated[int, Field(ge=1)]]
    prompts: list[Annotated[int, Field(ge=0)]]
    sampled: list[list[float]]
    by_trainer: list[bool]
    trainer_error: _Text = ""
    texts: dict[_Text, _Text] = {}

    @model_validator(mode="after")
    def _lists_fit(self) -> Frozen:
        lists: Sequence[Sequence[Any]] = (self.prompt_lengths, self.prompts, self.sampled, self.by_trainer)
        if any(len(each) != len(self.sequences) for each in lists):
            raise ValueError(f"its lists have other lengths than its {len(self.sequences)} sequences")
        for index, (sequence, start, sampled) in enumerate(
            zip(self.sequences, self.prompt_lengths, self.sampled, strict=True)
        ):
            if len(sequence) - start != len(sampled):
                raise ValueError(
                    f"sequence {index} has {len(sequence)} tokens, {start} of the prompt, {len(sampled)} sampled"
                )
            if any(map(math.isnan, sampled)):
                raise ValueError(f"sequence {index} has a sampled log-prob that is not a number")
        return self
