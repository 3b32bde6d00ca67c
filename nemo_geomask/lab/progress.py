"""How far runs are, while they train."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from nemo_geomask.lab.optional import require
from nemo_geomask.lab.runs import Run
from nemo_geomask.lab.task import task_of

__all__ = ["Progress"]

_LINES = 8


class Progress:
    """A bar for each run that trains, with its latest reward; plain lines now and then where there is no terminal.

    Args:
        console: a ``rich.console.Console``.
        seeds: how many seeds there are; one is not worth naming.
    """

    def __init__(self, console: Any, seeds: int = 1) -> None:
        rich = require("rich.progress")
        self._console, self._seeds = console, seeds
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, run: Run, step: int, reward: float) -> None:
        """A run has done a step."""
        steps = run.recipe.grpo.max_num_steps
        named = run.label if self._seeds == 1 else f"{run.label}, seed {run.recipe.grpo.seed}"
        status = f"reward {reward:.3f} (chance {task_of(run.recipe.env).chance:.3f})"
        if run.name not in self._tasks:
            self._tasks[run.name] = self._bar.add_task(named, total=steps, status="")
        self._bar.update(self._tasks[run.name], completed=step, status=status)
        many = self._seeds > 1
        if many and step == steps:
            # Of many runs only those that train have a bar.
            self._bar.remove_task(self._tasks.pop(run.name))
        if (
            step == steps
            if many
            else not self._console.is_terminal and (step % max(1, steps // _LINES) == 0 or step == steps)
        ):
            self.note(f"{named}  step {step}/{steps}  {status}")

    def note(self, text: str) -> None:
        """Print above the bars."""
        self._console.print(text, highlight=False, markup=False)
