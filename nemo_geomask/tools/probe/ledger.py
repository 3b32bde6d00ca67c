"""The ledger: one row for each switch, with its effect on the mismatch and a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_geomask.tools.probe.gap_statistics import Gap, GapChange
from nemo_geomask.tools.shared.mismatch_switches import MismatchSwitch

Verdict = Literal[
    "explains", "contributes", "no effect", "worse", "not effective", "not testable here", "undecided", "not tried"
]
"""Verdict on a switch; ``undecided``: there is not enough data; ``not tried``: the budget was spent."""

OTHER_ORDER = "other order"
"""End of the names of repetitions with the rows in another order."""
NEGLIGIBLE_K3 = 1e-7
"""Mean k3 in nats a token below which no mismatch matters: |Δ| of about 4e-4."""
_NEGLIGIBLE_SHARE = 0.02
_EXPLAINS_FROM = 0.5
SIGNIFICANT = 0.05
"""Largest p-value, adjusted by Holm's method, of a verdict."""


def verdict_of(change: GapChange, adjusted_p: float, before: float, floor: float) -> Verdict:
    """Return the verdict on a change of the mean k3.

    Args:
        adjusted_p: its p-value, adjusted for the number of switches.
        before: mean k3 of the baseline.
        floor: largest change between repetitions of the baseline.

    Returns:
        ``no effect`` if the interval lies within ±(the largest of the floor, 2 % of the baseline's k3 and
        :data:`NEGLIGIBLE_K3`); if the change is beyond that and significant at 5 %, ``worse``, or ``explains`` from
        half of the baseline's k3 on and else ``contributes``; otherwise ``undecided``.
    """
    negligible = max(floor, _NEGLIGIBLE_SHARE * before, NEGLIGIBLE_K3)
    if -negligible <= change.low and change.high <= negligible:
        return "no effect"
    if adjusted_p >= SIGNIFICANT or abs(change.value) <= negligible:
        return "undecided"
    if change.value > 0:
        return "worse"
    return "explains" if -change.value >= _EXPLAINS_FROM * before else "contributes"


@dataclass(frozen=True)
class LedgerRow:
    """Effect of a switch on the mismatch."""

    switch: MismatchSwitch  # the switch
    was: Any  # the recipe's value; None if it has none
    verdict: Verdict  # see :data:`Verdict`
    note: str = ""  # reason of the verdict, where numbers don't give it
    ran: Any = None  # the value of the baseline, where a smaller machine replaced the recipe's
    also: Mapping[str, Any] = field(default_factory=dict)  # values that had to change with it, by dotted key
    # resolved settings in which the arm differs from the baseline, as (before, after) by name
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    after: Gap | None = None  # gap of the arm
    change: GapChange | None = None  # change of k3
    adjusted_p: float | None = None  # p-value adjusted by Holm's method
    share: float | None = None  # share of the baseline's k3 that is gone
    # share of the baseline's k3 that comes back if all conservative values but this one are set
    last_share: float | None = None
    is_confirmed: bool | None = None  # True if the fresh prompts show the change too; None if that was not looked at


@dataclass(frozen=True)
class Ledger:
    """All rows, and what they are measured against."""

    baseline: Gap  # gap between trainer and decode with the recipe's settings
    triangle: Mapping[str, Gap]  # gaps D–P, P–T and D–T of the baseline, by name
    floor: float  # largest change of k3 between repetitions of the baseline
    repetitions: Mapping[str, Gap]  # gap of each side with its own repetitions, by name
    all_conservative: Gap | None  # gap with all conservative values; None if there is no such arm
    rows: tuple[LedgerRow, ...]  # the rows, the largest share first
    prompts: int  # number of prompts that the rows are computed over; as many others confirm them
    starts: int  # number of starts that the ledger uses
    is_complete: bool = True  # False if the budget ended first

    @property
    def has_mismatch(self) -> bool:
        """True if the baseline's k3 is beyond :data:`NEGLIGIBLE_K3`."""
        return self.baseline.k3 > NEGLIGIBLE_K3

    @property
    def noise(self) -> float:
        """Mean k3 between the sides that noise alone would make, by what repetitions of the same scores differ.

        Two passes of one side differ by twice its noise. Another order of the rows is no repetition: it changes the
        rounding, and not by chance.
        """
        largest = {
            side: max((each.k3 for name, each in self.repetitions.items() if _repeats(side, name)), default=0.0)
            for side in ("engine", "trainer")
        }
        return sum(largest.values()) / 2

    @property
    def is_within_noise(self) -> bool:
        """True if there is a mismatch, and at least half of it is noise."""
        return self.has_mismatch and (self.noise >= self.baseline.k3 / 2 or self.floor >= self.baseline.k3)

    @property
    def culprits(self) -> tuple[LedgerRow, ...]:
        """Rows of switches that explain the mismatch or contribute to it, the largest first; none if it is noise."""
        if self.is_within_noise:
            return ()
        return tuple(row for row in self.rows if row.verdict in ("explains", "contributes"))


def _repeats(side: str, name: str) -> bool:
    return name.startswith(side) and not name.endswith(OTHER_ORDER)
