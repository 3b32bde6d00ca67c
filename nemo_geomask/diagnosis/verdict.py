"""The verdict on a run: healthy, drifting or broken, since when, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nemo_geomask.diagnosis.causes import CAUSES, LOCAL, WITHIN_SEQUENCES, Cause
from nemo_geomask.diagnosis.changes import ChangePoint, find_change
from nemo_geomask.diagnosis.levels import LEAST_SEQUENCES, LEVELS, Health, Reading
from nemo_geomask.diagnosis.signs import Evidence, Found
from nemo_geomask.diagnosis.statistics import BOOT, Statistics, StepSums, Window
from nemo_geomask.errors import DataError

__all__ = ["CERTAIN", "LEAST_NOISE", "RISE", "Alarm", "RunDiagnosis", "diagnose"]

FEWEST_STEPS = 3
"""That are taken for how a run is now."""
_ORDER: tuple[Health, ...] = ("healthy", "drifting", "broken")


@dataclass(frozen=True)
class Alarm:
    """A number that has changed.

    Attributes:
        what: which.
        since: first step.
        before, after: its means, of the steps before and from then on.
        score: the change in standard errors.
        gradual: whether it is a slope that began then.
    """

    what: str
    since: int
    before: float
    after: float
    score: float
    gradual: bool


@dataclass(frozen=True)
class RunDiagnosis:
    """What the records of a run say.

    Attributes:
        health: of the run.
        since: first step; None: from the first on, or never.
        cause: the likely one; None: nothing is wrong, or none that is known.
        found: of every cause.
        levels: with their values over the steps that count.
        alarms: what has changed.
        evidence: what was compared.
        counted: how many steps that are.
        unknown: why nothing of the mismatch can be said; empty where it can.
        versus: what it is to another run, where it was held against one.
    """

    health: Health
    since: int | None
    cause: Cause | None
    found: dict[str, Found]
    levels: dict[str, Reading]
    alarms: tuple[Alarm, ...]
    evidence: Evidence
    counted: int
    unknown: str = ""
    versus: Versus | None = None

    @property
    def sentence(self) -> str:
        """The verdict, and what was ruled out."""
        return self.headline if self.unknown else f"{self.headline}; {self._ruled_out()}"

    @property
    def headline(self) -> str:
        """The verdict."""
        steps = self.evidence.statistics.steps
        if self.unknown:
            return f"not judged: {self.unknown}"
        if self.health == "healthy":
            error, kl = (self.levels[name].value for name in ("token_mult_prob_error", "geomask/mismatch_k3"))
            over = f"the last {self.counted} of {len(steps)}" if self.counted < len(steps) else len(steps)
            found = f"token_mult_prob_error {error:.4g}, KL {kl:.2g} nats a token over {over} steps"
            return f"healthy{self._against()}: {found}"
        since = f" since step {self.since}" if self.since is not None else ""
        if self.cause is None:
            why = "no cause that is known"
        else:
            found_cause = self.found[self.cause.id]
            why = f"{self.cause.name} ({found_cause.says}"
            if found_cause.steps and len(found_cause.steps) < len(
                [step for step in steps if step >= (self.since or 0)]
            ):
                why += f", in {len(found_cause.steps)} of {len(steps)} steps"
            why += ")"
        return f"{self.health}{since}{self._against()}: {why}"

    def _against(self) -> str:
        if self.versus is None:
            return ""
        name, times, low, high = self.versus
        return f", {times:.3g} times ({low:.3g} to {high:.3g}) the mismatch of {name}"

    def _ruled_out(self) -> str:
        names = [
            cause.id.replace("_", " ")
            for cause in CAUSES
            if not self.found[cause.id].shown and not math.isnan(self.found[cause.id].share)
        ]
        unknown = [cause.id.replace("_", " ") for cause in CAUSES if math.isnan(self.found[cause.id].share)]
        said = f"ruled out: {', '.join(names)}" if names else "nothing is ruled out"
        return said + (f"; not in these records: {', '.join(unknown)}" if unknown else "")


def diagnose(statistics: Statistics, against: Statistics | None = None, name: str = "the other run") -> RunDiagnosis:
    """The verdict on a run's statistics.

    Args:
        statistics: of the run.
        against: of one that is taken for what it should be: what has become worse is asked between the two, and not
            between the run's own steps.
        name: of the other.

    Raises: DataError: there is no step, or no trained token to hold the run against.
    """
    steps = sorted(statistics.steps)
    if not steps:
        raise DataError("the records hold no sequence")
    known = [step for step in steps if statistics.steps[step]["tokens"] > 0]
    other = None if against is None else against.total()
    if other is not None and not other["model"]:
        raise DataError(f"{name}: no sequence has a trained token with log-probs of both engines")
    onset, first = _course(statistics, known) if other is None else (None, None)
    first = steps[0] if first is None else first
    after = tuple(step for step in known if step >= first)
    # What counts is how it is now: of a run that has not become worse, its last third.
    recent = after if onset is not None or other is not None else after[-max(FEWEST_STEPS, len(known) // 3) :]
    total = statistics.total(recent)
    levels = {level.name: level.of(total) for level in LEVELS}
    level = max((reading.health for reading in levels.values()), key=_ORDER.index)
    versus = None if other is None or not known else _versus(total, other, name)
    fewest = total["sequences"] if other is None else min(total["sequences"], other["sequences"])
    worse = onset is not None or (fewest >= LEAST_SEQUENCES and versus is not None and versus.low > math.exp(RISE))
    begin = first // statistics.width * statistics.width
    earlier = [step for step in steps if onset is not None and step < onset]
    before, names = Window(), ("", "all steps" if first == steps[0] else f"from {first}")
    if against is not None:
        before, names = against.between(-math.inf, math.inf), (name, "this run")
    elif onset is not None:
        before, names = statistics.between(-math.inf, begin), (f"before {onset}", f"from {onset}")
    evidence = Evidence(
        statistics,
        onset,
        first,
        worse or level != "healthy",
        before if before.tail.any() else None,  # the change may be in the first window
        statistics.between(begin, math.inf),
        other if onset is None else statistics.total(earlier),
        after,
        names,
        tuple(statistics.steps[step] for step in earlier) if against is None else tuple(against.steps.values()),
    )
    found = {cause.id: cause.measure(evidence, cause.threshold) for cause in CAUSES}
    many = (evidence.sums_after["sequences"] if other is None else fewest) >= LEAST_SEQUENCES
    cause = _likely({name: one for name, one in found.items() if many or BUGS[name]}, evidence)
    unknown = "" if known else _unknown(statistics.total())
    health: Health = level if not worse or level == "broken" else "drifting"
    since = onset
    if cause is not None:
        health = "broken" if cause.bug or health == "broken" else "drifting"
        if found[cause.id].steps:
            begun = found[cause.id].steps[0]
            since = begun if begun > (first if onset is None else steps[0]) else None
            unknown = ""
    if known and health == "healthy":
        unknown = _too_few(fewest, levels, found, versus)
    return RunDiagnosis(
        health, since, cause, found, levels, _alarms(statistics, known), evidence, len(recent), unknown, versus
    )


class Versus(NamedTuple):
    """How many times the mismatch of another run this one has, in units of 1 − p, and the 95 % interval of that."""

    name: str
    times: float
    low: float
    high: float


def _versus(mine: StepSums, other: StepSums, name: str) -> Versus:
    def rates(sums: StepSums) -> Any:
        size, model = (sums.boot[:, BOOT.index(each)] for each in ("size", "model"))
        return size / np.maximum(model, 1e-12)

    low, high = np.quantile(rates(mine) / np.maximum(rates(other), 1e-12), [0.025, 0.975])
    times = mine.mean("size", "model") / max(other.mean("size", "model"), 1e-12)
    return Versus(name, times, float(low), float(high))


WITHIN = 1.25
BUGS = {cause.id: cause.bug for cause in CAUSES}


def _likely(found: dict[str, Found], evidence: Evidence) -> Cause | None:
    counted = {step for step in evidence.statistics.steps if step >= evidence.first}
    steps_of = {name: counted.intersection(one.steps) for name, one in found.items()}
    # What was seen only before the change, step by step, is none of it.
    shown = [
        cause
        for cause in CAUSES
        if cause.id in found and found[cause.id].shown and (steps_of[cause.id] or not found[cause.id].steps)
    ]
    if not shown:
        return None
    by_step = [cause for cause in shown if cause.bug and steps_of[cause.id]]
    if by_step:
        # One that a single step shows may come of another that all of them show: a shift leaves holes, say. What counts
        # is how it is now; of those that are seen as often, the first of the table.
        most = max(by_step, key=lambda cause: len(steps_of[cause.id]))
        steps = steps_of[most.id]
        if 2 * len(steps) < len(counted):
            others = evidence.without(steps)
            for cause in shown:
                # A few bad steps can look like it.
                if cause.bug and not found[cause.id].steps and cause.measure(others, cause.threshold).shown:
                    return cause
        return most
    if shown[0].id in LOCAL:
        local = [cause for cause in shown if cause.id in LOCAL]
        # Late tokens are in long responses: what differs within a sequence says more.
        return max(local, key=lambda cause: found[cause.id].share * (WITHIN if cause.id in WITHIN_SEQUENCES else 1.0))
    return shown[0]


def _unknown(total: StepSums) -> str:
    if total["no_prev"]:
        return (
            "prev_logprobs are 0 throughout, as NeMo-RL leaves them where it skips π_old (force_on_policy_ratio, "
            "ratio_anchor: gen); set loss_fn.audit_fraction, or seq_logprob_error_threshold to have them computed"
        )
    return "no sequence has a trained token with log-probs of both engines"


def _too_few(sequences: float, levels: Mapping[str, Reading], found: Mapping[str, Found], versus: Versus | None) -> str:
    """Where a number is beyond its limit, but of too few sequences to say that the run is."""
    beyond = [
        f"{level.name} {levels[level.name].value:.4g}" for level in LEVELS if level.beyond(levels[level.name].value)
    ]
    beyond += [f"{name} {one.share:.3g}" for name, one in found.items() if one.shown]
    if versus is not None and versus.low > math.exp(RISE):
        beyond.append(f"{versus.times:.3g} times the mismatch of {versus.name}")
    if not beyond or sequences >= LEAST_SEQUENCES:
        return ""
    return (
        f"only {sequences:.0f} sequences in the steps that count, at least {LEAST_SEQUENCES} are needed; "
        f"beyond the limits: {', '.join(beyond)}"
    )


RISE, CERTAIN, LEAST_NOISE = math.log(1.5), 6.0, 0.05


def _course(statistics: Statistics, steps: list[int]) -> tuple[int | None, int | None]:
    """The first step of a rise of the mismatch that has stayed, and the first since that or a fall; None: no such."""
    rise = _mismatch_change(statistics, steps)
    before, after = ([], steps) if rise is None else (steps[: rise.first], steps[rise.first :])
    fall = _mismatch_change(statistics, after, -1)
    # It has ended where what is left is no more than there was before.
    if fall is not None and (rise is None or _mismatch_change(statistics, before + after[fall.first :]) is None):
        begin = math.ceil(after[fall.first] / statistics.width) * statistics.width  # of windows without the fault
        left = [step for step in after if step >= begin]
        if len(left) >= FEWEST_STEPS:
            return None, left[0]
    return (None, None) if rise is None else (after[0], after[0])


def _mismatch_change(statistics: Statistics, steps: list[int], sign: int = 1) -> ChangePoint | None:
    """Where the mismatch rose: per token, and in proportion to what the tokens' probabilities let one expect.

    With ``sign`` -1, where it fell.
    """
    sums = [statistics.steps[step] for step in steps]
    scale = _logarithms([one.mean("size", "model") for one in sums])
    change = find_change(scale, LEAST_NOISE)
    if change is None or sign * change.rise < RISE or sign * change.score < CERTAIN:
        return None
    raw = _logarithms([one.mean("size") for one in sums])
    # What follows one bad step is no fall: most of the steps before one were worse.
    middle = np.mean if sign > 0 else np.median
    rise = float(middle(raw[change.first :]) - middle(raw[: change.first]))
    return change if sign * rise > RISE else None


def _logarithms(values: list[float]) -> list[float]:
    """Those of a mismatch by step; steps without any are near the least, so that a few of them are no change."""
    some = [value for value in values if value > 0]
    floor = min(*some, float(np.median(some)) / 2) if some else 1.0
    return [math.log(max(value, floor)) for value in values]


def _alarms(statistics: Statistics, steps: list[int]) -> tuple[Alarm, ...]:
    """Changes of the mismatch's KL, of what is removed, and of the responses' length."""
    sums = [statistics.steps[step] for step in steps]
    series: dict[str, list[float]] = {
        "geomask/mismatch_k3": [one.mean("k3") for one in sums],
        "mean response length": [one.mean("response", "sequences") for one in sums],
        "share of sequences masked out": [one["masked_out"] / max(one["all_sequences"], 1.0) for one in sums],
    }
    labels = {label for one in sums for label in one.removed if label}
    for label in sorted(labels):
        name = f"geomask/mask/{label}/removed"
        shares = [one.removed_share(label) for one in sums]
        series[name] = [0.0 if math.isnan(share) else share for share in shares]
    found = []
    for name, values in series.items():
        # Shares may be 0; a thousandth more or less is nothing.
        change = find_change([math.log(max(value, 0.0) + 1e-6) for value in values], LEAST_NOISE)
        if change is None or abs(change.rise) < RISE or abs(change.score) < CERTAIN:
            continue
        if max(values) < 1e-3 and "share" in name:
            continue
        before, after = (float(np.mean(part)) for part in (values[: change.first], values[change.first :]))
        found.append(Alarm(name, steps[change.first], before, after, change.score, change.gradual))
    return tuple(found)
