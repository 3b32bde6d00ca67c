"""``lab.png``: rewards, mismatch, weights and removals of all variants, to be read at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.lab.optional import require
from nemo_geomask.lab.outcome import by_variant
from nemo_geomask.lab.runs import Course

__all__ = ["write_plot"]

# Okabe and Ito's colours, told apart by colour-blind readers too; black and yellow left out.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLES = ("-", "--", "-.", ":")
_WINDOW = 5


def write_plot(curves: Sequence[Course], path: Path) -> None:
    """Draw the four panels into a PNG."""
    matplotlib = require("matplotlib")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot")
    figure, ((reward, mismatch), (weight, removed)) = pyplot.subplots(2, 2, figsize=(12, 8), sharex=True)

    _panel(reward, "Reward: mean over the task's responses", "mean reward of the rollout batch")
    _panel(mismatch, "Train / generation mismatch", "mean |prev − gen| per token (nats)")
    _panel(weight, "Effective sample size of the correction weights", "(mean w)² / mean w²   (1 = all equal)")
    _panel(removed, "Removed by masks", "fraction of tokens kept out of the loss")
    for index, (label, runs) in enumerate(by_variant(curves).items()):
        look = {"color": _COLOURS[index % len(_COLOURS)], "linestyle": _STYLES[index // len(_COLOURS) % len(_STYLES)]}
        hint = "" if runs[0].facts["corrected"] else " (not applied)"
        _lines(reward, runs, "reward", look, label=label)
        _lines(mismatch, runs, "geomask/mismatch_abs", look, label=label)
        _lines(removed, runs, "removed", look, label=label)
        _lines(weight, runs, "geomask/weight_ess", look, label=f"{label}{hint}")
    chance = curves[0].facts["chance"]
    reward.axhline(chance, color="0.35", linewidth=1, linestyle=":", label=f"chance ({chance:.3f})")
    reward.set_ylim(0, 1)
    removed.set_ylim(0, max(0.02, removed.get_ylim()[1]))
    if mismatch.has_data() and any(value > 0 for curve in curves for value in curve.series("geomask/mismatch_abs")):
        mismatch.set_yscale("log")
    for axes in (weight, removed):
        axes.set_xlabel("step (rollout batch)")
    for axes in (reward, weight, removed):
        axes.legend(fontsize="small", loc="best")

    first, seeds = curves[0].facts, sorted({curve.seed for curve in curves})
    several = len(seeds) > 1
    thin, thick = ("each seed, mean", "mean of the seeds,") if several else ("each step", "mean")
    told = f"{len(seeds)} seeds" if several else f"seed {seeds[0]}"
    figure.suptitle(
        f"nemo-geomask lab: {first['precision']} training against {first['sampler']} (nothing injected; {told})\n"
        f"thin: {thin}{f' of {_WINDOW} steps' if several else ''}; thick: {thick} of {_WINDOW} steps",
        fontsize="medium",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _panel(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_ylabel(unit, fontsize="small")
    axes.grid(alpha=0.25)


def _lines(axes: Any, runs: Sequence[Course], key: str, look: dict[str, Any], *, label: str) -> None:
    series = [run.series(key) for run in runs]
    if all(math.isnan(value) for values in series for value in values):
        return
    for values in series:
        shown = values if len(series) == 1 else _smooth(values)
        axes.plot(range(1, len(shown) + 1), shown, linewidth=0.7, alpha=0.35, **look)
    # As far as all of them are: a mean over fewer seeds would jump where one ends.
    shared = list(zip(*series, strict=False))
    mean = _smooth([_mean(values) for values in shared])
    axes.plot(range(1, len(mean) + 1), mean, linewidth=1.8, label=label, **look)


def _smooth(values: Sequence[float]) -> list[float]:
    return [_mean(values[max(0, end - _WINDOW) : end]) for end in range(1, len(values) + 1)]


def _mean(values: Sequence[float]) -> float:
    present = [value for value in values if not math.isnan(value)]
    return sum(present) / len(present) if present else math.nan
