"""Tables of a comparison with tuned baselines, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from nemo_geomask.tools.lab.outcome import WINDOW, best_reward, final_reward, has_collapsed, has_died
from nemo_geomask.tools.lab.run_store import RunCurves
from tests.evidence.lab.choice import TunedRun
from tests.evidence.lab.comparison import PairedDifference, TunedComparison, adjust_primaries
from tests.evidence.lab.regimes import Regime, TunedVariant
from tests.helpers.interval_text import format_mean
from tests.helpers.markdown import markdown_table

_COURSE_EVERY = 20  # steps between the columns of the primary comparison's course


def comparison_tables(comparison: TunedComparison) -> str:
    """Return the primary result and up to seven Markdown tables, each with a line that says what its numbers are."""
    choice, primary = comparison.choice, comparison.primary
    count = len(comparison.regime.confirmation_seeds)
    return "\n\n".join(
        (
            f"**{choice.correction} minus {choice.alternative}**, both tuned, over {len(primary.by_seed)} seeds: "
            f"{primary.text}.",
            "The same over the steps, as means of ten steps with an interval, and on the validation prompts after the "
            "last step. Nothing here is tested:",
            _course_table(*comparison.primary_runs),
            f"Mean reward of the last ten steps over {count} seeds, by learning rate; in parentheses that of the "
            "lowest seed. Bound, chosen and worst learning rate are those of the search:",
            _reward_table(comparison),
            *_below_grid_text(comparison),
            f"Bounds, by the mean reward on the search seeds at a learning rate of {comparison.regime.search_rate:g}:",
            _bound_table(comparison),
            "Other measures. All but the last two columns are of the chosen learning rate:",
            _measure_table(comparison),
            *_failure_text(comparison),
            f"Question 1, each variant tuned: reward minus that of {comparison.regime.baseline}:",
            _difference_table(comparison.tuned),
            "Question 2, without tuning the learning rate: the same over all rates, minus "
            f"{comparison.regime.baseline}:",
            _difference_table(comparison.over_rates),
            *_against_alternative(comparison),
        )
    )


def mismatch_tables(comparisons: Sequence[TunedComparison]) -> str:
    """Return the primary result of the first regime, its variants, and the controls, which are the other regimes."""
    first, *controls = comparisons
    count = len(first.regime.confirmation_seeds)
    by_variant = {row.variant: row.text for rows in first.tuned.values() for row in rows}
    by_variant[first.primary.variant] = f"{first.primary.text} (primary, {len(first.primary.by_seed)} seeds)"
    head = ["variant", "bound", "learning rate", "correct terms", "reward, last 10 steps", "correct terms minus none's"]
    rows = [[*_tuned_cells(first, variant), by_variant.get(variant, "–")] for variant in first.grid]
    control_rows = [
        [
            f"{comparison.regime.title}; {len(primary.by_seed)} seeds",
            comparison.regime.primary[0],
            *(_tuned_cells(comparison, variant)[3] for variant in comparison.grid),
            primary.text,
        ]
        for comparison, primary in zip(controls, adjust_primaries(controls), strict=True)
    ]
    parts = [
        f"Correct terms: share after a lucky call, under the trainer's policy after the last step; mean of {count} "
        "seeds, in parentheses the lowest. Bound and learning rate are those of the search:",
        markdown_table(head, rows),
    ]
    if controls:
        head = ["engine, task; seeds", "compared", "none", "the compared one", "minus none"]
        table = markdown_table(head, control_rows)
        parts += ["The other regimes, with Holm's correction over those that were run:", table]
    return "\n\n".join(parts)


def _tuned_cells(comparison: TunedComparison, variant: str) -> list[str]:
    """Return a variant's name, bound, learning rate, outcome and reward, all at its choice."""
    choice = comparison.choice
    runs = list(comparison.grid[variant][choice.rates[variant]].values())
    outcomes = [run.reward for run in runs]
    rewards = [final_reward(run.curves.series("reward")) for run in runs]
    return [
        *(variant, choice.bounds[variant], f"{choice.rates[variant]:g}"),
        f"{fmean(outcomes):.3f} ({min(outcomes):.3f})",
        f"{fmean(rewards):.3f}",
    ]


