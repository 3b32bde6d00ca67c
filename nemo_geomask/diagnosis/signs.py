"""How a cause of a mismatch shows in the records: a function for each, of the evidence and its threshold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nemo_geomask.diagnosis.read import Array
from nemo_geomask.diagnosis.statistics import BY_NAME, CELLS, PROB_EDGES, Dimension, Statistics, StepSums, Window, per

__all__ = [
    "FEW_STEPS",
    "GROUP_LIFT",
    "OF_FEW",
    "OF_ONE_STEP",
    "TYPICAL",
    "Evidence",
    "Found",
    "filtered",
    "nonfinite",
    "one_group",
    "positive",
    "precision",
    "routing",
    "shifted",
    "stale_engine",
    "staleness",
    "temperature",
    "where",
    "zeros",
]

_CELL = {name: index for index, name in enumerate(CELLS)}


@dataclass(frozen=True)
class Evidence:
    """A run before and after its mismatch rose, or another run and this one; else ``after`` is all of it since it fell.

    Attributes:
        statistics: of the whole run.
        onset: first step of the change; None: there is none, or the run is held against another.
        first: first step of what is ``after``: the onset, or the first since the mismatch fell, or of the run.
        worse: whether the mismatch is beyond what is healthy, or has changed for the worse.
        before, after: what is compared, split up.
        sums_before: of the same; None: there is nothing to compare with.
        steps_after: those of this run that count.
        names: of the two sides, for tables.
        each_before: sums of each step of what is compared with.
    """

    statistics: Statistics
    onset: int | None
    first: int
    worse: bool
    before: Window | None
    after: Window
    sums_before: StepSums | None
    steps_after: tuple[int, ...]
    names: tuple[str, str]
    each_before: tuple[StepSums, ...] = ()

    @property
    def sums_after(self) -> StepSums:
        """Of the steps that have changed, or of all."""
        return self.statistics.total(self.steps_after)

    def without(self, steps: Collection[int]) -> Evidence:
        """The same but for some steps, and the windows that hold them."""
        width, after = self.statistics.width, Window()
        gone = {step // width * width for step in steps}
        for begin, window in self.statistics.windows.items():
            if begin not in gone and begin >= self.first // width * width:
                after.add(window)
        kept = tuple(step for step in self.steps_after if step // width * width not in gone)
        return replace(self, after=after, steps_after=kept)


@dataclass(frozen=True)
class Found:
    """What the records say of one cause.

    Attributes:
        share: what is measured, in the units of the cause's threshold; NaN: the records can't tell.
        says: the measurement in words.
        shown: whether it is there.
        steps: those that show it, where it is a matter of single steps.
    """

    share: float
    says: str
    shown: bool = False
    steps: tuple[int, ...] = ()


def _each_step(evidence: Evidence, share: Callable[[StepSums], float], least: float, says: str) -> Found:
    shares = {step: share(sums) for step, sums in sorted(evidence.statistics.steps.items())}
    known = {step: value for step, value in shares.items() if np.isfinite(value)}
    if not known:
        return Found(float("nan"), "no sequence to judge by")
    steps = tuple(step for step, value in known.items() if value > least)
    highest = max(known.values())
    return Found(highest, says.format(highest), bool(steps), steps)


def zeros(evidence: Evidence, least: float) -> Found:
    """Log-probs of exactly 0 on one side."""

    def share(sums: StepSums) -> float:
        # Not no_prev: the trainer may skip π_old, for all sequences or for those that are not audited.
        zeros = per(max(sums["zero_gen"], sums["zero_prev"]), sums["unsure"])
        return max(per(sums["no_gen"], sums["all_sequences"]), zeros if np.isfinite(zeros) else 0.0)

    return _each_step(evidence, share, least, "{:.2%} of the unsure tokens have a log-prob of exactly 0")


def nonfinite(evidence: Evidence, least: float) -> Found:
    """Log-probs that are NaN or infinite."""

    def share(sums: StepSums) -> float:
        return per(sums["nonfinite"], sums["all_tokens"])

    return _each_step(evidence, share, least, "{:.2%} of the log-probs are NaN or infinite")


def positive(evidence: Evidence, least: float) -> Found:
    """Log-probs above 0."""

    def share(sums: StepSums) -> float:
        return per(sums["positive_logprobs"], sums["all_tokens"])

    return _each_step(evidence, share, least, "{:.2%} of the log-probs are above 0")


def shifted(evidence: Evidence, least: float) -> Found:
    """Log-probs that are another token's."""

    def share(sums: StepSums) -> float:
        return per(sums["shifted_later"] + sums["shifted_earlier"], sums["lagged"])

    found = _each_step(evidence, share, least, "{:.2%} of the sequences fit a neighbouring token better")
    # Where the engines are far apart, a few sequences of one step fit a neighbour by chance.
    chance = len(found.steps) == 1 < len(evidence.statistics.steps) and found.share < OF_ONE_STEP
    return replace(found, shown=False, steps=()) if chance else found


