"""Replay of a run's batches through the loss under each correction and mask, and a comparison of the gradients.

A candidate is a ``loss_fn``. Its loss gets the recorded batch and returns a gradient for each token's log-prob. The
same loss without correction, on samples of π_old itself (gen = prev), gives the reference gradient g. Their ratio is
the token's coefficient c: the correction's weight, times 0 where a mask removes the token. All measures follow from c
and g; :data:`~nemo_geomask.tools.diagnose.report.candidate_outcome.DEFINITIONS` has their formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, TOKEN_MASK
from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.losses import PolicyLoss, PrestepPass, build_loss
from nemo_geomask.losses.prestep import valid_counts
from nemo_geomask.records.flight import COLUMN_BATCH_KEYS
from nemo_geomask.tools.diagnose.read.record_reader import Array, RecordBlock
from nemo_geomask.tools.diagnose.report.candidate_outcome import CandidateOutcome, add_silent_tokens, add_step
from nemo_geomask.tools.diagnose.report.sweep_candidates import CANDIDATES, NO_CORRECTION, RECIPE_SOURCE, Candidate

SMALL_ADVANTAGE = 1e-4
"""Advantage that stands for 0, so that a token without a gradient has a coefficient."""

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
        is_silent = _is_trained(batch) & (reference == 0)
        for loss, prestep, outcome in zip(losses, presteps, outcomes, strict=True):
            gradient, metrics, is_trained = _gradient(loss, prestep, batch, batch[key][:, 1:])
            outcome.metrics[step] = metrics
            if is_trained:
                add_step(outcome, step, batch, reference, gradient)
                if is_silent.any():
                    pairs = [
                        (
                            _gradient(losses[0], presteps[0], _with_advantage(matched, value), batch[key][:, 1:])[0],
                            _gradient(loss, prestep, _with_advantage(batch, value), batch[key][:, 1:])[0],
                        )
                        for value in (SMALL_ADVANTAGE, -SMALL_ADVANTAGE)
                    ]
                    add_silent_tokens(outcome, step, is_silent, pairs)
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


def _is_trained(batch: Mapping[str, Tensor]) -> Tensor:
    """Return bool [B, T-1], the trained tokens with finite log-probs of both engines."""
    is_masked_in = (batch[TOKEN_MASK] != 0) & (batch["sample_mask"] != 0)[:, None]
    return (is_masked_in & torch.isfinite(batch[PREV_LOGPROBS] - batch[GENERATION_LOGPROBS]))[:, 1:]


def _with_advantage(batch: Mapping[str, Tensor], value: float) -> dict[str, Tensor]:
    """Return the batch with another advantage where it is 0."""
    return {**batch, "advantages": batch["advantages"].masked_fill(batch["advantages"] == 0, value)}
