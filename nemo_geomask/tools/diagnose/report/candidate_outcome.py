"""Effect of a candidate on a run's batches: sums over tokens, and the measures that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, TOKEN_MASK
from nemo_geomask.tools.diagnose.read.record_reader import Array
from nemo_geomask.tools.diagnose.report.sweep_candidates import Candidate
from nemo_geomask.tools.shared.intervals import percentile_interval

REPLICATES = 100
"""Number of bootstrap replicates over sequences."""

PARTS = ("all", "training engine likelier", "generation engine likelier", "good", "bad", "short", "long")
"""Parts of the tokens: all; Δ > 0; Δ < 0; A > 0; A < 0; in responses up to the step's median length; in longer ones."""

DEFINITIONS = {
    "removed": "share of tokens with c = 0",
    "bias": "Σ |c − ρ| |g| / Σ ρ |g|, ρ = exp(Δ): distance of the gradient, token by token, from the gradient on "
    "samples of the policy that trains",
    "variance": "Σ (c g)² / Σ g²: squared gradient over the squared gradient without correction",
    "ess": "(Σ c)² / (n Σ c²): effective sample size over the number of tokens",
    "advantage": "Σ c A / Σ c − mean A: shift of the mean advantage by what is removed and by the weights",
}
"""Formulas of the measures, with a token's coefficient c, reference gradient g and advantage A."""

_SUMS = ("n", "zero", "|c-ρ||g|", "ρ|g|", "(cg)²", "g²", "c", "c²", "cA", "A")
"""Columns of :attr:`CandidateOutcome.sums`: sums over tokens, from which the measures are computed."""

WITHOUT_GRADIENT = ("removed", "ess", "advantage")
"""Measures that tokens without a gradient have as well; the others weight tokens by their gradient."""

_Sums = Mapping[str, Array]
_MEASURES: dict[str, Callable[[_Sums], Array]] = {
    "removed": lambda sums: sums["zero"] / sums["n"],
    "bias": lambda sums: sums["|c-ρ||g|"] / sums["ρ|g|"],
    "variance": lambda sums: sums["(cg)²"] / sums["g²"],
    "ess": lambda sums: np.where(sums["c²"] == 0, 0.0, sums["c"] ** 2 / (sums["n"] * sums["c²"])),
    "advantage": lambda sums: np.where(sums["c"] == 0, np.nan, sums["cA"] / sums["c"]) - sums["A"] / sums["n"],
}


@dataclass
class CandidateOutcome:
    """Effect of one candidate, summed over the replayed steps.

    Attributes:
        candidate: the candidate.
        sequences: number of sequences with a token that has a gradient.
        tokens: [len(PARTS)], number of tokens in each part.
        removed: [len(PARTS)], number of each part's tokens with the coefficient 0.
        sums: [1 + REPLICATES, len(_SUMS)], row 0 over all sequences, the other rows over the bootstrap's samples.
        silent_sums: the same sums over the trained tokens without a gradient, which are in no other sum: their
            advantage is 0.
        skipped: steps that the candidate's batch veto would have skipped.
        metrics: by step, the metrics that the loss reported.
    """

    candidate: Candidate
    sequences: int = 0
    tokens: Array = field(default_factory=lambda: np.zeros(len(PARTS)))
    removed: Array = field(default_factory=lambda: np.zeros(len(PARTS)))
    sums: Array = field(default_factory=lambda: np.zeros((1 + REPLICATES, len(_SUMS))))
    silent_sums: Array = field(default_factory=lambda: np.zeros((1 + REPLICATES, len(_SUMS))))
    skipped: list[int] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    def value(self, measure: str) -> float:
        """Return a measure of :data:`DEFINITIONS`; NaN if no step was trained on."""
        return float(self._estimates(measure)[0])

    def interval(self, measure: str) -> tuple[float, float]:
        """Return the confidence interval of a measure over sequences; NaN for both ends if no step was trained on."""
        replicates = self._estimates(measure)[1:]
        return percentile_interval(replicates[np.isfinite(replicates)])

    @property
    def silent_tokens(self) -> int:
        """Number of trained tokens without a gradient, which the measures leave out."""
        return round(float(self.silent_sums[0, _SUMS.index("n")]))

    def value_of_all(self, measure: str) -> float:
        """Return a measure of :data:`WITHOUT_GRADIENT` over all trained tokens, with those without a gradient."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(_MEASURES[measure](dict(zip(_SUMS, (self.sums + self.silent_sums).T, strict=True)))[0])

    def _estimates(self, measure: str) -> Array:
        """Return a measure over all sequences, followed by its value in each replicate."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return _MEASURES[measure](dict(zip(_SUMS, self.sums.T, strict=True)))

    def removed_share(self, part: str) -> float:
        """Return the share of a part's tokens that has the coefficient 0; NaN if the part has no token."""
        index = PARTS.index(part)
        count = float(self.tokens[index])
        return float(self.removed[index]) / count if count else math.nan


