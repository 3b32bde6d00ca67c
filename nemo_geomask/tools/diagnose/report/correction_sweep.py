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

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, TOKEN_MASK
from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.losses import PolicyLoss, PrestepPass, build_loss
from nemo_geomask.losses.prestep import valid_counts
from nemo_geomask.records.flight import COLUMN_BATCH_KEYS
from nemo_geomask.tools.diagnose.measure.context import explained_advantage
from nemo_geomask.tools.diagnose.measure.step_sums import Estimate
from nemo_geomask.tools.diagnose.read.record_reader import Array, RecordBlock
from nemo_geomask.tools.diagnose.report.sweep_candidates import (
    CANDIDATES,
    NO_CORRECTION,
    RECIPE_SOURCE,
    RUN_SOURCE,
    Candidate,
)
from nemo_geomask.tools.shared.intervals import percentile_interval

REPLICATES = 100
"""Number of bootstrap replicates over sequences."""

DEFINITIONS = {
    "removed": "share of tokens with c = 0",
    "pull": "½ Σ s (c / C − ρ) d, mean over responses; ρ = exp(Δ), C the step's mean of c, d the sign "
    "of |s| (c / C − ρ) at this Δ, s the share of the advantage that its context predicts: the bias that persists",
    "bias": "Σ |c − ρ| |g| / Σ ρ |g|: distance of the gradient, token by token, from the gradient on samples of the "
    "policy that trains",
    "variance": "Σ (c g)² / Σ g²: squared gradient over the squared gradient without correction",
    "ess": "(Σ c)² / (n Σ c²): effective sample size over the number of tokens",
    "advantage": "Σ c A / Σ c − mean A: shift of the mean advantage by what is removed and by the weights",
}
"""Formulas of the measures, with a token's coefficient c, reference gradient g and advantage A."""

_SUMS = ("n", "zero", "|c-ρ||g|", "ρ|g|", "(cg)²", "g²", "c", "c²", "cA", "A")
"""Columns of :attr:`CandidateOutcome.sums`: sums over tokens, from which the measures are computed."""

_MEASURES: dict[str, Callable[[Mapping[str, Array]], Array]] = {
    "removed": lambda sums: sums["zero"] / sums["n"],
    "bias": lambda sums: sums["|c-ρ||g|"] / sums["ρ|g|"],
    "variance": lambda sums: sums["(cg)²"] / sums["g²"],
    "ess": lambda sums: np.where(sums["c²"] == 0, 0.0, sums["c"] ** 2 / (sums["n"] * sums["c²"])),
    "advantage": lambda sums: np.where(sums["c"] == 0, np.nan, sums["cA"] / sums["c"]) - sums["A"] / sums["n"],
}

PULL_EDGES = np.array([-1.0, -0.3, -0.1, -0.03, -0.01, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0])
"""Edges between the bins of Δ in which the pull has one sign, so that what other tokens do to a c averages out."""

EXPLAINED = "explained_advantage"
"""Key of the batch with s, see :mod:`~nemo_geomask.tools.diagnose.measure.context`; NaN where not identified."""

_COLUMNS = ("mask", "gen", "prev", "curr", "ref", "advantages")
"""Recorded columns that a replayed batch contains, where they were recorded."""


