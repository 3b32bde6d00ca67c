"""Figures of the evidence pages: of runs, and of a comparison with tuned baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from nemo_geomask.tools.lab.lab_report import import_pyplot, plot_runs
from nemo_geomask.tools.shared.intervals import CONFIDENCE_LABEL
from nemo_geomask.tools.shared.palette import BLUE, GREEN, VERMILION
from tests.evidence.lab.columns import EvidenceSpec, Runs, SeedMean, figure_look, figure_name
from tests.evidence.lab.comparison import TunedComparison


def draw_evidence(curves: Runs, path: Path, spec: EvidenceSpec) -> None:
    """Draw the figure of ``spec``: curves of a metric for some variants, and one column's intervals for all of them."""
    pyplot = import_pyplot()
    figure, (curve_axes, dot_axes) = pyplot.subplots(1, 2, figsize=(12, 4.6), gridspec_kw={"width_ratios": [1, 1.1]})
    variants = spec.variants(curves)
    baseline = spec.baseline_runs(curves)
    for row in spec.plotted_rows:
        name = figure_name(row)
        plot_runs(curve_axes, variants[row], spec.curves, figure_look(name), label=name, window=1)
    if spec.curves == "reward":
        curve_axes.axhline(curves[0].facts["chance"], color="0.35", linewidth=1, linestyle=":", label="chance")
    curve_axes.set(
        xlabel="step (rollout batch)", ylabel=spec.curve_label, title=f"{len(baseline)} seeds, thin; their mean, thick"
    )
    curve_axes.set_ylim(min(0, curve_axes.get_ylim()[0]), 1.35 * curve_axes.get_ylim()[1])
    curve_axes.legend(fontsize="small", loc="upper left")
    measure = next(
        column for column in spec.columns if isinstance(column, SeedMean) and column.title == spec.dot_column
    )
    estimates = {name: measure.estimate(runs, baseline) for name, runs in variants.items()}
    dots = [(name, *estimate) for name, estimate in reversed(estimates.items()) if estimate is not None]
    for height, (_, mean, interval) in enumerate(dots):
        low, high = interval or (mean, mean)
        verdict_colour = GREEN if low > 0 else VERMILION if high < 0 else "0.45"
        colour = verdict_colour if measure.is_paired else BLUE
        dot_axes.plot([low, high], [height, height], color=colour, linewidth=2)
        dot_axes.plot(mean, height, "o", color=colour)
    dot_axes.set_yticks(range(len(dots)), [figure_name(row) for row, *_ in dots], fontsize="small")
    dot_axes.axvline(0, color="0.35", linewidth=1)
    dot_axes.set(
        xlabel=f"{spec.curve_label}: {spec.dot_column}" if measure.is_paired else spec.dot_column,
        title=f"mean over seeds, {CONFIDENCE_LABEL} interval",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def draw_comparison(comparison: TunedComparison, path: Path) -> None:
    """Draw a tuned comparison into a PNG file: rewards by learning rate, and the answers with their intervals."""
    pyplot = import_pyplot()
    figure, (rate_axes, dot_axes) = pyplot.subplots(1, 2, figsize=(12, 4.6), gridspec_kw={"width_ratios": [1, 1.1]})
    count = len(comparison.regime.confirmation_seeds)
    rates = list(comparison.regime.learning_rates)
    for index, (variant, by_rate) in enumerate(comparison.grid.items()):
        name = figure_name(variant)
        look = figure_look(name)
        rewards = [[run.reward for run in by_seed.values()] for by_seed in by_rate.values()]
        means = [fmean(values) for values in rewards]
        # Ranges of the variants stand side by side.
        shifted = [rate * 1.04 ** (index - (len(comparison.grid) - 1) / 2) for rate in rates]
        rate_axes.vlines(
            shifted, [min(r) for r in rewards], [max(r) for r in rewards], color=look["color"], alpha=0.35, linewidth=2
        )
        rate_axes.plot(shifted, means, linewidth=1.8, marker="o", markersize=4, label=name, **look)
        chosen = rates.index(comparison.choice.rates[variant])
        rate_axes.plot(shifted[chosen], means[chosen], "o", color=look["color"], markersize=9, fillstyle="none")
        chance = next(iter(by_rate[rates[0]].values())).curves.facts["chance"]
    rate_axes.axhline(chance, color="0.35", linewidth=1, linestyle=":", label=f"chance ({chance:.3f})")
    rate_axes.set_xscale("log")
    rate_axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    rate_axes.minorticks_off()
    rate_axes.set(
        xlabel="learning rate (ring: chosen on the search seeds)",
        ylabel="mean reward, last 10 steps",
        title=f"mean of {count} seeds; bars: lowest to highest seed",
    )
    rate_axes.set_ylim(0, 1.35 * rate_axes.get_ylim()[1])
    rate_axes.legend(fontsize="small", loc="upper left", ncols=2)
    measures = list(comparison.answers)
    rows = [variant for variant in comparison.grid if variant != comparison.regime.baseline][::-1]
    for number, (measure, colour) in enumerate(zip(measures, (BLUE, GREEN, VERMILION), strict=True)):
        by_variant = {row.variant: row for row in comparison.answers[measure]}
        heights = [row + 0.22 * (1 - number) for row in range(len(rows))]
        intervals = [by_variant[row].interval or (by_variant[row].mean,) * 2 for row in rows]
        dot_axes.hlines(heights, [low for low, _ in intervals], [high for _, high in intervals], color=colour)
        dot_axes.plot([by_variant[row].mean for row in rows], heights, "o", color=colour, label=measure)
    dot_axes.set_yticks(range(len(rows)), [figure_name(row) for row in rows], fontsize="small")
    dot_axes.set_ylim(-0.6, len(rows) + 0.6)
    dot_axes.axvline(0, color="0.35", linewidth=1)
    dot_axes.legend(fontsize="small", loc="upper left", ncols=2)
    dot_axes.set(
        xlabel=f"mean reward minus {figure_name(comparison.regime.baseline)}, same seeds",
        title=f"mean over {count} seeds, {CONFIDENCE_LABEL} interval",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def draw_mismatch(comparisons: Sequence[TunedComparison], path: Path) -> None:
    """Draw rewards over the steps with and without a mismatch and a weight, and every variant's difference, as a PNG.

    The first comparison is the one with every variant; the second one's variant without a correction is its control.
    """
    pyplot = import_pyplot()
    first, *controls = comparisons
    figure, (curve_axes, dot_axes) = pyplot.subplots(1, 2, figsize=(12, 4.6), gridspec_kw={"width_ratios": [1.1, 1]})
    shown = (
        *(
            (control, control.regime.baseline, "equal engines, uncorrected", {"color": BLUE, "linestyle": "-"})
            for control in controls[:1]
        ),
        (first, first.choice.correction, f"int4 engine, {first.choice.correction}", {"color": GREEN, "linestyle": "-"}),
        (first, first.regime.baseline, "int4 engine, uncorrected", {"color": VERMILION, "linestyle": "-"}),
    )
    for comparison, variant, label, look in shown:
        runs = [run.curves for run in comparison.grid[variant][comparison.choice.rates[variant]].values()]
        plot_runs(curve_axes, runs, "reward", look, label=label, window=5)
    count = len(first.regime.confirmation_seeds)
    curve_axes.set(
        xlabel="step (rollout batch)",
        ylabel="reward",
        title=f"{count} seeds, thin; their mean, thick",
        ylim=(0, None),
    )
    curve_axes.legend(fontsize="small", loc="upper left")
    rows = {first.primary.variant: first.primary} | {
        row.variant: row for group in first.tuned.values() for row in group
    }
    for height, (_, row) in enumerate(reversed(rows.items())):
        low, high = row.interval or (row.mean, row.mean)
        colour = GREEN if low > 0 else VERMILION if high < 0 else "0.45"
        dot_axes.plot([low, high], [height, height], color=colour, linewidth=2)
        dot_axes.plot(row.mean, height, "o", color=colour)
    dot_axes.set_yticks(range(len(rows)), list(reversed(rows)), fontsize="small")
    dot_axes.axvline(0, color="0.35", linewidth=1)
    dot_axes.set(
        xlabel="share of correct terms after a lucky call, minus uncorrected",
        title=f"int4 engine, {CONFIDENCE_LABEL} interval",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
