"""Report of ``nemo-geomask lab``: table, notes, ``summary.json`` and plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.optional import require
from nemo_geomask.tools.lab.outcome import VariantSummary, group_by_variant, summarize_variants
from nemo_geomask.tools.lab.run_store import RunCurves, read_curves
from nemo_geomask.tools.shared.intervals import CONFIDENCE_LABEL
from nemo_geomask.tools.shared.json_output import to_json
from nemo_geomask.tools.shared.palette import LineLook, line_look
from nemo_geomask.tools.shared.terminal_tables import print_table

Row = dict[str, Any]


def report_results(folders: Sequence[Path], out: Path, *, baseline: str | None = None) -> None:
    """Print the table of all runs in some folders; write ``summary.json`` and ``lab.png`` to ``out``.

    ``baseline`` is the label of the variant that the others are compared with; None: see :func:`default_baseline`.

    Raises: ConfigError: there are no runs, or no run has the baseline's label.
    """
    curves = read_curves(folders)
    labels = list(group_by_variant(curves))
    if baseline is not None and baseline not in labels:
        raise ConfigError(f"--baseline: no run of '{baseline}' here; there are {', '.join(labels)}")
    baseline = baseline or default_baseline(curves)
    curves.sort(key=lambda curve: curve.label != baseline)
    summaries = summarize_variants(curves)
    _print_results(summaries, baseline)
    report = {
        **{key: curves[0].facts[key] for key in ("chance", "sampler", "precision")},
        "baseline": baseline,
        "variants": [summary.row for summary in summaries],
    }
    (out / "summary.json").write_text(to_json(report) + "\n", encoding="utf-8")
    write_plot(curves, out / "lab.png")


def default_baseline(curves: Sequence[RunCurves]) -> str:
    """Return the label of the uncorrected variant, or of the first variant if all are corrected.

    Of several uncorrected variants, it is the one with the fewest settings in its label, or the first of these.
    """
    labels = list(group_by_variant([curve for curve in curves if curve.is_uncorrected] or curves[:1]))
    return min(labels, key=lambda label: label.count(" "))


def _number_cell(style: str, *keys: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        values = [row.get(key) for key in keys]
        return " / ".join("–" if value is None else format(value, style) for value in values)

    return cell


def _bracket_unless_applied(cell: Callable[[Row], str]) -> Callable[[Row], str]:
    # A loss without correction also reports weights, those that it would have applied; the table puts them in brackets.
    return lambda row: cell(row) if row["corrected"] else f"({cell(row)})"


def _interval_cell(row: Row) -> str:
    interval = row["interval"]
    return "–" if interval is None else f"{interval[0]:+.3f} … {interval[1]:+.3f}"


def _seed_count_cell(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]} of {len(row['seeds'])}"


_LINES: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("seeds finished", lambda row: str(len(row["seeds"]))),
    ("reward, first step", _number_cell(".3f", "reward_first")),
    ("reward, last 10 steps", _number_cell(".3f", "reward_last")),
    ("  minus baseline's, same seeds", _number_cell("+.3f", "difference")),
    (f"  {CONFIDENCE_LABEL} interval of that", _interval_cell),
    ("validation, last", _number_cell(".3f", "validation")),
    ("best 10 steps", _number_cell(".3f", "reward_best")),
    ("collapsed", _seed_count_cell("collapses")),
    ("died", _seed_count_cell("deaths")),
    ("mismatch, mean |Δ|", _number_cell(".2e", "mismatch_abs")),
    ("mismatch, k3", _number_cell(".2e", "mismatch_k3")),
    ("weight, mean", _bracket_unless_applied(_number_cell(".3f", "weight"))),
    ("weight, ESS fraction", _bracket_unless_applied(_number_cell(".3f", "ess_fraction"))),
    ("removed by masks", _number_cell(".1%", "removed")),
    ("clipped, low / high", _number_cell(".1%", "clip_fraction_low", "clip_fraction_high")),
    ("seconds", _number_cell(".0f", "seconds")),
)


def _print_results(summaries: Sequence[VariantSummary], baseline: str) -> None:
    print_table(
        f"baseline {baseline}; runs of a seed have the same initial weights and prompts",
        ("means over seeds", *(summary.label for summary in summaries)),
        [(name, *(cell(summary.row) for summary in summaries)) for name, cell in _LINES],
    )
    print()
    first = summaries[0].curves[0].facts
    seeds = {seed for summary in summaries for seed in summary.row["seeds"]}
    for line in (
        f"Nothing was injected: the mismatch is {first['sampler']} against {first['precision']} training. Random "
        f"answers earn {first['chance']:.3f}.",
        "Δ = log π_train − log μ_generation of each sampled token; k3 estimates KL(μ ‖ π_train). ESS: effective sample "
        "size of the weights over their number. In brackets: weights that were not applied.",
        "" if len(seeds) > 1 else "One seed does not rank variants: --seeds 1..5 before you conclude.",
        *(_describe_problems(summary) for summary in summaries),
    ):
        if line:
            print(line)


def _describe_problems(summary: VariantSummary) -> str:
    """Return a sentence on non-finite values and unfinished runs of a variant; empty if there are none."""
    row, parts = summary.row, []
    if row["skipped_updates"]:
        parts.append(f"{row['skipped_updates']:.0%} of the updates had a non-finite gradient and were skipped")
    dropped = sum(_steps_with_dropped_sequences(curve) for curve in summary.curves)
    if dropped:
        steps = sum(curve.steps for curve in summary.curves)
        parts.append(f"sequences with non-finite log-probs were dropped in {dropped} of {steps} steps")
    numerics = f"{' and '.join(parts)}; means are over finite values only" if parts else ""
    unfinished = f"not finished on seeds {', '.join(map(str, row['unfinished']))}" if row["unfinished"] else ""
    unfinished += "".join(f"; on seed {seed}, {error}" for seed, error in sorted(row["errors"].items()))
    return (
        f"{summary.label}: {'; '.join(filter(None, (numerics, unfinished))).rstrip('.')}."
        if numerics or unfinished
        else ""
    )


def _steps_with_dropped_sequences(curve: RunCurves) -> int:
    return sum(value > 0 for value in curve.series("geomask/dropped_sequences"))


_MIN_WINDOW, _WINDOWS_IN_A_RUN = 5, 25
_LABEL_OF_A_COLUMN = 55  # characters of a label, with room for its suffix, at which two columns fit below the panels
_LEGEND_ROW = 0.2  # inches


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
    if mismatch.has_data() and any(value > 0 for curve in curves for value in curve.series("geomask/mismatch_abs")):
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
    series = [[value if math.isfinite(value) else math.nan for value in run.series(key)] for run in runs]
    if all(math.isnan(value) for values in series for value in values):
        return
    for values in series:
        points = values if len(series) == 1 else _smooth(values, window)
        axes.plot(range(1, len(points) + 1), points, linewidth=0.7, alpha=0.35, **look)
    # The mean ends with the shortest run, because a mean over fewer seeds would jump there.
    mean = _smooth([_mean(values) for values in zip(*series, strict=False)], window)
    axes.plot(range(1, len(mean) + 1), mean, linewidth=1.8, label=label, **look)


def _smooth(values: Sequence[float], window: int) -> list[float]:
    return [_mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _mean(values: Sequence[float]) -> float:
    present = [value for value in values if not math.isnan(value)]
    return sum(present) / len(present) if present else math.nan
