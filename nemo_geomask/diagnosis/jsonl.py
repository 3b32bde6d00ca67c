"""NeMo-RL's ``train_data_step{N}.jsonl``, converted once to records.

A file is one rollout batch, a line a sequence, every value a list of one; rows are padded to the batch
(``input_lengths`` says how much of each counts) and hold no group, so rows with the same prompt are taken for one.
Under dynamic sampling ``filtered_rewards`` belong to the rows, ``rewards`` do not. Non-finite numbers are written as
NaN and Infinity, which is not JSON; a run that is still writing ends in half a line.

Source: NeMo-RL ``Logger.log_batched_dict_as_jsonl`` and its callers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nemo_geomask.diagnosis.read import Array
from nemo_geomask.errors import DataError
from nemo_geomask.records.schema import COLUMNS, arrow_schema, file_name, require_arrow

__all__ = ["JSONL_WRITER", "convert", "source_of", "step_of"]

JSONL_WRITER = "nemo_rl"
"""In the names of converted files, where a recorder has its own."""
_NAME = re.compile(r"train_data_step(\d+)\.jsonl")
_NEEDED = ("input_lengths", "token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
_TOKENS = {
    "tokens": ("token_ids", np.int32),
    "mask": ("token_loss_mask", np.float32),
    "gen": ("generation_logprobs", np.float32),
    "prev": ("prev_logprobs", np.float32),
    "advantages": ("advantages", np.float32),
}


def step_of(path: Path) -> int | None:
    """The step in a file's name; None: it is no such file."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def source_of(path: Path) -> str:
    """What a converted file remembers of the one that it was made of: whether that has changed since."""
    status = path.stat()
    return f"{status.st_size}:{status.st_mtime_ns}"


def convert(path: Path, directory: Path, *, row_group: int = 2**20) -> Path:
    """Write one file's sequences as a record, unless that has been done.

    Args:
        path: the log.
        directory: where to.
        row_group: tokens that are held in memory at once, by this and by who reads it.

    Raises: DataError: a line that is not NeMo-RL's, but for a last one without an end. OSError: the disk.
    """
    arrow, parquet = require_arrow(), require_arrow("pyarrow.parquet")
    step, source = step_of(path), source_of(path)
    assert step is not None
    target = directory / file_name(step, JSONL_WRITER)
    with contextlib.suppress(OSError, arrow.ArrowException):  # none, or one that is damaged: made anew
        if (parquet.read_schema(target).metadata or {}).get(b"nemo_geomask.source") == source.encode():
            return target
    directory.mkdir(parents=True, exist_ok=True)
    schema = arrow_schema(facts={"source": str(path), "loop": "train_data_step{N}.jsonl"})
    schema = schema.with_metadata({**schema.metadata, b"nemo_geomask.source": source.encode()})
    part = target.with_name(f"{target.stem}.{os.getpid()}.part")
    logprobs = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in ("gen", "prev")}
    try:
        with parquet.ParquetWriter(
            part, schema, compression="zstd", compression_level=1, use_dictionary=False, column_encoding=logprobs
        ) as writer:
            groups: dict[bytes, int] = {}
            members: dict[int, int] = {}
            for rows in _batches(path, row_group):
                writer.write_table(_table(arrow, schema, step, rows, groups, members))
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _batches(path: Path, row_group: int) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    tokens = 0
    for row in _rows(path):
        if batch and tokens + len(row["tokens"]) > row_group:
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += len(row["tokens"])
    if batch:
        yield batch


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    parse = _parser()
    with path.open("rb") as file:
        for number, line in enumerate(file):
            try:
                found = parse(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return  # being written
                raise DataError(f"{path}:{number + 1}: not a line of JSON: {error}") from None
            yield _row(found, f"{path}:{number + 1}", number)


def _parser() -> Callable[[bytes], Any]:
    try:
        fast = importlib.import_module("orjson").loads
    except ImportError:
        return json.loads

    def parse(line: bytes) -> Any:
        try:
            return fast(line)
        except ValueError:  # NaN and Infinity, which the standard library takes
            return json.loads(line)

    return parse


def _row(found: Any, where: str, number: int) -> dict[str, Any]:
    if not isinstance(found, dict) or any(name not in found for name in _NEEDED):
        missing = ", ".join(name for name in _NEEDED if not isinstance(found, dict) or name not in found)
        raise DataError(
            f"{where}: has no {missing}, which NeMo-RL's GRPO and PPO loops write into train_data_step{{N}}.jsonl "
            "(distillation does not)"
        )

    def single(name: str) -> Any:
        value = found.get(name)
        return value[0] if isinstance(value, list) and len(value) == 1 else value

    try:
        length = int(single("input_lengths"))
        row: dict[str, Any] = {
            column: np.asarray(single(name)[:length], dtype=dtype)
            for column, (name, dtype) in _TOKENS.items()
            if found.get(name) is not None
        }
        reward = single("filtered_rewards") if "filtered_rewards" in found else single("rewards")
        row |= {
            "row": int(found.get("idx", number)),
            "reward": np.nan if reward is None else float(reward),
            "sample_mask": float(single("sample_loss_mask") if "sample_loss_mask" in found else 1),
        }
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: a value that NeMo-RL doesn't write: {error}") from None
    for column, (name, _) in _TOKENS.items():
        if column in row and row[column].shape != (length,):
            raise DataError(
                f"{where}: {name} must hold at least input_lengths = {length} numbers, but its shape is "
                f"{list(np.shape(single(name)))}"
            )
    return row


def _table(
    arrow: Any,
    schema: Any,
    step: int,
    rows: list[dict[str, Any]],
    groups: dict[bytes, int],
    members: dict[int, int],
) -> Any:
    lengths = np.array([len(row["tokens"]) for row in rows], dtype=np.int32)
    masks = [row["mask"] != 0 for row in rows]
    prompts = [int(mask.argmax()) if mask.any() else len(mask) for mask in masks]
    keys = [row["tokens"][:prompt].tobytes() for row, prompt in zip(rows, prompts, strict=True)]
    group = [groups.setdefault(key, len(groups)) for key in keys]
    sample = []
    for number in group:
        sample.append(members.get(number, 0))
        members[number] = sample[-1] + 1
    values: dict[str, Any] = {
        "step": np.full(len(rows), step),
        "group": group,
        "sample": sample,
        "length": lengths,
        "prompt_length": prompts,
        "turns": [runs(mask) for mask in masks],
        **{name: np.array([row[name] for row in rows], dtype=np.float32) for name in ("reward", "sample_mask")},
        "row": [row["row"] for row in rows],
    }
    values["reward"] = arrow.array(values["reward"], from_pandas=True)
    offsets = arrow.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))

    def column(name: str, kind: Any) -> Any:
        if name in values:
            return arrow.array(values[name], type=kind)
        if name == "mask":
            return arrow.ListArray.from_arrays(offsets, arrow.array(np.concatenate(masks)), type=kind)
        if all(name in row for row in rows):
            flat = arrow.array(np.concatenate([row[name] for row in rows]))
            return arrow.ListArray.from_arrays(offsets, flat, type=kind)
        return arrow.nulls(len(rows), kind)

    names = [column.name for column in COLUMNS]
    return arrow.Table.from_arrays([column(name, schema.field(name).type) for name in names], schema=schema)


def runs(mask: Array) -> int:
    """How many runs of True there are."""
    return int(mask[0]) + int(np.count_nonzero(mask[1:] & ~mask[:-1])) if len(mask) else 0
