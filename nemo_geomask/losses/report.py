"""Metrics of the batch and the surrogate: NeMo-RL's, under its names and meanings, and ``geomask/…``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.kernels.select import select, where_finite
from nemo_geomask.losses.batch import TokenBatch
from nemo_geomask.losses.correction import saturated
from nemo_geomask.losses.observe import Observed
from nemo_geomask.metrics import Metric, histogram

__all__ = ["report_audit", "report_batch", "report_surrogate"]


def report_surrogate(
    surrogate: F.Surrogate, batch: TokenBatch, seen: Observed, *, full: bool, by_sequence: bool
) -> Iterator[Metric]:
    """Ratios before and after clipping and, if ``full``, where the clip decided, and the tokens' own ratios where the
    surrogate takes them ``by_sequence``."""
    beyond = seen.trains.reciprocal() - 1  # 0 where a token trains, else infinite
    ratios = {"probs_ratio": surrogate.ratio, "probs_ratio_clamped": surrogate.ratio_clamped}
    if surrogate.ratio is surrogate.ratio_clamped:
        yield from _ratio(tuple(ratios), surrogate.ratio.detach(), beyond)
    else:
        for name, ratio in ratios.items():
            yield from _ratio((name,), ratio.detach(), beyond)
    if not full:
        return
    if by_sequence:
        # No extrema: NeMo-RL's loops know those of its own names, and add up all others.
        yield Metric(("geomask/token_ratio",), "tokens", lambda: F.saturating_exp(batch.log_ratio.detach()))
    low, high = surrogate.clips()
    yield Metric(("geomask/clip_fraction_low",), "summed", lambda: select(low, seen.weight).sum())
    yield Metric(("geomask/clip_fraction_high",), "summed", lambda: select(high, seen.weight).sum())
    yield Metric(("geomask/saturated_ratio",), "part", lambda: saturated(batch.log_ratio.detach(), seen.trains))
    if surrogate.dual_clipped is not None:
        yield Metric(("geomask/dual_clip_fraction",), "tokens", surrogate.dual_clipped.float)


def _ratio(names: tuple[str, ...], ratio: Tensor, beyond: Tensor) -> Iterator[Metric]:
    """Mean and extrema; ``beyond`` is infinite at tokens that don't train."""
    none = beyond.numel() == 0  # a reduction over no element is an error in torch
    lowest, highest = (tuple(f"{name}_{end}" for name in names) for end in ("min", "max"))
    yield Metric(names, "tokens", lambda: ratio)
    yield Metric(lowest, "lowest", lambda: beyond.new_tensor(torch.inf) if none else (ratio + beyond).amin())
    yield Metric(highest, "highest", lambda: beyond.new_tensor(-torch.inf) if none else (ratio - beyond).amax())


def report_audit(batch: TokenBatch, seen: Observed) -> Iterator[Metric]:
    """Mismatch and staleness of the tokens whose π_old was computed: sums, and how many they are of."""
    if batch.audited is None:
        return
    known = where_finite(seen.trains, batch.audited)
    weight = select(known, seen.weight)
    mismatch, policy = select(known, batch.audited - batch.gen), select(known, batch.curr.detach() - batch.audited)

    def total(name: str, value: Callable[[], Tensor]) -> Metric:
        return Metric((f"geomask/audit/{name}",), "part", lambda: (value() * weight).sum())

    yield total("tokens", lambda: known)
    yield total("mismatch_abs_sum", mismatch.abs)
    yield total("mismatch_k1_sum", mismatch.neg)
    yield total("mismatch_k3_sum", lambda: F.token_statistic(mismatch, "k3"))
    yield total("policy_abs_sum", policy.abs)
    yield total("policy_k3_sum", lambda: F.token_statistic(policy, "k3"))


def report_batch(batch: TokenBatch, seen: Observed, config: LossConfig, global_seqs: Tensor) -> Iterator[Metric]:
    r"""Train/generation mismatch and entropy; under ``metrics: full`` also staleness, the distance from the reference,
    and what a bug would show.

    With Δ = prev − gen and tokens sampled from μ: ``gen_kl_error`` estimates KL(μ ‖ π_old) by NeMo-RL's
    ``reference_policy_kl_type``, and ``policy_kl_error`` is the same with the two exchanged, as NeMo-RL has it (for
    tokens from μ only k4 is unbiased there); ``js_divergence_error`` is :math:`\log\cosh(\Delta/2)`, which equals
    NeMo-RL's mixture form; ``token_mult_prob_error`` is :math:`e^{|\Delta|}`; ``approx_entropy`` is
    :math:`-(\pi_\theta/\mu)\log\pi_\theta`.

    Where π_old is not known, Δ is curr − gen, as in NeMo-RL where it takes π_old to be the current policy, and what is
    reported under this package's names is called so.
    """
    # One after the other, so that the tensors of each are gone before the next needs some.
    full, own = config.metrics == "full", "geomask/mismatch" if config.knows_prev else "geomask/total"
    yield from _mismatch(batch.mismatch, seen, config.reference_policy_kl_type, own=own)
    yield from _total(batch, full=full and config.knows_prev)
    if full and config.knows_prev:
        yield from _policy(batch.log_ratios("policy"))
    if full and batch.reference is not None:
        yield from _reference(batch.reference, seen, global_seqs)
    yield from _impossible(batch, seen)


