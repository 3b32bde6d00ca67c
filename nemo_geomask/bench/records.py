"""``python -m nemo_geomask.bench.records``: what recording a step costs, beside NeMo-RL's JSONL of the same batch.

``call`` is what the trainer waits for; the rest is done in the recorder's thread. NeMo-RL's own logger is measured with
the columns that its GRPO loop logs, where ``nemo_rl`` is importable.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.bench.clock import spread
from nemo_geomask.config import LossConfig
from nemo_geomask.records.flight import LOGGED, FlightRecorder

__all__ = ["batch", "measure"]


def batch(rows: int, width: int, *, group: int = 8, seed: int = 0) -> dict[str, Tensor]:
    """A training batch as NeMo-RL's loop hands it over: sequences of a quarter of the width to all of it."""
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
        "generation_logprobs": gen * trained,
        "prev_logprobs": prev * inside,
        "advantages": (rewards - rewards.mean())[:, None].expand(rows, width).clone(),
        "token_mask": trained,
        "sample_mask": torch.ones(rows),
        "rewards": rewards,
    }


class Cost(NamedTuple):
    """Of one step."""

    call: float  # seconds until the trainer goes on
    all: float  # seconds until the file is there
    processor: float  # seconds of this process's processor time until then
    size: int  # bytes of the file


def measure(data: Mapping[str, Tensor], folder: Path, repeats: int) -> dict[str, list[Cost]]:
    """Each way that there is here, in turns."""
    masks = {"records": [], "with a verdict": [{"preset": "geometric", "min": 0.99, "max": 1.01}]}
    recorders = {
        name: FlightRecorder(LossConfig(record={"dir": str(folder / name)}, masks=given))
        for name, given in masks.items()
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
    return {name: found[2:] for name, found in costs.items()}  # by then, threads and caches are warm


def _record(recorder: FlightRecorder, data: Mapping[str, Tensor], step: int) -> Cost:
    start, processor = time.perf_counter(), time.process_time()
    recorder.record(step, data)
    called = time.perf_counter() - start
    recorder.recorder.flush()
    whole, processor = time.perf_counter() - start, time.process_time() - processor
    (path,) = recorder.recorder.directory.glob(f"step-{step:07d}-*.parquet")
    return Cost(called, whole, processor, path.stat().st_size)


def _logger(folder: Path) -> Any:
    """NeMo-RL's, as far as it writes JSONL; its constructor starts Weights & Biases and the like."""
    kind = importlib.import_module("nemo_rl.utils.logger").Logger
    logger = kind.__new__(kind)
    logger.base_log_dir, logger.loggers, logger.gpu_monitor = str(folder), [], None
    return logger


def _log(logger: Any, data: Mapping[str, Tensor], folder: Path, step: int) -> Cost:
    start, processor = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(None):
        logger.log_batched_dict_as_jsonl({name: data[key] for name, key in LOGGED.items()}, f"step{step}.jsonl")
    whole = time.perf_counter() - start
    return Cost(whole, whole, time.process_time() - processor, (folder / f"step{step}.jsonl").stat().st_size)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nemo_geomask.bench.records", description=__doc__)
    parser.add_argument("--batch", default="64,2048", metavar="B,T", help="sequences and the batch's width")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="measured steps")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    rows, width = (int(number) for number in given.batch.split(","))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(batch(rows, width), Path(folder), given.repeats)
    print(f"{rows} sequences, width {width}: median [quartiles] of {given.repeats} steps, ms")
    print(f"{'':16}{'call':>22}{'until it is written':>26}{'processor':>24}{'MB':>8}")
    for name, costs in found.items():
        line = f"{name:16}"
        for taken, space in (("call", 22), ("all", 26), ("processor", 24)):
            of = spread([getattr(cost, taken) * 1e3 for cost in costs])
            line += f"{of['median']:.1f} [{of['q1']:.1f}, {of['q3']:.1f}]".rjust(space)
        print(line + f"{costs[-1].size / 1e6:8.2f}")


if __name__ == "__main__":
    _main()
