"""Numbers that have a limit, and what they say of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from nemo_geomask.diagnosis.statistics import BOOT, StepSums

__all__ = ["LEAST_SEQUENCES", "LEVELS", "Health", "Level", "Reading"]

Health = Literal["healthy", "drifting", "broken"]
LEAST_SEQUENCES = 32
"""A bootstrap over fewer says nothing of the rest."""


class Reading(NamedTuple):
    """A number over steps, its 95 % interval over sequences, and what it says of the run."""

    value: float
    low: float
    high: float
    health: Health


@dataclass(frozen=True)
class Level:
    """A number that has a limit.

    Attributes:
        name: as NeMo-RL or this package reports it, where one does.
        definition: what it is.
        value: of sums by name, single ones or those of all replicates of the bootstrap.
        drifting, broken: from where on.
        below: whether low values are the bad ones.
        logged: names under which a run logs it.
        source: of the limits.
    """

    name: str
    definition: str
    value: Callable[[Mapping[str, Any]], Any]
    drifting: float
    broken: float
    source: str
    below: bool = False
    logged: tuple[str, ...] = ()

    def beyond(self, value: float) -> bool:
        """Whether it is on the bad side of ``drifting``; NaN isn't."""
        return value < self.drifting if self.below else value > self.drifting

    def of(self, sums: StepSums) -> Reading:
        """The value over steps, its interval, and what the end of it that is on the better side says."""
        counted = sums.boot[sums.boot[:, 0] > 0]
        if not len(counted):
            return Reading(math.nan, math.nan, math.nan, "healthy")
        values = self.value({name: counted[:, place] for place, name in enumerate(BOOT)})
        low, high = (float(end) for end in np.quantile(values, [0.025, 0.975]))
        sign, sure = (-1, high) if self.below else (1, low)
        health: Health = "healthy"
        if sums["sequences"] >= LEAST_SEQUENCES and self.beyond(sure):
            health = "broken" if sign * sure > sign * self.broken else "drifting"
        return Reading(float(self.value({name: sums[name] for name in BOOT})), low, high, health)


LEVELS: tuple[Level, ...] = (
    Level(
        "token_mult_prob_error",
        "mean of exp|Δ| over trained tokens",
        lambda sums: sums["prob_error"] / sums["tokens"],
        1.05,
        1.5,
        "NeMo-RL docs/guides/dtensor-tp-accuracy.md and grpo.md: above 1.05 suspect the framework; broken: ours",
        logged=("token_mult_prob_error",),
    ),
    Level(
        "geomask/mismatch_k3",
        "mean of exp(Δ) − 1 − Δ, nats a token",
        lambda sums: sums["k3"] / sums["tokens"],
        0.01,
        0.1,
        "NeMo-RL grpo.md: 1e-3 is acceptable, 0.0014 to 0.0031 usual with FP8 rollouts; verl: beyond 0.1 is a warning",
        logged=("geomask/mismatch_k3", "gen_kl_error"),
    ),
    Level(
        "effective sample size, tokens",
        "(Σ w)² / (n Σ w²) with w = exp(Δ)",
        lambda sums: sums["weight"] ** 2 / (sums["weight_square"] * sums["tokens"]),
        0.7,
        0.3,
        "verl docs/algo/rollout_corr.md: below 0.3 is a warning; drifting: ours",
        below=True,
    ),
    Level(
        "chi2_token",
        "mean of w² less 1",
        lambda sums: sums["weight_square"] / sums["tokens"] - 1,
        0.3,
        1.0,
        "verl docs/algo/rollout_corr.md: above 1 is a warning; drifting: ours",
    ),
)
