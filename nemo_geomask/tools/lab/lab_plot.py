"""Plot of runs: ``lab.png`` of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.optional import require
from nemo_geomask.tools.lab.outcome import group_by_variant
from nemo_geomask.tools.lab.run_store import RunCurves
from nemo_geomask.tools.shared.palette import LineLook, line_look

_MIN_WINDOW, _WINDOWS_IN_A_RUN = 5, 25
_LABEL_OF_A_COLUMN = 55  # characters of a label, with room for its suffix, at which two columns fit below the panels
_LEGEND_ROW = 0.2  # inches
_MOST_POINTS = 5_000  # of a line; smoothing takes time in proportion to their square
_LARGEST_DRAWN = 1e30  # matplotlib fails at an axis that ends near the largest float


def write_plot(curves: Sequence[RunCurves], path: Path) -> None:
    """Draw rewards, mismatch, correction weights and masked tokens of all variants into a PNG file."""
    pyplot = import_pyplot()
    variants = group_by_variant(curves)
    legend_columns = 2 if max(map(len, variants)) <= _LABEL_OF_A_COLUMN else 1
    legend_rows = math.ceil((len(variants) + 1) / legend_columns)
    figure, ((reward, mismatch), (weight, removed)) = pyplot.subplots(
        2, 2, figsize=(12, 7.8 + _LEGEND_ROW * legend_rows), sharex=True, layout="constrained"
    )
    is_any_applied = any(run.facts["corrected"] for run in curves)
    weight_title = "Effective sample size of the correction weights"

    _set_up_panel(reward, "Reward: mean over the task's responses", "mean reward of the rollout batch")
    _set_up_panel(mismatch, "Train / generation mismatch", "mean |prev − gen| per token (nats)")
    _set_up_panel(
        weight,
        weight_title if is_any_applied else f"{weight_title}, which no variant applies",
        "(mean w)² / mean w²   (1 = all equal)",
    )
    _set_up_panel(removed, "Removed by masks", "fraction of tokens left out of the loss")
    window = max(_MIN_WINDOW, max(len(run.series("reward")) for run in curves) // _WINDOWS_IN_A_RUN)
    for index, (label, runs) in enumerate(variants.items()):
        suffix = " (weight not applied)" if is_any_applied and not runs[0].facts["corrected"] else ""
        for axes, key in (
            (reward, "reward"),
            (mismatch, "geomask/mismatch_abs"),
            (removed, "removed"),
            (weight, "geomask/weight_ess"),
        ):
            plot_runs(axes, runs, key, line_look(index), label=label + suffix, window=window)
    chance = curves[0].facts["chance"]
    reward.axhline(chance, color="0.35", linewidth=1, linestyle=":", label=f"chance ({chance:.3f})")
    reward.set_ylim(0, 1)
    removed.set_ylim(0, max(0.02, removed.get_ylim()[1]))
    if mismatch.has_data() and any(
        0 < value <= _LARGEST_DRAWN for curve in curves for value in curve.series("geomask/mismatch_abs")
    ):
        mismatch.set_yscale("log")
    for axes in (weight, removed):
        axes.set_xlabel("step (rollout batch)")
    legend = figure.legend(
        *reward.get_legend_handles_labels(), fontsize="small", loc="outside lower center", ncols=legend_columns
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a label may hold a dollar sign

    first, seeds = curves[0].facts, sorted({curve.seed for curve in curves})
    has_seeds = len(seeds) > 1
    subject = f"{len(seeds)} seeds" if has_seeds else f"seed {seeds[0]}"
    figure.suptitle(
        f"nemo-geomask lab: {first['precision']} training against {first['sampler']} (nothing injected; {subject})\n"
        + (
            f"thin: each seed; thick: mean of the seeds; both averaged over {window} steps"
            if has_seeds
            else f"thin: each step; thick: mean of {window} steps"
        ),
        fontsize="medium",
        parse_math=False,
    )
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def import_pyplot() -> Any:
    """Import ``matplotlib.pyplot`` for drawing into files."""
    require("matplotlib", "the lab needs", "demo").use("Agg")
    return require("matplotlib.pyplot", "the lab needs", "demo")


def _set_up_panel(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_ylabel(unit, fontsize="small")
    axes.grid(alpha=0.25)


def plot_runs(axes: Any, runs: Sequence[RunCurves], key: str, look: LineLook, *, label: str, window: int) -> None:
    """Plot a metric of each run as a thin line, and the mean of the runs as a thick one, averaged over some steps."""
    series = [run.series(key) for run in runs]
    stride = math.ceil(max(map(len, series)) / _MOST_POINTS) or 1
    if stride > 1:
        series = [
            [_mean(values[start : start + stride]) for start in range(0, len(values), stride)] for values in series
        ]
        window = max(1, window // stride)
    if all(math.isnan(value) for values in series for value in values):
        return
    for values in series:
        points = values if len(series) == 1 else _smooth(values, window)
        axes.plot(
            [1 + stride * place for place in range(len(points))], _drawable(points), linewidth=0.7, alpha=0.35, **look
        )
    # The mean ends with the shortest run, because a mean over fewer seeds would jump there.
    mean = _smooth([_mean(values) for values in zip(*series, strict=False)], window)
    axes.plot([1 + stride * place for place in range(len(mean))], _drawable(mean), linewidth=1.8, label=label, **look)


def _drawable(values: Sequence[float]) -> list[float]:
    return [value if abs(value) <= _LARGEST_DRAWN else math.nan for value in values]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    return [_mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _mean(values: Sequence[float]) -> float:
    present = [value for value in values if not math.isnan(value)]
    return sum(present) / len(present) if present else math.nan
