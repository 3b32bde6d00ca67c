"""What is decided before an optimiser step, where the whole batch is visible: ``batch_veto``, ``denominator: kept``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.errors import BatchVetoError
from nemo_geomask.losses.batch import TokenBatch, read_nemo_rl
from nemo_geomask.losses.loss import MASKS_APPLIED, PolicyLoss
from nemo_geomask.losses.rejection import reject
from nemo_geomask.losses.statistics import SequenceStatistics
from nemo_geomask.metrics import MetricSums

__all__ = ["BeforeStep", "Decision", "untrained_metrics"]


@dataclass(frozen=True)
class Decision:
    """What to do with a batch.

    Attributes:
        train: whether to take the step; False: leave the policy and the optimiser as they are.
        changes: tensors that replace those of the batch.
        metrics: ``geomask/batch_kl``, ``geomask/batch_vetoed`` and those of the masks applied.
    """

    train: bool
    changes: dict[str, Tensor]
    metrics: dict[str, float]


class BeforeStep:
    r"""Look at a whole batch before its optimiser step or steps.

    ``batch_veto``: with :math:`x_t` = prev − gen over the batch's trained tokens, no step where the mean of
    :math:`-x_t` (k1) or :math:`e^{x_t} - 1 - x_t` (k3) exceeds the bound.

    ``denominator: kept``: the masks on the mismatch are applied to the token mask (token-level masks) and the sample
    mask (the others), so that counts taken of the batch afterwards are those of what is kept. Every mask judges the
    batch as it came. Advantages stay as they are: the group baseline counts what is rejected here.

    To be called by the trainer, on the driver; ``nemo-geomask run`` does it in NeMo-RL, and the lab does it.

    Args:
        config: the settings in force.

    Attributes:
        vetoed: batches vetoed so far.
    """

    def __init__(self, config: LossConfig) -> None:
        self._config = config
        before = set(config.rules_before_step)
        masks = [mask for mask, rule in zip(config.masks, config.mask_rules, strict=True) if rule in before]
        # Of the loss only what speaks of the mismatch, which is all that is known before the step.
        self._prior = LossConfig.model_validate(
            {"masks": masks, "reference_policy_kl_penalty": 0.0, "nonfinite": config.nonfinite}
        )
        self.vetoed = 0
        self._in_a_row = 0

    @property
    def needed(self) -> bool:
        """Whether the settings ask for anything here."""
        return self._config.batch_veto is not None or bool(self._prior.masks)

    @torch.no_grad()
    def __call__(self, data: Mapping[str, Any]) -> Decision:
        """Decide on a batch.

        Args:
            data: NeMo-RL's training batch [B, T], see :func:`nemo_geomask.losses.batch.read_nemo_rl`; the whole of
                what is trained on, all ranks' rows together.

        Returns:
            The decision; under ``denominator: kept`` its ``changes`` hold ``token_mask``, ``sample_mask`` and a mark
            that the loss asks for.

        Raises:
            BatchVetoError: one veto more in a row than ``max_in_a_row``.
            DataError, ShapeError, NonFiniteError: see :func:`~nemo_geomask.losses.batch.read_nemo_rl`.
        """
        if not self.needed:
            return Decision(True, {}, {})
        batch = read_nemo_rl(data["prev_logprobs"][:, 1:], data, self._prior)
        metrics: dict[str, float] = {}
        train = self._judge(batch, metrics)
        if not self._prior.masks:
            return Decision(train, {}, metrics)
        changes, of_masks = self._apply(batch, data)
        return Decision(train, changes, metrics | of_masks)

    def _judge(self, batch: TokenBatch, metrics: dict[str, float]) -> bool:
        veto = self._config.batch_veto
        if veto is None:
            return True
        x = (batch.prev - batch.gen).double()
        estimate = F.kl_estimate(-x, veto.estimator)
        kl = float((estimate * batch.weight).sum() * F.inverse_count(batch.weight.double().sum()))
        train = kl <= veto.max
        self._in_a_row = 0 if train else self._in_a_row + 1
        self.vetoed += not train
        metrics["geomask/batch_kl"], metrics["geomask/batch_vetoed"] = kl, float(not train)
        if self._in_a_row > veto.max_in_a_row:
            raise BatchVetoError(
                f"loss_fn.batch_veto: {self._in_a_row} batches in a row have a mismatch KL ({veto.estimator}) above "
                f"max: {veto.max}, the last {kl:.4g}, and max_in_a_row is {veto.max_in_a_row}. The generation engine "
                "no longer samples from the policy that trains: check that its weights are synchronised and its "
                "numerics (precision, quantisation, expert routing); or raise max"
            )
        return train

    def _apply(self, batch: TokenBatch, data: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
        token_mask, sample_mask = data["token_mask"].clone(), data["sample_mask"].clone()
        metrics = MetricSums(batch.weight, batch.sample_mask, batch.segments)
        statistics = SequenceStatistics(batch, self._prior, {})
        kept = reject(batch, statistics, self._prior, metrics)
        removed = batch.trained & ~kept
        token_mask[:, 1:] = torch.where(removed, 0, token_mask[:, 1:])
        # A sequence of which nothing is left is none of those that the loss is a mean over.
        emptied = removed.any(dim=1) & ~kept.any(dim=1)
        sample_mask = torch.where(emptied, torch.zeros_like(sample_mask), sample_mask)
        numbers, _ = metrics.read(global_seqs=batch.sample_mask.sum(), global_toks=batch.weight.sum())
        changes = {"token_mask": token_mask, "sample_mask": sample_mask, MASKS_APPLIED: torch.ones_like(sample_mask)}
        return changes, {name: value for name, value in numbers.items() if name.startswith("geomask/mask/")}


@torch.no_grad()
def untrained_metrics(loss: PolicyLoss, data: Mapping[str, Any], decision: Decision) -> dict[str, float]:
    """What the loss would have reported of a batch that is not trained on, of the policy as it is: curr = prev.

    Args:
        loss: the policy loss.
        data: the batch.
        decision: about it.

    Returns:
        Every metric of the loss, divided by the batch's own counts, ``loss`` 0, and those of the decision.
    """
    marked = {**data, **decision.changes}
    seqs = marked["sample_mask"].sum()
    toks = (marked["token_mask"][:, 1:] * marked["sample_mask"].unsqueeze(-1)).sum()
    _, metrics = loss(data["prev_logprobs"][:, 1:], marked, seqs, toks)
    return {**metrics, "loss": 0.0, **decision.metrics}
