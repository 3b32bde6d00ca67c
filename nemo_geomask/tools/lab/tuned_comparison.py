"""Comparison of variants that were tuned alike: choice on search seeds, differences and tests on confirmation seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.outcome import best_reward, final_reward, has_collapsed, has_died
from nemo_geomask.tools.lab.run_store import RunCurves
from nemo_geomask.tools.shared.intervals import mean_interval
from nemo_geomask.tools.shared.markdown import markdown_table
from nemo_geomask.tools.shared.paired_tests import holm, sign_flip_p

__all__ = ["Cell", "PairedDifference", "TunedRun", "choose_bounds", "choose_rates", "comparison_tables", "differences"]

_LEVEL = 0.05
_MIN_SHARE = 0.9  # share of the seeds on which a difference that counts is positive


@dataclass(frozen=True, order=True)
class Cell:
    """A variant at one bound and one learning rate."""

    variant: str
    bound: int
    learning_rate: float

    @property
    def label(self) -> str:
        """Name of the cell's runs."""
        return f"{self.variant} bound={self.bound} lr={self.learning_rate:g}"


@dataclass(frozen=True)
class TunedRun:
    """One finished run of a cell."""

    cell: Cell
    curves: RunCurves

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.curves.seed

    @property
    def reward(self) -> float:
        """Mean reward of the last ten steps."""
        return final_reward(self.curves.series("reward"))


@dataclass(frozen=True)
class PairedDifference:
    """A variant's reward minus that of the variant without a correction, on the same seeds.

    Attributes:
        variant: the variant.
        by_seed: the differences.
        p: two-sided p-value of the exact sign-flip test.
        adjusted_p: the same, adjusted by Holm's method for all differences of the question.
    """

    variant: str
    by_seed: Mapping[int, float]
    p: float
    adjusted_p: float

    @property
    def is_gain(self) -> bool:
        """True if the protocol calls the difference a gain."""
        values = list(self.by_seed.values())
        positive = sum(value > 0 for value in values)
        return self.adjusted_p < _LEVEL and fmean(values) > 0 and positive >= _MIN_SHARE * len(values)

    @property
    def cell(self) -> str:
        """Text of the difference in a table."""
        values = list(self.by_seed.values())
        interval = mean_interval(values)
        interval_text = "" if interval is None else " ({:+.3f} to {:+.3f})".format(*interval)
        positive = sum(value > 0 for value in values)
        verdict = "yes" if self.is_gain else "no"
        return f"{fmean(values):+.3f}{interval_text}; {positive} of {len(values)}; p {self.adjusted_p:.3f}: {verdict}"


def _mean_reward(runs: Sequence[TunedRun], cell: Cell, seeds: Sequence[int]) -> float:
    """Return a cell's mean reward over the seeds.

    Raises:
        ConfigError: a seed's run is missing.
    """
    rewards = {run.seed: run.reward for run in runs if run.cell == cell}
    missing = [seed for seed in seeds if seed not in rewards]
    if missing:
        raise ConfigError(f"the run of '{cell.label}' is missing on seeds {missing}; train them first")
    return fmean(rewards[seed] for seed in seeds)


def choose_bounds(
    runs: Iterable[TunedRun], variants: Sequence[str], published: Mapping[str, int], rate: float, seeds: Sequence[int]
) -> dict[str, int]:
    """Return each variant's bound with the highest mean reward at one learning rate; a tie goes to the published one.

    Raises:
        ConfigError: a run is missing.
    """
    runs = list(runs)
    chosen: dict[str, int] = {}
    for variant in variants:
        tried = {run.cell.bound for run in runs if run.cell.variant == variant and run.cell.learning_rate == rate}
        means = {
            bound: _mean_reward(runs, Cell(variant, bound, rate), seeds)
            for bound in sorted(tried | {published[variant]})
        }
        chosen[variant] = max(means, key=lambda bound: (means[bound], bound == published[variant]))
    return chosen


def choose_rates(
    runs: Iterable[TunedRun], bounds: Mapping[str, int], rates: Sequence[float], seeds: Sequence[int]
) -> dict[str, float]:
    """Return each variant's learning rate with the highest mean reward; a tie goes to the lower one.

    Raises:
        ConfigError: a run is missing.
    """
    runs = list(runs)
    chosen: dict[str, float] = {}
    for variant, bound in bounds.items():
        means = {rate: _mean_reward(runs, Cell(variant, bound, rate), seeds) for rate in rates}
        chosen[variant] = max(means, key=lambda rate: (means[rate], -rate))
    return chosen


