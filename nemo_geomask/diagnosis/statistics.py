r"""Sums over records that add up: over files, steps, processes, machines. Nothing holds a run in memory.

With :math:`\Delta` = prev − gen of a trained token, the training engine's log-prob less the generation engine's:

=============== =====================================================================
``abs``         :math:`|\Delta|`
``size``        :math:`\min(|\Delta|, 1)`: what is compared between parts of the data,
                since a mean of k3 is that of its few largest tokens
``delta``       :math:`\Delta`; its mean is −k1 and the gap of the log-perplexities
``square``      :math:`\Delta^2`
``k3``          :math:`e^\Delta - 1 - \Delta`, of KL(gen ‖ prev)
``k3_reverse``  :math:`e^{-\Delta} - 1 + \Delta`, as NeMo-RL has ``policy_kl_error``
``prob_error``  :math:`e^{|\Delta|}`, NeMo-RL's ``token_mult_prob_error``
``weight``      :math:`e^\Delta`, and its square
``model``       :math:`1 - p`, p the generation engine's probability: noise on the logits
                moves a token's log-prob by so many times its own size
``score``       :math:`\Delta/(1 - p)`, within ±0.1: its sign, where noise is large
``surprise``    −gen, at most 20; its mean is the sampled tokens' cross-entropy
``entropy``     of the training engine's distribution, where it was recorded
=============== =====================================================================

Ratios of tokens saturate at :math:`e^{40}`, as in the losses, those of sequences at :math:`e^{300}`: the sum of a long
one's log-ratios is far from 0, and an effective sample size asks only how far apart they are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_geomask.diagnosis.read import Array

__all__ = [
    "BOOT",
    "BY_NAME",
    "CELLS",
    "CLUSTERED",
    "CONTEXT",
    "DIMENSIONS",
    "PROB_EDGES",
    "REPLICATES",
    "SUMS",
    "TAIL_BINS",
    "TOKEN_SUMS",
    "WORST",
    "Dimension",
    "Statistics",
    "StepSums",
    "Window",
    "per",
]

REPLICATES = 100
"""Of the bootstrap over sequences."""

TOKEN_SUMS = (
    "tokens",
    "abs",
    "size",
    "delta",
    "square",
    "k3",
    "k3_reverse",
    "prob_error",
    "weight",
    "weight_square",
    "positive",
    "above_0.1",
    "above_1",
    "model",
    "score",
    "score_square",
    "size_square",
    "surprise",
)
SEQUENCE_SUMS = (
    "sequences",
    "length",
    "response",
    "reward",
    "rewarded",
    "staleness",
    "stale_known",
    "sequence_weight",
    "sequence_weight_square",
    "mean_weight",
    "mean_weight_square",
    "entropy",
    "entropy_known",
)
BUG_SUMS = (
    "all_sequences",
    "no_gen",
    "no_prev",
    "nonfinite",
    "unsure",
    "zero_gen",
    "zero_prev",
    "positive_logprobs",
    "all_tokens",
    "lagged",
    "shifted_later",
    "shifted_earlier",
    "masked_out",
    "masked_out_size",
    "masked_out_tokens",
)
LEARNED_SUMS = ("ad", "an", "a2d2", "a2dn", "a2n2")
"""Of a sequence's advantage a, n = √tokens and d = Σ score / n: how Δ goes with what was rewarded."""
SUMS = (*TOKEN_SUMS, *SEQUENCE_SUMS, *BUG_SUMS, *LEARNED_SUMS)
BOOT = ("tokens", "abs", "size", "delta", "k3", "prob_error", "weight", "weight_square", "model")
CELLS = ("tokens", "size", "model", "delta", "k3", "positive", "negative", "score", "score_square")
CLUSTERED = ("size2", "size_model", "model2")
"""Of sums over one sequence's tokens in a bin: what the standard error over sequences is made of."""

PROB_EDGES = np.array([1e-3, 1e-2, 0.1, 0.35, 0.7, 1.2, 2.0, 3.0, 4.6, 6.9])
"""Bins of a token's surprise −gen, nats; from 4.6 on its probability is below 1 %."""
TAIL_BINS = 48
"""Of log2 z², z = Δ/(1 − p), from 2^-32: scale and tails, whatever the probabilities."""
WINDOWS = 128
WORST = 8
CONTEXT = 8
"""Tokens that are kept before one of the worst."""


