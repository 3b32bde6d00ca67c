"""Comparison of variants that were tuned alike: choice on search seeds, differences and tests on confirmation seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.outcome import WINDOW, best_reward, final_reward, has_collapsed, has_died
from nemo_geomask.tools.lab.run_store import RunCurves
from nemo_geomask.tools.lab.tuned_regimes import Regime
from nemo_geomask.tools.shared.intervals import mean_interval
from nemo_geomask.tools.shared.markdown import markdown_table
from nemo_geomask.tools.shared.paired_tests import holm, sign_flip_p

__all__ = [
    "Cell",
    "PairedDifference",
    "TunedComparison",
    "TunedRun",
    "choose_bounds",
    "choose_rates",
    "compare_tuned_runs",
    "comparison_tables",
    "differences",
]

_LEVEL = 0.05
_MIN_SHARE = 0.9  # share of the seeds on which a difference that counts is positive
TUNED, MEAN_RATE, WORST_RATE = "tuned against tuned", "mean over the learning rates", "worst learning rate"


@dataclass(frozen=True, order=True)
class Cell:
    """A variant at one bound and one learning rate."""

    variant: str
    bound: str
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
    def mean(self) -> float:
        """Mean difference."""
        return fmean(self.by_seed.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean by Student's t; None for a single seed."""
        return mean_interval(list(self.by_seed.values()))

    @property
    def is_gain(self) -> bool:
        """True if the protocol calls the difference a gain."""
        positive = sum(value > 0 for value in self.by_seed.values())
        return self.adjusted_p < _LEVEL and self.mean > 0 and positive >= _MIN_SHARE * len(self.by_seed)

    @property
    def text(self) -> str:
        """Text of the difference in a table."""
        interval = self.interval
        interval_text = "" if interval is None else " ({:+.3f} to {:+.3f})".format(*interval)
        positive = sum(value > 0 for value in self.by_seed.values())
        verdict = "yes" if self.is_gain else "no"
        return f"{self.mean:+.3f}{interval_text}; {positive} of {len(self.by_seed)}; p {self.adjusted_p:.3f}: {verdict}"


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


def choose_bounds(runs: Sequence[TunedRun], regime: Regime) -> dict[str, str]:
    """Return each variant's bound with the highest mean reward at the search's learning rate.

    A tie goes to the published bound.

    Raises:
        ConfigError: a run is missing.
    """
    chosen: dict[str, str] = {}
    for variant in regime.variants.values():
        means = {
            bound: _mean_reward(runs, Cell(variant.name, bound, regime.search_rate), regime.search_seeds)
            for bound in variant.bounds
        }
        chosen[variant.name] = max(means, key=lambda bound: (means[bound], bound == variant.published))
    return chosen


def choose_rates(runs: Sequence[TunedRun], regime: Regime, bounds: Mapping[str, str]) -> dict[str, float]:
    """Return each variant's learning rate with the highest mean reward; a tie goes to the lower one.

    Raises:
        ConfigError: a run is missing.
    """
    chosen: dict[str, float] = {}
    for variant, bound in bounds.items():
        means = {
            rate: _mean_reward(runs, Cell(variant, bound, rate), regime.search_seeds) for rate in regime.learning_rates
        }
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


@dataclass(frozen=True)
class TunedComparison:
    """Results of a regime on its confirmation seeds.

    Attributes:
        regime: the regime.
        bounds: each variant's bound, chosen on the search seeds.
        rates: each variant's learning rate, chosen on the search seeds.
        grid: for each variant and learning rate, the confirmation runs by seed.
        answers: for each measure, the differences from the variant without a correction.
    """

    regime: Regime
    bounds: Mapping[str, str]
    rates: Mapping[str, float]
    grid: Mapping[str, Mapping[float, Mapping[int, TunedRun]]]
    answers: Mapping[str, Sequence[PairedDifference]]


