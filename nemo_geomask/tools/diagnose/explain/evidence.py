"""Evidence that the detectors of causes read, and the type of their results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.locate.change_points import MIN_BEFORE
from nemo_geomask.tools.diagnose.locate.location import Location, locate
from nemo_geomask.tools.diagnose.locate.region import Region
from nemo_geomask.tools.diagnose.locate.step_patterns import Period
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_sums import BOOTSTRAP_SUMS, StepSums
from nemo_geomask.tools.diagnose.measure.token_table import REPLICATES, TokenTable, sum_with_replicates
from nemo_geomask.tools.diagnose.read.record_reader import Array

DetectionState = Literal["shown", "explained", "also possible", "ruled out", "not testable"]


class MismatchSums(NamedTuple):
    """Sums of the mismatch over some tokens, or of the part of it that a cause accounts for.

    Attributes:
        k3, capped_abs: [1 + REPLICATES], the sum of k3, and that of min(|Δ|, 1); the estimate is followed by its
            bootstrap replicates.
    """

    k3: Array
    capped_abs: Array

    def plus(self, other: MismatchSums) -> MismatchSums:
        """Return these sums and the others added up."""
        return MismatchSums(self.k3 + other.k3, self.capped_abs + other.capped_abs)

    def minus(self, other: MismatchSums) -> MismatchSums:
        """Return what remains of these sums without the others, at least 0."""
        return MismatchSums(np.maximum(self.k3 - other.k3, 0.0), np.maximum(self.capped_abs - other.capped_abs, 0.0))

    def at_most(self, other: MismatchSums) -> MismatchSums:
        """Return these sums, each limited to the other one."""
        return MismatchSums(np.minimum(self.k3, other.k3), np.minimum(self.capped_abs, other.capped_abs))


def _estimates(sums: StepSums, name: str) -> Array:
    """Return [1 + REPLICATES], a sum and its replicates."""
    return np.concatenate([[sums[name]], sums.bootstrap[:REPLICATES, BOOTSTRAP_SUMS.index(name)]])


def fault_mismatch(sums: StepSums, fault: str) -> MismatchSums:
    """Return the mismatch of the tokens with a fault of ``FAULT_SUMS``."""
    return MismatchSums(_estimates(sums, f"{fault}_k3"), _estimates(sums, f"{fault}_capped_abs"))


@dataclass(frozen=True)
class Evidence:
    """A run's statistics, divided into the data to judge (*after*) and the data to compare it with (*before*).

    If the mismatch rose at some step, *after* consists of the steps from the rise on, and *before* of the earlier
    steps. If the run is compared with another run, *before* is the other run. Otherwise there is no *before*, and
    *after* is the whole run, or the part of it since an earlier rise of the mismatch ended.
    """

    statistics: RunStatistics  # statistics of the whole run
    onset: int | None  # first step of the rise; None if there was none, or the run is compared with another run
    first_step: int  # first step of *after*
    is_worse: bool  # True if the mismatch exceeds a health limit, or is significantly larger than *before*
    is_immaterial: bool = False  # True if the mismatch is too small to matter in the steps that count
    against: RunStatistics | None = None  # statistics of the other run; None if there is none
    against_name: str = ""
    period: Period | None = None  # the cycle in which the mismatch repeats from step to step; None if it does not

    @cached_property
    def steps_after(self) -> tuple[int, ...]:
        """Steps of *after* that hold tokens with log-probs of both engines."""
        steps = sorted(self.statistics.steps)
        return tuple(step for step in steps if step >= self.first_step and self.statistics.steps[step]["tokens"] > 0)

    @cached_property
    def sums_before(self) -> StepSums | None:
        """Sums over *before*; None if there is nothing to compare with."""
        if self.against is not None:
            return self.against.total()
        onset = self.onset
        return None if onset is None else self.statistics.total(step for step in self.statistics.steps if step < onset)

    @cached_property
    def tokens_before(self) -> TokenTable | None:
        """The tokens of *before*; None if there are none."""
        table = None if self.against is None else self.against.tokens
        if self.onset is not None:
            table = self.statistics.tokens.select_sequences(self.statistics.tokens.step < self.onset)
        return table if table is not None and len(table) else None

    @cached_property
    def facts(self) -> frozenset[str]:
        """Names of facts in the records that refute likely causes or make an advice pointless (``Cause.unless``)."""
        ages = self.tokens.numbers["staleness"][np.unique(self.tokens.sequence)]
        facts = ["experts_known"] if self.statistics.experts is not None else []
        if len(ages) and np.isfinite(ages).all():
            facts += ["ages_recorded"] if np.ptp(ages) else ["ages_recorded", "one_age"]
        return frozenset(facts)

    @property
    def side_names(self) -> tuple[str, str]:
        """Names of *before* and *after* in tables."""
        if self.against is not None:
            return self.against_name, "this run"
        if self.onset is not None:
            return f"before {self.onset}", f"from {self.onset}"
        return "", "all steps" if self.first_step == min(self.statistics.steps) else f"from {self.first_step}"

    @cached_property
    def tokens(self) -> TokenTable:
        """The tokens of *after*, without a first step of engines that still agree on every token."""
        table, first = self.statistics.tokens, self.first_step
        in_first = table.select_sequences(table.step == first)
        agrees = bool(table.delta.any()) and not in_first.delta.any()
        return table.select_sequences(table.step > first if agrees else table.step >= first)

    @cached_property
    def location(self) -> Location:
        """Location of the excess mismatch of *after*.

        A fault that grows from the start is in the first steps, too: so few are no measure of what is usual in a place.
        """
        is_short = self.onset is not None and sum(step < self.onset for step in self.statistics.steps) < MIN_BEFORE
        return locate(self.tokens, None if is_short else self.tokens_before)

    def is_growth(self, region: Region) -> bool:
        """Return True for a region of the last steps since a rise: what has risen keeps growing."""
        last = self.steps_after[len(self.steps_after) - len(region.values) :]
        return self.onset is not None and region.id == "step" and last == tuple(map(int, region.values))

    @cached_property
    def elsewhere(self) -> TokenTable:
        """The tokens of *after* outside the regions of :attr:`location`; all tokens if hardly any is outside.

        A region of probabilities does not count, nor one of the last steps: causes of all tokens make some
        probabilities worse than others, and may grow.
        """
        is_outside = self.location.outside(
            len(self.tokens), lambda region: region.id == "probability" or self.is_growth(region)
        )
        outside = self.tokens.select(is_outside)
        expected, remaining = (float((part.weight * part.one_minus_p).sum()) for part in (self.tokens, outside))
        return outside if remaining > MIN_OUTSIDE * expected else self.tokens

    @cached_property
    def sums_after(self) -> StepSums:
        """Sums over all steps of *after*, also those that hold no token with log-probs of both engines."""
        return self.statistics.total(step for step in self.statistics.steps if step >= self.first_step)

    @cached_property
    def mismatch_after(self) -> MismatchSums:
        """The whole mismatch of *after*, with that of log-probs which the generation engine did not return."""
        sums = self.sums_after
        measured = MismatchSums(_estimates(sums, "k3"), _estimates(sums, "capped_abs"))
        return measured.plus(fault_mismatch(sums, "missing"))

    def mismatch_beyond(self, base: StepSums) -> MismatchSums:
        """Return the mismatch of *after* beyond the rate of other steps, in proportion to 1 − p and its square."""
        after, total = self.sums_after, self.mismatch_after
        expected = (
            base.mean("k3", "one_minus_p_squared") * after["one_minus_p_squared"],
            base.mean("capped_abs", "one_minus_p") * after["one_minus_p"],
        )
        return MismatchSums(*(np.maximum(sums - rate, 0.0) for sums, rate in zip(total, expected, strict=True)))

    def mismatch_in(self, region: Region) -> MismatchSums:
        """Return the mismatch of a region's tokens beyond the rate of the tokens in no region."""
        table, is_outside = self.tokens, self.location.outside(len(self.tokens))
        if not is_outside.any():
            is_outside = ~region.is_member
        columns = np.stack([table.k3, table.one_minus_p**2, table.capped_abs, table.one_minus_p], axis=1)
        inside, outside = (
            sum_with_replicates(table, columns * flags[:, None]) for flags in (region.is_member, is_outside)
        )
        rates = outside[:, ::2] / np.maximum(outside[:, 1::2], 1e-12)
        excess = np.maximum(inside[:, ::2] - inside[:, 1::2] * rates, 0.0)
        return MismatchSums(excess[:, 0], excess[:, 1])


