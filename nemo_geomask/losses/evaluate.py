"""The one pass: read, observe, correct, reject, surrogate, reduce. Tensors in, a scalar and a vector out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.config.loss import WEIGHT_MEAN
from nemo_geomask.losses.batch import Raw, TokenBatch, read
from nemo_geomask.losses.correction import correct
from nemo_geomask.losses.observe import Observed, observe
from nemo_geomask.losses.rejection import reject
from nemo_geomask.losses.report import report_audit, report_batch, report_surrogate
from nemo_geomask.losses.variant import SurrogateInputs, Variant
from nemo_geomask.metrics import Label, Metric, Normalizer, Sums
from nemo_geomask.segments import PaddedSegments, Segments

__all__ = ["evaluate", "labels_of"]


def evaluate(
    config: LossConfig,
    variant: Variant,
    options: Any,
    raw: Raw,
    layout: Segments,
    tensors: tuple[Tensor, ...],
    global_seqs: Tensor,
    global_toks: Tensor,
) -> tuple[Tensor, Tensor]:
    """Loss and metrics of one microbatch.

    Args:
        config: settings in force.
        variant: the objective.
        options: the variant's own settings.
        raw: the microbatch.
        layout: the kind of its layout, and over which ranks; ``tensors`` are its own.
        global_seqs, global_toks: 0-d float32, valid sequences and valid tokens in the optimiser step.

    Returns: the loss, float32 0-d, its value over all ranks and its gradient that of this rank's part; values of the
    metrics over all ranks, whose names :func:`labels_of` gives.
    """
    loss, metrics = _reduced(config, variant, options, raw, layout.of(*tensors), global_seqs, global_toks)
    return metrics.whole(loss, global_seqs, global_toks)


def labels_of(config: LossConfig, variant: Variant, options: Any, names: Iterable[str]) -> tuple[Label, ...]:
    """Of the metrics of a microbatch that holds what ``names`` say, of :data:`~nemo_geomask.losses.batch.KEYS`.

    Found by a pass over a batch of one token, so that no table has to agree with the code.
    """
    one = torch.ones(1, 1, dtype=torch.float32)
    others = {name: one[0] if name == "rewards" else one for name in names}
    raw = Raw(one, one, one[0], others, one[0].expand(len(config.told)))
    return _reduced(config, variant, options, raw, PaddedSegments(), one[0, 0], one[0, 0])[1].labels


def _reduced(
    config: LossConfig, variant: Variant, options: Any, raw: Raw, segments: Segments, *counts: Tensor
) -> tuple[Tensor, Sums]:
    """Loss and metrics over this rank's tokens; ``counts`` are the global ones, of sequences and tokens."""
    global_seqs, global_toks = counts
    batch, of_batch = read(raw, segments, config.ratio_anchor)
    inputs = SurrogateInputs(batch.curr, batch.log_ratio, batch.advantages, config, options)
    pooled = variant.pool(inputs) if variant.pool is not None else {}
    of_variant = {f"variant.{name}": value for name, value in pooled.items()}
    seen, reports = observe(batch, config.rules_in_loss, config, of_variant)
    full = config.metrics == "full"
    metrics = Sums(seen.weight, seen.sample_mask, segments, full=full)
    metrics.add(reports)
    metrics.add(of_batch, always=config.nonfinite == "raise")  # then the caller looks at them
    metrics.add(report_batch(batch, seen, config, global_seqs))
    metrics.add(report_audit(batch, seen))

    weight, reports = correct(batch, seen, config)
    metrics.add(reports)
    bounds = {} if raw.bounds is None else dict(zip(config.told, raw.bounds, strict=True))
    if weight is not None and WEIGHT_MEAN in bounds:
        weight = weight / bounds[WEIGHT_MEAN]
    kept, reports = reject(batch, seen, config.rules_in_loss, bounds)
    metrics.add(reports)
    found = seen.sums.__getitem__ if variant.pooled_by == "sum" else seen.mean
    surrogate = variant.surrogate(inputs, {name: segments.spread(found(f"variant.{name}")) for name in pooled})
    metrics.add(report_surrogate(surrogate, batch, seen, full=full, by_sequence=len(pooled) > 0))

    coefficient = F.token_coefficients(
        config.normalization,
        mask=seen.weight,
        tokens_of_sequence=segments.spread(seen.declared) if config.normalization == "sequences" else None,
        global_seqs=global_seqs,
        global_toks=global_toks,
        constant=config.loss_normalization_constant,
    )
    per_token = surrogate.loss if weight is None else weight * surrogate.loss
    if kept is not None:
        per_token = torch.where(kept, per_token, 0.0)
    if surrogate.penalty is not None:
        per_token = per_token + surrogate.penalty
    loss = (coefficient * per_token).sum()
    own: Normalizer = "tokens" if config.normalization == "tokens" else "sequences"
    kl, nll = _kl(batch, coefficient, config), _positive_nll(batch, seen, coefficient, config)
    if kl is not None:
        loss = loss + config.kl_coefficient * kl
    if nll is not None:
        loss = loss + config.positive_example_nll_weight * nll
    # Trained tokens under a count that says there are none: no number is right.
    divisor = global_toks if own == "tokens" else global_seqs
    loss = torch.where((divisor > 0) | (seen.trained == 0), loss, torch.nan)

    zero = torch.zeros_like(loss)
    of_nll: Normalizer = "none" if config.positive_example_nll_normalization == "microbatch" else own
    reports = [
        Metric(("loss",), "part", lambda: loss, own),
        Metric(("kl_penalty",), "part", lambda: zero if kl is None else kl, own),
        Metric(("positive_nll_loss",), "part", lambda: zero if nll is None else nll, of_nll),
    ]
    metrics.add(reports)
    return loss, metrics


def _kl(batch: TokenBatch, coefficient: Tensor, config: LossConfig) -> Tensor | None:
    if batch.ref is None:
        return None
    kl = F.kl_penalty(
        curr=batch.curr_kl,
        ref=batch.ref,
        prev=batch.gen if config.ratio_anchor == "gen" else batch.prev,
        gen=batch.gen,
        value=config.reference_policy_kl_type,
        gradient=config.reference_policy_kl_gradient,
        importance_weighted=config.use_on_policy_kl_approximation,
        input_clamp=config.kl_input_clamp_value,
        output_clamp=config.kl_output_clamp_value,
    )
    return (coefficient * kl).sum()


def _positive_nll(batch: TokenBatch, seen: Observed, coefficient: Tensor, config: LossConfig) -> Tensor | None:
    if batch.rewards is None:
        return None
    positive = (batch.rewards > 0).float()
    if config.positive_example_nll_normalization == "microbatch":
        coefficient = seen.weight * F.inverse_count((seen.tokens * seen.sample_mask * positive).sum())
    return -(batch.curr * coefficient * batch.segments.spread(positive)).sum()
