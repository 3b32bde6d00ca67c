"""Tables of a comparison with tuned baselines, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from nemo_geomask.tools.lab.outcome import WINDOW, best_reward, has_collapsed, has_died
from nemo_geomask.tools.lab.run_store import RunCurves
from nemo_geomask.tools.lab.tuned_comparison import PairedDifference, TunedComparison
from nemo_geomask.tools.shared.markdown import markdown_table

__all__ = ["comparison_tables"]


def comparison_tables(comparison: TunedComparison) -> str:
    """Return the primary result, and four Markdown tables: rewards, other measures, and both kinds of differences."""
    choice, regime, grid = comparison.choice, comparison.regime, comparison.grid
    rewards = {
        variant: {rate: [run.reward for run in by_seed.values()] for rate, by_seed in by_rate.items()}
        for variant, by_rate in grid.items()
    }
    reward_rows = [
        [
            variant,
            choice.bounds[variant],
            *(f"{fmean(values):.3f} ({min(values):.3f})" for values in by_rate.values()),
            f"{choice.rates[variant]:g}",
            f"{choice.worst_rates[variant]:g}",
        ]
        for variant, by_rate in rewards.items()
    ]
    reward_head = ["variant", "bound", *(f"at {rate:g}" for rate in regime.learning_rates), "chosen", "worst"]
    measure_rows = [
        [
            variant,
            *_other_measures([run.curves for run in by_rate[choice.rates[variant]].values()]),
            *_count_failures([run.curves for by_seed in by_rate.values() for run in by_seed.values()]),
        ]
        for variant, by_rate in grid.items()
    ]
    measure_head = [
        *("variant", "all steps", "best 10 steps", "validation", "entropy", "gradient norm"),
        *("died, all rates", "collapsed, all rates"),
    ]
    primary = comparison.primary
    return "\n\n".join(
        (
            f"**{choice.correction} minus {choice.alternative}**, both tuned, over {len(primary.by_seed)} seeds: "
            f"{primary.text}.",
            markdown_table(reward_head, reward_rows),
            markdown_table(measure_head, measure_rows),
            _difference_table(f"minus {regime.baseline}", comparison.answers),
            _difference_table(f"minus {choice.alternative}", comparison.against_alternative),
        )
    )


def _difference_table(title: str, answers: Mapping[str, Sequence[PairedDifference]]) -> str:
    by_measure = {measure: {row.variant: row.text for row in rows} for measure, rows in answers.items()}
    names = next(iter(by_measure.values()))
    rows = [[name, *(texts[name] for texts in by_measure.values())] for name in names]
    return markdown_table([title, *by_measure], rows)


def _other_measures(curves: Sequence[RunCurves]) -> tuple[str, ...]:
    """Return the means of the protocol's other measures over runs."""
    validation = [value for run in curves for value in run.series("validation/reward")[-1:] if value == value]
    ends = {
        metric: fmean(value for run in curves for value in run.series(metric)[-WINDOW:])
        for metric in ("approx_entropy", "grad_norm")
    }
    return (
        f"{fmean(fmean(run.series('reward')) for run in curves):.3f}",
        f"{fmean(best_reward(run.series('reward')) for run in curves):.3f}",
        f"{fmean(validation):.3f}" if validation else "–",
        f"{ends['approx_entropy']:.2f}",
        f"{ends['grad_norm']:.2f}",
    )


def _count_failures(curves: Sequence[RunCurves]) -> tuple[str, str]:
    """Return how many runs died, and how many collapsed."""
    return (
        f"{sum(has_died(run) for run in curves)} of {len(curves)}",
        f"{sum(has_collapsed(run.series('reward')) for run in curves)} of {len(curves)}",
    )
