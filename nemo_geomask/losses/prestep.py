"""What is decided before an optimiser step, where the whole batch is visible: ``batch_veto``, ``denominator: kept``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.errors import BatchVetoError, DataError
from nemo_geomask.losses.batch import TokenBatch, read_nemo_rl
from nemo_geomask.losses.loss import PREPARED, PolicyLoss
from nemo_geomask.losses.rejection import reject
from nemo_geomask.losses.statistics import SequenceStatistics
from nemo_geomask.metrics import MetricSums

__all__ = ["BeforeStep", "Decision", "Review", "untrained_metrics", "valid_counts"]


@dataclass(frozen=True)
class Decision:
    """What to do with a batch.

    Attributes:
        train: whether to take the step; False: leave the policy and the optimiser as they are.
        why: where not, why not.
        changes: tensors that replace those of the batch, and the mark that the loss asks for.
        metrics: ``geomask/batch_kl`` and ``geomask/batch_vetoed`` under ``batch_veto``, ``geomask/batch_emptied`` and
            those of the masks applied under ``denominator: kept``.
    """

    train: bool
    why: str = ""
    changes: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class BeforeStep:
    r"""Look at a whole batch before its optimiser step or steps.

    ``batch_veto``: with :math:`x_t` = prev − gen over the batch's trained tokens, no step where the absolute mean of
    :math:`-x_t` (k1) or the mean of :math:`e^{x_t} - 1 - x_t` (k3) exceeds the bound. A KL is not negative, so a k1 far
    below 0 speaks of wrong log-probs as one above does. Tokens without finite log-probs are left out; where they are
    more than half, the KL counts as infinite.

    ``denominator: kept``: the masks on the mismatch are applied to the token mask (token-level masks) and the sample
    mask (the others), so that counts taken of the batch afterwards are those of what is kept. Every mask judges the
    batch as it came. Advantages stay as they are: the group baseline counts what is rejected here. No step on a batch
    of which nothing is kept.

    To be called by the trainer, on the driver; ``nemo-geomask run`` does it in NeMo-RL, and the lab does it.

    Args:
        config: the settings in force.

    Attributes:
        vetoed: batches vetoed so far.
    """

    def __init__(self, config: LossConfig) -> None:
        self._config = config
        before = set(config.rules_before_step)
        masks = [
            # Under the label that it has among all masks.
            {**mask.model_dump(exclude_unset=True), "label": rule.label}
            for mask, rule in zip(config.masks, config.mask_rules, strict=True)
            if rule in before
        ]
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
        return replace(review.decide(), changes=changes)

    def open(self) -> Review:
        """Begin with a batch that arrives in parts; nothing is decided until :meth:`Review.decide`."""
        return Review(self._config, self._prior, self._judge)

    def _judge(self, kl: float) -> bool:
        veto = self._config.batch_veto
        if veto is None:
            return True
        train = abs(kl) <= veto.max
        self._in_a_row = 0 if train else self._in_a_row + 1
        self.vetoed += not train
        if self._in_a_row > veto.max_in_a_row:
            raise BatchVetoError(
                f"loss_fn.batch_veto: {self._in_a_row} batches in a row have a mismatch KL ({veto.estimator}) beyond "
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
        self._kl = self._finite = self._kept = 0.0
        # As the batch declares them, which is what the loss divides by.
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
        if "prev_logprobs" not in data:
            raise DataError(
                "batch_veto and denominator: kept look at data['prev_logprobs'] before the step, but the batch has none"
            )
        batch = read_nemo_rl(data["prev_logprobs"][:, 1:], data, self._prior)
        seqs, toks = valid_counts([data])
        self._seqs += seqs
        self._toks += toks
        self._finite += float(batch.weight.double().sum())
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
        why = ""
        # A batch without a token to train says nothing of the engines.
        if self._toks > 0:
            if self._masks:
                metrics["geomask/batch_emptied"] = float(self._kept == 0)
                why = "denominator: kept, and the masks keep nothing of it" if self._kept == 0 else ""
            veto = self._config.batch_veto
            if veto is not None:
                kl = self._kl / self._finite if self._finite >= float(self._toks) / 2 else math.inf
                vetoed = not self._judge(kl)
                metrics |= {"geomask/batch_kl": kl, "geomask/batch_vetoed": float(vetoed)}
                why = f"mismatch KL {kl:.4g} is beyond loss_fn.batch_veto.max: {veto.max:g}" if vetoed else why
        return Decision(not why, why, metrics=metrics)

    def _apply(self, batch: TokenBatch, data: Mapping[str, Any]) -> dict[str, Tensor]:
        token_mask, sample_mask = data["token_mask"].clone(), data["sample_mask"].clone()
        metrics = MetricSums(batch.weight, batch.sample_mask, batch.segments)
        statistics = SequenceStatistics(batch, self._prior, {})
        kept = reject(batch, statistics, self._prior, metrics)
        self._masks.append(metrics)
        self._kept += float((batch.weight * kept).double().sum())
        removed = batch.trained & ~kept
        # A sequence of which nothing is left is none of those that the loss is a mean over.
        emptied = removed.any(dim=1) & ~kept.any(dim=1)
        token_mask[:, 1:].masked_fill_(removed.to(token_mask.device), 0)
        sample_mask.masked_fill_(emptied.to(sample_mask.device), 0)
        return {"token_mask": token_mask, "sample_mask": sample_mask}


def valid_counts(parts: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
    """Valid sequences and tokens of a batch, whole or in parts, as trainers count them; 0-d float64 on the CPU."""
    seqs = toks = torch.zeros((), dtype=torch.float64)
    for part in parts:
        sample_mask = part["sample_mask"].double().cpu()
        token_mask = part["token_mask"][:, 1:].double().cpu()
        seqs, toks = seqs + sample_mask.sum(), toks + (token_mask * sample_mask.unsqueeze(-1)).sum()
    return seqs, toks


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
    seqs, toks = valid_counts(parts)
    found: dict[str, list[float]] = {}
    for part in parts:
        _, metrics = loss(part["prev_logprobs"][:, 1:], part, seqs, toks)
        for name, value in metrics.items():
            found.setdefault(name, []).append(0.0 if name == "loss" else value)
    return found | {name: [value] for name, value in decision.metrics.items()}
