"""The loss as one pass over a microbatch: read, pool, correct, reject, surrogate, reduce.

The pass takes tensors and returns tensors, so that ``torch.compile`` can trace it as one graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.config.loss_settings import WEIGHT_MEAN
from nemo_geomask.losses.batch import TokenBatch, read, report_invalid, zero_outside
from nemo_geomask.losses.batch_metrics import report_audit, report_batch, report_surrogate
from nemo_geomask.losses.correction import correct, request_mismatch
from nemo_geomask.losses.raw_batch import BY_SEQUENCE, RawBatch
from nemo_geomask.losses.rejection import reject, request_rules
from nemo_geomask.losses.sequence_stats import SequencePool, SequenceStats
from nemo_geomask.metrics import Label, Metric, MetricSums, Normalizer
from nemo_geomask.objectives.variant import SurrogateInputs, Variant
from nemo_geomask.segments import PaddedSegments, Segments


def evaluate(
    config: LossConfig,
    variant: Variant,
    options: Any,
    raw: RawBatch,
    layout: Segments,
    layout_tensors: tuple[Tensor, ...],
    global_seqs: Tensor,
    global_toks: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the metrics of one microbatch.

    Args:
        config: settings in force.
        variant: the objective.
        options: the variant's own settings.
        raw: the microbatch.
        layout: the token layout and the ranks that share its sequences.
        layout_tensors: the tensors of ``layout``, passed separately so that a graph takes them as inputs.
        global_seqs, global_toks: 0-d float32, valid sequences and valid tokens in the optimiser step.

    Returns: the loss, 0-d float32, whose value is that over all ranks and whose gradient is that of this rank's part;
    and the values of the metrics over all ranks, in the order of :func:`metric_labels`.
    """
    segments = layout.with_tensors(*layout_tensors)
    loss, metrics = _local_loss_and_metrics(config, variant, options, raw, segments, global_seqs, global_toks)
    return metrics.reduce_over_ranks(loss, global_seqs, global_toks)


def metric_labels(config: LossConfig, variant: Variant, options: Any, tensor_names: Iterable[str]) -> tuple[Label, ...]:
    """Return the labels of the metrics of a microbatch that holds the named tensors.

    A pass over a batch of one token collects the labels, so that there is no second list to keep up to date.

    Args:
        config, variant, options: as for :func:`evaluate`.
        tensor_names: names, among :data:`~nemo_geomask.losses.raw_batch.BATCH_KEYS`, of the tensors in the batch.
    """
    token = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    sequence, scalar = token[0], token[0, 0]
    tensors = {name: sequence if name in BY_SEQUENCE else token for name in tensor_names}
    raw = RawBatch(token, token, sequence, tensors, sequence.expand(len(config.batch_scalars)))
    _, metrics = _local_loss_and_metrics(config, variant, options, raw, PaddedSegments(), scalar, scalar)
    return metrics.labels


