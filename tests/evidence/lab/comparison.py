"""Comparison of variants that were tuned alike: differences and tests on the confirmation seeds.

``docs/evidence/protocol.md`` has the questions, and says why they are answered in this way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.probe.paired_tests import holm, sign_flip_p
from nemo_geomask.tools.shared.intervals import mean_interval
from tests.evidence.lab.choice import Cell, TunedChoice, TunedRun, choose, mean_reward
from tests.evidence.lab.regimes import Regime
from tests.helpers.interval_text import format_mean

_LEVEL = 0.05
_MIN_SHARE = 0.9  # share of the seeds on which a difference that counts has its sign, except in the primary comparison
_TUNED, _MEAN_RATE, _WORST_RATE = "tuned against tuned", "mean over the learning rates", "worst learning rate"


@dataclass(frozen=True)
class PairedDifference:
    """A variant's reward minus another one's, on the same seeds.

    Attributes:
        variant: the variant.
        by_seed: the differences.
        p: two-sided p-value of the exact sign-flip test.
        adjusted_p: the same, adjusted by Holm's method for all differences of its table.
        min_share: share of the seeds on which a difference that counts has its sign.
    """

    variant: str
    by_seed: Mapping[int, float]
    p: float
    adjusted_p: float
    min_share: float = _MIN_SHARE

    @property
    def mean(self) -> float:
        """Mean difference."""
        return fmean(self.by_seed.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean by Student's t; None for a single seed."""
        return mean_interval(list(self.by_seed.values()))

    @property
    def verdict(self) -> str:
        """``gain``, ``loss``, or ``not detected``, as the protocol calls the difference."""
        signs = [math.copysign(1.0, self.mean) * value > 0 for value in self.by_seed.values()]
        if self.adjusted_p >= _LEVEL or sum(signs) < self.min_share * len(signs):
            return "not detected"
        return "gain" if self.mean > 0 else "loss"

    @property
    def text(self) -> str:
        """Text of the difference in a table."""
        positive = sum(value > 0 for value in self.by_seed.values())
        seeds = f"higher on {positive} of {len(self.by_seed)}"
        return f"{format_mean(list(self.by_seed.values()))}; {seeds}; p {self.adjusted_p:.3g}: {self.verdict}"


def differences(
    rewards: Mapping[str, Mapping[str, Mapping[int, float]]], baseline: str
) -> dict[str, list[PairedDifference]]:
    """Compare each variant with the baseline in each measure; Holm's correction is over all of them together.

    Args:
        rewards: for each measure and variant, the reward by seed.
        baseline: the variant that the others are compared with.
    """
    by_comparison = [
        (measure, variant, _difference(by_seed, by_variant[baseline]))
        for measure, by_variant in rewards.items()
        for variant, by_seed in by_variant.items()
        if variant != baseline
    ]
    p_values = [sign_flip_p(list(by_seed.values())) for *_, by_seed in by_comparison]
    result: dict[str, list[PairedDifference]] = {measure: [] for measure in rewards}
    for (measure, variant, by_seed), p, adjusted in zip(by_comparison, p_values, holm(p_values), strict=True):
        result[measure].append(PairedDifference(variant, by_seed, p, adjusted))
    return result


