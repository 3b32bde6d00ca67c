"""What a record holds: one row a sequence, its tokens as lists, unpadded; one file a step and writer.

Data alone: pyarrow is imported where it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nemo_geomask
from nemo_geomask.optional import require

__all__ = ["COLUMNS", "REMOVED", "VERSION", "Column", "arrow_schema", "file_name", "require_arrow", "step_files"]

VERSION = 1
"""Of the schema. A column that is added keeps it; one whose meaning changes does not."""

REMOVED = "removed."
"""Before a mask's label: the column of its verdicts."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: its name.
        kind: Arrow's name of its type; ``list<…>`` holds one element a token, token t's at place t.
        definition: what it holds, in which unit.
        always: every record has it; otherwise null stands where the trainer doesn't know it.
    """

    name: str
    kind: str
    definition: str
    always: bool = False

    @property
    def by_token(self) -> bool:
        """Whether it holds a list, one element a token."""
        return self.kind.startswith("list<")

    @property
    def element(self) -> str:
        """Type of a value, of a token or of the sequence."""
        return self.kind.removeprefix("list<").removesuffix(">")


_LOGPROB = "log-prob of each token, nats; 0 or NaN where nobody computed it (prompt, tool output)"

COLUMNS: tuple[Column, ...] = (
    Column("step", "int64", "rollout batch that it is of, from 1, as NeMo-RL logs it", always=True),
    Column("row", "int32", "its row in the rollout batch, from 0", always=True),
    Column("group", "int64", "number of its prompt in the step: rows of one group have the same prompt", always=True),
    Column("sample", "int64", "number of the response within its group, in the order of the rows"),
    Column("weight_version", "int64", "number of the weights that generation began with"),
    Column("staleness", "int32", "optimiser's rollout batches between these weights and those that train on it"),
    Column("reward", "float32", "reward of the sequence, after shaping, before the baseline"),
    Column("length", "int32", "tokens, prompt and response", always=True),
    Column("prompt_length", "int32", "tokens before the first trained one; all of them where none is", always=True),
    Column("turns", "int32", "runs of trained tokens: turns of the policy", always=True),
    Column("sample_mask", "float32", "weight of the sequence in the loss; 0: not trained on", always=True),
    Column("tokens", "list<int32>", "token ids", always=True),
    Column("mask", "list<bool>", "tokens that train, before any mask of ours", always=True),
    Column("gen", "list<float32>", f"generation engine's {_LOGPROB}"),
    Column("prev", "list<float32>", f"training engine's {_LOGPROB}, before the batch's first optimiser step"),
    Column("curr", "list<float32>", f"training engine's {_LOGPROB}, at the optimiser step on the sequence"),
    Column("ref", "list<float32>", f"reference policy's {_LOGPROB}"),
    Column("entropy", "list<float32>", "entropy of the training engine's distribution at each token, nats"),
    Column("advantages", "list<float32>", "advantage of each token, as it is trained on"),
)
"""Of every record; a column for each mask comes on top, see :func:`arrow_schema`."""


def arrow_schema(masks: Iterable[str] = (), facts: Mapping[str, Any] | None = None) -> Any:
    """The schema of a file, a ``pyarrow.Schema``.

    Its metadata hold ``nemo_geomask.schema`` (:data:`VERSION`), ``nemo_geomask.version`` and, as JSON,
    ``nemo_geomask.facts``; those of each field its ``definition``.

    Args:
        masks: labels of the masks, a column ``removed.<label>`` each: the trained tokens that the mask removes.
        facts: what is true of the whole run, for JSON: ``settings`` of the loss, ``loop``, ``policy`` (whose log-probs
            stand for the current policy's in the verdicts, ``curr`` or ``prev``), versions.

    Raises:
        MissingDependencyError: there is no pyarrow.
    """
    arrow = require_arrow()
    of_masks = (Column(f"{REMOVED}{label}", "list<bool>", f"tokens that mask {label} removes") for label in masks)
    metadata = {
        "nemo_geomask.schema": str(VERSION),
        "nemo_geomask.version": nemo_geomask.__version__,
        "nemo_geomask.facts": json.dumps(dict(facts or {})),
    }
    return arrow.schema(
        [
            arrow.field(
                column.name,
                arrow.list_(_type(arrow, column)) if column.by_token else _type(arrow, column),
                nullable=not column.always,
                metadata={"definition": column.definition},
            )
            for column in (*COLUMNS, *of_masks)
        ],
        metadata=metadata,
    )


def _type(arrow: Any, column: Column) -> Any:
    return arrow.type_for_alias(column.element)


def file_name(step: int, writer: str) -> str:
    """Of one writer's records of one step."""
    return f"step-{step:07d}-{writer}.parquet"


_NAME = re.compile(r"step-(\d{7,})-(.+)\.parquet")


def step_files(directory: Path) -> dict[int, list[Path]]:
    """The files of a run's directory by step, in order; what is being written is not among them."""
    found: dict[int, list[Path]] = {}
    for path in sorted(directory.iterdir()):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append(path)
    return dict(sorted(found.items()))


def require_arrow(module: str = "pyarrow") -> Any:
    """Import pyarrow or a module of it.

    Raises:
        MissingDependencyError: it can't be imported.
    """
    return require(module, "records need", "diagnose")
