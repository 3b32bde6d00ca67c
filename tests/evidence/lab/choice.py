"""Choice of bounds and learning rates on the search seeds, and the runs that confirm it.

``docs/evidence/protocol.md`` has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.outcome import final_reward
from nemo_geomask.tools.lab.run_store import RunCurves
from tests.evidence.lab.regimes import Regime


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
    """One finished run of a cell.

    Attributes:
        cell: what was run.
        curves: its metrics.
        outcome: metric that decides, as :attr:`Regime.outcome` has it.
    """

    cell: Cell
    curves: RunCurves
    outcome: str = "reward"

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.curves.seed

    @property
    def reward(self) -> float:
        """What decides: the mean reward of the last ten steps, or the outcome's last value, 0 if it has none."""
        if self.outcome == "reward":
            return final_reward(self.curves.series("reward"))
        value = self.curves.series(self.outcome)[-1]
        return 0.0 if math.isnan(value) else value


def mean_reward(runs: Sequence[TunedRun], cell: Cell, seeds: Sequence[int]) -> float:
    """Return a cell's mean reward over the seeds.

    Raises: ConfigError: a seed's run is missing.
    """
    rewards = {run.seed: run.reward for run in runs if run.cell == cell}
    missing = [seed for seed in seeds if seed not in rewards]
    if missing:
        raise ConfigError(f"the run of '{cell.label}' is missing on seeds {missing}; train them first")
    return fmean(rewards[seed] for seed in seeds)


def choose_bounds(runs: Sequence[TunedRun], regime: Regime) -> dict[str, str]:
    """Return the bound of each variant that :func:`choose_bound` chooses."""
    return {name: choose_bound(runs, regime, name) for name in regime.variants}


def choose_bound(runs: Sequence[TunedRun], regime: Regime, name: str) -> str:
    """Return a variant's bound with the highest mean reward at the search's learning rate.

    A tie goes to the published bound.

    Raises: ConfigError: a run is missing.
    """
    means = _rewards_by_bound(runs, regime, name)
    return max(means, key=lambda bound: (means[bound], bound == regime.variants[name].published))


def _rewards_by_bound(runs: Sequence[TunedRun], regime: Regime, name: str) -> dict[str, float]:
    return {
        bound: mean_reward(runs, Cell(name, bound, regime.search_rate), regime.search_seeds)
        for bound in regime.variants[name].bounds
    }


def choose_rates(runs: Sequence[TunedRun], regime: Regime, bounds: Mapping[str, str]) -> dict[str, float]:
    """Return each variant's learning rate with the highest mean reward; a tie goes to the lower one.

    Raises: ConfigError: a run is missing.
    """
    chosen: dict[str, float] = {}
    for variant, bound in bounds.items():
        means = {
            rate: mean_reward(runs, Cell(variant, bound, rate), regime.search_seeds) for rate in regime.learning_rates
        }
        chosen[variant] = max(means, key=lambda rate: (means[rate], -rate))
    return chosen


@dataclass(frozen=True)
class TunedChoice:
    """Bounds, learning rates and the two variants of the primary comparison, as the search seeds chose them.

    Attributes:
        regime: the regime.
        bounds: each variant's bound.
        rates: each variant's best learning rate at this bound.
        worst_rates: each variant's worst learning rate at this bound.
        correction: the best correction, by its reward at the chosen bound and learning rate.
        alternative: the best variant that is no correction.
        search_rewards: each variant's mean reward on the search seeds, at its chosen bound and learning rate.
        bound_rewards: each variant's mean reward on the search seeds by bound, at the search's learning rate.
    """

    regime: Regime
    bounds: Mapping[str, str]
    rates: Mapping[str, float]
    worst_rates: Mapping[str, float]
    correction: str
    alternative: str
    search_rewards: Mapping[str, float]
    bound_rewards: Mapping[str, Mapping[str, float]]

    @property
    def below_grid(self) -> list[Cell]:
        """Cells below the grid of the variants whose chosen learning rate is the grid's lowest."""
        lowest = min(self.regime.learning_rates)
        at_the_edge = [name for name, rate in self.rates.items() if rate == lowest]
        return [Cell(name, self.bounds[name], rate) for rate in self.regime.below_grid for name in at_the_edge]

    @property
    def grid(self) -> dict[str, list[Cell]]:
        """Cells of each variant in the confirmation."""
        if not self.regime.confirms_all_rates:
            return {name: [self.tuned_cell(name)] for name in self.bounds}
        rates = self.regime.learning_rates
        return {name: [Cell(name, bound, rate) for rate in rates] for name, bound in self.bounds.items()}

    def tuned_cell(self, variant: str) -> Cell:
        """Return a variant's cell at its chosen learning rate."""
        return Cell(variant, self.bounds[variant], self.rates[variant])

    @property
    def confirmation(self) -> list[tuple[Cell, int]]:
        """Cells and seeds of all confirmation runs."""
        regime = self.regime
        primary = [self.tuned_cell(variant) for variant in (self.correction, self.alternative)]
        further = [seed for seed in regime.primary_seeds if seed not in regime.confirmation_seeds]
        cells = [cell for row in self.grid.values() for cell in row]
        return [
            *((cell, seed) for cell in cells for seed in regime.confirmation_seeds),
            *((cell, seed) for cell in primary for seed in further),
        ]


def choose(runs: Iterable[TunedRun], regime: Regime) -> TunedChoice:
    """Choose bounds, learning rates and the two variants of the primary comparison on the search seeds.

    Raises: ConfigError: a run is missing.
    """
    search = [run for run in runs if run.seed in regime.search_seeds]
    bounds = choose_bounds(search, regime)
    rates = choose_rates(search, regime, bounds)

    def rewards(variant: str) -> dict[float, float]:
        cells = {rate: Cell(variant, bounds[variant], rate) for rate in regime.learning_rates}
        return {rate: mean_reward(search, cell, regime.search_seeds) for rate, cell in cells.items()}

    by_variant = {variant: rewards(variant) for variant in bounds}
    worst = {variant: min(by_rate, key=by_rate.__getitem__) for variant, by_rate in by_variant.items()}

    def best(*, is_correction: bool) -> str:
        names = [name for name, variant in regime.variants.items() if variant.is_correction == is_correction]
        return max(names, key=lambda name: by_variant[name][rates[name]])

    correction, alternative = regime.primary or (best(is_correction=True), best(is_correction=False))
    search_rewards = {variant: by_rate[rates[variant]] for variant, by_rate in by_variant.items()}
    bound_rewards = {name: _rewards_by_bound(search, regime, name) for name in regime.variants}
    return TunedChoice(regime, bounds, rates, worst, correction, alternative, search_rewards, bound_rewards)