def _difference(rewards: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    return {seed: reward - other[seed] for seed, reward in rewards.items()}


@dataclass(frozen=True)
class TunedComparison:
    """Results of a regime on its confirmation seeds.

    Attributes:
        choice: bounds, learning rates and variants that the search chose.
        grid: for each variant and learning rate, the confirmation runs by seed.
        primary: the best correction minus the best alternative, both tuned.
        primary_runs: the runs of both, the correction's first, by seed.
        tuned: the tuned variants minus the tuned variant without a correction.
        over_rates: for both measures over the learning rates, the differences from the variant without a correction.
        against_alternative: the same of corrections minus the best alternative.
        below_grid: mean rewards on the search seeds of those of :attr:`TunedChoice.below_grid` that were run.
    """

    choice: TunedChoice
    grid: Mapping[str, Mapping[float, Mapping[int, TunedRun]]]
    primary: PairedDifference
    primary_runs: tuple[Mapping[int, TunedRun], Mapping[int, TunedRun]]
    tuned: Mapping[str, Sequence[PairedDifference]]
    over_rates: Mapping[str, Sequence[PairedDifference]]
    against_alternative: Mapping[str, Sequence[PairedDifference]]
    below_grid: Mapping[Cell, float]

    @property
    def regime(self) -> Regime:
        """The regime."""
        return self.choice.regime

    @property
    def answers(self) -> dict[str, Sequence[PairedDifference]]:
        """The differences from the variant without a correction, by measure."""
        return {**self.tuned, **self.over_rates}


def compare_tuned_runs(runs: Iterable[TunedRun], regime: Regime) -> TunedComparison:
    """Choose bounds and learning rates on the search seeds, and compare the variants on the confirmation seeds.

    Raises: ConfigError: a run is missing, or the runs of a seed come from several machines or versions.
    """
    runs = list(runs)
    _check_machines(run for run in runs if run.seed not in regime.search_seeds)  # the search pairs nothing
    choice = choose(runs, regime)
    by_key = {(run.cell, run.seed): run for run in runs}
    if absent := sum(key not in by_key for key in choice.confirmation):
        raise ConfigError(f"{absent} runs of the confirmation are missing; train them first")
    grid = {
        variant: {
            cell.learning_rate: {seed: by_key[cell, seed] for seed in regime.confirmation_seeds} for cell in cells
        }
        for variant, cells in choice.grid.items()
    }

    def tuned_runs(variant: str, seeds: Sequence[int]) -> dict[int, TunedRun]:
        return {seed: by_key[choice.tuned_cell(variant), seed] for seed in seeds}

    correction, alternative = (
        tuned_runs(variant, regime.primary_seeds) for variant in (choice.correction, choice.alternative)
    )
    primary = _difference(_rewards(correction), _rewards(alternative))
    p = sign_flip_p(list(primary.values()))
    # Where the protocol names the two variants of the primary comparison, it is not one of the others.
    others = [variant for variant in grid if variant not in regime.primary[:1]]
    tuned = {variant: _rewards(tuned_runs(variant, regime.confirmation_seeds)) for variant in others}
    over_rates: dict[str, dict[str, dict[int, float]]] = {}
    if regime.confirms_all_rates:
        over_rates = _over_rates(grid, choice)
    compared = [
        name for name, variant in regime.variants.items() if variant.is_correction or name == choice.alternative
    ]
    return TunedComparison(
        choice,
        grid,
        PairedDifference(choice.correction, primary, p, p, min_share=0.0),
        (correction, alternative),
        differences({_TUNED: tuned}, regime.baseline),
        differences(over_rates, regime.baseline),
        differences(
            {measure: {name: by_variant[name] for name in compared} for measure, by_variant in over_rates.items()},
            choice.alternative,
        ),
        {
            cell: mean_reward(runs, cell, regime.search_seeds)
            for cell in choice.below_grid
            if all((cell, seed) in by_key for seed in regime.search_seeds)
        },
    )


def _over_rates(
    grid: Mapping[str, Mapping[float, Mapping[int, TunedRun]]], choice: TunedChoice
) -> dict[str, dict[str, dict[int, float]]]:
    """Return each variant's reward by seed, as the mean over the learning rates and at the worst one."""
    return {
        _MEAN_RATE: {
            variant: {
                seed: fmean(by_seed[seed].reward for by_seed in by_rate.values())
                for seed in choice.regime.confirmation_seeds
            }
            for variant, by_rate in grid.items()
        },
        # The worst learning rate is that of the search: a minimum over each seed's runs would be that of their noise.
        _WORST_RATE: {variant: _rewards(by_rate[choice.worst_rates[variant]]) for variant, by_rate in grid.items()},
    }


def adjust_primaries(comparisons: Sequence[TunedComparison]) -> list[PairedDifference]:
    """Return the primary differences of several regimes with Holm's correction over all of them."""
    primaries = [comparison.primary for comparison in comparisons]
    adjusted = holm([primary.p for primary in primaries])
    return [replace(primary, adjusted_p=p) for primary, p in zip(primaries, adjusted, strict=True)]


def _rewards(runs: Mapping[int, TunedRun]) -> dict[int, float]:
    return {seed: run.reward for seed, run in runs.items()}


def _check_machines(runs: Iterable[TunedRun]) -> None:
    by_seed: dict[int, set[str]] = {}
    for run in runs:
        facts = run.curves.facts
        if not facts.get("machine") or not facts.get("versions"):
            raise ConfigError(f"the run of '{run.cell.label}' on seed {run.seed} does not say where it was trained")
        by_seed.setdefault(run.seed, set()).add(f"{facts.get('machine')}, {facts.get('versions')}")
    for seed, machines in by_seed.items():
        if len(machines) > 1:
            raise ConfigError(
                f"the runs of seed {seed} come from several machines or versions ({'; '.join(sorted(machines))}), so "
                "they can't be paired; train all runs of a seed on one"
            )
