"""``python -m nemo_geomask.tools.bench.record_bench``: cost of recording a step, compared with NeMo-RL's JSONL.

``call`` is the time that the trainer waits; the recorder's thread does the rest. NeMo-RL's logger is measured with the
columns that its GRPO loop logs, if ``nemo_rl`` can be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, TOKEN_MASK
from nemo_geomask.records.flight import JSONL_KEYS, FlightRecorder
from nemo_geomask.tools.bench.timing import Clock, Lap, interleave, quartiles
from nemo_geomask.tools.shared.terminal_tables import format_table

__all__ = ["RecordingCost", "draw_batch", "measure"]

_JSONL = "NeMo-RL's JSONL"


def draw_batch(rows: int, width: int, *, group: int = 8, seed: int = 0) -> dict[str, Tensor]:
    """Draw a batch as NeMo-RL's loop passes it; its sequences have between a quarter of the width and the width."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(max(2, width // 4), width + 1, (rows,), generator=draw)
    prompts = torch.randint(1, max(2, width // 8), (rows // group + 1,), generator=draw).repeat_interleave(group)[:rows]
    column = torch.arange(width)
    inside, response = column < lengths[:, None], column >= prompts[:, None]
    ids = torch.randint(0, 151_936, (rows, width), generator=draw)
    shared = ids[::group].repeat_interleave(group, 0)[:rows]
    gen = -torch.rand(rows, width, generator=draw).pow(3) * 6
    prev = gen + 0.02 * torch.randn(rows, width, generator=draw)
    trained = (inside & response).float()
    rewards = torch.rand(rows, generator=draw).round()
    return {
        "input_ids": torch.where(inside, torch.where(response, ids, shared), 0),
        "input_lengths": lengths,
        GENERATION_LOGPROBS: gen * trained,
        PREV_LOGPROBS: prev * inside,
        "advantages": (rewards - rewards.mean())[:, None].expand(rows, width).clone(),
        TOKEN_MASK: trained,
        "sample_mask": torch.ones(rows),
        "rewards": rewards,
    }


class RecordingCost(NamedTuple):
    """Cost of one way to record steps.

    Attributes:
        laps: times of each step. The first stage lasts until the trainer continues, the second until the file is
            written.
        bytes: size of a step's file.
    """

    laps: Sequence[Lap]
    bytes: int


def measure(data: Mapping[str, Tensor], folder: Path, repeats: int) -> dict[str, RecordingCost]:
    """Measure our recorder, without and with a mask's decisions, and NeMo-RL's logger if it can be imported.

    They take turns at each step, in random order. Two steps, which start threads and fill caches, are left out.
    """
    clock = Clock(torch.device("cpu"))
    masks = {"records": [], "with a verdict": [{"preset": "geometric", "min": 0.99, "max": 1.01}]}
    recorders = {
        name: FlightRecorder(LossConfig(record={"dir": str(folder / name)}, masks=rules))
        for name, rules in masks.items()
    }
    candidates = {name: _recorder_candidate(clock, recorder, data) for name, recorder in recorders.items()}
    jsonl = folder / "jsonl"
    jsonl.mkdir()
    try:
        candidates[_JSONL] = _logger_candidate(clock, _logger(jsonl), data)
    except ImportError as error:
        print(f"NeMo-RL's logger is not measured: {error}", file=sys.stderr)
    laps, failures = interleave(candidates, repeats, warmup=2)
    for recorder in recorders.values():
        recorder.recorder.close()
    for name, reason in failures.items():
        print(f"{name} is not measured: {reason}", file=sys.stderr)
    folders = {name: recorder.recorder.directory for name, recorder in recorders.items()} | {_JSONL: jsonl}
    return {name: RecordingCost(laps[name], _file_size(folders[name])) for name in laps}


def _file_size(folder: Path) -> int:
    """Return the size of the last step's file."""
    return (
        max((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_mtime).stat().st_size
    )


def _recorder_candidate(clock: Clock, recorder: FlightRecorder, data: Mapping[str, Tensor]) -> Callable[[int], Lap]:
    steps = itertools.count(1)
    return lambda turn: clock.lap(lambda: recorder.record(next(steps), data), lambda _: recorder.recorder.flush())


def _logger_candidate(clock: Clock, logger: Any, data: Mapping[str, Tensor]) -> Callable[[int], Lap]:
    steps = itertools.count(1)
    columns = {name: data[key] for name, key in JSONL_KEYS.items()}

    def log() -> None:
        with contextlib.redirect_stdout(None):
            logger.log_batched_dict_as_jsonl(columns, f"step{next(steps)}.jsonl")

    return lambda turn: clock.lap(log)


def _logger(folder: Path) -> Any:
    """Return NeMo-RL's logger without its constructor, which would start Weights & Biases and other services."""
    logger_class = importlib.import_module("nemo_rl.utils.logger").Logger
    logger = logger_class.__new__(logger_class)
    logger.base_log_dir, logger.loggers, logger.gpu_monitor = str(folder), [], None
    return logger


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nemo_geomask.tools.bench.record_bench", description=__doc__)
    parser.add_argument("--batch", default="64,2048", metavar="B,T", help="sequences and the batch's width")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="measured steps")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows, width = (int(number) for number in arguments.batch.split(","))
    with tempfile.TemporaryDirectory() as folder:
        costs = measure(draw_batch(rows, width), Path(folder), arguments.repeats)
    print(f"{rows} sequences, width {width}: median [quartiles] of {arguments.repeats} steps, ms")
    columns = ["", "call", "until it is written", "processor", "MB"]
    table_rows = [
        [
            name,
            _format_milliseconds([lap.first for lap in cost.laps]),
            _format_milliseconds([lap.total for lap in cost.laps]),
            _format_milliseconds([lap.processor for lap in cost.laps]),
            f"{cost.bytes / 1e6:.2f}",
        ]
        for name, cost in costs.items()
    ]
    print(format_table(columns, table_rows))


def _format_milliseconds(seconds: Sequence[float]) -> str:
    return "{median:.1f} [{q1:.1f}, {q3:.1f}]".format(**quartiles([value * 1e3 for value in seconds]))


if __name__ == "__main__":
    _main()
