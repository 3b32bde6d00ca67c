"""Replay of a run's batches through the loss under each correction and mask, and a comparison of the gradients.

A candidate is a ``loss_fn``. Its loss gets the recorded batch and returns a gradient for each token's log-prob. The
same loss without correction, on samples of π_old itself (gen = prev), gives the reference gradient g. Their ratio is
the token's coefficient c: the correction's weight, times 0 where a mask removes the token. All measures follow from c
and g; :data:`DEFINITIONS` has their formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_geomask.config.strict import inline_yaml
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, TOKEN_MASK
from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.losses import PolicyLoss, PrestepPass, build_loss
from nemo_geomask.losses.prestep import valid_counts
from nemo_geomask.records.flight import COLUMN_BATCH_KEYS
from nemo_geomask.tools.diagnose.record_reader import Array, RecordBlock
from nemo_geomask.tools.diagnose.sweep_candidates import CANDIDATES, NO_CORRECTION, RECIPE_SOURCE, Candidate
from nemo_geomask.tools.shared.intervals import percentile_interval

__all__ = [
    "DEFINITIONS",
    "PARTS",
    "CandidateOutcome",
    "format_loss_block",
    "padded_batch",
    "pareto_front",
    "recommend",
    "replay",
    "select_compatible",
]

REPLICATES = 100
"""Bootstrap replicates over sequences."""

MAX_VARIANCE = 1.1
"""Largest variance that a recommended candidate may have, as a multiple of the variance without correction."""

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
        tokens: [len(PARTS)], number of tokens in each part.
        removed: [len(PARTS)], number of them with the coefficient 0.
        sums: [1 + REPLICATES, len(_SUMS)], row 0 over all sequences, the other rows over the bootstrap's samples.
        skipped: steps that the candidate's batch veto would have skipped.
        metrics: by step, the metrics that the loss reported.
    """

    candidate: Candidate
    tokens: Array = field(default_factory=lambda: np.zeros(len(PARTS)))
    removed: Array = field(default_factory=lambda: np.zeros(len(PARTS)))
    sums: Array = field(default_factory=lambda: np.zeros((1 + REPLICATES, len(_SUMS))))
    skipped: list[int] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    def value(self, measure: str) -> float:
        """Return a measure of :data:`DEFINITIONS`; NaN if no step was trained on."""
        return float(self._estimates(measure)[0])

    def interval(self, measure: str) -> tuple[float, float]:
        """Return the confidence interval of a measure over sequences; NaN for both ends if no step was trained on."""
        replicates = self._estimates(measure)[1:]
        return percentile_interval(replicates[np.isfinite(replicates)])

    def _estimates(self, measure: str) -> Array:
        """Return a measure over all sequences, followed by its value in each replicate."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return _MEASURES[measure](dict(zip(_SUMS, self.sums.T, strict=True)))

    def removed_share(self, part: str) -> float:
        """Return the share of a part's tokens that has the coefficient 0; NaN if the part has no token."""
        index = PARTS.index(part)
        count = float(self.tokens[index])
        return float(self.removed[index]) / count if count else math.nan


_COLUMNS = ("mask", "gen", "prev", "curr", "ref", "advantages")
"""Recorded columns that a replayed batch contains, where they were recorded."""


def padded_batch(blocks: Iterable[RecordBlock], max_positions: int = 2**22) -> tuple[dict[str, Tensor], int]:
    """Return a step's padded batch under NeMo-RL's keys, and the number of sequences that were left out.

    Args:
        blocks: the step's records.
        max_positions: upper limit of rows × width; sequences that would exceed it are left out.

    Raises:
        DataError: there is no sequence, or the log-probs of an engine or the advantages were not recorded.
    """
    rows: list[dict[str, Array]] = []
    width = left_out = 0
    for block in blocks:
        if missing := [name for name in ("gen", "prev", "advantages") if name not in block.tokens]:
            raise DataError(f"the records have no {', '.join(missing)}, which a replay through the loss needs")
        for index in range(len(block)):
            begin, end = int(block.offsets[index]), int(block.offsets[index + 1])
            new_width = max(width, end - begin)
            if rows and new_width * (len(rows) + 1) > max_positions:
                left_out += 1
                continue
            width = new_width
            row = {name: block.tokens[name][begin:end] for name in _COLUMNS if name in block.tokens}
            row["sample_mask"] = block.sequences["sample_mask"][index]
            row["rewards"] = np.nan_to_num(block.sequences.get("reward", np.zeros(len(block)))[index])
            rows.append(row)
    if not rows:
        raise DataError("the records hold no sequence")
    batch: dict[str, Tensor] = {}
    for name, key in ((name, COLUMN_BATCH_KEYS[name]) for name in _COLUMNS):
        if name in rows[0]:
            padded = np.zeros((len(rows), width), np.float32)
            for index, row in enumerate(rows):
                padded[index, : len(row[name])] = row[name]
            batch[key] = torch.from_numpy(padded)
    for key in ("sample_mask", "rewards"):
        batch[key] = torch.tensor([float(row[key]) for row in rows])
    return batch, left_out


