"""``python -m tests.benchmarks.records``: cost of recording a step, compared with NeMo-RL's JSONL.

``call`` is the time that the trainer waits; the recorder's thread does the rest. NeMo-RL's logger is measured with the
columns that its GRPO loop logs, if ``nemo_rl`` can be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, TOKEN_MASK
from nemo_geomask.records.flight import JSONL_KEYS, FlightRecorder
from nemo_geomask.tools.bench.peers import import_peer, lazily
from nemo_geomask.tools.bench.results import PATH, figure, format_rows, spread
from nemo_geomask.tools.bench.timing import Clock, Lap, compare

_MASKS: dict[str, list[dict[str, Any]]] = {
    "records": [],
    "with a verdict": [{"preset": "geometric", "min": 0.99, "max": 1.01}],
}
_JSONL = "NeMo-RL's JSONL"
_COLUMNS = (
    PATH,
    spread("call", "forward_ms"),
    spread("until it is written", "ms"),
    spread("processor", "processor_ms"),
    figure("MB", "bytes", scale=1e6),
)


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


def measure(data: Mapping[str, Tensor], folder: Path, repeats: int) -> dict[str, dict[str, Any]]:
    """Measure our recorder, without and with a mask's decisions, and NeMo-RL's logger if it can be imported.

    They take turns at each step, in random order. Two steps, which start threads and fill caches, are left out. The
    first of a row's two times ends when the trainer continues, and the second when the file is written. ``bytes`` is
    the size of a step's file.
    """
    clock = Clock(torch.device("cpu"))
    recorders = {
        name: FlightRecorder(LossConfig(record={"dir": str(folder / name)}, masks=masks))
        for name, masks in _MASKS.items()
    }

    def candidate(recorder: FlightRecorder) -> Callable[[int], Lap]:
        steps = itertools.count(1)
        return lambda turn: clock.lap(lambda: recorder.record(next(steps), data), lambda _: recorder.recorder.flush())

    candidates = {name: candidate(recorder) for name, recorder in recorders.items()}
    candidates[_JSONL] = lazily(lambda: _jsonl_candidate(clock, folder / "jsonl", data))
    rows = compare(candidates, repeats, warmup=2)
    for recorder in recorders.values():
        recorder.recorder.close()
    folders = {name: recorder.recorder.directory for name, recorder in recorders.items()} | {_JSONL: folder / "jsonl"}
    for name, row in rows.items():
        if row["status"] == "measured":
            files = [path for path in folders[name].iterdir() if path.is_file()]
            row["bytes"] = max(files, key=lambda path: path.stat().st_mtime).stat().st_size
    return rows


def _jsonl_candidate(clock: Clock, folder: Path, data: Mapping[str, Tensor]) -> Callable[[int], Lap]:
    logger_class = import_peer("nemo_rl.utils.logger").Logger
    logger = logger_class.__new__(logger_class)  # its constructor would start Weights & Biases and other services
    folder.mkdir()
    logger.base_log_dir, logger.loggers, logger.gpu_monitor = str(folder), [], None
    columns, steps = {name: data[key] for name, key in JSONL_KEYS.items()}, itertools.count(1)

    def log() -> None:
        with contextlib.redirect_stdout(None):
            logger.log_batched_dict_as_jsonl(columns, f"step{next(steps)}.jsonl")

    return lambda turn: clock.lap(log, lambda _: None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.records", description=__doc__)
    parser.add_argument("--batch", default="64,2048", metavar="B,T", help="sequences and the batch's width")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="measured steps")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    count, width = (int(number) for number in arguments.batch.split(","))
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(draw_batch(count, width), Path(folder), arguments.repeats)
    title = f"{count} sequences, width {width}: median and quartiles of {arguments.repeats} steps, ms"
    print(format_rows(title, _COLUMNS, [{"path": name, **row} for name, row in rows.items()]))


if __name__ == "__main__":
    main()
