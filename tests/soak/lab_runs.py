"""Runs of the lab that are killed at random moments and resumed, against one that is not."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import random
import time
from pathlib import Path

import yaml

from tests.soak.outcome import Outcome

TIMINGS = {"generation_seconds", "step_seconds"}


def _lab(recipe: str, steps: int, out: str, log: str) -> None:
    from nemo_geomask.cli import main

    with Path(log).open("a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        with contextlib.redirect_stderr(file):
            status = main(["lab", recipe, "--steps", str(steps), "--jobs", "1", "--out", out])
        file.write(f"\nstatus {status}\n")


def kill_labs(count: int, folder: Path, *, seed: int = 0, steps_a_kill: int = 2) -> Outcome:
    """Kill a run ``count`` times, resume it each time, and compare it with a run that nobody killed."""
    from nemo_geomask.tools.lab.run_store import read_curves
    from tests.tools.lab.tiny_recipe import TINY

    outcome, draw = Outcome("kills of the lab"), random.Random(seed)
    recipe = folder / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    steps = max(4, count * steps_a_kill)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "nemo_geomask.cli", "nemo_geomask.tools.lab.trainer"])

    def start(name: str) -> multiprocessing.process.BaseProcess:
        arguments = (str(recipe), steps, str(folder / name), str(folder / f"{name}.log"))
        process = context.Process(target=_lab, args=arguments)
        process.start()
        return process

    whole = start("whole")
    began = time.monotonic()
    whole.join()
    seconds = time.monotonic() - began
    while outcome.done < count:
        process = start("killed")
        # Long enough for a step or two after the start; a kill may also come during the start.
        process.join(draw.uniform(0.2, 1.0) * seconds / max(2, count // 4))
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        outcome.done += 1
    start("killed").join()
    log = (folder / "killed.log").read_text(encoding="utf-8")
    if "Traceback" in log:
        outcome.problems.append(f"a traceback in {folder / 'killed.log'}")
    if not log.rstrip().endswith("status 0"):
        outcome.problems.append(f"the run did not end: see {folder / 'killed.log'}")
        return outcome
    ((one,), (other,)) = (read_curves([folder / name]) for name in ("whole", "killed"))
    outcome.facts["steps"] = one.steps
    for key in one.columns.keys() - TIMINGS:
        outcome.checked += 1
        pairs = list(zip(one.series(key), other.series(key), strict=True))
        if not all(first == second or (math.isnan(first) and math.isnan(second)) for first, second in pairs):
            outcome.problems.append(f"{key} differs from that of the run that was not killed")
    return outcome