def sensitivity_table(runs: Iterable[TunedRun], regime: Regime) -> str:
    """Return the rewards of each mask and weight at its five bounds, and that of the variant without a correction.

    A mean is over the search seeds at the search's learning rate. Bounds that were not run on all of them are left out,
    since a mean over fewer seeds can't be compared. The variant without a correction has its best bound.
    """
    rewards: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if run.seed in regime.search_seeds and run.cell.learning_rate == regime.search_rate:
            rewards.setdefault(run.cell.variant, {}).setdefault(run.cell.bound, []).append(run.reward)
    count = len(regime.search_seeds)
    rows = []
    for name, variant in regime.sensitivity.items():
        by_bound = {bound: rewards.get(name, {}).get(bound, []) for bound in variant.bounds}
        texts = [f"{bound}: {fmean(values):.3f}" for bound, values in by_bound.items() if len(values) == count]
        if texts:
            rows.append([_preset_name(variant), variant.published, ", ".join(texts)])
    if regime.baseline not in rewards or not rows:
        return "Not enough data: the runs without a correction, or those of every bound, are missing."
    without = max(fmean(values) for values in rewards[regime.baseline].values())
    table = markdown_table(["mask or weight", "published bound", "mean reward by bound"], rows)
    return f"Without a correction: {without:.3f}.\n\n{table}"


def _preset_name(variant: TunedVariant) -> str:
    """Return the preset of a variant's mask, or the level of its weight."""
    _, _, correction = variant.compare.partition(":")
    level, _, preset = correction.partition("+")
    return f"`{preset}`" if preset else f"`is_correction_level: {level}`"


def _against_alternative(comparison: TunedComparison) -> list[str]:
    alternative = comparison.choice.alternative
    if alternative == comparison.regime.baseline:
        return []  # the table before has the same differences
    return [f"The same, minus {alternative}:", _difference_table(comparison.against_alternative)]


def _reward_table(comparison: TunedComparison) -> str:
    choice, regime = comparison.choice, comparison.regime
    rows = []
    for variant, by_rate in comparison.grid.items():
        rewards = [[run.reward for run in by_seed.values()] for by_seed in by_rate.values()]
        rows.append(
            [
                variant,
                "correction" if regime.variants[variant].is_correction else "alternative",
                choice.bounds[variant],
                *(f"{fmean(values):.3f} ({min(values):.3f})" for values in rewards),
                f"{choice.rates[variant]:g}",
                f"{choice.worst_rates[variant]:g}",
            ]
        )
    rates = (f"at {rate:g}" for rate in regime.learning_rates)
    return markdown_table(["variant", "", "bound", *rates, "chosen", "worst"], rows)


def _bound_table(comparison: TunedComparison) -> str:
    rows = [
        [variant, comparison.regime.variants[variant].published, ", ".join(f"{b}: {r:.3f}" for b, r in rewards.items())]
        for variant, rewards in comparison.choice.bound_rewards.items()
        if len(rewards) > 1
    ]
    return markdown_table(["variant", "published or documented bound", "mean reward by bound"], rows)


def _below_grid_text(comparison: TunedComparison) -> list[str]:
    texts = [f"{cell.variant} {reward:.3f} at {cell.learning_rate:g}" for cell, reward in comparison.below_grid.items()]
    variants = dict.fromkeys(cell.variant for cell in comparison.choice.below_grid)
    chosen = [f"{variant} {comparison.choice.search_rewards[variant]:.3f}" for variant in variants]
    if not texts:
        return []
    return [
        f"Below the grid, on the search seeds: {', '.join(texts)}. There, at the lowest rate of the grid: "
        f"{', '.join(chosen)}. This changes no choice."
    ]


