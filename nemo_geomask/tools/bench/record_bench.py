"""``python -m nemo_geomask.tools.bench.record_bench``: cost of recording a step, compared with NeMo-RL's JSONL.

``call`` is the time that the trainer waits; the recorder's thread does the rest. NeMo-RL's logger is measured with the
columns that its GRPO loop logs, if ``nemo_rl`` can be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, TOKEN_MASK
from nemo_geomask.records.flight import JSONL_KEYS, FlightRecorder
from nemo_geomask.tools.bench.timing import quartiles
from nemo_geomask.tools.shared.terminal_tables import format_table

__all__ = ["draw_batch", "measure"]


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


class Cost(NamedTuple):
    """Cost of recording one step.

    Attributes:
        call: seconds until the trainer continues.
        written: seconds until the file is written.
        processor: seconds of this process's processor time until the file is written.
        size: size of the file in bytes.
    """

    call: float
    written: float
    processor: float
    size: int


def measure(data: Mapping[str, Tensor], folder: Path, repeats: int) -> dict[str, list[Cost]]:
    """Measure our recorder, without and with a mask's decisions, and NeMo-RL's logger if it can be imported.

    They take turns at each step.
    """
    masks = {"records": [], "with a verdict": [{"preset": "geometric", "min": 0.99, "max": 1.01}]}
    recorders = {
        name: FlightRecorder(LossConfig(record={"dir": str(folder / name)}, masks=rules))
        for name, rules in masks.items()
    }
    ways: dict[str, Callable[[int], Cost]] = {
        name: functools.partial(_record, recorder, data) for name, recorder in recorders.items()
    }
    try:
        ways["NeMo-RL's JSONL"] = functools.partial(_log, _logger(folder), data, folder)
    except ImportError as error:
        print(f"NeMo-RL's logger is not measured: {error}", file=sys.stderr)
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for step in range(1, repeats + 3):
        for name, way in ways.items():
            costs[name].append(way(step))
    for recorder in recorders.values():
        recorder.recorder.close()
    # Leave out the first two steps, which start threads and fill caches.
    return {name: steps[2:] for name, steps in costs.items()}


def _record(recorder: FlightRecorder, data: Mapping[str, Tensor], step: int) -> Cost:
    start, processor = time.perf_counter(), time.process_time()
    recorder.record(step, data)
    called = time.perf_counter() - start
    recorder.recorder.flush()
    written, processor = time.perf_counter() - start, time.process_time() - processor
    (path,) = recorder.recorder.directory.glob(f"step-{step:07d}-*.parquet")
    return Cost(called, written, processor, path.stat().st_size)


def _logger(folder: Path) -> Any:
    """Return NeMo-RL's logger without its constructor, which would start Weights & Biases and other services."""
    logger_class = importlib.import_module("nemo_rl.utils.logger").Logger
    logger = logger_class.__new__(logger_class)
    logger.base_log_dir, logger.loggers, logger.gpu_monitor = str(folder), [], None
    return logger


def _log(logger: Any, data: Mapping[str, Tensor], folder: Path, step: int) -> Cost:
    start, processor = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(None):
        logger.log_batched_dict_as_jsonl({name: data[key] for name, key in JSONL_KEYS.items()}, f"step{step}.jsonl")
    seconds = time.perf_counter() - start
    return Cost(seconds, seconds, time.process_time() - processor, (folder / f"step{step}.jsonl").stat().st_size)


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
            *(
                _format_quartiles([getattr(cost, field) * 1e3 for cost in steps])
                for field in ("call", "written", "processor")
            ),
            f"{steps[-1].size / 1e6:.2f}",
        ]
        for name, steps in costs.items()
    ]
    print(format_table(columns, table_rows))


def _format_quartiles(values: Sequence[float]) -> str:
    return "{median:.1f} [{q1:.1f}, {q3:.1f}]".format(**quartiles(values))


if __name__ == "__main__":
    _main()