def replay(
    steps: Iterable[tuple[int, Mapping[str, Tensor]]],
    candidates: Sequence[Candidate] = CANDIDATES,
    base: Mapping[str, Any] | None = None,
    *,
    at: str = "prev",
) -> list[CandidateOutcome]:
    """Replay steps through the loss of each candidate, and return the outcomes in the candidates' order.

    Args:
        steps: number and batch of each step, the batch from :func:`padded_batch`.
        candidates: the loss of the first one gives the reference gradient.
        base: settings of ``loss_fn`` that all candidates share, without corrections; ``record`` and
            ``audit_fraction`` are ignored.
        at: the recorded log-probs to take for the current policy's: ``prev``, or ``curr`` where they were recorded.

    Raises:
        ConfigError: a candidate contradicts the base.
        DataError: ``curr`` was not recorded.
    """
    losses = [_build_candidate_loss(candidate, base or {}) for candidate in candidates]
    presteps = [PrestepPass(loss.config) for loss in losses]
    outcomes = [CandidateOutcome(candidate) for candidate in candidates]
    for step, batch in steps:
        key = f"{at}_logprobs"
        if key not in batch:
            raise DataError(f"the records have no {at}, the log-probs of the current policy; replay them at prev")
        # Without a mismatch no candidate corrects anything, and a ratio to gen equals a ratio to π_old.
        matched = {**batch, GENERATION_LOGPROBS: batch[PREV_LOGPROBS]}
        reference, _, _ = _gradient(losses[0], presteps[0], matched, batch[key][:, 1:])
        for loss, prestep, outcome in zip(losses, presteps, outcomes, strict=True):
            gradient, metrics, is_trained = _gradient(loss, prestep, batch, batch[key][:, 1:])
            outcome.metrics[step] = metrics
            if is_trained:
                _add_step(outcome, step, batch, reference, gradient)
            else:
                outcome.skipped.append(step)
    return outcomes


def _build_candidate_loss(candidate: Candidate, base: Mapping[str, Any]) -> PolicyLoss:
    settings = {key: value for key, value in base.items() if key not in ("record", "audit_fraction")}
    # Leave out the KL penalty: no correction changes its gradient.
    return build_loss({**settings, **candidate.settings, "reference_policy_kl_penalty": 0, "compile": False})


