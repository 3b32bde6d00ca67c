"""What is decided before an optimiser step, where the whole batch is visible: ``batch_veto``, ``denominator: kept`` and
the bounds of masks with a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.config.fields import BatchVeto
from nemo_geomask.config.loss import WEIGHT_MEAN
from nemo_geomask.errors import BatchVetoError, ConfigError, DataError, Problem
from nemo_geomask.losses.batch import TokenBatch
from nemo_geomask.losses.correction import correct
from nemo_geomask.losses.loss import BOUND, PREPARED, PolicyLoss, refuse_nonfinite
from nemo_geomask.losses.observe import Observed
from nemo_geomask.losses.rejection import reject
from nemo_geomask.losses.verdicts import budget_bounds, seen_by
from nemo_geomask.metrics import Over

__all__ = ["BeforeStep", "Decision", "OpenBatch", "needs_whole_batch", "untrained_metrics", "valid_counts"]


@dataclass(frozen=True)
class Decision:
    """What to do with a batch.

    Attributes:
        train: whether to take the step; False: leave the policy and the optimiser as they are.
        why: where not, why not.
        changes: tensors that replace those of the batch, and the marks that the loss asks for.
        metrics: ``geomask/batch_kl`` and ``geomask/batch_vetoed`` under ``batch_veto``, ``geomask/batch_emptied`` and
            those of the masks applied under ``denominator: kept``; ``geomask/batch_weight_mean``.
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

    A mask's ``drop_at_most`` or ``until_mean``: the bound that the batch sets, over the tokens that train (at sequence
    levels the sequences), each counted once. The loss gets it with the batch and removes what exceeds it; under
    ``denominator: kept`` it is applied here as the other masks are. No step on a batch of which a budget keeps nothing.

    ``is_correction_batch_normalize``: the mean of the weights over what is then trained on; the loss gets it likewise.

    To be called by the trainer, on the driver; ``nemo-geomask run`` does it in NeMo-RL, and the lab does it.

    Args:
        config: the settings in force.

    Attributes:
        vetoed: batches vetoed so far.
        in_a_row: those since the last that was not.
    """

    def __init__(self, config: LossConfig) -> None:
        self._config = config
        self.vetoed = 0
        self.in_a_row = 0

    @property
    def needed(self) -> bool:
        """Whether the settings ask for anything here."""
        return self._config.looks_before_step

    def __call__(self, data: Mapping[str, Any]) -> Decision:
        """Decide on a batch.

        Args:
            data: NeMo-RL's training batch [B, T], see :func:`nemo_geomask.losses.batch.take_padded`; the whole of
                what is trained on, all ranks' rows together.

        Returns: the decision; under ``denominator: kept`` its ``changes`` hold ``token_mask`` and ``sample_mask``.
        Raises: as :meth:`OpenBatch.add` and :meth:`OpenBatch.decide`.
        """
        if not self.needed:
            return Decision(True)
        batch = self._opened(data)
        changes = batch.add(data)
        return replace(batch.decide(), changes=changes)

    def changes(self, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a whole batch is to be changed by, without a decision that counts: for one that is not trained on."""
        return self._opened(data).add(data)

    def open(self) -> OpenBatch:
        """Begin with a batch that arrives in parts; nothing is decided until :meth:`OpenBatch.decide`.

        Raises: ConfigError: a mask has a budget over the whole batch, or the weight is divided by its mean there, of
        which the first part knows nothing.
        """
        if problems := needs_whole_batch(self._config):
            raise ConfigError(*problems)
        return OpenBatch(self, self._config, {})

    def _opened(self, data: Mapping[str, Any]) -> OpenBatch:
        return OpenBatch(self, self._config, budget_bounds(self._config, data))

    def _judge(self, kl: float, veto: BatchVeto) -> bool:
        train = abs(kl) <= veto.max
        self.in_a_row = 0 if train else self.in_a_row + 1
        self.vetoed += not train
        if self.in_a_row > veto.max_in_a_row:
            raise BatchVetoError(
                f"loss_fn.batch_veto: {self.in_a_row} batches in a row have a mismatch KL ({veto.estimator}) beyond "
                f"max: {veto.max}, the last {kl:.4g}, and max_in_a_row is {veto.max_in_a_row}. The generation engine "
                "no longer samples from the policy that trains: check that its weights are synchronised and its "
                "numerics (precision, quantisation, expert routing); or raise max"
            )
        return train


