"""Numbers of a run: those with health limits, beyond which it is drifting or broken, and the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.measure.step_sums import Estimate, StepSums
from nemo_geomask.tools.shared.intervals import percentile_interval

Health = Literal["healthy", "drifting", "broken"]
HEALTH_ORDER: tuple[Health, ...] = ("healthy", "drifting", "broken")
"""Values of :data:`Health`, from best to worst."""
MAX_PULL = 0.05
"""Pull above which training without a correction is harmed: the theory's error is half of it, 2.5 % of the tokens."""
MIN_SEQUENCES = 32
"""Number of sequences that a bootstrap interval needs to be trusted."""

IMMATERIAL_K3 = 1e-5
"""k3, in nats a token, below which a mismatch is too small to matter.

The typical weight exp(Δ) is then within √(2 · 1e-5), or half a percent, of 1.
"""


class Reading(NamedTuple):
    """A number over several steps, its confidence interval over sequences, and the health that follows from it."""

    value: float
    low: float
    high: float
    health: Health


@dataclass(frozen=True)
class Quantity:
    """A number of one step, or of several steps together.

    Attributes:
        value: computes it from the sums by name: those of steps, and with ``has_interval`` also arrays of bootstrap
            replicates; NaN if the records don't contain the data.
    """

    name: str  # name under which NeMo-RL or this package reports it, if either does
    definition: str  # its definition, as tables, figures and pages show it
    value: Callable[[Any], Any]
    has_interval: bool = field(default=False, kw_only=True)  # True if the number is of ``BOOTSTRAP_SUMS`` alone

    def estimate(self, sums: StepSums) -> Estimate:
        """Return the number over the steps of ``sums``."""
        if not self.has_interval:
            return Estimate(float(self.value(sums)), math.nan, math.nan)
        replicates = sums.replicates()
        if not len(replicates["tokens"]):
            return Estimate(math.nan, math.nan, math.nan)
        return Estimate(float(self.value(sums)), *percentile_interval(self.value(replicates)))


@dataclass(frozen=True)
class HealthLimit(Quantity):
    """A number with two limits."""

    drifting: float  # drifting, broken: the limits
    broken: float
    source: str  # where the limits come from
    is_minimum: bool = False  # True if values below the limits are bad, False if values above are
    has_interval: bool = field(default=True, kw_only=True)

    @property
    def sign(self) -> str:
        """``<`` or ``>``: how a bad value compares with the limits."""
        return "<" if self.is_minimum else ">"

    def is_beyond(self, value: float) -> bool:
        """Return True if the value is on the bad side of the limit ``drifting``; False for NaN."""
        return value < self.drifting if self.is_minimum else value > self.drifting

    def read(self, sums: StepSums) -> Reading:
        """Return the number over the steps of ``sums``, and its health.

        The health is judged by the better end of the interval: a limit is exceeded only if the whole interval is beyond
        it.
        """
        estimate = self.estimate(sums)
        better_end = estimate.high if self.is_minimum else estimate.low
        health: Health = "healthy"
        if sums["sequences"] >= MIN_SEQUENCES and self.is_beyond(better_end):
            is_broken = better_end < self.broken if self.is_minimum else better_end > self.broken
            health = "broken" if is_broken else "drifting"
        return Reading(*estimate, health)


