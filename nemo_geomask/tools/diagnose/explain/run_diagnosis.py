"""Result of diagnosing a run from its records, and the sentence that states it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nemo_geomask.tools.diagnose.explain.cause_selection import ShownCause
from nemo_geomask.tools.diagnose.explain.causes import Cause
from nemo_geomask.tools.diagnose.explain.evidence import Detection, Evidence
from nemo_geomask.tools.diagnose.locate.change_points import MIN_NOISE, MIN_SCORE, MIN_VALUES, find_change
from nemo_geomask.tools.diagnose.measure.thresholds import IMMATERIAL_K3, Health, Reading

NOTABLE_GROWTH, NOTABLE_SHARE = 4.0, 0.5
"""Growth of the few tokens with large noise, and their share of k3, above which a healthy verdict mentions them."""
LOW_SURPRISE = 0.01
"""Mean surprise, in nats a token, below which the engines agree because the policy has hardly any choice left."""


class MismatchRatio(NamedTuple):
    """Ratio of a run's mismatch to that of another run, with confidence intervals.

    Attributes:
        low, high: ends of its interval.
        k3_low, k3_high: ends of its interval.
    """

    name: str  # name of the other run
    times: float  # ratio of the mean min(|Δ|, 1) in units of 1 − p
    low: float
    high: float
    k3_times: float  # ratio of the mean k3 in units of (1 − p)²
    k3_low: float
    k3_high: float


@dataclass(frozen=True)
class RunDiagnosis:
    """Diagnosis of a run from its records.

    Attributes:
        since: first step of the named cause, or else of the rise; None if there is no change, or the first step already
            has it.
    """

    health: Health  # health of the run; meaningless if there is an ``unjudged_reason``
    since: int | None
    shown: tuple[ShownCause, ...]  # the causes that are shown, the one that accounts for most of the mismatch first
    detections: dict[str, Detection]  # result of each cause's detector, by the id of the cause
    readings: dict[str, Reading]  # value of each health limit over the steps that count, by its name
    evidence: Evidence  # the data that the detectors read
    counted_steps: int  # number of steps that the readings are computed over
    surprise: float  # mean of −gen over these steps, in nats a token
    unjudged_reason: str = ""  # why no verdict is possible; empty if there is one
    comparison: MismatchRatio | None = None  # mismatch relative to the other run, if the run was compared with one

    @property
    def cause(self) -> Cause | None:
        """The likely cause; None if nothing is wrong, or no known cause is shown."""
        return self.shown[0].cause if self.shown else None

    @property
    def trend(self) -> str:
        """Text on how k3 and the reward change over a run whose mismatch has not risen; empty if they don't clearly."""
        if self.comparison is not None or self.evidence.onset is not None:
            return ""
        statistics, steps, changes = self.evidence.statistics, self.evidence.steps_after, []
        for name, key, over in (("k3", "k3", "tokens"), ("the reward", "reward", "sequences_with_reward")):
            values = [statistics.steps[step].mean(key, over) for step in steps]
            change = find_change(values, MIN_NOISE * max(map(abs, values), default=0.0))
            if change is None or abs(change.score) < MIN_SCORE:
                continue
            third = len(steps) // 3
            first, last = (statistics.total(part).mean(key, over) for part in (steps[:third], steps[-third:]))
            verb = "rises" if last > first else "falls"
            changes.append(
                f"{name} {verb} from {first:.2g} in the first {third} steps to {last:.2g} in the last {third}"
            )
        return "; ".join(changes)

    @property
    def sentence(self) -> str:
        """The verdict, followed by the causes that are ruled out and those that can't be tested."""
        return self.headline if self.unjudged_reason else f"{self.headline}; {self._tested_text()}"

    @property
    def headline(self) -> str:
        """The verdict alone."""
        if self.unjudged_reason:
            return f"not judged: {self.unjudged_reason}"
        compared = ""
        if self.comparison is not None:
            ratio = self.comparison
            k3 = f"k3 {ratio.k3_times:.3g} times, {ratio.k3_low:.3g} to {ratio.k3_high:.3g}"
            compared = f", {ratio.times:.3g} times ({ratio.low:.3g} to {ratio.high:.3g}; {k3})"
            compared += f" the mismatch of {ratio.name}"
        if self.health == "healthy":
            return f"healthy{compared}: {self._readings_text()}"
        since = f" since step {self.since}" if self.since is not None else ""
        return f"{self.health}{since}{compared}: {self.explanation}"

    def _readings_text(self) -> str:
        error, kl = (self.readings[name].value for name in ("token_mult_prob_error", "geomask/mismatch_k3"))
        all_steps = len(self.evidence.statistics.steps)
        steps = f"the last {self.counted_steps} of {all_steps}" if self.counted_steps < all_steps else all_steps
        text = f"token_mult_prob_error {error:.4g}, KL {kl:.2g} nats a token over {steps} steps"
        if all_steps < MIN_VALUES and self.comparison is None:
            text += ", too short to judge a change"
        if self.surprise < LOW_SURPRISE:
            text += (
                f"; the policy is nearly certain of its tokens (mean surprise {self.surprise:.2g} nats), which hides a "
                "mismatch"
            )
        return "; ".join([text, *(f"remark: {remark}" for remark in self._remarks())])

    def _remarks(self) -> list[str]:
        """Return what stands out in a healthy run: a part of the data that is worse, or a few tokens that are."""
        if self.comparison is not None or self.readings["geomask/mismatch_k3"].high < IMMATERIAL_K3:
            return []
        doubtful = sorted(self.evidence.location.doubtful, key=lambda region: -region.excess)[:1]
        remarks = [] if self.since is not None else self._ended_rise()
        remarks += [
            f"{region.description}: {region.lift:.1f} times the mismatch of the other tokens" for region in doubtful
        ]
        few = self.detections["few_tokens"]
        if few.explained is not None and few.value > NOTABLE_GROWTH:
            share = float(few.explained.k3[0] / max(float(self.evidence.mismatch_after.k3[0]), 1e-30))
            remarks += [f"{few.description}, with {share:.0%} of k3"] if share > NOTABLE_SHARE else []
        return remarks

    def _ended_rise(self) -> list[str]:
        """Return that earlier steps were worse, if the verdict is about the steps since."""
        first, statistics = self.evidence.first_step, self.evidence.statistics
        before = [step for step in statistics.steps if step < first]
        if not before or self.evidence.onset is not None:
            return []
        worst = max(before, key=lambda step: statistics.steps[step].mean("k3"))
        k3 = statistics.steps[worst].mean("k3")
        return [f"steps before {first} were worse (k3 {k3:.2g} at step {worst}), which is over"]

    @property
    def explanation(self) -> str:
        """The named cause with its share of the mismatch, followed by the other causes that are shown."""
        if not self.shown:
            period = self.evidence.period
            cycle = "" if period is None else f"; it repeats every {period.steps} steps"
            advice = "compare with a good run (--against)"
            return f"no part of the data stands out, and no known cause is shown{cycle}; {advice}"
        first, *further_causes = self.shown
        text = f"{first.phrase} ({self._evidence_text(first)})"
        text += "; cause not known" if first.cause.is_place else ""
        if further_causes:
            listed = ", ".join(f"{shown.phrase}{self._further_text(shown)}" for shown in further_causes)
            text += f"; also {listed}"
        return text

    def _evidence_text(self, shown: ShownCause) -> str:
        detection, share = shown.detection, shown.share
        steps = self.evidence.statistics.steps
        steps_since = sum(step >= (self.since or 0) for step in steps)
        parts = [] if share is None else [share.text]
        parts.append(detection.description)
        text = "; ".join(parts)
        if detection.steps and len(detection.steps) < steps_since:
            text += f", in {len(detection.steps)} of {len(steps)} steps"
        return text

    def _further_text(self, shown: ShownCause) -> str:
        parts = [] if shown.share is None else [shown.share.text]
        if shown.since != self.since and shown.since is not None:
            parts.append(f"since step {shown.since}")
        return f" ({', '.join(parts)})" if parts else ""

    def _tested_text(self) -> str:
        detections = self.detections.items()
        ruled_out = [
            id_.replace("_", " ")
            + ("" if math.isnan(detection.detectable_share) else f" (from {detection.detectable_share:.0%} of |Δ|)")
            for id_, detection in detections
            if detection.state == "ruled out"
        ]
        text = f"ruled out: {', '.join(ruled_out)}" if ruled_out else "nothing is ruled out"
        possible = [
            f"{id_.replace('_', ' ')} ({detection.description})"
            for id_, detection in detections
            if detection.state == "also possible"
        ]
        text = f"also possible: {', '.join(possible)}; {text}" if possible else text
        untested = [
            f"{', '.join(id_.replace('_', ' ') for id_ in ids)} (needs {needs})"
            for needs, ids in causes_by_need(self.detections).items()
        ]
        return text + (f"; not testable in these records: {'; '.join(untested)}" if untested else "")


def causes_by_need(detections: Mapping[str, Detection]) -> dict[str, list[str]]:
    """Return the ids of the causes that could not be tested, by the data that a test of them needs."""
    by_need: dict[str, list[str]] = {}
    for id_, detection in detections.items():
        if detection.state == "not testable":
            by_need.setdefault(detection.needs, []).append(id_)
    return by_need
