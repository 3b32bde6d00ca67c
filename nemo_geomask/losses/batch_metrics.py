"""Metrics of the batch and of the surrogate.

Metrics that NeMo-RL's loss reports too have its names and meanings; the others begin with ``geomask/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.losses.batch import TokenBatch, is_finite, pad_empty, zero_outside
from nemo_geomask.losses.correction import count_saturated
from nemo_geomask.losses.sequence_stats import SequenceStats
from nemo_geomask.metrics import Metric, histogram


def report_surrogate(
    surrogate: F.Surrogate, batch: TokenBatch, stats: SequenceStats, *, is_full: bool, is_pooled: bool
) -> Iterator[Metric]:
    """Yield metrics of the policy ratios before and after clipping.

    Args:
        surrogate: per-token loss and ratios.
        batch: the microbatch.
        stats: statistics of its sequences.
        is_full: True to yield also how often a clip bound decides the loss, and how many ratios reach the limit of
            :func:`~nemo_geomask.functional.saturating_exp`.
        is_pooled: True if the surrogate's ratios are pooled over sequences; with ``is_full``, the mean of the token
            ratios is then a metric, too.
    """
    ratio, clipped_ratio = surrogate.ratio.detach(), surrogate.ratio_clamped.detach()
    # Added before a minimum and subtracted before a maximum, so that neither is reached at a token that isn't trained.
    # To select the trained tokens for each minimum and maximum would take four times as long on a CPU.
    exclusion = stats.exclusion
    if surrogate.ratio is surrogate.ratio_clamped:
        yield from _ratio_metrics(("probs_ratio", "probs_ratio_clamped"), ratio, exclusion)
    else:
        yield from _ratio_metrics(("probs_ratio",), ratio, exclusion)
        yield from _ratio_metrics(("probs_ratio_clamped",), clipped_ratio, exclusion)
    if not is_full:
        return
    log_ratio = batch.surrogate_log_ratio.detach()
    if is_pooled:
        # Only the mean: NeMo-RL's training loops take minima and maxima over microbatches for metrics with NeMo-RL's
        # own names, and add up all other metrics.
        yield Metric(("geomask/token_ratio",), "tokens", lambda: F.saturating_exp(log_ratio))
    low, high = surrogate.clips()
    yield Metric(("geomask/clip_fraction_low",), "tokens", lambda: low)
    yield Metric(("geomask/clip_fraction_high",), "tokens", lambda: high)
    yield Metric(("geomask/saturated_ratio",), "local_sum", lambda: count_saturated(log_ratio, stats.is_trained))
    if surrogate.dual_clipped is not None:
        yield Metric(("geomask/dual_clip_fraction",), "tokens", surrogate.dual_clipped.float)


def _ratio_metrics(names: tuple[str, ...], ratio: Tensor, exclusion: Tensor) -> Iterator[Metric]:
    """Yield the mean, the minimum and the maximum of a ratio over the trained tokens.

    Args:
        names: names of the mean; those of the extrema end in ``_min`` and ``_max``.
        ratio: token layout.
        exclusion: token layout, 0 at trained tokens and infinity elsewhere.
    """
    yield Metric(names, "tokens", lambda: ratio)
    minima, maxima = (tuple(f"{name}_{suffix}" for name in names) for suffix in ("min", "max"))
    yield Metric(minima, "min", lambda: pad_empty(ratio + exclusion, torch.inf).amin())
    yield Metric(maxima, "max", lambda: pad_empty(ratio - exclusion, -torch.inf).amax())


def report_audit(batch: TokenBatch, stats: SequenceStats) -> Iterator[Metric]:
    """Yield sums of mismatch and staleness over the audited tokens, and the sum of these tokens' weights.

    Audited tokens are the trained tokens whose log π_old was computed under ``audit_fraction``. The mismatch is
    prev − gen, the staleness curr − prev. Nothing is yielded for a batch without audited tokens' log-probs.
    """
    if batch.audited_prev is None:
        return
    is_audited = stats.is_trained & is_finite(batch.audited_prev)
    weight = zero_outside(is_audited, stats.weight)
    mismatch = zero_outside(is_audited, batch.audited_prev - batch.gen)
    policy = zero_outside(is_audited, batch.curr.detach() - batch.audited_prev)

    def weighted_sum(name: str, value: Callable[[], Tensor]) -> Metric:
        return Metric((f"geomask/audit/{name}",), "local_sum", lambda: (value() * weight).sum())

    yield weighted_sum("tokens", is_audited.float)
    yield weighted_sum("mismatch_abs_sum", mismatch.abs)
    yield weighted_sum("mismatch_k1_sum", mismatch.neg)
    yield weighted_sum("mismatch_k3_sum", lambda: F.k3(mismatch))
    yield weighted_sum("policy_abs_sum", policy.abs)
    yield weighted_sum("policy_k3_sum", lambda: F.k3(policy))


def report_batch(batch: TokenBatch, stats: SequenceStats, config: LossConfig, global_seqs: Tensor) -> Iterator[Metric]:
    r"""Yield metrics of the mismatch and the entropy; under ``metrics: full`` also of staleness and the reference.

    With Δ = prev − gen and tokens sampled from μ, the means over tokens are:

    - ``gen_kl_error``: KL(μ ‖ π_old) by the estimator ``reference_policy_kl_type``.
    - ``policy_kl_error``: the same estimator with π_old and μ exchanged, as NeMo-RL defines it. For tokens sampled from
      μ only k4 is an unbiased estimate of KL(π_old ‖ μ).
    - ``js_divergence_error``: :math:`\log\cosh(\Delta/2)`, which equals NeMo-RL's formula with the mixture of π_old
      and μ.
    - ``token_mult_prob_error``: :math:`e^{|\Delta|}`.
    - ``approx_entropy``: :math:`-(\pi_\theta/\mu)\log\pi_\theta`.

    If π_old is not known, Δ is curr − gen: NeMo-RL does the same where it takes π_old to be the current policy. The
    ``geomask/mismatch_…`` metrics are then called ``geomask/total_…``.
    """
    is_full, knows_prev = config.metrics == "full", config.knows_prev
    prefix = "geomask/mismatch" if knows_prev else "geomask/total"
    # The metrics come in groups, so that the tensors of one group are freed before the next group allocates its own.
    yield from _mismatch_metrics(batch.mismatch, stats, config.reference_policy_kl_type, prefix, is_full=is_full)
    yield from _total_metrics(batch, is_full=is_full and knows_prev)
    if not is_full:
        return
    if knows_prev:
        yield from _policy_metrics(batch.detached_log_ratio("policy"))
    if (reference_log_ratio := batch.reference_log_ratio) is not None:
        yield from _reference_metrics(reference_log_ratio, stats, global_seqs)
    yield from _impossible_logprob_metrics(batch, stats)


def _mismatch_metrics(
    mismatch: Tensor, stats: SequenceStats, kl_type: F.KLEstimator, prefix: str, *, is_full: bool
) -> Iterator[Metric]:
    """Yield metrics of Δ = ``mismatch``, token layout; the k1 estimate of KL(μ ‖ π_old) is −Δ."""
    # All estimates are made of e^Δ - 1 and e^-Δ - 1, since exponentials are most of the cost. Both keep the digits of a
    # small Δ.
    upper, lower = mismatch.clamp(max=F.LOG_RATIO_LIMIT), mismatch.clamp(min=-F.LOG_RATIO_LIMIT)
    excess, inverse_excess = torch.expm1(upper), torch.expm1(-lower)
    k3, inverse_k3 = excess - upper, inverse_excess + lower
    if kl_type == "k3":
        yield Metric(("gen_kl_error", f"{prefix}_k3"), "tokens", lambda: k3)
        yield Metric(("policy_kl_error",), "tokens", lambda: inverse_k3)
    else:
        ratio = F.saturating_exp(mismatch) if kl_type == "k4" else None
        yield Metric(("gen_kl_error",), "tokens", lambda: F.kl_estimate(-mismatch, kl_type))
        yield Metric(("policy_kl_error",), "tokens", lambda: F.kl_estimate(mismatch, kl_type, ratio=ratio))
        yield Metric((f"{prefix}_k3",), "tokens", lambda: k3)
    yield Metric(("token_mult_prob_error",), "tokens", lambda: 1 + torch.maximum(excess, inverse_excess))
    # log cosh(Δ/2) = log(1 + sinh²(Δ/2)) / 2, and 4 sinh²(Δ/2) = e^Δ + e^-Δ - 2, the sum of both k3.
    yield Metric(("js_divergence_error",), "tokens", lambda: torch.log1p((k3 + inverse_k3) * 0.25), unit=0.5)
    if not is_full:
        return
    size = mismatch.abs()
    yield Metric((f"{prefix}_abs",), "tokens", lambda: size)
    yield Metric((f"{prefix}_k1",), "tokens", lambda: mismatch, unit=-1.0)
    yield Metric((f"{prefix}_max",), "max", lambda: pad_empty(size - stats.exclusion, 0.0).amax().clamp(min=0.0))
    yield histogram(prefix, size)


def _total_metrics(batch: TokenBatch, *, is_full: bool) -> Iterator[Metric]:
    """Yield the entropy and, if ``is_full``, metrics of curr − gen, such as estimates of KL(μ ‖ π_θ)."""
    curr, total = batch.curr.detach(), batch.detached_log_ratio("total")
    if not is_full:
        yield Metric(("approx_entropy",), "tokens", lambda: F.saturating_exp(total) * curr, unit=-1.0)
        return
    clamped = total.clamp(max=F.LOG_RATIO_LIMIT)
    excess = torch.expm1(clamped)
    yield Metric(("approx_entropy",), "tokens", lambda: (1 + excess) * curr, unit=-1.0)
    yield Metric(("geomask/total_abs",), "tokens", total.abs)
    yield Metric(("geomask/total_k1",), "tokens", lambda: total, unit=-1.0)
    yield Metric(("geomask/total_k3",), "tokens", lambda: excess - clamped)


def _policy_metrics(policy: Tensor) -> Iterator[Metric]:
    """Yield metrics of the staleness ``policy`` = curr − prev, token layout."""
    yield Metric(("geomask/policy_abs",), "tokens", policy.abs)
    yield Metric(("geomask/policy_k3",), "tokens", lambda: F.k3(policy))


def _reference_metrics(log_ratio: Tensor, stats: SequenceStats, global_seqs: Tensor) -> Iterator[Metric]:
    """Yield estimates of KL(π_θ ‖ π_ref) from x = ``log_ratio`` = curr − ref.

    k1 is x and k3 is e^−x − 1 + x. Both assume that the tokens were sampled from a policy close to π_θ.
    """
    k1 = (log_ratio * stats.weight).sum()
    yield Metric(("geomask/reference_k1",), "token_sum", lambda: k1)
    yield Metric(("geomask/reference_k3",), "tokens", lambda: F.k3(-log_ratio))
    yield Metric(
        ("geomask/reference_k1_sequence",), "local_sum", lambda: F.inverse_count(global_seqs) * k1, "sequences"
    )


def _impossible_logprob_metrics(batch: TokenBatch, stats: SequenceStats) -> Iterator[Metric]:
    """Yield how often log-probs are above 0 or exactly 0; many of these point to a bug in the trainer or sampler."""

    def positive() -> Tensor:
        highest = torch.maximum(torch.maximum(batch.gen, batch.prev), batch.curr.detach())
        return ((highest > 1e-3) & stats.is_trained).count_nonzero().float()

    yield Metric(("geomask/positive_logprobs",), "local_sum", positive)

    def zero_gen() -> Tensor:
        # |sign| is 1 except at 0; to compare with 0 and to select takes four times as long on a CPU.
        return stats.total_weight - (batch.gen.sign().abs() * stats.weight).sum()

    yield Metric(("geomask/zero_gen_logprobs",), "token_sum", zero_gen)