def effective_share(weight: Any, weight_squared: Any, count: Any) -> Any:
    """Return the effective sample size (Σ w)² / Σ w² as a share of the sample; NaN if all weights are 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.divide(weight**2, weight_squared * count)


HEALTH_LIMITS: tuple[HealthLimit, ...] = (
    HealthLimit(
        "token_mult_prob_error",
        "mean of exp|Δ| over trained tokens",
        value=lambda sums: sums["prob_error"] / sums["tokens"],
        drifting=1.05,
        broken=1.5,
        source="NeMo-RL docs/guides/dtensor-tp-accuracy.md and grpo.md: above 1.05 suspect the framework; broken: ours",
    ),
    HealthLimit(
        "geomask/mismatch_k3",
        "mean of exp(Δ) − 1 − Δ, nats a token",
        value=lambda sums: sums["k3"] / sums["tokens"],
        drifting=0.01,
        broken=0.1,
        source=(
            "NeMo-RL grpo.md: 1e-3 is acceptable, 0.0014 to 0.0031 usual with FP8 rollouts; verl: beyond 0.1 "
            "is a warning"
        ),
    ),
    HealthLimit(
        "effective sample size, tokens",
        "(Σ w)² / (n Σ w²) with w = exp(Δ)",
        value=lambda sums: effective_share(sums["weight"], sums["weight_squared"], sums["tokens"]),
        drifting=0.7,
        broken=0.3,
        source="verl docs/algo/rollout_corr.md: below 0.3 is a warning; drifting: ours",
        is_minimum=True,
    ),
    HealthLimit(
        "chi2_token",
        "mean of w² minus 1",
        value=lambda sums: sums["weight_squared"] / sums["tokens"] - 1,
        drifting=0.3,
        broken=1.0,
        source="verl docs/algo/rollout_corr.md: above 1 is a warning; drifting: ours",
    ),
)
"""Numbers by which a run is called healthy, drifting or broken."""

QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        "k1",
        "mean of −Δ, nats a token; also the difference of the log-perplexities",
        lambda sums: -sums["delta"] / sums["tokens"],
        has_interval=True,
    ),
    Quantity("k3 reversed", "mean of exp(−Δ) − 1 + Δ; policy_kl_error", lambda sums: sums.mean("k3_reverse")),
    Quantity("|Δ|", "mean, nats", lambda sums: sums["abs_delta"] / sums["tokens"], has_interval=True),
    Quantity("|Δ| > 0.1", "share of tokens; geomask/mismatch_above_0.1", lambda sums: sums.mean("above_0.1")),
    Quantity("|Δ| > 1", "share of tokens; geomask/mismatch_above_1", lambda sums: sums.mean("above_1")),
    Quantity(
        "Δ > 0",
        "share of tokens that the training engine finds likelier than the generation engine",
        lambda sums: sums.mean("delta_positive"),
    ),
    Quantity("noise", "mean |Δ| (at most 1) in units of 1 − p", lambda sums: sums.mean("capped_abs", "one_minus_p")),
    Quantity("surprise", "mean of −gen (at most 20), nats a token", lambda sums: sums.mean("surprise")),
    Quantity(
        "mean weight",
        "mean of exp(Δ); 1 if gen are the sampler's log-probs",
        lambda sums: sums["weight"] / sums["tokens"],
        has_interval=True,
    ),
    Quantity(
        "ESS, sequences",
        "effective sample size, as a share, of the weights exp(Σ Δ)",
        lambda sums: effective_share(sums["sequence_weight"], sums["sequence_weight_squared"], sums["sequences"]),
    ),
    Quantity(
        "ESS, sequence_mean",
        "effective sample size, as a share, of the weights exp(mean Δ)",
        lambda sums: effective_share(sums["mean_weight"], sums["mean_weight_squared"], sums["sequences"]),
    ),
    Quantity(
        "masked out",
        "share of sequences with a sample mask of 0",
        lambda sums: sums.mean("masked_out_sequences", "all_sequences"),
    ),
    Quantity(
        "their |Δ|",
        "mean |Δ| (at most 1) of the sequences that are masked out",
        lambda sums: sums.mean("masked_out_capped_abs", "masked_out_tokens"),
    ),
    Quantity("reward", "mean over sequences", lambda sums: sums.mean("reward", "sequences_with_reward")),
    Quantity(
        "response length",
        "mean over sequences, in tokens, tool output included",
        lambda sums: sums.mean("response_tokens", "sequences"),
    ),
    Quantity("staleness", "mean, in steps", lambda sums: sums.mean("staleness", "sequences_with_staleness")),
    Quantity(
        "wrong tokens",
        "Σ (1 − exp(Δ))₊, mean over responses: tokens that the training engine would not have sampled",
        lambda sums: sums.mean("wrong_tokens", "sequences_with_advantages"),
    ),
    Quantity("A > 0, wrong", "the part of it at A > 0", lambda sums: sums.mean("wrong_tokens_good", "wrong_tokens")),
    Quantity("A < 0, wrong", "the part of it at A < 0", lambda sums: sums.mean("wrong_tokens_bad", "wrong_tokens")),
    Quantity(
        "advantage explained",
        "share of the mean square of A that its context predicts: environment, turn and the reply before it",
        lambda sums: sums.advantage_explained().value,
    ),
    Quantity(
        "pull",
        "½ Σ s |1 − exp(Δ)|, mean over responses with A ≠ 0; s: share of A explained",
        lambda sums: sums.pull().value,
    ),
)
"""Quantities of a run, in the order of the table."""
REMOVED_SHARES: tuple[tuple[Literal["tokens", "capped_abs"], str], ...] = (
    ("tokens", "share of trained tokens that it removes"),
    ("capped_abs", "share of the sum of |Δ| (each at most 1) that it removes"),
)
"""Shares that a mask removes: the argument of :meth:`StepSums.removed_share`, and a definition."""