def add_silent_tokens(
    outcome: CandidateOutcome, step: int, is_silent: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Add a step's trained tokens without a gradient to an outcome.

    Args:
        outcome: the outcome.
        step: number of the step.
        is_silent: bool [B, T-1], the tokens.
        pairs: the reference gradient and the candidate's for a small positive and a small negative advantage. A mask
            that depends on the sign of the advantage removes a token under one of them only, and keeps it at 0.
    """
    coefficients = np.stack(
        [(gradient[is_silent].double() / reference[is_silent].double()).numpy() for reference, gradient in pairs]
    )
    c = np.nan_to_num(coefficients[np.abs(coefficients).argmax(axis=0), np.arange(coefficients.shape[1])])
    sequence = torch.nonzero(is_silent)[:, 0].numpy()
    columns = {"n": np.ones_like(c), "zero": (c == 0).astype(float), "c": c, "c²": c * c}
    _add_sums(outcome.silent_sums, step, sequence, len(is_silent), columns)


def _add_sums(sums: Array, step: int, sequence: Array, sequence_count: int, columns: Mapping[str, Array]) -> None:
    """Add the sums of token values over all sequences, and over each sample of the bootstrap, in place.

    Args:
        sums: as :attr:`CandidateOutcome.sums`.
        step: number of the step, which seeds the bootstrap.
        sequence: [N], sequence of each token.
        sequence_count: number of sequences.
        columns: [N] each, values by the names of ``_SUMS``; the others are 0.
    """
    absent = np.zeros(len(sequence))
    by_sequence = np.stack(
        [np.bincount(sequence, columns.get(name, absent), minlength=sequence_count) for name in _SUMS], axis=1
    )
    draws = np.random.default_rng(step).poisson(1.0, (REPLICATES, sequence_count))
    sums += np.concatenate([by_sequence.sum(axis=0, keepdims=True), draws @ by_sequence])


def add_step(
    outcome: CandidateOutcome, step: int, batch: Mapping[str, Tensor], reference: Tensor, gradient: Tensor
) -> None:
    """Add a step's tokens with a finite mismatch and a non-zero reference gradient to an outcome."""
    difference = (batch[PREV_LOGPROBS] - batch[GENERATION_LOGPROBS])[:, 1:]
    is_compared = (reference != 0) & torch.isfinite(reference) & torch.isfinite(difference)
    g = reference[is_compared].double().numpy()
    c = gradient[is_compared].double().numpy() / g
    delta, advantage = (value[is_compared].double().numpy() for value in (difference, batch["advantages"][:, 1:]))
    sequence = torch.nonzero(is_compared)[:, 0].numpy()
    sequence_count = len(batch["sample_mask"])
    lengths = (batch[TOKEN_MASK] != 0).sum(dim=1).numpy()
    is_long = (lengths > np.median(lengths))[sequence]
    is_removed = c == 0
    parts = (np.ones_like(is_removed), delta > 0, delta < 0, advantage > 0, advantage < 0, ~is_long, is_long)
    outcome.sequences += len(np.unique(sequence))
    outcome.tokens += [part.sum() for part in parts]
    outcome.removed += [(part & is_removed).sum() for part in parts]
    size, rho = np.abs(g), np.exp(np.clip(delta, -40, 40))
    token_values = {
        "n": np.ones_like(c),
        "zero": is_removed.astype(float),
        "|c-ρ||g|": np.abs(c - rho) * size,
        "ρ|g|": rho * size,
        "(cg)²": np.square(c * g),
        "g²": np.square(g),
        "c": c,
        "c²": c * c,
        "cA": c * advantage,
        "A": advantage,
    }
    _add_sums(outcome.sums, step, sequence, sequence_count, token_values)
