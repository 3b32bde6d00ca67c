"""What is decided before an optimiser step, where the whole batch is visible: ``batch_veto``, ``denominator: kept``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.errors import BatchVetoError
from nemo_geomask.losses.batch import TokenBatch, read_nemo_rl
from nemo_geomask.losses.loss import PREPARED, PolicyLoss
from nemo_geomask.losses.rejection import reject
from nemo_geomask.losses.statistics import SequenceStatistics
from nemo_geomask.metrics import MetricSums

__all__ = ["BeforeStep", "Decision", "Review", "untrained_metrics"]


@dataclass(frozen=True)
class Decision:
    """What to do with a batch.

    Attributes:
        train: whether to take the step; False: leave the policy and the optimiser as they are.
        changes: tensors that replace those of the batch, and the mark that the loss asks for.
        metrics: ``geomask/batch_kl``, ``geomask/batch_vetoed`` and those of the masks applied.
    """

    train: bool
    changes: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


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
        return self._config.looks_before_step

    def __call__(self, data: Mapping[str, Any]) -> Decision:
        """Decide on a batch.

        Args:
            data: NeMo-RL's training batch [B, T], see :func:`nemo_geomask.losses.batch.read_nemo_rl`; the whole of
                what is trained on, all ranks' rows together.

        Returns:
            The decision; under ``denominator: kept`` its ``changes`` hold ``token_mask`` and ``sample_mask``.

        Raises:
            BatchVetoError: one veto more in a row than ``max_in_a_row``.
            DataError, ShapeError, NonFiniteError: see :func:`~nemo_geomask.losses.batch.read_nemo_rl`.
        """
        if not self.needed:
            return Decision(True)
        review = self.open()
        changes = review.add(data)
        decision = review.decide()
        return Decision(decision.train, changes, decision.metrics)

    def open(self) -> Review:
        """Begin with a batch that arrives in parts; nothing is decided until :meth:`Review.decide`."""
        return Review(self._config, self._prior, self._judge)

    def _judge(self, kl: float) -> bool:
        veto = self._config.batch_veto
        if veto is None:
            return True
        train = kl <= veto.max
        self._in_a_row = 0 if train else self._in_a_row + 1
        self.vetoed += not train
        if self._in_a_row > veto.max_in_a_row:
            raise BatchVetoError(
                f"loss_fn.batch_veto: {self._in_a_row} batches in a row have a mismatch KL ({veto.estimator}) above "
                f"max: {veto.max}, the last {kl:.4g}, and max_in_a_row is {veto.max_in_a_row}. The generation engine "
                "no longer samples from the policy that trains: check that its weights are synchronised and its "
                "numerics (precision, quantisation, expert routing); or raise max"
            )
        return train


class Review:
    """A look at one step's batch, part by part; from :meth:`BeforeStep.open`.

    Masks judge a token or a sequence by itself, so each part can be masked when it comes; the KL is the whole batch's.
    """

    def __init__(self, config: LossConfig, prior: LossConfig, judge: Callable[[float], bool]) -> None:
        self._config = config
        self._prior = prior
        self._judge = judge
        self._kl = 0.0
        self._seqs = torch.zeros((), dtype=torch.float64)
        self._toks = torch.zeros((), dtype=torch.float64)
        self._masks: list[MetricSums] = []

    @torch.no_grad()
    def add(self, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Take in whole sequences of the batch.

        Args:
            data: as for calling :class:`BeforeStep`.

        Returns:
            What the part is to be changed by, see :class:`Decision`.

        Raises:
            DataError, ShapeError, NonFiniteError: see :func:`~nemo_geomask.losses.batch.read_nemo_rl`.
        """
        batch = read_nemo_rl(data["prev_logprobs"][:, 1:], data, self._prior)
        self._seqs += batch.sample_mask.double().sum().cpu()
        self._toks += batch.weight.double().sum().cpu()
        veto = self._config.batch_veto
        if veto is not None:
            estimate = F.kl_estimate((batch.gen - batch.prev).double(), veto.estimator)
            self._kl += float((estimate * batch.weight).sum())
        changes = self._apply(batch, data) if self._prior.masks else {}
        return {**changes, PREPARED: torch.ones_like(data["sample_mask"])}

    def decide(self) -> Decision:
        """The decision on all parts; its ``changes`` are empty, as each part has got its own.

        Raises:
            BatchVetoError: one veto more in a row than ``max_in_a_row``.
        """
        metrics: dict[str, float] = {}
        for part in self._masks:
            numbers, _ = part.read(global_seqs=self._seqs, global_toks=self._toks)
            for name, value in numbers.items():
                if name.startswith("geomask/mask/"):
                    metrics[name] = metrics.get(name, 0.0) + value
        if self._config.batch_veto is None:
            return Decision(True, metrics=metrics)
        kl = float(self._kl * F.inverse_count(self._toks))
        train = self._judge(kl)
        return Decision(train, metrics={"geomask/batch_kl": kl, "geomask/batch_vetoed": float(not train), **metrics})

    def _apply(self, batch: TokenBatch, data: Mapping[str, Any]) -> dict[str, Tensor]:
        token_mask, sample_mask = data["token_mask"].clone(), data["sample_mask"].clone()
        metrics = MetricSums(batch.weight, batch.sample_mask, batch.segments)
        statistics = SequenceStatistics(batch, self._prior, {})
        kept = reject(batch, statistics, self._prior, metrics)
        self._masks.append(metrics)
        removed = batch.trained & ~kept
        token_mask[:, 1:] = torch.where(removed, 0, token_mask[:, 1:])
        # A sequence of which nothing is left is none of those that the loss is a mean over.
        emptied = removed.any(dim=1) & ~kept.any(dim=1)
        sample_mask = torch.where(emptied, torch.zeros_like(sample_mask), sample_mask)
        return {"token_mask": token_mask, "sample_mask": sample_mask}


@torch.no_grad()
def untrained_metrics(
    loss: PolicyLoss, parts: Sequence[Mapping[str, Any]], decision: Decision
) -> dict[str, list[float]]:
    """What the loss would have reported of a batch that is not trained on, of the policy as it is: curr = prev.

    Args:
        loss: the policy loss.
        parts: the batch, whole or in parts, after the changes.
        decision: about it.

    Returns:
        Every metric of the loss, a value for each part, which add up (extrema aside) as those of microbatches do:
        they are divided by the whole batch's counts. ``loss`` is 0. And those of the decision, one value each.
    """
    loss = loss.for_prepared_batches()
    masks = [(part["token_mask"][:, 1:], part["sample_mask"]) for part in parts]
    seqs = torch.stack([sample.double().sum() for _, sample in masks]).sum()
    toks = torch.stack([(token * sample.unsqueeze(-1)).double().sum() for token, sample in masks]).sum()
    found: dict[str, list[float]] = {}
    for part in parts:
        _, metrics = loss(part["prev_logprobs"][:, 1:], part, seqs, toks)
        for name, value in metrics.items():
            found.setdefault(name, []).append(0.0 if name == "loss" else value)
    return found | {name: [value] for name, value in decision.metrics.items()}