def differences(
    rewards: Mapping[str, Mapping[str, Mapping[int, float]]], baseline: str
) -> dict[str, list[PairedDifference]]:
    """Compare each variant with the baseline in each measure; Holm's correction is over all of them together.

    Args:
        rewards: for each measure and variant, the reward by seed.
        baseline: the variant without a correction.
    """
    by_comparison = [
        (measure, variant, {seed: value - by_variant[baseline][seed] for seed, value in by_seed.items()})
        for measure, by_variant in rewards.items()
        for variant, by_seed in by_variant.items()
        if variant != baseline
    ]
    p_values = [sign_flip_p(list(by_seed.values())) for *_, by_seed in by_comparison]
    result: dict[str, list[PairedDifference]] = {measure: [] for measure in rewards}
    for (measure, variant, by_seed), p, adjusted in zip(by_comparison, p_values, holm(p_values), strict=True):
        result[measure].append(PairedDifference(variant, by_seed, p, adjusted))
    return result


def comparison_tables(
    runs: Iterable[TunedRun],
    variants: Sequence[str],
    published: Mapping[str, int],
    rates: Sequence[float],
    search_rate: float,
    search_seeds: Sequence[int],
    confirmation_seeds: Sequence[int],
) -> str:
    """Return the tables of a regime in Markdown; a sentence if the confirmation is not complete.

    The first of ``variants`` is the one without a correction.
    """
    runs = list(runs)
    search = [run for run in runs if run.seed in search_seeds]
    confirmed = {(run.cell, run.seed): run for run in runs if run.seed in confirmation_seeds}
    try:
        bounds = choose_bounds(search, variants, published, search_rate, search_seeds)
        best = choose_rates(search, bounds, rates, search_seeds)
    except ConfigError as error:
        return f"Not enough data: {error}."
    grid = {variant: [Cell(variant, bounds[variant], rate) for rate in rates] for variant in variants}
    absent = sum(
        (cell, seed) not in confirmed for cells in grid.values() for cell in cells for seed in confirmation_seeds
    )
    if absent:
        return f"Not enough data: {absent} runs of the confirmation are missing."

    def rewards(cell: Cell) -> dict[int, float]:
        return {seed: confirmed[cell, seed].reward for seed in confirmation_seeds}

    by_cell = {cell: rewards(cell) for cells in grid.values() for cell in cells}
    tuned = {variant: by_cell[Cell(variant, bounds[variant], best[variant])] for variant in variants}
    untuned = {
        measure: {
            variant: {seed: combine([by_cell[cell][seed] for cell in grid[variant]]) for seed in confirmation_seeds}
            for variant in variants
        }
        for measure, combine in (("mean over the learning rates", fmean), ("worst learning rate", min))
    }
    answers = differences({"tuned": tuned}, variants[0]) | differences(untuned, variants[0])
    reward_rows = [
        [
            variant,
            *(f"{fmean(by_cell[cell].values()):.3f} ({min(by_cell[cell].values()):.3f})" for cell in grid[variant]),
            f"{best[variant]:g}",
            *_fate(confirmed, grid[variant], confirmation_seeds),
        ]
        for variant in variants
    ]
    head = [
        "variant",
        *(f"at {rate:g}" for rate in rates),
        "chosen rate",
        "best 10 steps",
        "validation",
        "died",
        "collapsed",
    ]
    by_variant = {measure: {row.variant: row.cell for row in rows} for measure, rows in answers.items()}
    answer_rows = [[variant, *(by_variant[measure][variant] for measure in by_variant)] for variant in variants[1:]]
    answer_head = ["minus " + variants[0], "tuned against tuned", *untuned]
    return markdown_table(head, reward_rows) + "\n\n" + markdown_table(answer_head, answer_rows)


def _fate(
    confirmed: Mapping[tuple[Cell, int], TunedRun], cells: Sequence[Cell], seeds: Sequence[int]
) -> tuple[str, str, str, str]:
    """Return the means of best and validation reward, and how many runs died and collapsed, over all learning rates."""
    curves = [confirmed[cell, seed].curves for cell in cells for seed in seeds]
    validation = [value for run in curves for value in run.series("validation/reward")[-1:] if value == value]
    return (
        f"{fmean(best_reward(run.series('reward')) for run in curves):.3f}",
        f"{fmean(validation):.3f}" if validation else "–",
        f"{sum(has_died(run) for run in curves)} of {len(curves)}",
        f"{sum(has_collapsed(run.series('reward')) for run in curves)} of {len(curves)}",
    )
