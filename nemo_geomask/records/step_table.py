"""A step's tensors as an Arrow table, with the padding removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.records.record_schema import COLUMNS, REMOVED, Column, arrow_schema, require_arrow


@dataclass(frozen=True)
class StepRows:
    """The recorded sequences of one step.

    Attributes:
        lengths: [S] number of tokens of each sequence.
        values: tensors by column name: [S], or [S, T] with padding at the right for a column of lists. A column of
            texts is a sequence of S texts, None where a text is not known. A column without a value is null.
        facts: properties of these sequences, in addition to those of the run.
    """

    lengths: Tensor
    values: Mapping[str, Tensor | Sequence[str | None]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


def step_table(step: int, rows: StepRows, masks: Sequence[str], facts: Mapping[str, Any]) -> Any:
    """Return a step's sequences as a ``pyarrow.Table`` with the schema of records.

    Args:
        step: the step's number.
        rows: the sequences.
        masks: labels of the masks whose verdicts are recorded.
        facts: properties of the run; see :func:`~nemo_geomask.records.record_schema.arrow_schema`.
    """
    arrow = require_arrow()
    schema = arrow_schema(masks, {**facts, **rows.facts})
    count = rows.lengths.numel()
    lengths = rows.lengths.to("cpu", torch.int64)
    offsets = torch.zeros(count + 1, dtype=torch.int32, device="cpu")
    offsets[1:] = lengths.cumsum(0)
    values = {
        **rows.values,
        "step": torch.full((count,), step, device="cpu"),
        "length": lengths,
    }
    sizes = lengths.tolist()

    def remove_padding(value: Tensor) -> Tensor:
        width = value.shape[1]
        tokens_and_padding = [size for length in sizes for size in (length, width - length)]
        parts = torch.split(value.to("cpu").flatten(), tokens_and_padding)
        return torch.cat(parts[::2]) if parts else value.flatten()

    def to_array(column: Column) -> Any:
        value = values.get(column.name)
        arrow_type = schema.field(column.name).type
        if value is None:
            return arrow.nulls(count, arrow_type)
        if not isinstance(value, Tensor):
            return arrow.array(value, type=arrow_type)
        if not column.is_per_token:
            return _flat_array(arrow, value, column.element)
        elements = _flat_array(arrow, remove_padding(value), column.element)
        return arrow.ListArray.from_arrays(_flat_array(arrow, offsets, "int32"), elements, type=arrow_type)

    columns = [*COLUMNS, *(Column(f"{REMOVED}{label}", "list<bool>", "") for label in masks)]
    return arrow.Table.from_arrays([to_array(column) for column in columns], schema=schema)


# Arrow stores booleans as bits: they are passed as bytes and cast.
_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "bool": torch.uint8}


def _flat_array(arrow: Any, value: Tensor, element: str) -> Any:
    """Return a 1-d tensor as an Arrow array that shares the tensor's memory where dtype and device allow."""
    if element == "bool":
        value = value != 0
    stored = value.detach().to("cpu", _DTYPES[element]).contiguous()
    # The buffer keeps a reference to the tensor, so that its memory lives as long as the array.
    buffer = arrow.foreign_buffer(stored.data_ptr(), stored.numel() * stored.element_size(), stored)
    stored_type = arrow.type_for_alias("uint8" if element == "bool" else element)
    array = arrow.Array.from_buffers(stored_type, stored.numel(), [None, buffer])
    return array.cast(arrow.bool_()) if element == "bool" else array
