"""Evidence that the detectors of causes read, and the type of their results."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from nemo_geomask.tools.diagnose.run_statistics import BIN_SUMS, RunStatistics, Window
from nemo_geomask.tools.diagnose.step_sums import StepSums

__all__ = ["BIN_SUM_COLUMN", "Detection", "Detector", "Evidence"]

BIN_SUM_COLUMN = {name: index for index, name in enumerate(BIN_SUMS)}
"""Column of each sum in :attr:`Window.bin_sums`."""


@dataclass(frozen=True)
class Evidence:
    """A run's statistics, divided into the data to judge (*after*) and the data to compare it with (*before*).

    If the mismatch rose at some step, *after* consists of the steps from the rise on, and *before* of the earlier
    steps. If the run is compared with another run, *before* is the other run. Otherwise there is no *before*, and
    *after* is the whole run, or the part of it since an earlier rise of the mismatch ended.

    Attributes:
        statistics: statistics of the whole run.
        onset: first step of the rise; None if there was none, or the run is compared with another run.
        first_step: first step of *after*.
        is_worse: True if the mismatch exceeds a health limit, or is significantly larger than *before*.
        before, after: the windows of both sides; ``before`` is None if no window precedes the rise.
        sums_before: sums over *before*; None if there is nothing to compare with.
        steps_after: steps of *after* that hold tokens with log-probs of both engines.
        side_names: names of *before* and *after* in tables.
        step_sums_before: sums of each step of *before*.
    """

    statistics: RunStatistics
    onset: int | None
    first_step: int
    is_worse: bool
    before: Window | None
    after: Window
    sums_before: StepSums | None
    steps_after: tuple[int, ...]
    side_names: tuple[str, str]
    step_sums_before: tuple[StepSums, ...] = ()

    @property
    def sums_after(self) -> StepSums:
        """Sums over the steps of *after*."""
        return self.statistics.total(self.steps_after)

    @property
    def compares_runs(self) -> bool:
        """True if *before* is another run."""
        return self.onset is None and self.before is not None

    def without(self, steps: Collection[int]) -> Evidence:
        """Return the evidence without the windows that contain any of these steps."""
        start = self.statistics.window_start
        removed, after = {start(step) for step in steps}, Window()
        for first_step, window in self.statistics.windows.items():
            if first_step not in removed and first_step >= start(self.first_step):
                after.add(window)
        remaining = tuple(step for step in self.steps_after if start(step) not in removed)
        return replace(self, after=after, steps_after=remaining)


@dataclass(frozen=True)
class Detection:
    """Result of a detector, which looks for one cause.

    Attributes:
        value: the measured value, in the unit of the cause's threshold; NaN if the records lack the data.
        description: the measurement as text.
        is_shown: True if the records show the cause.
        steps: the steps that show the cause, if it is judged step by step.
    """

    value: float
    description: str
    is_shown: bool = False
    steps: tuple[int, ...] = ()


Detector = Callable[[Evidence, float], Detection]
"""Function that looks for one cause: takes the evidence and the threshold of the cause."""
