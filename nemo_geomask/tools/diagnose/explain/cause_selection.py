"""Ranking of the causes that the records show, by the share of the mismatch that each accounts for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.explain.causes import (
    CAUSES,
    DISTRIBUTION_CAUSES,
    LOCATION_CAUSES,
    NOISE_CAUSES,
    WITHIN_SEQUENCE_CAUSES,
    Cause,
)
from nemo_geomask.tools.diagnose.locate.run_evidence import Detection, Evidence, MismatchSums
from nemo_geomask.tools.diagnose.read.record_reader import Array
from nemo_geomask.tools.shared.intervals import percentile_interval

__all__ = ["Estimate", "ExplainedShare", "RankedCause", "rank_causes"]

WITHIN_SEQUENCE_PREFERENCE = 1.25
"""Factor by which the share of a cause within a sequence counts more than that of other location causes.

Late tokens are mostly in long responses, so a mismatch at late positions also makes long responses stand out. The
difference within one sequence is the more specific observation.
"""
LARGEST_PART = 0.5
"""Share of k3 above which a cause precedes all others, since none of them can account for as much of it."""
MIN_LISTED_SHARE = 0.05
"""Share of k3, or of |Δ|, below which a cause that is no bug is not listed."""


class Estimate(NamedTuple):
    """A value and the ends of its confidence interval, from a bootstrap over sequences."""

    value: float
    low: float
    high: float


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


class RankedCause(NamedTuple):
    """A cause that the records show.

    Attributes:
        cause: the cause.
        detection: what its detector found.
        share: the share of the mismatch that it accounts for; None if that can't be measured.
    """

    cause: Cause
    detection: Detection
    share: ExplainedShare | None


def rank_causes(detections: Mapping[str, Detection], evidence: Evidence) -> list[RankedCause]:
    """Return the causes that the records show, the one that accounts for most of the mismatch first.

    The rank is the mean of the cause's shares of k3 and of |Δ|; a cause with more than half of k3 precedes. Several
    causes may say that a part of the data is worse, such as late positions; the part with most excess mismatch and
    least other data precedes the others. Causes overlap, so a part of the data only accounts for the mismatch that no
    cause in ``DISTRIBUTION_CAUSES`` accounts for, and noise only for what remains after both.

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
    if {"filtered", "temperature", "stale_engine"} & set(shown):
        shown.pop("biased_weight", None)  # it follows from any of them
    sums = _disjoint_sums({id_: detections[id_] for id_ in shown}, evidence)
    total = evidence.mismatch_after
    ranks: dict[str, float] = {}
    shares: dict[str, ExplainedShare | None] = {}
    for id_, cause in shown.items():
        explained = sums[id_]
        share = shares[id_] = None if explained is None else ExplainedShare(*map(_share, explained, total))
        if share is None:
            ranks[id_] = _unmeasured_rank(cause, evidence)
        elif cause.is_bug or max(share.k3.value, share.capped_abs.value) >= MIN_LISTED_SHARE:
            ranks[id_] = (share.k3.value + share.capped_abs.value) / 2 + (share.k3.value > LARGEST_PART)
    _prefer_narrow_part(ranks, detections)
    return [RankedCause(shown[id_], detections[id_], shares[id_]) for id_ in sorted(ranks, key=lambda id_: -ranks[id_])]


def _prefer_narrow_part(ranked: dict[str, float], detections: Mapping[str, Detection]) -> None:
    """Give the highest rank of the parts of the data to the one with most excess mismatch and least other data.

    Parts overlap: of a wide and a narrow one with the same excess mismatch, the narrow one is the cause.
    """
    excess_shares = {
        id_: detections[id_].value * (WITHIN_SEQUENCE_PREFERENCE if id_ in WITHIN_SEQUENCE_CAUSES else 1.0)
        for id_ in LOCATION_CAUSES
        if id_ in ranked
    }
    if excess_shares:
        chosen = max(excess_shares, key=lambda id_: excess_shares[id_])
        # Slightly higher, so that it precedes a part with an equal share.
        ranked[chosen] = max(ranked[id_] for id_ in excess_shares) * (1 + 1e-9)


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
    for ids, more_specific, available in (
        (LOCATION_CAUSES, DISTRIBUTION_CAUSES, total),
        (NOISE_CAUSES, (*DISTRIBUTION_CAUSES, *LOCATION_CAUSES), excess),
    ):
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
