"""Conversion of NeMo-RL's ``train_data_step{N}.jsonl`` to records, once for each file.

A file holds one rollout batch. Each line is a JSON object with one sequence, whose values are lists of one element.
Lists of tokens are padded to the longest sequence of the batch; ``input_lengths`` is the number of tokens without the
padding. A line does not name its prompt group, so sequences with the same prompt are taken for one group. Under dynamic
sampling ``filtered_rewards`` belong to the lines and ``rewards`` do not. Under NeMo-Gym ``agent_ref`` has the name of
the agent, which is the sequence's environment. Non-finite numbers are written as NaN and Infinity, which is not JSON.
While a run writes the file, its last line may be incomplete.

Source: NeMo-RL ``Logger.log_batched_dict_as_jsonl`` and its callers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nemo_geomask.errors import DataError
from nemo_geomask.records.record_checks import read_metadata
from nemo_geomask.records.record_schema import (
    COLUMNS,
    MAX_TEXT_BYTES,
    RecordOrigin,
    arrow_schema,
    file_name,
    is_recordable_text,
    require_arrow,
)
from nemo_geomask.records.stored_files import open_folder, store_record
from nemo_geomask.tools.diagnose.read.json_lines import open_log, read_json_lines
from nemo_geomask.tools.diagnose.read.record_reader import Array

JSONL_WRITER = "nemo_rl"
"""Name of the writer in the file names of converted records."""
_LOG_NAME = re.compile(r"train_data_step([0-9]{1,9})\.jsonl")
_MAX_GROUP_ROWS = 2**16
"""Number of sequences in a row group, however short they are."""
_MAX_ROW = 2**31 - 1
# Fields of the files, not keys of a batch: logs stay readable when NeMo-RL renames a key.
_REQUIRED = ("input_lengths", "token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
_TOKEN_COLUMNS = {
    "tokens": ("token_ids", np.int32),
    "mask": ("token_loss_mask", np.float32),
    "gen": ("generation_logprobs", np.float32),
    "prev": ("prev_logprobs", np.float32),
    "advantages": ("advantages", np.float32),
}


def log_step(path: Path) -> int | None:
    """Return the step in the file name of ``train_data_step{N}.jsonl``; None if the file has another name."""
    match = _LOG_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def convert_log(path: Path, directory: Path, *, row_group: int = 2**20) -> Path:
    """Write a log's sequences as a record, unless an up-to-date record exists, and return the record's path.

    The conversion, and a reader, hold one row group in memory, of ``row_group`` tokens.

    Raises: InputLimitError: a line exceeds a limit. DataError: the log can't be read, or a line is not one that NeMo-RL
    writes; an incomplete last line is ignored. OSError: the record can't be written.
    """
    arrow = require_arrow()
    open_log(path).close()  # fails here rather than as an error of the record
    step, status = log_step(path), path.stat()
    assert step is not None
    source = f"{status.st_size}:{status.st_mtime_ns}".encode()  # in the record, to detect that the log has changed
    target = directory / file_name(step, JSONL_WRITER)
    if read_metadata(target).get(b"nemo_geomask.source") == source:
        return target
    schema = arrow_schema(facts={"source": str(path), "loop": "train_data_step{N}.jsonl"})
    schema = schema.with_metadata({**schema.metadata, b"nemo_geomask.source": source})
    groups: dict[bytes, int] = {}
    group_sizes: dict[int, int] = {}
    tables = (_arrow_table(arrow, schema, step, rows, groups, group_sizes) for rows in _row_groups(path, row_group))
    with open_folder(directory) as folder:
        store_record(
            folder,
            target.name,
            schema,
            tables,
            origin=RecordOrigin(JSONL_WRITER),
            may_replace=lambda identity: True,
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in ("gen", "prev")},
        )
    return target


def _row_groups(path: Path, max_tokens: int) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    tokens = 0
    for number, values in read_json_lines(path):
        row = _parse_row(values, f"{path}:{number}", number - 1)
        if group and (tokens + len(row["tokens"]) > max_tokens or len(group) == _MAX_GROUP_ROWS):
            yield group
            group, tokens = [], 0
        group.append(row)
        tokens += len(row["tokens"])
    if group:
        yield group


def _parse_row(values: Any, location: str, number: int) -> dict[str, Any]:
    """Return a line's values under the names of the record's columns, tokens as arrays without the padding."""
    missing = [name for name in _REQUIRED if not isinstance(values, dict) or values.get(name) in (None, [None])]
    if missing:
        raise DataError(
            f"{location}: has no {', '.join(missing)}, which NeMo-RL's GRPO and PPO loops write into "
            "train_data_step{N}.jsonl (distillation does not)"
        )

    def single(name: str) -> Any:
        """Return a value without the list of one element that NeMo-RL wraps it in."""
        value = values.get(name)
        return value[0] if isinstance(value, list) and len(value) == 1 else value

    try:
        length = int(single("input_lengths"))
        with np.errstate(over="ignore"):  # a number beyond float32 is infinite
            row: dict[str, Any] = {
                column: np.asarray(single(name)[:length], dtype=dtype)
                for column, (name, dtype) in _TOKEN_COLUMNS.items()
                if values.get(name) is not None
            }
        reward = single("filtered_rewards") if "filtered_rewards" in values else single("rewards")
        row |= {
            "row": int(values.get("idx", number)),
            "reward": np.nan if reward is None else float(reward),
            "sample_mask": float(single("sample_loss_mask") if "sample_loss_mask" in values else 1),
            "environment": _agent_name(single("agent_ref")),
        }
        if not 0 <= row["row"] <= _MAX_ROW:
            raise ValueError(f"idx {row['row']}")
    except (TypeError, ValueError, OverflowError, KeyError, MemoryError) as error:
        raise DataError(f"{location}: has a value that NeMo-RL does not write: {str(error)[:200]}") from None
    for column, (name, _) in _TOKEN_COLUMNS.items():
        if column in row and row[column].shape != (length,):
            raise DataError(
                f"{location}: {name} must hold at least input_lengths = {length} numbers, but its shape is "
                f"{list(np.shape(single(name)))}"
            )
    return row


def _agent_name(agent: Any) -> str | None:
    """Return the name in NeMo-Gym's ``agent_ref``; None if a line has none.

    Raises: ValueError: it has another form than NeMo-Gym's.
    """
    if agent is None:
        return None
    name = agent.get("name") if isinstance(agent, dict) else None
    if not is_recordable_text(name):
        raise ValueError(f"agent_ref must be an object whose name has 1 to {MAX_TEXT_BYTES} bytes, not {agent!r}")
    return name


def _arrow_table(
    arrow: Any,
    schema: Any,
    step: int,
    rows: list[dict[str, Any]],
    groups: dict[bytes, int],
    group_sizes: dict[int, int],
) -> Any:
    """Return rows as an Arrow table, and add them to ``groups`` (number by prompt) and ``group_sizes`` (by number)."""
    lengths = np.array([len(row["tokens"]) for row in rows], dtype=np.int32)
    masks = [row["mask"] != 0 for row in rows]
    prompts = [int(mask.argmax()) if mask.any() else len(mask) for mask in masks]
    keys = [row["tokens"][:prompt].tobytes() for row, prompt in zip(rows, prompts, strict=True)]
    group = [groups.setdefault(key, len(groups)) for key in keys]
    sample = []
    for number in group:
        sample.append(group_sizes.get(number, 0))
        group_sizes[number] = sample[-1] + 1
    values: dict[str, Any] = {
        "step": np.full(len(rows), step),
        "group": group,
        "sample": sample,
        "length": lengths,
        "prompt_length": prompts,
        "turns": [count_turns(mask) for mask in masks],
        **{name: np.array([row[name] for row in rows], dtype=np.float32) for name in ("reward", "sample_mask")},
        "row": [row["row"] for row in rows],
        "environment": [row["environment"] for row in rows],
    }
    values["reward"] = arrow.array(values["reward"], from_pandas=True)
    offsets = arrow.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))

    def column(name: str, dtype: Any) -> Any:
        if name in values:
            return arrow.array(values[name], type=dtype)
        if name == "mask":
            return arrow.ListArray.from_arrays(offsets, arrow.array(np.concatenate(masks)), type=dtype)
        if all(name in row for row in rows):
            flat = arrow.array(np.concatenate([row[name] for row in rows]))
            return arrow.ListArray.from_arrays(offsets, flat, type=dtype)
        return arrow.nulls(len(rows), dtype)

    names = [column.name for column in COLUMNS]
    return arrow.Table.from_arrays([column(name, schema.field(name).type) for name in names], schema=schema)


def count_turns(mask: Array) -> int:
    """Return the number of runs of consecutive True in a bool mask, which are the turns that the policy generated."""
    return int(mask[0]) + int(np.count_nonzero(mask[1:] & ~mask[:-1])) if len(mask) else 0