def select_compatible(
    candidates: Sequence[Candidate], base: Mapping[str, Any]
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates that are compatible with a base, and the error message of each other one, by its name.

    Raises:
        ConfigError: ``NO_CORRECTION`` or the recipe's candidate is not compatible, so the base itself is invalid.
    """
    compatible, errors = [], {}
    for candidate in candidates:
        try:
            _build_candidate_loss(candidate, base)
            compatible.append(candidate)
        except ConfigError as error:
            if candidate is NO_CORRECTION or candidate.source == RECIPE_SOURCE:
                raise
            errors[candidate.name] = str(error)
    return compatible, errors


def _gradient(
    loss: PolicyLoss, prestep: PrestepPass, batch: Mapping[str, Tensor], curr: Tensor
) -> tuple[Tensor, dict[str, float], bool]:
    """Return the loss's gradient with respect to ``curr`` [B, T-1], its metrics, and False if it skips the step."""
    decision = prestep(batch)
    if not decision.train:
        return torch.zeros_like(curr), decision.metrics, False
    batch = {**batch, **decision.changes}
    leaf = curr.clone().requires_grad_()
    value, metrics = loss(leaf, batch, *valid_counts([batch]))
    (gradient,) = torch.autograd.grad(value, leaf)
    return gradient, {**metrics.copy(), **decision.metrics}, True


def _add_step(
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
    by_sequence = np.stack(
        [np.bincount(sequence, weights=token_values[name], minlength=sequence_count) for name in _SUMS], axis=1
    )
    draws = np.random.default_rng(step).poisson(1.0, (REPLICATES, sequence_count))
    outcome.sums += np.concatenate([by_sequence.sum(axis=0, keepdims=True), draws @ by_sequence])


def pareto_front(outcomes: Sequence[CandidateOutcome]) -> list[CandidateOutcome]:
    """Return the outcomes to which no other outcome is better in bias or variance without being worse in the other."""
    compared = [outcome for outcome in outcomes if not math.isnan(outcome.value("bias"))]
    points = [(outcome.value("bias"), outcome.value("variance")) for outcome in compared]
    return [
        outcome
        for outcome, (bias, variance) in zip(compared, points, strict=True)
        if not any(b <= bias and v <= variance and (b, v) != (bias, variance) for b, v in points)
    ]


def recommend(
    outcomes: Sequence[CandidateOutcome], base: Mapping[str, Any] | None = None
) -> tuple[CandidateOutcome, str]:
    """Return the best outcome and the ``loss_fn`` block that sets its candidate.

    The best candidate has the least bias of those that skip no step and whose variance is at most
    :data:`MAX_VARIANCE`, judged by the upper end of its interval. If its bias is within the interval of the bias
    without correction, the outcome without correction is returned.

    Args:
        outcomes: from :func:`replay`; the first is that of ``NO_CORRECTION``.
        base: settings that all candidates share.

    Raises:
        DataError: no token has a gradient.
    """
    uncorrected = outcomes[0]
    if not uncorrected.tokens[0] and not uncorrected.skipped:
        raise DataError("the records hold no trained token with log-probs of both engines and an advantage")
    allowed = [
        outcome
        for outcome in outcomes
        if outcome.interval("variance")[1] <= MAX_VARIANCE and not outcome.skipped and outcome.candidate.settings
    ]
    best = min(allowed, key=lambda outcome: (outcome.value("bias"), outcome.value("variance")), default=uncorrected)
    if best.value("bias") >= uncorrected.interval("bias")[0]:
        best = uncorrected
    return best, format_loss_block(best, outcomes, base or {})


def format_loss_block(best: CandidateOutcome, outcomes: Sequence[CandidateOutcome], base: Mapping[str, Any]) -> str:
    """Return the YAML of a ``loss_fn`` with the base's and a candidate's settings, and its measures as comments.

    Args:
        best: the candidate's outcome.
        outcomes: outcomes of all candidates; the first is that of ``NO_CORRECTION``.
        base: settings that all candidates share; the candidate's settings override them.
    """
    uncorrected = outcomes[0]

    def percent(outcome: CandidateOutcome, measure: str) -> str:
        low, high = (100 * end for end in outcome.interval(measure))
        return f"{100 * outcome.value(measure):.3g} % ({low:.3g} to {high:.3g})"

    low, high = best.interval("variance")
    lines = [
        f"# {best.candidate.name} ({best.candidate.source}), of {len(outcomes)} candidates:",
        f"# bias of the gradient {percent(best, 'bias')}; without correction {percent(uncorrected, 'bias')}",
        f"# variance {best.value('variance'):.3g} ({low:.3g} to {high:.3g}) times that without correction; "
        f"{MAX_VARIANCE:g} times is allowed",
        f"# removes {percent(best, 'removed')} of the tokens; shifts the mean advantage by "
        f"{best.value('advantage'):.2g}",
        "loss_fn:",
    ]
    settings = {**base, **best.candidate.settings}
    if not settings:
        return "\n".join([*lines[:-1], "loss_fn: {}"])
    settings = {"name": "clipped_pg", **settings}
    try:
        build_loss(settings)
    except ConfigError:
        # audit_fraction computes π_old for some sequences only, and the candidate needs it for all of them.
        settings.pop("audit_fraction", None)
    return "\n".join([*lines, *(f"  {key}: {inline_yaml(value)}" for key, value in settings.items())])
