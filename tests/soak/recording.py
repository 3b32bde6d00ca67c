"""Steps that are recorded, and recorders that are killed while they write."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import pyarrow.parquet as parquet
import torch

from nemo_geomask.records import step_files
from nemo_geomask.records.step_table import StepRows
from nemo_geomask.records.writer import Recorder
from tests.soak.outcome import Outcome, resident_mib


def step_rows(step: int) -> StepRows:
    """Rows of a step, drawn from its number."""
    draw = torch.Generator().manual_seed(step)
    count, width = 1 + step % 5, 4 + step % 29
    lengths = torch.randint(1, width + 1, (count,), generator=draw)
    logprobs = -torch.rand(count, width, generator=draw)
    values = {
        "row": torch.arange(count),
        "group": torch.arange(count) // 2,
        "prompt_length": torch.ones(count, dtype=torch.int64),
        "turns": torch.ones(count, dtype=torch.int64),
        "sample_mask": torch.ones(count),
        "reward": torch.rand(count, generator=draw),
        "tokens": torch.randint(0, 1000, (count, width), generator=draw),
        "mask": torch.ones(count, width, dtype=torch.bool),
        "gen": logprobs,
        "prev": logprobs * 1.001,
        "advantages": torch.ones(count, width),
    }
    return StepRows(lengths, values)


def file_difference(path: Path, step: int) -> str:
    """How a file differs from what was recorded of a step; empty if it doesn't."""
    try:
        table = parquet.read_table(path)
    except Exception as error:
        return f"{path.name} can't be read: {error}"
    rows = step_rows(step)
    lengths = rows.lengths.tolist()
    if table["step"].to_pylist() != [step] * len(lengths) or table["length"].to_pylist() != lengths:
        return f"{path.name} has other sequences"
    for name in ("tokens", "gen", "prev"):
        expected = [rows.values[name][row, :length].tolist() for row, length in enumerate(lengths)]
        if table[name].to_pylist() != expected:
            return f"{path.name} has another {name}"
    return ""


def paths_by_step(folder: Path) -> dict[int, Path]:
    """The record file of each step; one writer writes each once."""
    return {step: path for step, (path,) in step_files(folder).items()}


def record_steps(count: int, folder: Path, *, check_every: int = 20) -> Outcome:
    """Record steps with one recorder, and compare every ``check_every``-th file with what was recorded."""
    outcome, half = Outcome("recorded steps"), 0.0
    recorder = Recorder(folder)
    for step in range(1, count + 1):
        if step == max(count // 2, 1):
            half = resident_mib()
        recorder.record(step, lambda step=step: step_rows(step))
        recorder.flush()
    outcome.growth_mib = resident_mib() - half
    recorder.close()
    outcome.done = recorder.written
    paths = paths_by_step(folder)
    if recorder.lost or set(paths) != set(range(1, count + 1)):
        outcome.problems.append(f"{recorder.lost} lost, {len(paths)} of {count} files")
    for step in range(1, count + 1, check_every):
        outcome.checked += 1
        if step in paths and (found := file_difference(paths[step], step)):
            outcome.problems.append(found)
    return outcome


def _record_until_killed(folder: str, first: int, acknowledged: str) -> None:
    recorder = Recorder(folder)
    with Path(acknowledged).open("a", encoding="utf-8") as file:
        for step in range(first, first + 100_000):
            recorder.record(step, lambda step=step: step_rows(step))
            recorder.flush()
            file.write(f"{step}\n")
            file.flush()


def kill_recorders(count: int, folder: Path, *, seed: int = 0) -> Outcome:
    """Kill a recorder at a random moment, ``count`` times; each next one continues in the same folder.

    A step whose ``flush`` has returned must be there, whole; one that was being written may be there, whole, or not.
    """
    outcome = Outcome("kills of the recorder")
    draw = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.soak.recording"])
    first, checked = 1, set()
    for number in range(count):
        acknowledged = folder.parent / f"acknowledged-{number}"
        process = context.Process(target=_record_until_killed, args=(str(folder), first, str(acknowledged)))
        process.start()
        deadline = time.monotonic() + 300
        while not (acknowledged.exists() and acknowledged.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.3))
        process.kill()
        process.join()
        steps = [int(line) for line in acknowledged.read_text(encoding="utf-8").split()]
        paths = paths_by_step(folder)
        if not steps:
            outcome.problems.append(f"kill {number}: no step was recorded in 300 s")
            break
        for step in steps:
            if step not in paths:
                outcome.problems.append(f"kill {number}: step {step} was acknowledged and is not there")
        for step in set(paths) - checked:
            checked.add(step)
            if found := file_difference(paths[step], step):
                outcome.problems.append(f"kill {number}: {found}")
        first = max(*paths, *steps) + 1
        outcome.done += 1
    outcome.checked = len(checked)
    records = set(paths_by_step(folder).values())
    outcome.facts["other files left, which no reader takes"] = sum(path not in records for path in folder.iterdir())
    return outcome