OF_ONE_STEP = 0.05
_NO_MISMATCH = "the two engines agree on every token"


def filtered(evidence: Evidence, least: float) -> Found:
    """Of a token that top-p or top-k kept, the generation engine's probability is the larger, whatever it is."""
    cells = evidence.after.cells["probability"]
    count, negative = (cells[:, _CELL[name]] for name in ("tokens", "negative"))
    some = count >= LEAST_OF_BIN
    # Of tokens that are nearly sure, another temperature looks the same.
    if np.count_nonzero(some) < 3 or not some[UNSURE:].any():
        return Found(float("nan"), f"too few tokens, or none of {PROB_EDGES[UNSURE - 1]:g} nats of surprise and more")
    share = float((negative[some] / count[some]).min())
    says = f"the training engine finds {share:.0%} of the tokens or more less likely, whatever their probability"
    # Every step has its part in it, so that the zeros that come of it explain no more.
    return Found(share, says, share > least, evidence.steps_after if share > least else ())


def temperature(evidence: Evidence, least: float) -> Found:
    """Another temperature makes likely tokens likelier and unlikely ones less likely, or the other way round."""
    cells = evidence.after.cells["probability"]
    count, score, square = (cells[:, _CELL[name]] for name in ("tokens", "score", "score_square"))
    some = count > 20
    if not some.any():
        return Found(float("nan"), "too few tokens")
    mean = score[some] / count[some]
    error = np.sqrt(np.maximum(square[some] / count[some] - mean**2, 1e-12) / count[some])
    explained = count[some] * np.square(mean) * (np.abs(mean) > 4 * error)
    up, down = float(explained[mean > 0].sum()), float(explained[mean < 0].sum())
    if not square.sum():
        return Found(0.0, _NO_MISMATCH)
    share = 2 * min(up, down) / float(square.sum())
    likely = np.average(np.arange(len(mean)), weights=np.where(mean > 0, explained, 0) + 1e-300)
    unlikely = np.average(np.arange(len(mean)), weights=np.where(mean < 0, explained, 0) + 1e-300)
    sharper = "sharper" if likely < unlikely else "flatter"
    says = f"{share:.1%} of the variance is a tilt: likely against unlikely tokens"
    if share > least:
        says += f" (the training engine's distribution is the {sharper} one)"
    return Found(share, says, share > least)