@dataclass(frozen=True)
class Dimension:
    """Something that a token's mismatch may go with.

    Attributes:
        name: in the tables.
        edges: bin i holds values from edges[i-1] up to but not edges[i].
        unit: of the values.
        by_token: whether it differs within a sequence.
        whole: whether it counts something.
        needs: what has to be recorded for it, beside log-probs.
    """

    name: str
    edges: Array
    unit: str
    by_token: bool
    whole: bool = True
    needs: str = ""

    @property
    def bins(self) -> int:
        """How many."""
        return len(self.edges) + 1

    def label(self, first: int, last: int) -> str:
        """Of the bins from ``first`` to ``last``."""
        # The edges next to 0 keep it apart.
        low, high = (
            None if not 0 <= place < len(self.edges) else round(float(self.edges[place]), 5) + 0.0
            for place in (first - 1, last)
        )
        if self.whole and low is None and high == 1:
            return "0"
        if low == 0 and not self.whole:
            return "0" if high == 0 else "above 0" if high is None else f"above 0 to {high:g}"
        if low is None or high is None:
            return f"all {self.unit}" if low == high else f"below {high:g}" if low is None else f"{low:g} and more"
        if high - low == (1 if self.whole else 0):
            return f"{low:g}"
        return f"{low:g} to {high - self.whole:g}"


_HALF_OCTAVES = np.sort(np.concatenate([2.0 ** np.arange(4, 18), 3.0 * 2.0 ** np.arange(3, 17)]))
DIMENSIONS = (
    Dimension("probability", PROB_EDGES, "nats of surprise", True, False),
    Dimension("position", _HALF_OCTAVES, "tokens into it", True),
    Dimension("turn", np.array([1.0, 2, 3, 4, 6, 8]), "earlier turns", True, needs="runs of several turns"),
    Dimension("length", _HALF_OCTAVES, "tokens", False),
    Dimension(
        "staleness",
        np.array([1.0, 2, 3, 4, 6, 8, 12, 16]),
        "steps",
        False,
        needs="the flight recorder's weight versions, of asynchronous runs",
    ),
    Dimension("reward", np.array([-1e-6, 1e-6, 0.25, 0.5, 0.75, 1.0]), "reward", False, False),
    Dimension("advantage", np.array([-1e-6, 1e-6]), "sign", True, False),
    Dimension(
        "entropy",
        np.array([0.01, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0]),
        "nats of entropy",
        True,
        False,
        needs="loss_fn.record.entropy: true",
    ),
)
BY_NAME = {one.name: one for one in DIMENSIONS}


def per(part: float, whole: float) -> float:
    """A part of a whole; NaN of nothing."""
    return part / whole if whole else math.nan


@dataclass
class StepSums:
    """One step's sums, and those of its bootstrap replicates.

    Attributes:
        sums: by the order of ``SUMS``.
        boot: [replicates, len(BOOT)].
        removed: by a mask's label, removed tokens and the sum of their sizes; under "" those of all trained tokens,
            where masks are recorded.
        versions: smallest and largest weight version, infinite where there is none.
        groups: of each prompt, its size, expected size and squares of the tokens' sizes.
    """

    sums: Array = field(default_factory=lambda: np.zeros(len(SUMS)))
    boot: Array = field(default_factory=lambda: np.zeros((REPLICATES, len(BOOT))))
    removed: dict[str, tuple[float, float]] = field(default_factory=dict)
    versions: tuple[float, float] = (np.inf, -np.inf)
    groups: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def put(self, name: str, value: float) -> None:
        """Set a sum."""
        self.sums[_PLACE[name]] = value

    def __getitem__(self, name: str) -> float:
        return float(self.sums[_PLACE[name]])

    def mean(self, name: str, over: str = "tokens") -> float:
        """Per trained token, or whatever ``over`` counts; NaN of nothing."""
        count = self[over]
        return self[name] / count if count else float("nan")

    def removed_share(self, label: str, of: int = 0) -> float:
        """What a mask removes of the trained tokens, or with ``of`` 1 of their sizes; NaN where nothing is recorded."""
        whole = self.removed.get("", (0.0, 0.0))[of]
        return self.removed.get(label, (0.0, 0.0))[of] / whole if whole else float("nan")

    def interval(self, name: str) -> tuple[float, float]:
        """95 % of the bootstrap's means per token."""
        counts = self.boot[:, 0]
        if not (counts > 0).any():
            return float("nan"), float("nan")
        means = self.boot[counts > 0, BOOT.index(name)] / counts[counts > 0]
        low, high = np.quantile(means, [0.025, 0.975])
        return float(low), float(high)

    def add(self, other: StepSums) -> None:
        """Take in another part of the same step, or of another."""
        self.sums = self.sums + other.sums
        self.boot = self.boot + other.boot
        for label, (count, size) in other.removed.items():
            removed = self.removed.get(label, (0.0, 0.0))
            self.removed[label] = removed[0] + count, removed[1] + size
        self.versions = min(self.versions[0], other.versions[0]), max(self.versions[1], other.versions[1])
        for group, found in other.groups.items():
            mine = self.groups.get(group, (0.0, 0.0, 0.0))
            self.groups[group] = (mine[0] + found[0], mine[1] + found[1], mine[2] + found[2])


