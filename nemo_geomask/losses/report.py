"""Metrics of the batch and the surrogate: NeMo-RL's, under its names and meanings, and ``geomask/…``."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.losses.batch import TokenBatch
from nemo_geomask.losses.observe import Observed
from nemo_geomask.metrics import Metric

__all__ = ["report_batch", "report_surrogate"]


def report_surrogate(surrogate: F.Surrogate, batch: TokenBatch, seen: Observed) -> list[Metric]:
    """Ratios before and after clipping and where the clip decided."""
    reports: list[Metric] = []
    beyond = seen.trains.reciprocal() - 1  # 0 where a token trains, else infinite
    for name, ratio in (("probs_ratio", surrogate.ratio), ("probs_ratio_clamped", surrogate.ratio_clamped)):
        reports += _ratio(name, ratio.detach(), beyond)
    policy = batch.log_ratios("policy")
    reports += [
        Metric(("geomask/clip_fraction_low",), "tokens", lambda: surrogate.clips()[0]),
        Metric(("geomask/clip_fraction_high",), "tokens", lambda: surrogate.clips()[1]),
        Metric(("geomask/saturated_ratio",), "part", lambda: F.saturated(policy * seen.trains)),
    ]
    if surrogate.dual_clipped is not None:
        reports.append(Metric(("geomask/dual_clip_fraction",), "tokens", surrogate.dual_clipped.float))
    return reports


def _ratio(name: str, ratio: Tensor, beyond: Tensor) -> list[Metric]:
    """Mean and extrema; ``beyond`` is infinite at tokens that don't train."""
    none = beyond.numel() == 0  # a reduction over no element is an error in torch
    return [
        Metric((name,), "tokens", lambda: ratio),
        Metric((f"{name}_min",), "lowest", lambda: beyond.new_tensor(torch.inf) if none else (ratio + beyond).amin()),
        Metric((f"{name}_max",), "highest", lambda: beyond.new_tensor(-torch.inf) if none else (ratio - beyond).amax()),
    ]


def report_batch(batch: TokenBatch, kl_type: F.KLEstimator) -> list[Metric]:
    r"""Train/generation mismatch, staleness and entropy.

    With Δ = prev − gen and tokens sampled from μ: ``gen_kl_error`` estimates KL(μ ‖ π_old) by NeMo-RL's
    ``kl_type``, and ``policy_kl_error`` is the same with the two exchanged, as NeMo-RL has it (for tokens from μ only
    k4 is unbiased there); ``js_divergence_error`` is :math:`\log\cosh(\Delta/2)`, which equals
    NeMo-RL's mixture form; ``token_mult_prob_error`` is :math:`e^{|\Delta|}`; ``approx_entropy`` is
    :math:`-(\pi_\theta/\mu)\log\pi_\theta`.
    """
    mismatch, policy = batch.mismatch, batch.log_ratios("policy")
    x = mismatch.clamp(-F.LOG_RATIO_LIMIT, F.LOG_RATIO_LIMIT)
    # Everything below is made of these two, which keep the digits of a small x.
    up, down = torch.expm1(x), torch.expm1(-x)
    curr, total = batch.curr.detach(), batch.log_ratios("total")
    by_k3 = kl_type == "k3"
    return [
        Metric(("token_mult_prob_error",), "tokens", lambda: 1 + torch.maximum(up, down)),
        Metric(("gen_kl_error",), "tokens", lambda: up - x if by_k3 else F.kl_estimate(-mismatch, kl_type)),
        Metric(
            ("policy_kl_error",),
            "tokens",
            lambda: down + x if by_k3 else F.kl_estimate(mismatch, kl_type, ratio=1 + up),
        ),
        # sinh²(x/2) = -up·down/4 and log cosh = log1p(sinh²)/2.
        Metric(("js_divergence_error",), "tokens", lambda: torch.log1p(up * down / -4) / 2),
        Metric(("approx_entropy",), "tokens", lambda: -F.saturating_exp(total) * curr),
        Metric(("geomask/mismatch_abs",), "tokens", mismatch.abs),
        Metric(("geomask/mismatch_k1",), "tokens", mismatch.neg),
        Metric(("geomask/mismatch_k3",), "tokens", lambda: up - x),
        Metric(("geomask/policy_abs",), "tokens", policy.abs),
        Metric(("geomask/policy_k3",), "tokens", lambda: F.kl_estimate(-policy, "k3")),
    ]