def _measure_table(comparison: TunedComparison) -> str:
    rows = []
    for variant, by_rate in comparison.grid.items():
        tuned = [run.curves for run in by_rate[comparison.choice.rates[variant]].values()]
        all_rates = [run.curves for by_seed in by_rate.values() for run in by_seed.values()]
        rows.append(
            [
                variant,
                *_other_measures([run for run in tuned if "error" not in run.facts]),
                f"{sum(has_died(run) for run in tuned)} of {len(tuned)}",
                f"{sum(has_died(run) for run in all_rates)} of {len(all_rates)}",
                f"{sum(has_collapsed(run.series('reward')) for run in all_rates)} of {len(all_rates)}",
            ]
        )
    head = [
        *("variant", "reward, all steps", "best 10 steps", "validation", "entropy", "gradient norm"),
        *("died", "died, all rates", "collapsed, all rates"),
    ]
    return markdown_table(head, rows)


def _other_measures(curves: Sequence[RunCurves]) -> tuple[str, ...]:
    """Return the means of the protocol's other measures over runs."""
    if not curves:
        return ("–",) * 5
    validation = [value for value in map(_last_validation, curves) if not math.isnan(value)]
    ends = {
        metric: fmean(value for run in curves for value in run.series(metric)[-WINDOW:])
        for metric in ("approx_entropy", "grad_norm")
    }
    return (
        f"{fmean(fmean(run.series('reward')) for run in curves):.3f}",
        f"{fmean(best_reward(run.series('reward')) for run in curves):.3f}",
        f"{fmean(validation):.3f}" if validation else "–",
        f"{ends['approx_entropy']:.3f}",
        f"{ends['grad_norm']:.2f}",
    )


def _last_validation(run: RunCurves) -> float:
    """Return the reward of the validation after the last step; NaN if there was none."""
    return run.series("validation/reward")[-1]


def _failure_text(comparison: TunedComparison) -> list[str]:
    failed = [
        f"{variant} at {rate:g} on seed {seed}"
        for variant, by_rate in comparison.grid.items()
        for rate, by_seed in by_rate.items()
        for seed, run in by_seed.items()
        if "error" in run.curves.facts
    ]
    if not failed:
        return []
    return [f"Runs that raised an error, with a reward of 0 in their missing steps: {', '.join(failed)}."]


def _course_table(corrected_runs: Mapping[int, TunedRun], alternative_runs: Mapping[int, TunedRun]) -> str:
    """Return the mean differences of two variants over the steps, and those of their last validations."""
    pairs = [(run.curves, alternative_runs[seed].curves) for seed, run in corrected_runs.items()]
    rewards = [(corrected.series("reward"), alternative.series("reward")) for corrected, alternative in pairs]
    cells = {
        f"step {end}": [
            final_reward(corrected[:end]) - final_reward(alternative[:end]) for corrected, alternative in rewards
        ]
        for end in range(_COURSE_EVERY, pairs[0][0].steps + 1, _COURSE_EVERY)
    }
    cells["all steps"] = [fmean(corrected) - fmean(alternative) for corrected, alternative in rewards]
    validation = [_last_validation(corrected) - _last_validation(alternative) for corrected, alternative in pairs]
    cells["validation"] = [difference for difference in validation if not math.isnan(difference)]
    return markdown_table(list(cells), [[format_mean(differences) for differences in cells.values()]])


def _difference_table(answers: Mapping[str, Sequence[PairedDifference]]) -> str:
    by_measure = {measure: {row.variant: row.text for row in rows} for measure, rows in answers.items()}
    names = next(iter(by_measure.values()))
    rows = [[name, *(texts[name] for texts in by_measure.values())] for name in names]
    return markdown_table(["variant", *by_measure], rows)
