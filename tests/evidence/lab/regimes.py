"""Regimes of the comparison with tuned baselines, as ``docs/evidence/tuned.toml`` defines them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.train_recipe import parse_seeds


@dataclass(frozen=True)
class TunedVariant:
    """A variant with the bounds that are tried.

    Attributes:
        name: its name in tables.
        compare: its SPEC, as ``--compare`` of ``nemo-geomask lab`` takes it.
        bounds: for each bound, by its name in tables, the overrides that set it.
        published: name of the bound that the source publishes.
        is_correction: True for a correction; False for what a user has without one, such as PPO's clip.
    """

    name: str
    compare: str
    bounds: Mapping[str, Sequence[str]]
    published: str
    is_correction: bool

    def __post_init__(self) -> None:
        if self.published not in self.bounds:
            raise ConfigError(f"'{self.name}' has no bound '{self.published}'; its bounds are {list(self.bounds)}")


@dataclass(frozen=True)
class Regime:
    """A regime of the protocol.

    Attributes:
        name: its name, and that of its data file.
        title: its title in pages.
        recipe: path of the recipe, from the repository's root.
        overrides: overrides of the recipe in all runs.
        variants: the variants by name; the first one has no correction.
        learning_rates: the grid, ascending.
        search_rate: learning rate at which the bounds are searched.
        search_seeds: seeds of the search.
        confirmation_seeds: seeds of the confirmation, on which every variant is run.
        primary_seeds: seeds of the primary comparison, the confirmation's among them.
        below_grid: learning rates that are run beside the grid, where the search chose its lowest one.
        builds_on_baseline: True if the other variants run at the bound that the search chose for the first one.
        outcome: metric that decides: the reward's mean over the last ten steps, or a validation's last value.
        primary: the two variants of the primary comparison; empty: the best correction and the best alternative.
        confirms_all_rates: True if the confirmation runs every learning rate, False if only the chosen one.
        sensitivity: masks and weights, each with five bounds, that are run at the search's learning rate and seeds, and
            choose nothing. Those of :attr:`variants` have the same names and share their runs.
    """

    name: str
    title: str
    recipe: str
    overrides: Sequence[str]
    variants: Mapping[str, TunedVariant]
    learning_rates: Sequence[float]
    search_rate: float
    search_seeds: Sequence[int]
    confirmation_seeds: Sequence[int]
    primary_seeds: Sequence[int]
    below_grid: Sequence[float] = ()
    builds_on_baseline: bool = False
    outcome: str = "reward"
    primary: Sequence[str] = ()
    confirms_all_rates: bool = True
    sensitivity: Mapping[str, TunedVariant] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """Name of the variant without a correction."""
        return next(iter(self.variants))


def read_regimes(path: Path) -> dict[str, Regime]:
    """Read the regimes of ``tuned.toml``, by name.

    Raises: ConfigError: the published bound of a variant is not one of its bounds.
    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    rates, search_rate = data.pop("learning_rates"), data.pop("search_rate")
    seeds: dict[str, Any] = {
        key: parse_seeds(data.pop(key)) for key in ("search_seeds", "confirmation_seeds", "primary_seeds")
    }
    regimes = {}
    for name, settings in data.items():
        own = {key: parse_seeds(value) if key in seeds else value for key, value in settings.items()}
        for section in ("variants", "sensitivity"):
            own[section] = {key: TunedVariant(key, **value) for key, value in settings.get(section, {}).items()}
        common = {"learning_rates": rates, "search_rate": search_rate, **seeds}
        regimes[name] = Regime(name=name, **{**common, **own})
    return regimes
