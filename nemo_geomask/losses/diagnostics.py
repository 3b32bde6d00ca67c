"""Metrics of the batch and the surrogate: NeMo-RL's, under its names and meanings, and ``geomask/…``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.functional import LOG_RATIO_LIMIT
from nemo_geomask.losses.batch import TokenBatch, Verdict
from nemo_geomask.metrics import MetricSums

__all__ = ["report_batch", "report_surrogate"]


def report_surrogate(surrogate: F.Surrogate, batch: TokenBatch, metrics: MetricSums) -> None:
    """Ratios before and after clipping and where the clip decided."""
    # 0 where a token trains, infinite elsewhere: the bit pattern of infinity AND all zeros or all ones.
    beyond = ((batch.trained.int() - 1) & 0x7F800000).view(torch.float32)
    for name, ratio in (("probs_ratio", surrogate.ratio), ("probs_ratio_clamped", surrogate.ratio_clamped)):
        ratio = ratio.detach().expand(batch.weight.shape)
        metrics.tokens(name, ratio)
        metrics.extrema(
            name, _extreme(ratio + beyond, torch.amin, torch.inf), _extreme(ratio - beyond, torch.amax, -torch.inf)
        )
    side = surrogate.clip_side if surrogate.clip_side is not None else torch.zeros_like(batch.weight)
    metrics.tokens("geomask/clip_fraction_low", torch.relu(-side))
    metrics.tokens("geomask/clip_fraction_high", torch.relu(side))
    if surrogate.dual_clipped is not None:
        metrics.tokens("geomask/dual_clip_fraction", surrogate.dual_clipped)
    metrics.part("geomask/saturated_ratio", F.overflow_count(batch.policy))


@torch.no_grad()
def report_batch(batch: TokenBatch, verdict: Verdict, kl_type: F.KLEstimator, metrics: MetricSums) -> None:
    r"""Train/generation mismatch, staleness, entropy and counts.

    With Δ = prev − gen and tokens sampled from μ: ``gen_kl_error`` estimates KL(μ ‖ π_old) by NeMo-RL's
    ``kl_type``, and ``policy_kl_error`` is the same with the two exchanged, as NeMo-RL has it (for tokens from μ only
    k4 is unbiased there); ``js_divergence_error`` is :math:`\log\cosh(\Delta/2)`, which equals
    NeMo-RL's mixture form; ``token_mult_prob_error`` is :math:`e^{|\Delta|}`; ``approx_entropy`` is
    :math:`-(\pi_\theta/\mu)\log\pi_\theta`.
    """
    mismatch, policy = batch.mismatch, batch.policy
    size = mismatch.abs()
    x = mismatch.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # Everything below is made of these two, which keep the digits of a small x.
    up, down = torch.expm1(x), torch.expm1(-x)
    k3 = up - x
    metrics.tokens("token_mult_prob_error", 1 + torch.maximum(up, down))
    metrics.tokens("gen_kl_error", k3 if kl_type == "k3" else F.kl_estimate(-mismatch, kl_type))
    policy_kl = down + x if kl_type == "k3" else F.kl_estimate(mismatch, kl_type, ratio=1 + up)
    metrics.tokens("policy_kl_error", policy_kl)
    # sinh²(x/2) = -up·down/4 and log cosh = log1p(sinh²)/2.
    metrics.tokens("js_divergence_error", torch.log1p(up * down / -4) / 2)
    entropy = -F.saturating_exp(batch.total) * batch.curr
    metrics.tokens("approx_entropy", entropy)
    metrics.scalar("num_valid_samples", batch.valid_samples)

    metrics.tokens("geomask/mismatch_abs", size)
    metrics.tokens("geomask/mismatch_k1", -mismatch)
    metrics.tokens("geomask/mismatch_k3", k3)
    metrics.tokens("geomask/policy_abs", policy.abs())
    metrics.tokens("geomask/policy_k3", F.kl_estimate(-policy, "k3"))
    for name, count in batch.nonfinite.items():
        metrics.part(f"geomask/nonfinite_{name}", count)
    metrics.scalar("geomask/dropped_sequences", verdict.dropped.sum())


def _extreme(value: Tensor, reduce: Callable[[Tensor], Tensor], empty: float) -> Tensor:
    # A reduction over no element is an error in torch.
    return reduce(value) if value.numel() else value.new_full((), empty)
