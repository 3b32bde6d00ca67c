"""Pre-step pass over the whole batch: ``batch_veto``, ``denominator: kept``, budgets, the weight's mean, stale tokens.

A mask has a budget if ``drop_at_most`` or ``until_mean`` takes the place of its bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.config.conflicts import whole_batch_problems
from nemo_geomask.config.fields import BatchVeto
from nemo_geomask.config.loss_settings import WEIGHT_MEAN
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, TOKEN_MASK
from nemo_geomask.errors import BatchVetoError, ConfigError, DataError
from nemo_geomask.losses.batch import TokenBatch
from nemo_geomask.losses.batch_masks import budget_bounds, masks_without, masks_without_stale, pool_batch
from nemo_geomask.losses.correction import correct
from nemo_geomask.losses.policy_loss import BATCH_SCALAR_PREFIX, PREPARED_KEY, PolicyLoss, raise_if_nonfinite
from nemo_geomask.losses.rejection import reject
from nemo_geomask.losses.sequence_stats import SequenceStats
from nemo_geomask.metrics import Reduction

_STALE: tuple[str, Reduction] = ("geomask/stale_tokens", "tokens")


@dataclass(frozen=True)
class Decision:
    """Result of the pre-step pass over a batch.

    Attributes:
        train: whether to take the step; False: leave the policy and the optimiser as they are.
        reason: why the step is not taken; empty if ``train``.
        changes: tensors to replace in the batch or to add to it.
        metrics: ``geomask/batch_kl`` and ``geomask/batch_vetoed`` under ``batch_veto``; ``geomask/batch_emptied`` under
            ``denominator: kept`` or with budgets; ``geomask/mask/…`` of the masks applied under ``denominator: kept``;
            ``geomask/batch_weight_mean`` under ``is_correction_batch_normalize``; ``geomask/stale_tokens`` under
            ``max_token_lag``.
    """

    train: bool
    reason: str = ""
    changes: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class PrestepPass:
    r"""Pass over a whole batch before its optimiser step or steps.

    ``batch_veto``: with :math:`x_t` = prev − gen over the batch's trained tokens, no step is taken if the absolute mean
    of :math:`-x_t` (k1) or the mean of :math:`e^{x_t} - 1 - x_t` (k3) exceeds the bound. A KL is not negative, so a k1
    far below 0 indicates wrong log-probs just as one far above does. Tokens without finite log-probs are left out; if
    they are more than half of the valid tokens, the KL counts as infinite.

    ``denominator: kept``: the pass sets the token mask to 0 at the tokens that the masks on the mismatch remove, and
    the sample mask to 0 at the sequences of which they keep no token. The trainer counts valid tokens and sequences
    afterwards, so it counts only what is kept. Every mask judges the batch as it was before the pass. Advantages don't
    change: the group baseline still includes the rejected samples. If nothing is kept, no step is taken.

    ``max_token_lag``: before anything else, the pass sets the token mask to 0 at tokens that were sampled too many
    updates ago, so that no count includes them either.

    A mask's ``drop_at_most`` or ``until_mean``: the pass computes the mask's bound from the trained tokens (at sequence
    levels, the sequences) of the whole batch, all with equal weight. It adds the bound to the batch, and the loss
    removes the tokens or sequences that exceed it. Under ``denominator: kept`` the pass itself applies these masks. If
    a budget keeps nothing, no step is taken.

    ``is_correction_batch_normalize``: the pass adds to the batch the mean of the weights over the tokens (at sequence
    levels, the sequences) that are left to train on, and the loss divides its weights by this mean.

    The pass runs in the trainer's driver process. ``nemo-geomask run`` adds the call to NeMo-RL; the training loop of
    ``nemo_geomask.tools.lab`` contains it.

    Args:
        config: settings in force.

    Attributes:
        vetoed: number of batches vetoed so far.
        in_a_row: number of batches vetoed since the last batch that was trained on.
    """

    def __init__(self, config: LossConfig) -> None:
        self._config = config
        self.vetoed = 0
        self.in_a_row = 0

    @property
    def needed(self) -> bool:
        """True if the settings need this pass."""
        return self._config.needs_prestep_pass

    def __call__(self, data: Mapping[str, Any]) -> Decision:
        """Decide on a batch.

        Args:
            data: NeMo-RL's training batch [B, T], see :func:`nemo_geomask.losses.raw_batch.take_padded`; it holds all
                rows that the step trains on, those of all ranks.

        Returns: the decision; under ``denominator: kept`` its ``changes`` hold ``token_mask`` and ``sample_mask``.
        Raises: as :meth:`OpenBatch.add` and :meth:`OpenBatch.decide`.
        """
        if not self.needed:
            return Decision(True)
        batch = OpenBatch(self, self._config)
        changes = batch.add(data)
        return replace(batch.decide(), changes=changes)

    def changes(self, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return :attr:`Decision.changes` for a whole batch without counting it for the veto."""
        return OpenBatch(self, self._config).add(data)

    def open(self) -> OpenBatch:
        """Start the pass over a batch that arrives in parts; :meth:`OpenBatch.decide` ends it.

        Raises: ConfigError: a mask has a budget over the whole batch, or the weight is divided by its mean over it,
        neither of which can be computed from the first part.
        """
        if problems := whole_batch_problems(self._config):
            raise ConfigError(*problems)
        return OpenBatch(self, self._config)

    def _allows_step(self, kl: float, veto: BatchVeto) -> bool:
        """Return True if the batch's mismatch KL is within the veto's bound, and count vetoes.

        Raises: BatchVetoError: more than ``max_in_a_row`` batches in a row were vetoed.
        """
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
    """One step's batch, added in parts; made by :meth:`PrestepPass.open`.

    Masks judge each token or sequence by itself, so each part is masked as it is added. The KL is computed over all
    parts. A budget's bound is computed from the part, which is then the whole batch (see :meth:`PrestepPass.open`).
    """

    def __init__(self, prestep_pass: PrestepPass, config: LossConfig) -> None:
        self._prestep_pass, self._config = prestep_pass, config
        self._budget_bounds: dict[str, float] = {}
        self._kl_sum = self._finite_weight = self._kept_weight = 0.0
        # Numbers of valid sequences and tokens of the batch, before the pass removes any.
        self._seqs, self._toks = valid_counts([])
        self._removed: dict[tuple[str, Reduction], float] = {}
        self._metrics: dict[str, float] = {}

    @torch.no_grad()
    def add(self, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Add complete sequences of the batch.

        Args:
            data: as for calling :class:`PrestepPass`.

        Returns: :attr:`Decision.changes` for this part.
        Raises: MissingDataError, ShapeError: as :func:`~nemo_geomask.losses.raw_batch.take_padded`. DataError: masks
        with values that are NaN or not from 0 to 1 or, under ``denominator: kept``, other than 0 and 1;
        generation log-probs that can only come from a bug.
        NonFiniteError: a trained token has a non-finite value, under ``nonfinite: raise``.
        """
        config, data_with_stale = self._config, data
        stale_changes = masks_without_stale(config, data)
        data = {**data, **stale_changes}
        self._budget_bounds = budget_bounds(config, data)
        batch = pool_batch(config.rules_before_step, config, data)
        stats = batch.stats
        # A count is computed when it is read, and those of non-finite values matter under `raise` alone.
        counts = {
            metric.names[0]: float(metric.value())
            for metric in batch.invalid_counts
            if config.nonfinite == "raise" or metric.names[0].startswith("geomask/invalid_")
        }
        raise_if_nonfinite(counts)
        _refuse_impossible_logprobs(batch.tokens, stats)
        seqs, toks = valid_counts([data_with_stale])
        self._seqs, self._toks = self._seqs + seqs, self._toks + toks
        if stale_changes:
            removed = float(toks - valid_counts([data])[1])
            self._removed[_STALE] = self._removed.get(_STALE, 0.0) + removed
        self._finite_weight += float(stats.weight.double().sum())
        veto = config.batch_veto
        if veto is not None:
            kl = F.kl_estimate(-batch.tokens.mismatch.double(), veto.estimator)
            self._kl_sum += float((kl * stats.weight).sum())

        changes: dict[str, Tensor] = {**stale_changes}
        # The last metric, geomask/kept_tokens, is left to the loss.
        kept, (*mask_metrics, _) = reject(batch.tokens, stats, batch.rules, self._budget_bounds)
        if kept is not None:
            _require_binary_masks(data)
            weights = {"tokens": stats.weight, "sequences": stats.sample_mask}
            for (name,), reduction, compute, *_ in mask_metrics:
                removed = float((compute() * weights[reduction]).sum())
                self._removed[name, reduction] = self._removed.get((name, reduction), 0.0) + removed
            self._kept_weight += float((stats.weight * kept).double().sum())
            changes |= masks_without(data, stats.is_trained & ~kept, stats.is_trained & kept)

        scalars = {rule.label: self._budget_bounds[rule.label] for rule in config.rules_in_loss if rule.has_budget}
        if config.is_correction_batch_normalize:  # only for a batch that is added as a whole, see whole_batch_problems
            weight_mean = _weight_mean(config, {**data, **changes})
            scalars[WEIGHT_MEAN] = self._metrics["geomask/batch_weight_mean"] = weight_mean
        for label, value in scalars.items():
            changes[f"{BATCH_SCALAR_PREFIX}{label}"] = torch.full_like(data["sample_mask"], value, dtype=torch.float32)
        return {**changes, PREPARED_KEY: torch.ones_like(data["sample_mask"])}

    def decide(self) -> Decision:
        """Decide on all parts; the decision's ``changes`` are empty, since :meth:`add` returned those of each part.

        Raises: BatchVetoError: more than ``max_in_a_row`` batches in a row were vetoed.
        """
        counts = {"tokens": float(self._toks), "sequences": float(self._seqs)}
        metrics = {name: value / (counts[reduction] or 1.0) for (name, reduction), value in self._removed.items()}
        metrics |= self._metrics
        reason = ""
        # A batch without trained tokens gives no evidence about the engines.
        if self._toks > 0:
            is_all_stale = self._removed.get(_STALE, 0.0) == float(self._toks)
            if is_all_stale:
                reason = f"all of its tokens are more than loss_fn.max_token_lag: {self._config.max_token_lag} behind"
            if self._config.rules_before_step or self._budget_bounds:
                masks_keep_nothing = bool(self._config.rules_before_step) and self._kept_weight == 0
                # A budget that keeps nothing has the bound -1.
                is_emptied = masks_keep_nothing or any(bound < 0 for bound in self._budget_bounds.values())
                metrics["geomask/batch_emptied"] = float(is_emptied)
                reason = "loss_fn.masks keep nothing of it" if is_emptied and not is_all_stale else reason
            veto = self._config.batch_veto
            if veto is not None and not is_all_stale:
                is_mostly_finite = self._finite_weight >= (float(self._toks) - self._removed.get(_STALE, 0.0)) / 2
                kl = self._kl_sum / self._finite_weight if is_mostly_finite else math.inf
                is_vetoed = not self._prestep_pass._allows_step(kl, veto)
                metrics |= {"geomask/batch_kl": kl, "geomask/batch_vetoed": float(is_vetoed)}
                if is_vetoed:
                    reason = f"mismatch KL {kl:.4g} is beyond loss_fn.batch_veto.max: {veto.max:g}"
        return Decision(not reason, reason, metrics=metrics)


def _weight_mean(config: LossConfig, data: Mapping[str, Any]) -> float:
    """Return the mean weight over trained tokens or, at sequence levels, sequences; 1 if the mean is at most 1e-8."""
    batch = pool_batch((), config, data)
    stats = batch.stats
    weight, _ = correct(batch.tokens, stats, batch.mismatch, config)
    assert weight is not None
    weight, counted = weight.double().expand_as(stats.weight), stats.weight.double()
    if not config.has_token_weights:
        # Each sequence counts with its sample mask, divided among its tokens.
        counted = counted / counted.sum(dim=1, keepdim=True).clamp(min=1e-300) * stats.sample_mask.unsqueeze(-1)
    mean = float((weight * counted).sum() / counted.sum().clamp(min=1e-300))
    # As in verl, weights close to 0 are not normalised, since a division by their mean would amplify noise.
    return mean if mean > 1e-8 else 1.0


def _refuse_impossible_logprobs(batch: TokenBatch, stats: SequenceStats) -> None:
    """Raise DataError if generation log-probs can only come from a bug.

    This is so if all of them are 0 although those of the training engine are not, or if more than half are above 0.
    """
    gen, prev = batch.gen[stats.is_trained], batch.prev[stats.is_trained]
    if gen.numel() == 0:
        return
    zero_fraction, positive_fraction = (gen == 0).double().mean().item(), (gen > 1e-3).double().mean().item()
    prev_mean = prev.double().mean().item()
    if zero_fraction == 1 and prev_mean < -0.01:
        problem = f"0 at all of the {gen.numel()} trained tokens, whose prev_logprobs are {prev_mean:.3g} on average"
        hint = "the generation engine returned none: check that log-probs are requested from it"
    elif positive_fraction > 0.5:
        problem = f"above 0 at {positive_fraction:.0%} of the {gen.numel()} trained tokens, which no log-prob can be"
        hint = "they are not log-probs of a normalised distribution: check logprobs_mode and their sign"
    else:
        return
    raise DataError(f"data['{GENERATION_LOGPROBS}'] is {problem}; {hint}")


def _require_binary_masks(data: Mapping[str, Any]) -> None:
    """Raise DataError if a mask holds values other than 0 and 1."""
    for key in (TOKEN_MASK, "sample_mask"):
        fractional = data[key][(data[key] != 0) & (data[key] != 1)]
        if fractional.numel():
            raise DataError(
                f"loss_fn.denominator: kept counts tokens and sequences, so data['{key}'] must hold 0 and 1 only, but "
                f"it holds {float(fractional[0]):g}; weight samples by their advantages, or set denominator: original"
            )


def valid_counts(parts: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return the counts of valid sequences and tokens of a batch in parts, as trainers compute them.

    Args:
        parts: batches [B, T] with ``token_mask`` and ``sample_mask``.

    Returns: sum of ``sample_mask``, and sum of ``token_mask[:, 1:] * sample_mask``, over all parts; two 0-d float64
    tensors on the CPU.
    """
    seqs = toks = torch.zeros((), dtype=torch.float64, device="cpu")
    for part in parts:
        sample_mask = part["sample_mask"].double().cpu()
        token_mask = part[TOKEN_MASK][:, 1:].double().cpu()
        seqs, toks = seqs + sample_mask.sum(), toks + (token_mask * sample_mask.unsqueeze(-1)).sum()
    return seqs, toks


@torch.no_grad()
def untrained_metrics(
    loss: PolicyLoss, parts: Sequence[Mapping[str, Any]], decision: Decision
) -> dict[str, list[float]]:
    """Return the metrics that the loss would have reported for a batch that is not trained on, with curr = prev.

    Args:
        loss: the loss.
        parts: the batch in parts, or as a single part, after the changes of the decision.
        decision: the decision not to train on it.

    Returns: every metric of the loss with one value for each part. The values are divided by the counts of the whole
    batch, so that they add up like those of microbatches (except minima and maxima); ``loss`` is 0. The metrics of the
    decision are included, with one value each.
    """
    loss = loss.for_prepared_batches()
    seqs, toks = valid_counts(parts)
    values: dict[str, list[float]] = {}
    for part in parts:
        _, metrics = loss(part[PREV_LOGPROBS][:, 1:], part, seqs, toks)
        for name, value in metrics.items():
            values.setdefault(name, []).append(0.0 if name == "loss" else value)
    return values | {name: [value] for name, value in decision.metrics.items()}