def _local_loss_and_metrics(
    config: LossConfig,
    variant: Variant,
    options: Any,
    raw: RawBatch,
    segments: Segments,
    global_seqs: Tensor,
    global_toks: Tensor,
) -> tuple[Tensor, MetricSums]:
    """Return the loss and the metrics over this rank's tokens; arguments are those of :func:`evaluate`."""
    batch = read(raw, segments, config.ratio_anchor, drop_filtered=config.drop_filtered_tokens)
    inputs = SurrogateInputs(batch.curr, batch.surrogate_log_ratio, batch.advantages, config, options)
    pool = SequencePool(batch)
    variant_tensors = variant.pool(inputs) if variant.pool is not None else {}
    variant_statistics = {name: pool.request(value, variant.pooled_by) for name, value in variant_tensors.items()}
    mismatch = request_mismatch(pool, batch, config)
    rules = request_rules(pool, batch, config.rules_in_loss)
    stats, reports = pool.reduce(config)

    is_full = config.metrics == "full"
    metrics = MetricSums(stats.weight, stats.sample_mask, segments, is_full=is_full)
    metrics.add(reports)
    if batch.filtered_mask is not None:
        filtered = batch.filtered_mask * segments.spread(batch.sample_mask)
        metrics.add([Metric(("geomask/filtered_tokens",), "token_sum", lambda: filtered.sum())])
    if is_full or config.nonfinite == "raise":
        metrics.add(report_invalid(raw, batch), always=True)  # under `raise`, PolicyLoss raises if one is above 0
    metrics.add(report_batch(batch, stats, config, global_seqs))
    metrics.add(report_audit(batch, stats))

    weight, reports = correct(batch, stats, mismatch, config)
    metrics.add(reports)
    batch_scalars = {}
    if raw.batch_scalars is not None:
        batch_scalars = dict(zip(config.batch_scalars, raw.batch_scalars, strict=True))
    if weight is not None and WEIGHT_MEAN in batch_scalars:
        weight = weight / batch_scalars[WEIGHT_MEAN]
    kept, (*reports, kept_tokens) = reject(batch, stats, rules, batch_scalars)
    metrics.add(reports)
    metrics.add([kept_tokens], always=config.denominator == "kept_in_loss")  # kept_factor reads it
    pooled = {name: segments.spread(statistic.value) for name, statistic in variant_statistics.items()}
    surrogate = variant.surrogate(inputs, pooled)
    metrics.add(report_surrogate(surrogate, batch, stats, is_full=is_full, is_pooled=len(pooled) > 0))

    token_loss = surrogate.loss if weight is None else weight * surrogate.loss
    if kept is not None:
        token_loss = zero_outside(kept, token_loss)
    if surrogate.penalty is not None:
        token_loss = token_loss + surrogate.penalty
    coefficient = F.token_coefficients(
        config.normalization,
        mask=stats.weight,
        tokens_of_sequence=None if stats.declared_tokens is None else segments.spread(stats.declared_tokens),
        global_seqs=global_seqs,
        global_toks=global_toks,
        constant=config.loss_normalization_constant,
    )
    loss = (coefficient * token_loss).sum()
    kl_coefficient = coefficient
    if kept is not None and config.kl_tokens == "kept":
        kl_coefficient = zero_outside(kept, coefficient)
    kl = _reference_kl(batch, kl_coefficient, config)
    if kl is not None:
        loss = loss + config.kl_coefficient * kl
    nll = _positive_nll(batch, stats, coefficient, config)
    if nll is not None:
        loss = loss + config.positive_example_nll_weight * nll
    # The loss is NaN where no number would be right: a global count is negative or not finite, or it is 0 although the
    # batch has trained tokens; a mask has values that no mask can have. The gradient of this rank's part is then 0.
    normalizer: Normalizer = "tokens" if config.normalization == "tokens" else "sequences"
    divisor = global_toks if normalizer == "tokens" else global_seqs
    margins = torch.stack((*batch.mask_margins, global_seqs, global_toks))
    # Infinity minus itself is NaN, which is the minimum of whatever contains it, and not at least 0.
    is_valid = (margins + (margins - margins)).amin() >= 0
    is_defined = (divisor > 0) | (stats.total_weight == 0)
    loss = torch.where(is_defined & is_valid, loss, torch.nan)

    zero = torch.zeros_like(loss)
    nll_normalizer: Normalizer = "none" if config.positive_example_nll_normalization == "microbatch" else normalizer
    reports = [
        Metric(("loss",), "local_sum", lambda: loss, normalizer),
        Metric(("kl_penalty",), "local_sum", lambda: zero if kl is None else kl, normalizer),
        Metric(("geomask/invalid_counts",), "shared_count", lambda: _count_invalid(margins[-2:])),
        Metric(("positive_nll_loss",), "local_sum", lambda: zero if nll is None else nll, nll_normalizer),
    ]
    metrics.add(reports)
    return loss, metrics


def _count_invalid(counts: Tensor) -> Tensor:
    """Return the number of global counts that are negative or not finite, 0-d float32."""
    return (~((counts >= 0) & (counts < torch.inf))).sum().float()


def _reference_kl(batch: TokenBatch, coefficient: Tensor, config: LossConfig) -> Tensor | None:
    """Return the KL to the reference policy, summed over this rank's tokens; None without reference log-probs."""
    if batch.ref is None:
        return None
    kl = F.kl_penalty(
        curr=batch.curr_kl,
        ref=batch.ref,
        prev=batch.gen if config.ratio_anchor == "gen" else batch.prev,
        gen=batch.prev if config.kl_ratio_anchor == "prev" else batch.gen,
        value=config.reference_policy_kl_type,
        gradient=config.reference_policy_kl_gradient,
        importance_weighted=config.use_on_policy_kl_approximation,
        input_clamp=config.kl_input_clamp_value,
        output_clamp=config.kl_output_clamp_value,
    )
    return (coefficient * kl).sum()


def _positive_nll(batch: TokenBatch, stats: SequenceStats, coefficient: Tensor, config: LossConfig) -> Tensor | None:
    """Return the NLL of sequences with a positive reward over this rank's tokens; None without rewards."""
    if batch.rewards is None:
        return None
    positive = (batch.rewards > 0).float()
    if config.positive_example_nll_normalization == "microbatch":
        positive_weight = (stats.trained_tokens * stats.sample_mask * positive).sum()
        coefficient = stats.weight * F.inverse_count(positive_weight)
    return -(batch.curr * coefficient * batch.segments.spread(positive)).sum()
