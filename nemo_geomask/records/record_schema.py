"""Schema of the records: one row for each sequence, its tokens as unpadded lists; a file for each step.

pyarrow is imported when a function needs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import nemo_geomask
from nemo_geomask.optional import require

VERSION = 1
"""Version of the schema. Adding a column does not change it; changing the meaning of a column increments it."""

CHECKSUM_KEY = "nemo_geomask.checksum"
"""Key of a file's metadata with the checksum of all its bytes; see :mod:`nemo_geomask.records.checksums`."""

ORIGIN_KEY = "nemo_geomask.origin"
"""Key of a file's metadata with the :class:`RecordOrigin` that wrote it, as JSON; every file with a checksum has it."""

FACTS_KEY = "nemo_geomask.facts"
"""Key of a file's metadata with properties of the whole run, as JSON; see :func:`arrow_schema`."""

REMOVED = "removed."
"""Prefix of the column that is True for the tokens a mask removes; the mask's label follows."""

MAX_TEXT_BYTES = 128
"""Largest size of a text in a record, such as an environment's name, in bytes of UTF-8; no text is empty."""


@dataclass(frozen=True)
class Column:
    """One column of a record.

    Attributes:
        name: the column's name.
        arrow_type: Arrow's name of the column's type; a ``list<…>`` has one element for each token, in their order.
        definition: meaning of its values, with the unit.
        is_required: True if every record has a value; else it is null where the trainer doesn't know the value.
    """

    name: str
    arrow_type: str
    definition: str
    is_required: bool = False

    @property
    def is_per_token(self) -> bool:
        """True if the column holds a list with one element for each token."""
        return self.arrow_type.startswith("list<")

    @property
    def is_text(self) -> bool:
        """True if the column holds a text for each sequence; see :func:`is_recordable_text`."""
        return self.arrow_type == "string"

    @property
    def element(self) -> str:
        """Arrow's name of the type of one value: of a token's in a list, else of the sequence's."""
        return self.arrow_type.removeprefix("list<").removesuffix(">")


@dataclass(frozen=True)
class RecordOrigin:
    """Origin of a record file: a recording, which is a recorder's work from its first step to its process's end.

    A run that is resumed is another recording.

    Attributes:
        writer: name of what wrote the file: a recorder's process, or the loop whose log was converted.
        id: random name of the recording; empty for a file that was written by itself, outside a recording.
        started: when the recording began, in seconds since 1970 by the clock of its machine.
        first_step: first step of the recording. A later recording replaces an earlier one from this step on.
    """

    writer: str
    id: str = ""
    started: float = 0.0
    first_step: int = 0


_LOGPROB = "log-prob of each token, nats; 0 or NaN where not computed"

COLUMNS: tuple[Column, ...] = (
    Column("step", "int64", "number of the rollout batch, from 1, as NeMo-RL logs it", is_required=True),
    Column("row", "int32", "row of the sequence in the rollout batch, from 0", is_required=True),
    Column(
        "group", "int64", "number of the prompt in the step: rows of a group have the same prompt", is_required=True
    ),
    Column("sample", "int64", "number of the response within its group, in row order"),
    Column(
        "environment",
        "string",
        "name of the environment of the sequence's prompt, NeMo-Gym's agent; null where the loop does not name it",
    ),
    Column(
        "replica", "string", "name of the generation engine's replica of the sequence; null where the loop names none"
    ),
    Column("weight_version", "int64", "version of the weights that generation began with"),
    Column("staleness", "int32", "number of rollout batches between the weights that generated and those that train"),
    Column("reward", "float32", "reward of the sequence, after shaping, before the baseline"),
    Column("length", "int32", "number of tokens, of prompt and response together", is_required=True),
    Column(
        "prompt_length",
        "int32",
        "number of tokens before the first trained one; all tokens if none is trained",
        is_required=True,
    ),
    Column("turns", "int32", "contiguous runs of trained tokens: the policy's turns", is_required=True),
    Column("sample_mask", "float32", "weight of the sequence in the loss; 0: not trained on", is_required=True),
    Column("tokens", "list<int32>", "token ids", is_required=True),
    Column("mask", "list<bool>", "tokens that train, before the masks of loss_fn", is_required=True),
    Column("gen", "list<float32>", f"generation engine's {_LOGPROB}"),
    Column("prev", "list<float32>", f"training engine's {_LOGPROB}, before the batch's first optimiser step"),
    Column("curr", "list<float32>", f"training engine's {_LOGPROB}, at the optimiser step on the sequence"),
    Column("ref", "list<float32>", f"reference policy's {_LOGPROB}"),
    Column("entropy", "list<float32>", "entropy of the training engine's distribution at each token, nats"),
    Column("advantages", "list<float32>", "advantage of each token, as used in training"),
    Column("token_version", "list<int64>", "number of updates behind the weights that sampled each token"),
)
"""Columns of every record; :func:`arrow_schema` adds one for each mask."""


