"""Checks of what trained: π_θ at the first update of each step, and the loss that the workers computed from it.

Before the first update of a step, the weights are those that computed π_old. So π_θ must equal it up to numerical
noise, and the mean of exp(π_θ − π_old) must be 1. And the loss that NeMo-RL logs must be that of the recorded batch,
recomputed from the recorded π_θ in one piece: masks, counts or rows of another microbatch or rank show there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.data_keys import TOKEN_MASK
from nemo_geomask.errors import GeomaskError
from nemo_geomask.losses import PolicyLoss, PrestepPass, build_loss
from nemo_geomask.losses.prestep import valid_counts
from nemo_geomask.records.flight import COLUMN_BATCH_KEYS
from nemo_geomask.tools.diagnose import (
    exchanged_share,
    find_run,
    measure_gap,
    padded_batch,
    read_step,
    select_pairs,
    shifted_share,
)
from nemo_geomask.tools.rehearse.healthy_limits import HealthyLimits
from nemo_geomask.tools.rehearse.mismatch_check import MIN_TILT, MIN_TOKENS, Mismatch

MAX_RATIO_ERROR = 0.02
"""Largest distance from 1 of the mean of exp(π_θ − π_old) at a first update."""
MAX_UPDATE_K3 = 0.01
"""Largest mean of exp(Δ) − 1 − Δ at a first update, nats a token."""
_PATHS = "loss_fn.logprob_backend, policy.sequence_packing, policy.megatron_cfg"
_SHIFTED = (
    "the loss gets each token's neighbour's log-prob (curr is shifted by a token against prev)",
    _PATHS,
    "column t of what the back end returns must be about the token that NeMo-RL's own path has there",
)
_EXCHANGED = (
    "the loss gets the log-probs of other rows (curr of a sequence is prev of another)",
    _PATHS,
    "the rows of a microbatch and its log-probs must be in the same order, also where they are packed",
)


def check_update(folder: Path, limits: HealthyLimits, *, rows: int) -> Mismatch:
    """Judge π_θ at the first update of each recorded step against π_old.

    Args:
        folder: ``loss_fn.record.dir``.
        rows: number of rows that an update trains on; the first update has the first ones of each step's batch.
    """
    parts, shifted, exchanged = [], [], []
    try:
        run = find_run(folder)
        for step in run.steps:
            for block in read_step(run, step):
                pairs = select_pairs(block, "prev", "curr", (block.sequences["row"] < rows) & block.has_prev)
                parts.append(pairs)
                shifted.append(shifted_share(pairs))
                exchanged.append(exchanged_share(pairs))
    except GeomaskError as error:
        return Mismatch(limits, unjudged=str(error))
    before, at_update = (np.concatenate([part[index] for part in parts]) for index in range(2))
    gap = measure_gap(before, at_update, noise=limits.noise, far_noise=limits.far_noise)
    verdict = Mismatch(limits, gap)
    if gap.tokens < MIN_TOKENS:
        needed = f"{MIN_TOKENS} are needed; NeMo-RL computes no π_old where the loss doesn't read it"
        return replace(verdict, unjudged=f"only {gap.tokens} tokens have π_old and π_θ; {needed}")
    for shares, fault in ((shifted, _SHIFTED), (exchanged, _EXCHANGED)):
        if share := float(np.mean(shares)):
            return verdict.with_fault(*fault, f"{share:.0%} of the sequences")
    if not verdict.is_beyond and abs(gap.ratio - 1) <= MAX_RATIO_ERROR and gap.k3 <= MAX_UPDATE_K3:
        return verdict
    sides = f"mean of exp(curr − prev) {gap.ratio:.4g}, and no weight has changed between the two"
    if abs(gap.tilt) >= MIN_TILT:
        return verdict.with_fault(
            "another temperature in the training pass than in the pass that computed prev_logprobs",
            "policy.generation.temperature",
            f"the logits of both passes must be divided by it once; Δ and the log-prob correlate by {gap.tilt:.2f}",
            sides,
        )
    return verdict.with_fault(
        "the policy that trains is not the one that computed prev_logprobs (curr differs from prev at a first update)",
        f"{_PATHS}, dropout",
        "compare the training pass with that of prev_logprobs: dropout, precision, packing, kernels, a changed weight",
        sides,
    )


def replay_losses(folder: Path, config: LossConfig, *, rows: int) -> Iterator[tuple[int, float, float]]:
    """Recompute the loss of each recorded step in one piece, from its recorded batch and π_θ.

    NeMo-RL logs the mean of the losses of a step's updates, each divided by its own counts.

    Args:
        config: settings of the loss that trained.
        rows: number of rows that an update trains on.

    Yields: step, loss, and the sum of absolute values of its terms, of which float32 rounds a share. Steps of which
    anything was not recorded, or that were not trained, are left out; all are if the loss depends on the microbatches.
    """
    if config.positive_example_nll_weight and config.positive_example_nll_normalization == "microbatch":
        return
    loss = build_loss(config.model_copy(update={"record": None, "compile": False, "compare_ranks": False}))
    try:
        run = find_run(folder)
    except GeomaskError:
        return
    for step in run.steps:
        try:
            replayed = _replay_loss(*padded_batch(read_step(run, step)), loss, rows)
        except GeomaskError:  # what the loss needs was not recorded
            continue
        if replayed is not None:
            yield step, *replayed


def _replay_loss(batch: dict[str, Tensor], left_out: int, loss: PolicyLoss, rows: int) -> tuple[float, float] | None:
    curr = batch.pop(COLUMN_BATCH_KEYS["curr"], None)
    is_trained = (batch[TOKEN_MASK][:, 1:] * batch["sample_mask"].unsqueeze(1)) != 0
    if curr is None or left_out or not curr[:, 1:][is_trained].isfinite().all():
        return None
    decision = PrestepPass(loss.config)(batch)
    if not decision.train:
        return None
    batch |= decision.changes
    total = size = 0.0
    for begin in range(0, len(curr), rows):
        part = {name: value[begin : begin + rows] for name, value in batch.items()}
        leaf = curr[begin : begin + rows, 1:].clone().requires_grad_()
        value, _ = loss(leaf, part, *valid_counts([part]))
        (gradient,) = torch.autograd.grad(value, leaf)
        total += float(value.detach())
        size += float(gradient.abs().sum())
    updates = max(1, len(curr) // rows)
    return total / updates, size / updates