def compare_tuned_runs(runs: Iterable[TunedRun], regime: Regime) -> TunedComparison:
    """Choose bounds and learning rates on the search seeds, and compare the variants on the confirmation seeds.

    Raises:
        ConfigError: a run is missing.
    """
    runs = list(runs)
    search = [run for run in runs if run.seed in regime.search_seeds]
    confirmed = {(run.cell, run.seed): run for run in runs if run.seed in regime.confirmation_seeds}
    bounds = choose_bounds(search, regime)
    rates = choose_rates(search, regime, bounds)
    wanted = [
        (Cell(variant, bound, rate), seed)
        for variant, bound in bounds.items()
        for rate in regime.learning_rates
        for seed in regime.confirmation_seeds
    ]
    if absent := sum(key not in confirmed for key in wanted):
        raise ConfigError(f"{absent} runs of the confirmation are missing; train them first")
    grid: dict[str, dict[float, dict[int, TunedRun]]] = {}
    for cell, seed in wanted:
        by_rate = grid.setdefault(cell.variant, {})
        by_rate.setdefault(cell.learning_rate, {})[seed] = confirmed[cell, seed]

    tuned = {
        variant: {seed: run.reward for seed, run in by_rate[rates[variant]].items()}
        for variant, by_rate in grid.items()
    }
    untuned = {
        measure: {
            variant: {
                seed: combine([by_seed[seed].reward for by_seed in by_rate.values()])
                for seed in regime.confirmation_seeds
            }
            for variant, by_rate in grid.items()
        }
        for measure, combine in ((MEAN_RATE, fmean), (WORST_RATE, min))
    }
    answers = differences({TUNED: tuned}, regime.baseline) | differences(untuned, regime.baseline)
    return TunedComparison(regime, bounds, rates, grid, answers)


def comparison_tables(comparison: TunedComparison) -> str:
    """Return three Markdown tables: rewards by learning rate, other measures over all of them, and the answers."""
    regime, grid = comparison.regime, comparison.grid
    rewards = {
        variant: {rate: [run.reward for run in by_seed.values()] for rate, by_seed in by_rate.items()}
        for variant, by_rate in grid.items()
    }
    reward_rows = [
        [
            variant,
            comparison.bounds[variant],
            *(f"{fmean(values):.3f} ({min(values):.3f})" for values in by_rate.values()),
            f"{comparison.rates[variant]:g}",
        ]
        for variant, by_rate in rewards.items()
    ]
    reward_head = ["variant", "bound", *(f"at {rate:g}" for rate in regime.learning_rates), "chosen rate"]
    measure_rows = [
        [variant, *_other_measures([run.curves for by_seed in by_rate.values() for run in by_seed.values()])]
        for variant, by_rate in grid.items()
    ]
    measure_head = ["variant", "best 10 steps", "validation", "entropy", "gradient norm", "died", "collapsed"]
    answers = {measure: {row.variant: row.text for row in rows} for measure, rows in comparison.answers.items()}
    answer_rows = [
        [variant, *(by_variant[variant] for by_variant in answers.values())]
        for variant in grid
        if variant != regime.baseline
    ]
    return "\n\n".join(
        (
            markdown_table(reward_head, reward_rows),
            markdown_table(measure_head, measure_rows),
            markdown_table([f"minus {regime.baseline}", *answers], answer_rows),
        )
    )


def _other_measures(curves: Sequence[RunCurves]) -> tuple[str, ...]:
    """Return the protocol's other measures: means over the runs, and how many of them died and collapsed."""
    validation = [value for run in curves for value in run.series("validation/reward")[-1:] if value == value]
    ends = {
        metric: fmean(value for run in curves for value in run.series(metric)[-WINDOW:])
        for metric in ("approx_entropy", "grad_norm")
    }
    return (
        f"{fmean(best_reward(run.series('reward')) for run in curves):.3f}",
        f"{fmean(validation):.3f}" if validation else "–",
        f"{ends['approx_entropy']:.2f}",
        f"{ends['grad_norm']:.2f}",
        f"{sum(has_died(run) for run in curves)} of {len(curves)}",
        f"{sum(has_collapsed(run.series('reward')) for run in curves)} of {len(curves)}",
    )