def padded_batch(blocks: Iterable[RecordBlock], max_positions: int = 2**22) -> tuple[dict[str, Tensor], int]:
    """Return a step's padded batch under NeMo-RL's keys, and the number of sequences that were left out.

    Args:
        blocks: the step's records.
        max_positions: upper limit of rows × width; sequences that would exceed it are left out.

    Raises: DataError: there is no sequence, or the log-probs of an engine or the advantages were not recorded.
    """
    rows: list[dict[str, Array]] = []
    width = left_out = 0
    for block in blocks:
        owner = np.repeat(np.arange(len(block)), np.diff(block.offsets))
        is_trained = block.tokens["mask"].astype(bool) & (block.sequences["sample_mask"] != 0)[owner]
        share = explained_advantage(block, is_trained)
        explained = np.full(len(owner), np.nan) if share is None else share
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
            row[EXPLAINED] = explained[begin:end]
            row["sample_mask"], row["group"] = (block.sequences[name][index] for name in ("sample_mask", "group"))
            row["rewards"] = np.nan_to_num(block.sequences.get("reward", np.zeros(len(block)))[index])
            rows.append(row)
    if not rows:
        raise DataError("the records hold no sequence")
    batch: dict[str, Tensor] = {}
    for name in (name for name in (*_COLUMNS, EXPLAINED) if name in rows[0]):
        padded = np.zeros((len(rows), width), np.float32)
        for index, row in enumerate(rows):
            padded[index, : len(row[name])] = row[name]
        batch[COLUMN_BATCH_KEYS.get(name, name)] = torch.from_numpy(padded)
    for key in ("sample_mask", "rewards", "group"):
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
        base: settings of ``loss_fn`` that all candidates share; ``record`` and ``audit_fraction`` are ignored.
        at: the recorded log-probs to take for the current policy's: ``prev``, or ``curr`` where they were recorded.

    Raises: ConfigError: a candidate contradicts the base. DataError: ``curr`` was not recorded.
    """
    losses = [_build_candidate_loss(candidate, base or {}) for candidate in candidates]
    presteps = [PrestepPass(loss.config) for loss in losses]
    outcomes = [CandidateOutcome(candidate) for candidate in candidates]
    for step, batch in steps:
        if f"{at}_logprobs" not in batch:
            raise DataError(f"the records have no {at}, the log-probs of the current policy; replay them at prev")
        curr = batch[f"{at}_logprobs"][:, 1:]
        # Without a mismatch no candidate corrects anything, and a ratio to gen equals a ratio to π_old.
        matched = {**batch, GENERATION_LOGPROBS: batch[PREV_LOGPROBS]}
        reference, _, _ = _gradient(losses[0], presteps[0], matched, curr)
        is_masked_in = (batch[TOKEN_MASK] != 0) & (batch["sample_mask"] != 0)[:, None]
        is_trained = (is_masked_in & torch.isfinite(batch[PREV_LOGPROBS] - batch[GENERATION_LOGPROBS]))[:, 1:]
        silent_tokens = int((is_trained & (reference == 0)).sum())
        for loss, prestep, outcome in zip(losses, presteps, outcomes, strict=True):
            gradient, outcome.metrics[step], trains = _gradient(loss, prestep, batch, curr)
            if not trains:
                outcome.skipped.append(step)
                continue
            outcome.add_step(step, batch, reference, gradient)
            outcome.silent_tokens += silent_tokens
    return outcomes


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
            if candidate is NO_CORRECTION or candidate.source in (RECIPE_SOURCE, RUN_SOURCE):
                raise
            errors[candidate.name] = str(error)
    return compatible, errors


def _build_candidate_loss(candidate: Candidate, base: Mapping[str, Any]) -> PolicyLoss:
    settings = {key: value for key, value in base.items() if key not in ("record", "audit_fraction")}
    # Leave out the KL penalty: no correction changes its gradient.
    return build_loss({**settings, **candidate.settings, "reference_policy_kl_penalty": 0, "compile": False})


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


@dataclass
class CandidateOutcome:
    """Effect of one candidate, summed over the replayed steps."""

    candidate: Candidate
    sequences: int = 0  # number of sequences with a token that has a gradient
    tokens: int = 0  # number of compared tokens
    # [1 + REPLICATES, len(_SUMS)], row 0 over all sequences, the other rows over the bootstrap's samples
    sums: Array = field(default_factory=lambda: np.zeros((1 + REPLICATES, len(_SUMS))))
    # of each step, [2, prompts, bins]: Σ |s| (c / C − ρ) and Σ s (c / C − ρ) in each bin of Δ
    pull_sums: list[Array] = field(default_factory=lambda: [np.zeros((2, 0, len(PULL_EDGES) + 1))])
    responses: int = 0  # number of sequences in pull_sums
    silent_tokens: int = 0  # number of trained tokens without a gradient, which the measures leave out
    skipped: list[int] = field(default_factory=list)  # steps that the candidate's batch veto would have skipped
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # by step, the metrics that the loss reported

    def value(self, measure: str) -> float:
        """Return a measure of :data:`DEFINITIONS`; NaN if no step was trained on."""
        return self.pull().value if measure == "pull" else float(self._replicates(measure)[0])

    def interval(self, measure: str) -> tuple[float, float]:
        """Return the confidence interval of a measure over sequences; NaN for both ends if no step was trained on."""
        if measure == "pull":
            return self.pull()[1:]
        replicates = self._replicates(measure)[1:]
        return percentile_interval(replicates[np.isfinite(replicates)])

    def _replicates(self, measure: str) -> Array:
        """Return a measure over all sequences, followed by its value in each replicate."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return _MEASURES[measure](dict(zip(_SUMS, self.sums.T, strict=True)))

    def pull(self) -> Estimate:
        """Return the pull, with an interval over prompts; NaN where s is not identified.

        Without correction it is :meth:`StepSums.pull`. Signs come from |s|, so that noise in s averages out.
        """
        unsigned, signed = np.concatenate(self.pull_sums, axis=1)
        by_prompt = signed @ np.sign(unsigned.sum(axis=0)) / 2
        return Estimate.over_prompts(float(by_prompt.sum()), float(np.square(by_prompt).sum()), self.responses)

    def add_step(self, step: int, batch: Mapping[str, Tensor], reference: Tensor, gradient: Tensor) -> None:
        """Add a step's tokens with a finite mismatch and a non-zero reference gradient."""
        difference = (batch[PREV_LOGPROBS] - batch[GENERATION_LOGPROBS])[:, 1:]
        is_compared = (reference != 0) & torch.isfinite(reference) & torch.isfinite(difference)
        g = reference[is_compared].double().numpy()
        c = gradient[is_compared].double().numpy() / g
        delta, advantage = (value[is_compared].double().numpy() for value in (difference, batch["advantages"][:, 1:]))
        sequence = torch.nonzero(is_compared)[:, 0].numpy()
        count = len(reference)
        self.sequences += len(np.unique(sequence))
        self.tokens += len(c)
        size, rho = np.abs(g), np.exp(np.clip(delta, -40, 40))
        columns = {
            "n": np.ones_like(c),
            "zero": (c == 0).astype(float),
            "|c-ρ||g|": np.abs(c - rho) * size,
            "ρ|g|": rho * size,
            "(cg)²": np.square(c * g),
            "g²": np.square(g),
            "c": c,
            "c²": c * c,
            "cA": c * advantage,
            "A": advantage,
        }
        self.sums += _sums_and_replicates(step, sequence, count, np.stack([columns[name] for name in _SUMS], axis=1))
        share = batch[EXPLAINED][:, 1:][is_compared].double().numpy()
        self.responses += len(np.unique(sequence[~np.isnan(share)]))
        prompts, prompt = np.unique(batch["group"].numpy(), return_inverse=True)
        shape = len(prompts), len(PULL_EDGES) + 1
        cells = prompt[sequence] * shape[1] + np.digitize(delta, PULL_EDGES)
        excess = c * len(c) / (c.sum() or 1.0) - rho
        sums = [np.bincount(cells, np.nan_to_num(each * excess), math.prod(shape)) for each in (np.abs(share), share)]
        self.pull_sums.append(np.reshape(sums, (2, *shape)))


def _sums_and_replicates(step: int, sequence: Array, sequence_count: int, values: Array) -> Array:
    """Return [1 + REPLICATES, k], sums of [N, k] values over all sequences, then over each bootstrap sample."""
    by_sequence = np.stack([np.bincount(sequence, column, minlength=sequence_count) for column in values.T], axis=1)
    draws = np.random.default_rng(step).poisson(1.0, (REPLICATES, sequence_count))
    sums: Array = np.concatenate([by_sequence.sum(axis=0, keepdims=True), draws @ by_sequence])
    return sums
