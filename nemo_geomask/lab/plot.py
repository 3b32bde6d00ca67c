"""``lab.png``: rewards, mismatch, weights and removals of all variants, to be read at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.lab.optional import require
from nemo_geomask.lab.results import LabResult, VariantResult

__all__ = ["write_plot"]

# Okabe and Ito's colours, told apart by colour-blind readers too; black and yellow left out.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLES = ("-", "--", "-.", ":")
_WINDOW = 5


def write_plot(result: LabResult, path: Path) -> None:
    """Draw the four panels into a PNG."""
    matplotlib = require("matplotlib")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot")
    figure, ((reward, mismatch), (weight, removed)) = pyplot.subplots(2, 2, figsize=(12, 8), sharex=True)

    _panel(reward, "Reward: fraction of correct terms", "mean reward of the rollout batch")
    _panel(mismatch, "Train / generation mismatch", "mean |prev − gen| per token (nats)")
    _panel(weight, "Effective sample size of the correction weights", "(mean w)² / mean w²   (1 = all equal)")
    _panel(removed, "Removed by masks", "fraction of tokens kept out of the loss")
    for index, variant in enumerate(result.variants):
        look = {"color": _COLOURS[index % len(_COLOURS)], "linestyle": _STYLES[index // len(_COLOURS) % len(_STYLES)]}
        _curve(reward, variant, "reward", look, label=variant.label)
        _curve(mismatch, variant, "geomask/mismatch_abs", look, label=variant.label)
        _curve(removed, variant, "removed", look, label=variant.label)
        hint = "" if variant.corrected else " (not applied)"
        _curve(weight, variant, "geomask/weight_ess", look, label=f"{variant.label}{hint}")
    reward.axhline(result.chance, color="0.35", linewidth=1, linestyle=":", label=f"chance ({result.chance:.3f})")
    reward.set_ylim(0, 1)
    removed.set_ylim(0, max(0.02, removed.get_ylim()[1]))
    if mismatch.has_data() and any(_positive(v.series("geomask/mismatch_abs")) for v in result.variants):
        mismatch.set_yscale("log")
    for axes in (weight, removed):
        axes.set_xlabel("step (rollout batch)")
    for axes in (reward, weight, removed):
        axes.legend(fontsize="small", loc="best")

    figure.suptitle(
        "nemo-geomask lab: float32 training against a bfloat16 generation engine"
        f" (nothing injected; seed {result.seed})\nthin: each step; thick: mean of {_WINDOW} steps",
        fontsize="medium",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_ylabel(unit, fontsize="small")
    axes.grid(alpha=0.25)


def _curve(axes: Any, variant: VariantResult, key: str, look: dict[str, Any], *, label: str) -> None:
    values = variant.series(key)
    if all(math.isnan(value) for value in values):
        return
    steps = range(1, len(values) + 1)
    axes.plot(steps, values, linewidth=0.7, alpha=0.35, **look)
    axes.plot(steps, _smooth(values), linewidth=1.8, label=label, **look)


def _smooth(values: Sequence[float]) -> list[float]:
    smooth = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - _WINDOW) : end] if not math.isnan(value)]
        smooth.append(sum(window) / len(window) if window else math.nan)
    return smooth


def _positive(values: Sequence[float]) -> bool:
    return any(value > 0 for value in values)
