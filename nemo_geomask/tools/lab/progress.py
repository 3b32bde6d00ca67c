"""Progress display of training runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from nemo_geomask.optional import require
from nemo_geomask.tools.lab.run_store import Run
from nemo_geomask.tools.lab.tasks import load_task

_LINES = 8  # lines for a run if the output is not a terminal
_FIRST_LINE = 5  # step of its first line
_MINUTES_FROM = 120  # seconds from which on the time left is in minutes


class Progress:
    """Progress bar, with the latest reward, for each run that trains; lines now and then if the output is no terminal.

    Args:
        console: a ``rich.console.Console``.
        runs: the runs; their seeds are shown only if there are several.
    """

    def __init__(self, console: Any, runs: Sequence[Run]) -> None:
        rich = require("rich.progress", "the lab needs", "demo")
        self._console, self._seeds = console, len({run.recipe.grpo.seed for run in runs})
        self._steps_left = {run.name: 0 if run.finished else run.recipe.grpo.max_num_steps for run in runs}
        self._start_time, self._trained = 0.0, -1  # of the first step, which includes the start of the processes
        self._bar = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[status]}"),
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, run: Run, step: int, reward: float) -> None:
        """Show that a run completed a step."""
        steps = run.recipe.grpo.max_num_steps
        title = run.label if self._seeds == 1 else f"{run.label}, seed {run.recipe.grpo.seed}"
        status = f"reward {reward:.3f} (chance {load_task(run.recipe.env).chance:.3f})"
        self._steps_left[run.name] = steps - step
        self._trained += 1
        self._start_time = self._start_time or time.monotonic()
        if run.name not in self._tasks:
            self._tasks[run.name] = self._bar.add_task(title, total=steps, status="")
        self._bar.update(self._tasks[run.name], completed=step, status=status)
        is_last = step == steps
        if self._seeds > 1:
            # With several seeds, only runs that are still training keep a bar.
            if is_last:
                self._bar.remove_task(self._tasks.pop(run.name))
            prints_line = is_last
        else:
            # The first line gives the time left, so it comes early.
            is_due = is_last or step == _FIRST_LINE or step % max(1, steps // _LINES) == 0
            prints_line = not self._console.is_terminal and is_due
        if prints_line:
            self.note(f"{title}  step {step}/{steps}  {status}{self._time_left()}")

    def _time_left(self) -> str:
        """Return the time that the remaining steps of all runs take at the pace so far; empty if there are none."""
        seconds = sum(self._steps_left.values()) * (time.monotonic() - self._start_time) / max(1, self._trained)
        if not any(self._steps_left.values()):
            return ""
        return f"  about {seconds:.0f} s left" if seconds < _MINUTES_FROM else f"  about {seconds / 60:.0f} min left"

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, highlight=False, markup=False)
