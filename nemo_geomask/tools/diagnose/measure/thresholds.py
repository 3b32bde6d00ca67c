"""Numbers with health limits: the values beyond which a run is called drifting, and broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from nemo_geomask.tools.diagnose.measure.step_sums import BOOTSTRAP_SUMS, StepSums
from nemo_geomask.tools.shared.intervals import percentile_interval

Health = Literal["healthy", "drifting", "broken"]
HEALTH_ORDER: tuple[Health, ...] = ("healthy", "drifting", "broken")
"""Values of :data:`Health`, from best to worst."""
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
class HealthLimit:
    """A number with two limits.

    Attributes:
        name: name under which NeMo-RL or this package reports it, if either does.
        definition: its definition, as tables and pages show it.
        value: function that computes it from the ``BOOTSTRAP_SUMS`` by name; each is a float, or an array of bootstrap
            replicates.
        drifting, broken: the limits.
        source: where the limits come from.
        is_minimum: True if values below the limits are bad, False if values above are.
    """

    name: str
    definition: str
    value: Callable[[Mapping[str, Any]], Any]
    drifting: float
    broken: float
    source: str
    is_minimum: bool = False

    @property
    def sign(self) -> str:
        """``<`` or ``>``: how a bad value compares with the limits."""
        return "<" if self.is_minimum else ">"

    def is_beyond(self, value: float) -> bool:
        """Return True if the value is on the bad side of the limit ``drifting``; False for NaN."""
        return value < self.drifting if self.is_minimum else value > self.drifting

    def read(self, sums: StepSums) -> Reading:
        """Return the number over the steps of ``sums``.

        The health is judged by the better end of the interval: a limit is exceeded only if the whole interval is beyond
        it.
        """
        replicates = {name: sums.bootstrapped(name) for name in BOOTSTRAP_SUMS}
        if not len(replicates["tokens"]):
            return Reading(math.nan, math.nan, math.nan, "healthy")
        low, high = percentile_interval(self.value(replicates))
        better_end = high if self.is_minimum else low
        health: Health = "healthy"
        if sums["sequences"] >= MIN_SEQUENCES and self.is_beyond(better_end):
            is_broken = better_end < self.broken if self.is_minimum else better_end > self.broken
            health = "broken" if is_broken else "drifting"
        return Reading(float(self.value({name: sums[name] for name in BOOTSTRAP_SUMS})), low, high, health)


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
        value=lambda sums: sums["weight"] ** 2 / (sums["weight_squared"] * sums["tokens"]),
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
