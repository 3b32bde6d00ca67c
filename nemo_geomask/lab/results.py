"""What a comparison came to: one history a variant, and the numbers of the table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

__all__ = ["LabResult", "Row", "VariantResult"]

Row = dict[str, Any]

# Steps that "last" averages over; one batch of rewards alone is noisy.
_LAST = 10


@dataclass
class VariantResult:
    """One curve.

    Attributes:
        label: the SPEC.
        loss_fn: settings in force.
        corrected: whether the weight was applied; if not, ``geomask/weight…`` is what it would have been.
        history: metrics of each step.
        seconds: wall-clock time of the training.
        complete: False when the run was interrupted.
    """

    label: str
    loss_fn: Mapping[str, Any]
    corrected: bool
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False

    def series(self, key: str) -> list[float]:
        """One metric over the steps, NaN where it is missing; ``removed`` is derived."""
        return [math.nan if value is None else value for value in (_value(step, key) for step in self.history)]

    @property
    def trouble(self) -> str:
        """What went wrong numerically, or nothing."""
        skipped = _mean([step.get("skipped_update") for step in self.history]) or 0.0
        dropped = sum(1 for step in self.history if step.get("geomask/dropped_sequences"))
        parts = []
        if skipped:
            parts.append(f"{skipped:.0%} of the updates had a non-finite gradient and were skipped")
        if dropped:
            parts.append(f"sequences with non-finite log-probs were dropped in {dropped} of {len(self.history)} steps")
        return f"{self.label}: {' and '.join(parts)}; means are over finite values alone." if parts else ""

    @property
    def final_reward(self) -> float | None:
        """Mean reward of the last ten steps; None before the first."""
        return fmean(step["reward"] for step in self.history[-_LAST:]) if self.history else None

    def summary(self) -> Row:
        """The variant's row of the table; None for what its loss does not report."""
        means = {
            name: _mean([_value(step, key) for step in self.history])
            for name, key in {
                "mismatch_abs": "geomask/mismatch_abs",
                "mismatch_k3": "geomask/mismatch_k3",
                "weight": "geomask/weight_mean",
                "ess_fraction": "geomask/weight_ess",
                "removed": "removed",
                "clip_fraction_low": "geomask/clip_fraction_low",
                "clip_fraction_high": "geomask/clip_fraction_high",
                "skipped_updates": "skipped_update",
                "dropped_sequences": "geomask/dropped_sequences",
            }.items()
        }
        return {
            "variant": self.label,
            "steps": len(self.history),
            "complete": self.complete,
            "corrected": self.corrected,
            "reward_first": self.history[0]["reward"] if self.history else None,
            "reward_last": self.final_reward,
            **means,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class LabResult:
    """A comparison.

    Attributes:
        variants: those that trained at least one step.
        chance: reward of random answers.
        seed: of all variants.
        sampler: what the generation engine was.
        precision: of training.
        out: folder of the outputs.
    """

    variants: Sequence[VariantResult]
    chance: float
    seed: int
    sampler: str
    precision: str
    out: Path

    @property
    def finding(self) -> str:
        """One sentence on what the rewards allow to say, and what they don't."""
        finals = {
            variant.label: variant.final_reward
            for variant in self.variants
            if variant.complete and variant.final_reward is not None
        }
        if len(finals) < 2:
            return ""
        worst, *_, best = sorted(finals, key=lambda label: finals[label])
        gap = finals[best] - finals[worst]
        return (
            f"Final rewards span {gap:.3f}, from {worst} ({finals[worst]:.3f}) to {best} ({finals[best]:.3f}). "
            "One seed does not rank variants: repeat with other --seed values before you conclude."
        )

    def write_summary(self, path: Path) -> None:
        """Write the table as JSON."""
        report = {
            "seed": self.seed,
            "chance": self.chance,
            "sampler": self.sampler,
            "precision": self.precision,
            "finding": self.finding,
            "variants": [variant.summary() for variant in self.variants],
        }
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _value(step: Mapping[str, float], key: str) -> float | None:
    if key == "removed":
        # Rounded, since a sum of counts over a global count is 1 up to float32.
        return None if "geomask/kept_tokens" not in step else max(0.0, round(1.0 - step["geomask/kept_tokens"], 6))
    return step.get(key)


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(present) if present else None