class OpenBatch:
    """One step's batch, taken in part by part; from :meth:`BeforeStep.open`.

    Masks judge a token or a sequence by itself, so each part can be masked when it comes; the KL is the whole batch's.
    """

    def __init__(self, before_step: BeforeStep, config: LossConfig, bounds: Mapping[str, float]) -> None:
        self._before_step, self._config, self._bounds = before_step, config, bounds
        self._kl = self._finite = self._kept = 0.0
        # As the batch declares them, which is what the loss divides by.
        self._seqs, self._toks = valid_counts([])
        self._removed: dict[tuple[str, Over], float] = {}
        self._metrics: dict[str, float] = {}

    @torch.no_grad()
    def add(self, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Take in whole sequences of the batch.

        Args:
            data: as for calling :class:`BeforeStep`.

        Returns: what the part is to be changed by, see :class:`Decision`.
        Raises: MissingDataError, ShapeError: as :func:`~nemo_geomask.losses.batch.take_padded`. DataError: masks that
        aren't 0 and 1, under ``denominator: kept``; generation log-probs that no engine computed. NonFiniteError: under
        ``nonfinite: raise``.
        """
        config = self._config
        batch, seen, reports = seen_by(config.rules_before_step, config, data)
        if config.nonfinite == "raise":
            refuse_nonfinite({report.names[0]: float(report.value()) for report in reports})
        _refuse_impossible(batch, seen)
        seqs, toks = valid_counts([data])
        self._seqs, self._toks = self._seqs + seqs, self._toks + toks
        self._finite += float(seen.weight.double().sum())
        veto = config.batch_veto
        if veto is not None:
            estimate = F.kl_estimate(-batch.mismatch.double(), veto.estimator)
            self._kl += float((estimate * seen.weight).sum())
        changes: dict[str, Tensor] = {}
        kept, (*of_masks, _) = reject(batch, seen, config.rules_before_step, self._bounds)
        if kept is not None:
            _require_binary(data)
            weights = {"tokens": seen.weight, "sequences": seen.sample_mask}
            for (name,), over, compute, *_ in of_masks:
                removed = float((compute() * weights[over]).sum())
                self._removed[name, over] = self._removed.get((name, over), 0.0) + removed
            trained = seen.trains != 0
            self._kept += float((seen.weight * kept).double().sum())
            changes = _without(data, trained & ~kept, trained & kept)
        told = {rule.label: self._bounds[rule.label] for rule in config.rules_in_loss if rule.budgeted}
        if config.is_correction_batch_normalize:  # then this part is the whole
            told[WEIGHT_MEAN] = self._metrics["geomask/batch_weight_mean"] = _weight_mean(config, {**data, **changes})
        for label, value in told.items():
            changes[f"{BOUND}{label}"] = torch.full_like(data["sample_mask"], value, dtype=torch.float32)
        return {**changes, PREPARED: torch.ones_like(data["sample_mask"])}

    def decide(self) -> Decision:
        """The decision on all parts; its ``changes`` are empty, as each part has got its own.

        Raises: BatchVetoError: one veto more in a row than ``max_in_a_row``.
        """
        # By the counts of the whole batch, which are known at its end.
        counts = {"tokens": float(self._toks), "sequences": float(self._seqs)}
        metrics = {name: value / (counts[by] or 1.0) for (name, by), value in self._removed.items()}
        metrics |= self._metrics
        why = ""
        # A batch without a token to train says nothing of the engines.
        if self._toks > 0:
            if self._config.rules_before_step or self._bounds:
                rejected = bool(self._config.rules_before_step) and self._kept == 0
                emptied = rejected or any(bound < 0 for bound in self._bounds.values())
                metrics["geomask/batch_emptied"] = float(emptied)
                why = "loss_fn.masks keep nothing of it" if emptied else ""
            veto = self._config.batch_veto
            if veto is not None:
                kl = self._kl / self._finite if self._finite >= float(self._toks) / 2 else math.inf
                vetoed = not self._before_step._judge(kl, veto)
                metrics |= {"geomask/batch_kl": kl, "geomask/batch_vetoed": float(vetoed)}
                why = f"mismatch KL {kl:.4g} is beyond loss_fn.batch_veto.max: {veto.max:g}" if vetoed else why
        return Decision(not why, why, metrics=metrics)


def needs_whole_batch(config: LossConfig) -> tuple[Problem, ...]:
    """What stands against a batch that arrives in parts: a budget over the whole of it, or the weight's mean there."""
    budgets = tuple(rule.key for rule in config.budgets)
    normalize = ("loss_fn.is_correction_batch_normalize",) if config.is_correction_batch_normalize else ()
    why = "is over the whole batch, but here its parts are trained on as they come (as by NeMo-RL's single controller)"
    found = (
        Problem(budgets, f"a budget {why}; give the mask bounds (min, max), or use a trainer that holds the batch"),
        Problem(normalize, f"the weight's mean {why}; set false, or use a trainer that holds the batch"),
    )
    return tuple(problem for problem in found if problem.keys)


def _weight_mean(config: LossConfig, data: Mapping[str, Any]) -> float:
    """Mean of the weights over trained tokens or, at sequence levels, sequences; 1 where that is 1e-8 or less."""
    batch, seen, _ = seen_by((), config, data)
    weight, _ = correct(batch, seen, config)
    assert weight is not None
    weight, trained = weight.double().expand_as(seen.weight), seen.weight.double()
    if not config.weighs_tokens:
        trained = trained / trained.sum(dim=1, keepdim=True).clamp(min=1e-300) * seen.sample_mask.unsqueeze(-1)
    mean = float((weight * trained).sum() / trained.sum().clamp(min=1e-300))
    # Weights that have vanished are left so, as in verl: no division makes them say more.
    return mean if mean > 1e-8 else 1.0


def _without(data: Mapping[str, Any], removed: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """The masks without what is removed, [B, T-1]."""
    token_mask, sample_mask = data["token_mask"].clone(), data["sample_mask"].clone()
    # A sequence of which nothing is left is none of those that the loss is a mean over.
    emptied = removed.any(dim=1) & ~kept.any(dim=1)
    token_mask[:, 1:].masked_fill_(removed.to(token_mask.device), 0)
    sample_mask.masked_fill_(emptied.to(sample_mask.device), 0)
    return {"token_mask": token_mask, "sample_mask": sample_mask}


def _refuse_impossible(batch: TokenBatch, seen: Observed) -> None:
    """Generation log-probs that are all 0 where those of training are not, or mostly above 0, are a bug upstream."""
    trained = seen.trains != 0
    gen, prev = batch.gen[trained], batch.prev[trained]
    if gen.numel() == 0:
        return
    zero, positive = (gen == 0).double().mean().item(), (gen > 1e-3).double().mean().item()
    mean = prev.double().mean().item()
    if zero == 1 and mean < -0.01:
        found = f"0 at all of the {gen.numel()} trained tokens, whose prev_logprobs are {mean:.3g} on average"
        hint = "the generation engine returned none: check that it is asked for log-probs"
    elif positive > 0.5:
        found = f"above 0 at {positive:.0%} of the {gen.numel()} trained tokens, as no log-prob is"
        hint = "they are no log-probs of a normalised distribution: check logprobs_mode, and their sign"
    else:
        return
    raise DataError(f"data['generation_logprobs'] is {found}; {hint}")


def _require_binary(data: Mapping[str, Any]) -> None:
    for key in ("token_mask", "sample_mask"):
        other = data[key][(data[key] != 0) & (data[key] != 1)]
        if other.numel():
            raise DataError(
                f"loss_fn.denominator: kept counts tokens and sequences, so data['{key}'] must hold 0 and 1 only, but "
                f"it holds {float(other[0]):g}; weight samples by their advantages, or set denominator: original"
            )


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

    The batch comes whole or in parts, after the changes.

    Returns: every metric of the loss, a value for each part, which add up (extrema aside) as those of microbatches do:
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
