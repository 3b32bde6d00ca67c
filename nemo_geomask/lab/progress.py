"""The live line: which variant, how far, which reward."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

from nemo_geomask.lab.optional import require

__all__ = ["Progress", "RichProgress", "Silent"]


class Progress(Protocol):
    """What :func:`nemo_geomask.lab.run.run_lab` tells about."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def start(self, label: str, steps: int, chance: float) -> None:
        """A variant begins."""

    def advance(self, reward: float) -> None:
        """A step is done."""

    def note(self, text: str) -> None:
        """A message to the user."""


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def start(self, label: str, steps: int, chance: float) -> None:
        """Ignore it."""

    def advance(self, reward: float) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Ignore it."""


class RichProgress:
    """A bar for each variant with the latest reward; plain lines now and then where there is no terminal.

    Args:
        console: a ``rich.console.Console``.
    """

    _LINES = 8

    def __init__(self, console: Any) -> None:
        rich = require("rich.progress")
        self._console = console
        self._live = console.is_terminal
        self._bar = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[status]}"),
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
            console=console,
            disable=not self._live,
        )
        self._task: Any = None
        self._label, self._steps, self._chance, self._done = "", 0, 0.0, 0

    def __enter__(self) -> RichProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def start(self, label: str, steps: int, chance: float) -> None:
        """Open a bar."""
        self._label, self._steps, self._chance, self._done = label, steps, chance, 0
        self._task = self._bar.add_task(label, total=steps, status="")

    def advance(self, reward: float) -> None:
        """Move the bar."""
        self._done += 1
        status = f"reward {reward:.3f} (chance {self._chance:.3f})"
        self._bar.update(self._task, advance=1, status=status)
        every = max(1, self._steps // self._LINES)
        if not self._live and (self._done % every == 0 or self._done == self._steps):
            self._console.print(
                f"{self._label}  step {self._done}/{self._steps}  {status}", highlight=False, markup=False
            )

    def note(self, text: str) -> None:
        """Print above the bar."""
        self._console.print(text, highlight=False, markup=False)
