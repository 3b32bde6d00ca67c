"""Lines on the progress of training runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nemo_geomask.tools.lab.run_store import Run
from nemo_geomask.tools.lab.tasks import load_task

_LINES = 8  # lines for a run
_FIRST_LINE = 5  # step of its first line
_MINUTES_FROM = 120  # seconds from which on the time left is in minutes


class Progress:
    """Lines now and then with the latest reward and the time that the steps left of all runs take.

    If the runs have several seeds, each run has one line, at its end.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._has_seeds = len({run.recipe.grpo.seed for run in runs}) > 1
        self._steps_left = {run.name: 0 if run.finished else run.recipe.grpo.max_num_steps for run in runs}
        self._start_time, self._trained = 0.0, -1  # of the first step, which includes the start of the processes

    def advance(self, run: Run, step: int, reward: float) -> None:
        """Take note that a run completed a step, and print a line if one is due."""
        steps = run.recipe.grpo.max_num_steps
        self._steps_left[run.name] = steps - step
        self._trained += 1
        self._start_time = self._start_time or time.monotonic()
        # The first line gives the time left, so it comes early.
        is_due = not self._has_seeds and (step == _FIRST_LINE or step % max(1, steps // _LINES) == 0)
        if is_due or step == steps:
            title = f"{run.label}, seed {run.recipe.grpo.seed}" if self._has_seeds else run.label
            status = f"reward {reward:.3f} (chance {load_task(run.recipe.env).chance:.3f})"
            print(f"{title}  step {step}/{steps}  {status}{self._time_left()}", flush=True)

    def _time_left(self) -> str:
        """Return the time that the remaining steps of all runs take at the pace so far; empty if none are left."""
        if not self._trained or not any(self._steps_left.values()):
            return ""
        seconds = sum(self._steps_left.values()) * (time.monotonic() - self._start_time) / self._trained
        return f"  about {seconds:.0f} s left" if seconds < _MINUTES_FROM else f"  about {seconds / 60:.0f} min left"