_PLACE = {name: index for index, name in enumerate(SUMS)}


@dataclass
class Window:
    """Sums over a few steps, split up.

    Attributes:
        cells: by dimension, [bins, len(CELLS)]; by ``one,other``, [bins of one * bins of other, len(CELLS)].
        clustered: the same, [bins, len(CLUSTERED)].
        tail: [TAIL_BINS] tokens by the size of z.
    """

    cells: dict[str, Array] = field(
        default_factory=lambda: {one.name: np.zeros((one.bins, len(CELLS))) for one in DIMENSIONS}
    )
    clustered: dict[str, Array] = field(
        default_factory=lambda: {one.name: np.zeros((one.bins, len(CLUSTERED))) for one in DIMENSIONS}
    )
    tail: Array = field(default_factory=lambda: np.zeros(TAIL_BINS))

    def add(self, other: Window) -> None:
        """Take in another."""
        for mine, others in ((self.cells, other.cells), (self.clustered, other.clustered)):
            for name, sums in others.items():
                mine[name] = mine[name] + sums if name in mine else sums
        self.tail = self.tail + other.tail


@dataclass
class Statistics:
    """All that a diagnosis looks at.

    Attributes:
        steps: by number.
        windows: by the first step of ``width`` successive ones; the width doubles as the run grows.
        width: steps of a window.
        worst_tokens: by |Δ|: its size, and step, row, place in the sequence, gen, prev and the ids that lead to it.
        worst_sequences: by mean |Δ|: that, and step, row, group, trained tokens and k1.
    """

    steps: dict[int, StepSums] = field(default_factory=dict)
    windows: dict[int, Window] = field(default_factory=dict)
    width: int = 1
    worst_tokens: list[tuple[float, tuple[Any, ...]]] = field(default_factory=list)
    worst_sequences: list[tuple[float, tuple[Any, ...]]] = field(default_factory=list)

    def add(self, other: Statistics) -> None:
        """Take in another; in any order the same comes out, but for rounding."""
        for step, sums in other.steps.items():
            self.steps.setdefault(step, StepSums()).add(sums)
        self._widen(other.width)
        for first, window in other.windows.items():
            self.windows.setdefault(first // self.width * self.width, Window()).add(window)
        while len(self.windows) > WINDOWS:
            self._widen(2 * self.width)
        self.worst_tokens = heapq.nlargest(WORST, [*self.worst_tokens, *other.worst_tokens])
        self.worst_sequences = heapq.nlargest(WORST, [*self.worst_sequences, *other.worst_sequences])

    def _widen(self, width: int) -> None:
        if width <= self.width:
            return
        before, self.width, self.windows = self.windows, width, {}
        for first, window in sorted(before.items()):
            self.windows.setdefault(first // width * width, Window()).add(window)

    def total(self, steps: Iterable[int] | None = None) -> StepSums:
        """Sums over steps, or over all."""
        whole = StepSums()
        for step in self.steps if steps is None else steps:
            whole.add(self.steps[step])
            whole.groups = {}
        return whole

    def between(self, first: float, last: float) -> Window:
        """Windows that begin at ``first`` or later and before ``last``."""
        whole = Window()
        for begin, window in self.windows.items():
            if first <= begin < last:
                whole.add(window)
        return whole