def _mismatch(mismatch: Tensor, seen: Observed, kl_type: F.KLEstimator, *, own: str) -> Iterator[Metric]:
    # All of it is made of e^|Δ| - 1 and e^-|Δ| - 1, which keep the digits of a small Δ.
    size = mismatch.abs()
    clamped = size.clamp(max=F.LOG_RATIO_LIMIT)
    up = torch.expm1(clamped)
    mult = 1 + up
    down = -up / mult
    if kl_type == "k3":
        # lerp is exact at both ends.
        above, below, positive = up - clamped, down + size, torch.relu(torch.sign(mismatch))
        yield Metric(("gen_kl_error", f"{own}_k3"), "tokens", lambda: torch.lerp(below, above, positive))
        yield Metric(("policy_kl_error",), "tokens", lambda: torch.lerp(above, below, positive))
    else:
        ratio = F.saturating_exp(mismatch) if kl_type == "k4" else None
        yield Metric(("gen_kl_error",), "tokens", lambda: F.kl_estimate(-mismatch, kl_type))
        yield Metric(("policy_kl_error",), "tokens", lambda: F.kl_estimate(mismatch, kl_type, ratio=ratio))
        yield Metric((f"{own}_k3",), "tokens", lambda: F.kl_estimate(-mismatch, "k3"))
    yield Metric(("token_mult_prob_error",), "tokens", lambda: mult)
    # sinh²(Δ/2) = -up·down/4 and log cosh = log1p(sinh²)/2.
    yield Metric(("js_divergence_error",), "tokens", lambda: (up * down).mul_(-0.25).log1p_(), unit=0.5)
    yield Metric((f"{own}_abs",), "tokens", lambda: size)
    yield Metric((f"{own}_k1",), "tokens", lambda: mismatch, unit=-1.0)
    yield Metric((f"{own}_max",), "highest", lambda: (size * seen.trains).amax() if size.numel() else size.sum())
    yield histogram(own, size)


def _total(batch: TokenBatch, *, full: bool) -> Iterator[Metric]:
    curr, total = batch.curr.detach(), batch.log_ratios("total")
    clamped = total.clamp(max=F.LOG_RATIO_LIMIT)
    excess = torch.expm1(clamped)
    yield Metric(("approx_entropy",), "tokens", lambda: torch.addcmul(curr, excess, curr), unit=-1.0)
    if full:
        yield Metric(("geomask/total_abs",), "tokens", total.abs)
        yield Metric(("geomask/total_k1",), "tokens", lambda: total, unit=-1.0)
        yield Metric(("geomask/total_k3",), "tokens", lambda: excess - clamped)


def _policy(policy: Tensor) -> Iterator[Metric]:
    yield Metric(("geomask/policy_abs",), "tokens", policy.abs)
    yield Metric(("geomask/policy_k3",), "tokens", lambda: F.token_statistic(policy, "k3"))


def _reference(x: Tensor, seen: Observed, global_seqs: Tensor) -> Iterator[Metric]:
    """KL(π ‖ π_ref) of x = curr − ref, for tokens sampled from near π: k1 x, k3 e^−x − 1 + x."""
    k1 = (x * seen.weight).sum()
    yield Metric(("geomask/reference_k1",), "summed", lambda: k1)
    yield Metric(("geomask/reference_k3",), "tokens", lambda: F.token_statistic(-x, "k3"))
    yield Metric(("geomask/reference_k1_sequence",), "part", lambda: F.inverse_count(global_seqs) * k1, "sequences")


def _impossible(batch: TokenBatch, seen: Observed) -> Iterator[Metric]:
    """Log-probs that a bug must have made where there are many: above 0, or exactly 0."""

    def positive() -> Tensor:
        highest = torch.maximum(torch.maximum(batch.gen, batch.prev), batch.curr.detach())
        return select(highest, seen.trains, above=1e-3).sum()

    def zero() -> Tensor:
        return seen.trained - select(batch.gen.abs(), seen.weight).sum()

    yield Metric(("geomask/positive_logprobs",), "part", positive)
    yield Metric(("geomask/zero_gen_logprobs",), "summed", zero)