MIN_OUTSIDE = 0.1
"""Share of the expected mismatch outside the regions below which causes of all tokens are sought in all tokens."""


@dataclass(frozen=True)
class Detection:
    """Result of a detector, which looks for one cause.

    Attributes:
        explained: mismatch of *after* that the cause accounts for; None if it can't be measured.
        part_value: value of the cause in some steps' tokens, whose rise is its onset; None if it has none of its own.
        is_open: True if the records could show the cause and leave it open, so that the run can't be called healthy.
        detectable_share: share of |Δ| that the cause must account for to be shown; NaN if it is not known.
    """

    value: float  # the measured value, in the unit of the cause's threshold; NaN if the records lack the data
    description: str  # the measurement as text
    is_shown: bool = False  # True if the records show the cause
    steps: tuple[int, ...] = ()  # the steps that show the cause, if it is judged step by step
    needs: str = ""  # data that a test of the cause needs and the records lack; empty if the cause was tested
    explained: MismatchSums | None = None
    is_standing: bool = False  # True if the cause is shown by *after* alone, although it is no worse than *before*
    part_value: Callable[[TokenTable], float] | None = None
    is_open: bool = False
    detectable_share: float = math.nan
    place: str = ""  # the tokens that have it, as a phrase; empty if all tokens do
    is_explained: bool = False  # True if the place stands out, but another one explains it
    is_possible: bool = False  # True if the value exceeds the threshold of the cause, which is not shown for all that

    @property
    def state(self) -> DetectionState:
        """Outcome of the test; a cause is ruled out only if there was something to compare."""
        if self.is_shown:
            return "shown"
        if self.is_explained:
            return "explained"
        return "not testable" if self.needs else "also possible" if self.is_possible else "ruled out"


Detector = Callable[[Evidence, float], Detection]
"""Function that looks for one cause: takes the evidence and the threshold of the cause."""