def arrow_schema(masks: Iterable[str] = (), facts: Mapping[str, Any] | None = None) -> Any:
    """Return the schema of a file, a ``pyarrow.Schema``.

    Its metadata have ``nemo_geomask.schema`` (:data:`VERSION`), ``nemo_geomask.version`` and, as JSON,
    ``nemo_geomask.facts``; the metadata of each field have its ``definition``.

    Args:
        masks: labels of the masks; each gets a column ``removed.<label>``, True for the trained tokens it removes.
        facts: properties of the whole run, for JSON: ``settings`` of the loss, ``loop``, ``policy`` (``curr`` or
            ``prev``: the log-probs that masks on the current policy were evaluated on), ``experts`` of a layer of the
            model (0 for none), ``sampler`` and ``trainer``, the engines with their precision, versions.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    arrow = require_arrow()
    mask_columns = (Column(f"{REMOVED}{label}", "list<bool>", f"tokens that mask {label} removes") for label in masks)
    metadata = {
        "nemo_geomask.schema": str(VERSION),
        "nemo_geomask.version": nemo_geomask.__version__,
        FACTS_KEY: json.dumps(dict(facts or {})),
    }
    return arrow.schema(
        [
            arrow.field(
                column.name,
                _field_type(arrow, column),
                nullable=not column.is_required,
                metadata={"definition": column.definition},
            )
            for column in (*COLUMNS, *mask_columns)
        ],
        metadata=metadata,
    )


def _field_type(arrow: Any, column: Column) -> Any:
    element = arrow.type_for_alias(column.element)
    return arrow.list_(element) if column.is_per_token else element


def is_recordable_text(value: object) -> TypeGuard[str]:
    """Return True if a value is a text of 1 to :data:`MAX_TEXT_BYTES` bytes of UTF-8, which a record can hold."""
    if not isinstance(value, str):
        return False
    try:
        return 0 < len(value.encode()) <= MAX_TEXT_BYTES
    except UnicodeEncodeError:  # a surrogate without its other half
        return False


def file_name(step: int, writer: str) -> str:
    """Return the name of the file with a writer's records of one step."""
    return f"step-{step:07d}-{writer}.parquet"


_FILE_NAME = re.compile(r"step-(\d{7,})-(.+)\.parquet")


def file_step(path: Path) -> int | None:
    """Return the step in the name of a record file; None for another name."""
    match = _FILE_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def step_files(directory: Path) -> dict[int, list[Path]]:
    """Return the complete record files in a run's directory, by step in ascending order."""
    files: dict[int, list[Path]] = {}
    for path in sorted(directory.iterdir()):
        if (step := file_step(path)) is not None:
            files.setdefault(step, []).append(path)
    return dict(sorted(files.items()))


def require_arrow(module: str = "pyarrow") -> Any:
    """Return pyarrow, or a module of it.

    Raises:
        MissingDependencyError: pyarrow can't be imported.
    """
    return require(module, "records need", "diagnose")
