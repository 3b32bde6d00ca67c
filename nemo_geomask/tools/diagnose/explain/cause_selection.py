"""Ranking of the causes that the records show, by the share of the mismatch that each accounts for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.explain.causes import CAUSES, DISTRIBUTION_CAUSES, NOISE_CAUSES, PLACES, Cause
from nemo_geomask.tools.diagnose.explain.evidence import Detection, Evidence, MismatchSums
from nemo_geomask.tools.diagnose.measure.step_sums import Estimate
from nemo_geomask.tools.diagnose.read.record_reader import Array
from nemo_geomask.tools.shared.intervals import percentile_interval

LARGEST_PART = 0.5
"""Share of k3 above which a cause precedes all others, since none of them can account for as much of it."""
MIN_NOISE_SHARE, MIN_SURE_SHARE = 0.25, 0.1
"""Share of k3 or of |Δ| that noise must account for to be named, and the lower end of its interval."""
MIN_LISTED_SHARE = 0.05
"""Share of k3, or of |Δ|, below which a cause that is no bug is not listed."""


class ExplainedShare(NamedTuple):
    """Share of the mismatch that a cause accounts for, of k3 and of |Δ| (each at most 1)."""

    k3: Estimate
    capped_abs: Estimate

    @property
    def text(self) -> str:
        """The shares with their intervals."""
        k3, size = (
            f"{_percent(share.value)} % ({_percent(share.low)} to {_percent(share.high)}) of {name}"
            for share, name in ((self.k3, "k3"), (self.capped_abs, "|Δ|"))
        )
        return f"{k3} and {size}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.095 else f"{100 * share:.1g}"


class ShownCause(NamedTuple):
    """A cause that the records show."""

    cause: Cause  # the cause
    detection: Detection  # what its detector found
    share: ExplainedShare | None  # the share of the mismatch that it accounts for; None if that can't be measured
    since: int | None = None  # first step that shows it; None if that is the first one, or two runs are compared
    facts: frozenset[str] = frozenset()  # what the records hold of ``Cause.unless``

    @property
    def phrase(self) -> str:
        """The cause and where it is; of a place, the place alone."""
        place = self.detection.place
        if self.cause.is_place:
            return f"concentrated in {place or self.cause.name}"
        return f"{self.cause.name} in {place}" if place else self.cause.name

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice on what to do; of a place, the likeliest causes and what tells them apart."""
        if not self.cause.is_place:
            return (f"to do: {self.cause.action}",)
        likely = "; ".join(f"({number}) {text}" for number, text in enumerate(self.likely, start=1))
        return f"cause not known; likely: {likely}", f"to tell them apart: {self.action}"

    @property
    def likely(self) -> list[str]:
        """Likely causes of a place, without those that the records refute."""
        return self.cause.keep_unrefuted(self.cause.likely, self.facts)

    @property
    def action(self) -> str:
        """Advice to the user, without what the records make pointless."""
        return "; ".join(self.cause.keep_unrefuted(self.cause.action.split("; "), self.facts))


def rank_causes(detections: Mapping[str, Detection], evidence: Evidence) -> list[ShownCause]:
    """Return the causes that the records show, the one that accounts for most of the mismatch first.

    The rank is the mean of the cause's shares of k3 and of |Δ|; a cause with more than half of k3 precedes. Places have
    no token in common, but causes overlap: a place only accounts for the mismatch that no cause in
    ``DISTRIBUTION_CAUSES`` accounts for, and noise only for what remains after both.

    Args:
        detections: outcome of each cause that may be named, by the id of the cause.
        evidence: the evidence that the detectors read.
    """
    judged_steps = {step for step in evidence.statistics.steps if step >= evidence.first_step}
    shown = {
        cause.id: cause
        for cause in CAUSES
        if cause.id in detections
        and detections[cause.id].is_shown
        # A bug that shows only in steps before the change cannot have caused the change.
        and (judged_steps.intersection(detections[cause.id].steps) or not detections[cause.id].steps)
    }
    if "filtered" in shown:
        # Where the filter keeps a single token, that token has a log-prob of 0.
        shown.pop("zero_logprobs", None)
    if {"filtered", "temperature", "penalty", "smoothed", "scaled", "stale_engine"} & set(shown):
        shown.pop("biased_weight", None)  # it follows from any of them
    if {"temperature", "penalty", "smoothed"} & set(shown):
        shown.pop("precision", None)  # noise has no tilt
    if "routing" in shown:
        shown.pop("few_tokens", None)  # the tokens whose experts differ
    sums = _disjoint_sums({id_: detections[id_] for id_ in shown}, evidence)
    total = evidence.mismatch_after
    ranks: dict[str, float] = {}
    shares: dict[str, ExplainedShare | None] = {}
    for id_, cause in shown.items():
        explained = sums[id_]
        share = shares[id_] = None if explained is None else ExplainedShare(*map(_share, explained, total))
        if share is None:
            ranks[id_] = _unmeasured_rank(cause, evidence)
        elif id_ in ("routing", "precision") and not _is_sure_of_part(share):
            continue  # there is such noise, too, but the mismatch is something else
        elif cause.is_bug or max(share.k3.value, share.capped_abs.value) >= MIN_LISTED_SHARE:
            ranks[id_] = (share.k3.value + share.capped_abs.value) / 2 + (share.k3.value > LARGEST_PART)
    return [
        ShownCause(shown[id_], detections[id_], shares[id_], facts=evidence.facts)
        for id_ in sorted(ranks, key=lambda id_: -ranks[id_])
    ]


def _is_sure_of_part(share: ExplainedShare) -> bool:
    return any(part.value >= MIN_NOISE_SHARE and part.low >= MIN_SURE_SHARE for part in share)


def _disjoint_sums(shown: Mapping[str, Detection], evidence: Evidence) -> dict[str, MismatchSums | None]:
    """Return the mismatch that each cause accounts for, without what a more specific cause accounts for."""
    total = evidence.mismatch_after
    sums = {id_: detection.explained for id_, detection in shown.items()}

    def largest(ids: tuple[str, ...]) -> MismatchSums:
        none = MismatchSums(np.zeros_like(total.k3), np.zeros_like(total.k3))
        measured = [explained for id_ in ids if (explained := sums.get(id_)) is not None]
        return max(measured, key=lambda explained: float(explained.k3[0]), default=none).at_most(total)

    # The mismatch that the run already had before the change needs no cause.
    excess = total if evidence.sums_before is None else evidence.mismatch_beyond(evidence.sums_before)
    everywhere = tuple(id_ for id_ in DISTRIBUTION_CAUSES if id_ in shown and not shown[id_].place)
    for ids, more_specific, available in ((PLACES, everywhere, total), (NOISE_CAUSES, (*everywhere, *PLACES), excess)):
        remainder = available.minus(largest(more_specific))
        for id_ in ids:
            if (explained := sums.get(id_)) is not None:
                sums[id_] = explained.at_most(remainder)
    return sums


def _share(explained: Array, total: Array) -> Estimate:
    shares = np.clip(explained / np.maximum(total, 1e-30), 0.0, 1.0)
    low, high = percentile_interval(shares[1:])
    return Estimate(float(shares[0]), low, high)


def _unmeasured_rank(cause: Cause, evidence: Evidence) -> float:
    """Return the rank of a cause whose share can't be measured: 2, or the share of tokens that are not finite."""
    if cause.id != "nonfinite":
        return 2.0
    sums = evidence.sums_after
    return sums["nonfinite"] / sums["all_tokens"] if sums["all_tokens"] else 1.0