def stale_engine(evidence: Evidence, least: float) -> Found:
    """The engine's weights stand still: π_old moves on, towards what was rewarded, and the more the longer it lasts."""
    steps = [evidence.statistics.steps[step] for step in evidence.steps_after]
    if not steps:
        return Found(float("nan"), "no step with log-probs of both engines")
    frozen = [sums.versions for sums in steps if np.isfinite(sums.versions[0])]
    if len(frozen) >= 5 and frozen[0][1] == frozen[-1][1]:
        number = frozen[0][1]
        return Found(float("inf"), f"all of the last {len(frozen)} steps sampled from weights {number:.0f}", True)
    if evidence.onset is None:
        if evidence.sums_before is not None:
            return Found(float("nan"), "two runs are compared, and no steps")
        return Found(0.0, "the mismatch has not grown")
    z = _with_advantage(evidence.sums_after)
    third = max(1, len(steps) // 3)
    early, late = (float(np.mean([sums.mean("k3") for sums in part])) for part in (steps[:third], steps[-third:]))
    growth = late / early if early else float("nan")
    says = f"Δ goes with the advantage by {z:.1f} standard errors, and grew {growth:.1f} times since"
    # Nothing else here keeps growing: then a weaker sign will do.
    sure = z > (least / 2 if growth > 4 else least)
    return Found(z, says, sure and len(steps) >= 3 and growth > 1.5)


def _with_advantage(sums: StepSums) -> float:
    """z of Σ a·(d − n·mean) over sequences."""
    mean = sums.mean("score")
    value = sums["ad"] - mean * sums["an"]
    variance = sums["a2d2"] - 2 * mean * sums["a2dn"] + mean * mean * sums["a2n2"]
    return value / float(np.sqrt(variance)) if variance > 0 else 0.0


@dataclass(frozen=True)
class Concentration:
    """The part of the data where the mismatch is highest, against the rest; all 0: there is none.

    Attributes:
        first, last: its bins.
        lift: its mismatch, in proportion to the expected one, against that of the rest.
        share: of all of the mismatch, what it has beyond the rest's.
        excess: its share of the mismatch less its share of the expected.
        score: standard errors by which the lift's logarithm is above 0.
    """

    first: int
    last: int
    lift: float
    share: float
    excess: float
    score: float


def concentration(one: Dimension, evidence: Evidence, *, suffix: bool) -> Concentration | None:
    """The bins whose excess accounts for most of the mismatch; None where there is one kind of data only.

    With a moment of change, a bin is expected to have the mismatch that it had before; without one, that of noise on
    the logits, which is in proportion to 1 − p.
    """
    cells = evidence.after.cells[one.name]
    size, model = cells[:, _CELL["size"]].copy(), cells[:, _CELL["model"]]
    expected, clustered = model.copy(), evidence.after.clustered[one.name].copy()
    earlier = None if evidence.before is None else evidence.before.cells[one.name]
    # Where there was no mismatch before, there is nothing to be in proportion to.
    compared = earlier is not None and earlier[:, _CELL["size"]].sum() > 0
    if earlier is not None and compared:
        total = earlier.sum(axis=0)
        rate = total[_CELL["size"]] / max(total[_CELL["model"]], 1e-12)
        # What a bin with little data before is expected to have is pulled towards the mean.
        pulled = 0.02 * total[_CELL["model"]]
        rates = (earlier[:, _CELL["size"]] + pulled * rate) / (earlier[:, _CELL["model"]] + pulled + 1e-12)
        expected = model * rates
        clustered[:, 1] *= rates
        clustered[:, 2] *= np.square(rates)
    if np.count_nonzero(model) < 2:
        return None
    whole, all_expected = float(size.sum()), float(expected.sum())
    best = Concentration(0, 0, 0.0, 0.0, 0.0, 0.0)
    if not whole:
        return best
    for first in range(1 if suffix else 0, one.bins):
        for last in (one.bins - 1,) if suffix else range(first, one.bins):
            here = slice(first, last + 1)
            inside, within = float(size[here].sum()), float(expected[here].sum())
            if not 0.002 * all_expected < within < 0.9 * all_expected:
                continue
            outside = (whole - inside) / (all_expected - within)
            rate = inside / within
            if compared and rate < WORSE:
                continue  # it stands out, and is no worse than it was
            share = (inside - within * outside) / whole
            # Its share of the mismatch less that of what is expected: greatest for the part that holds all of the
            # excess and nothing else.
            excess = inside / whole - within / all_expected
            if rate <= outside or excess <= best.excess:
                continue
            relative = _relative(clustered[here].sum(axis=0), rate, inside)
            rest = _relative(clustered.sum(axis=0) - clustered[here].sum(axis=0), outside, whole - inside)
            lift = rate / max(outside, 1e-12)
            best = Concentration(
                first, last, lift, share, excess, float(np.log(lift) / np.sqrt(relative + rest + 1e-12))
            )
    return best


def _relative(clustered: Array, rate: float, total: float) -> float:
    """Squared relative standard error of a rate, over sequences."""
    square = clustered[0] - 2 * rate * clustered[1] + rate * rate * clustered[2]
    return max(float(square), 0.0) / max(total, 1e-12) ** 2


LIFT, SCORE = 1.8, 6.0
WORSE = 1.5
"""Times what it was before, or is in the other run, from where on a part of the data may be a cause."""


def where(name: str, *, suffix: bool) -> Callable[[Evidence, float], Found]:
    """One part of the data, by a dimension; ``suffix``: an upper part of it."""
    one = BY_NAME[name]

    def measure(evidence: Evidence, least: float) -> Found:
        part = concentration(one, evidence, suffix=suffix)
        if part is None:
            return Found(float("nan"), f"nothing to compare: one {name} only, or none recorded")
        if not part.excess:
            return Found(0.0, "no part of it stands out")
        where = f"{name} {one.label(part.first, part.last)} ({one.unit})"
        says = f"{where}: {part.lift:.1f} times the rest's mismatch, {part.share:.0%} of all of it"
        return Found(part.excess, says, part.excess > least and part.lift > LIFT and part.score > SCORE)

    return measure


def staleness(evidence: Evidence, least: float) -> Found:
    """The older samples, or all that are not fresh: in asynchronous loops the first steps' alone are."""
    name = "staleness"
    found = where(name, suffix=True)(evidence, least)
    if found.shown or (evidence.onset is None and evidence.before is not None):
        return found
    whole, after = evidence.statistics.between(-np.inf, np.inf), evidence.after
    cells = np.concatenate([whole.cells[name][:1], after.cells[name][1:]])
    clustered = np.concatenate([whole.clustered[name][:1], after.clustered[name][1:]])
    tokens, size, model = (cells[:, _CELL[of]] for of in ("tokens", "size", "model"))
    if min(tokens[0], tokens[1:].sum()) < LEAST_OF_BIN or not size[0]:
        return found
    fresh, stale = float(size[0] / model[0]), float(size[1:].sum() / model[1:].sum())
    if evidence.before is not None:
        before = evidence.before.cells[name][1:].sum(axis=0)
        if before[_CELL["size"]] < LIFT * fresh * before[_CELL["model"]]:
            return found  # they were as stale, and it was not there
    error = _relative(clustered[0], fresh, float(size[0]))
    error += _relative(clustered[1:].sum(axis=0), stale, float(size[1:].sum()))
    lift = stale / fresh
    share = float(size[1:].sum() - model[1:].sum() * fresh) / float(size.sum())
    if lift <= LIFT or np.log(lift) <= SCORE * np.sqrt(error + 1e-12) or share <= least:
        return found
    return Found(share, f"samples that are not fresh: {lift:.1f} times the mismatch of those that are", True)


LEAST_OF_BIN = 100
"""Tokens of one probability, for a share of them."""
UNSURE = int(np.digitize(2.0, PROB_EDGES))
"""First bin of tokens with a probability of 0.14 and less: a filter makes them less likely, too."""
GROUP_LIFT, LEAST_TOKENS = 3.0, 20
"""At how many times the mismatch of the others, and of how many tokens at least that is the sum."""
FEW_STEPS, OF_FEW = 5, 2.5
"""Over fewer steps, so many times that: the highest of a step's many prompts is high by chance."""


class _HighestGroup(NamedTuple):
    """Of a step: share of the mismatch less the share expected, mismatch against that of the others, and per 1 − p."""

    share: float
    lift: float
    rate: float
    group: int


def _highest_groups(steps: Iterable[StepSums]) -> list[_HighestGroup]:
    found = []
    for sums in steps:
        groups = sums.groups
        size, model = (sum(found[place] for found in groups.values()) for place in (0, 1))
        if len(groups) < 3 or size <= 0 or model <= 0:
            continue
        best = _HighestGroup(0.0, 0.0, 0.0, 0)
        for group, (own, expected, squares) in groups.items():
            if own * own < LEAST_TOKENS * squares:
                continue  # a few tokens
            outside = (size - own) / max(model - expected, 1e-12)
            share, lift = own / size - expected / model, own / max(expected * outside, 1e-12)
            best = max(best, _HighestGroup(share, lift, own / max(expected, 1e-12), group))
        found.append(best)
    return found


def one_group(evidence: Evidence, least: float) -> Found:
    """One prompt's responses."""
    found = _highest_groups(evidence.statistics.steps[step] for step in evidence.steps_after)
    if not found:
        return Found(float("nan"), "nothing to compare: no step with a mismatch and three prompts")
    share, lift, rate = (float(np.median([one[place] for one in found])) for place in range(3))
    earlier = [one.rate for one in _highest_groups(evidence.each_before)]
    name = f"group {found[0].group}" if len({one.group for one in found}) == 1 else "one group a step"
    says = f"{name}: {lift:.1f} times the rest's mismatch"
    worse = not earlier or rate > WORSE * float(np.median(earlier))
    needed = GROUP_LIFT * (OF_FEW if len(found) < FEW_STEPS else 1.0)
    return Found(share, says, share > least and lift > needed and worse)


def _tail(window: Window, beyond: float | None = None) -> tuple[float, float]:
    """Median of |z|, z = Δ/(1 − p), and the share of tokens with more than ``beyond``, or 8 times that."""
    count = window.tail
    whole = float(count.sum())
    if not whole:
        return float("nan"), float("nan")
    below = np.cumsum(count)
    place = int(np.searchsorted(below, whole / 2))
    inside = (whole / 2 - (below[place] - count[place])) / max(count[place], 1.0)
    median = 2.0 ** ((place + inside - 32) / 2)
    edge = 2 * np.log2(beyond or 8 * median) + 32
    whole_bins = np.arange(len(count)) - edge
    return median, float((count * np.clip(whole_bins + 1, 0, 1)).sum() / whole)


def _tails(evidence: Evidence) -> tuple[float, float]:
    """By how many times the usual size of the noise has grown, and its share of large values."""
    before = _tail(evidence.before) if evidence.before is not None else (TYPICAL, TYPICAL_TAIL)
    after = _tail(evidence.after, 8 * before[0])
    return after[0] / before[0], after[1] / max(before[1], 1e-4)


TYPICAL, TYPICAL_TAIL = 0.016, 0.015
"""Of bfloat16 decoding against float32 training, in the lab: median of |z| and share of tokens beyond 8 times that."""


def routing(evidence: Evidence, least: float) -> Found:
    """A tail that has grown beside the usual token's noise."""
    noise, tail = _tails(evidence)
    says = (
        f"{tail:.1f} times as many tokens are far off, while the usual token's noise is {noise:.1f} times what it was"
    )
    return Found(tail, says, bool(evidence.worse and tail > least and noise < least))


def precision(evidence: Evidence, least: float) -> Found:
    """The usual token's noise."""
    noise, _ = _tails(evidence)
    return Found(
        noise, f"the usual token's noise is {noise:.1f} times what it was", bool(evidence.worse and noise > least)
    )
