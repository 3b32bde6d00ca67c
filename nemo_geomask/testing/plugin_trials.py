"""Implementation of ``nemo-geomask test-variant``: tests of a named plugin, with settings from the command line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nemo_geomask import testing
from nemo_geomask.errors import ConfigError
from nemo_geomask.optional import require
from nemo_geomask.recipe import Origins
from nemo_geomask.recipe.overrides import apply_override


class TrialResult(NamedTuple):
    """Outcome of one promise in one trial.

    Attributes:
        trial: description of the settings under which the plugin was tried.
        promise: name of the promise.
        violation: how the loss breaks the promise; empty if it keeps it.
    """

    trial: str
    promise: str
    violation: str


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse command-line words such as ``key.path=value``, in Hydra's grammar, into nested settings of ``loss_fn``.

    Raises:
        ConfigError: a word has another form, or two words set the same key.
        MissingDependencyError: the ``recipes`` extra is not installed.
    """
    if not words:
        return {}
    omegaconf = require("omegaconf", "a setting on the command line needs", "recipes").OmegaConf
    config, origins = omegaconf.create({}), Origins()
    for word in words:
        if not re.match(r"\w[\w.]*=", word):
            raise ConfigError(f"'{word}' is not a setting; write key=value")
        config, origins = apply_override(config, origins, word, new_keys=True)
    for first, second in itertools.permutations(words, 2):
        if f"{second.partition('=')[0]}.".startswith(f"{first.partition('=')[0]}."):
            raise ConfigError(f"'{first}' and '{second}' set the same key; remove one of them")
    settings: dict[str, Any] = omegaconf.to_container(config, resolve=False)
    return settings


def run_trials(name: str, settings: Mapping[str, Any]) -> Iterator[TrialResult]:
    """Test a plugin under each of its :func:`~nemo_geomask.testing.trials`, and yield the result for each promise.

    Args:
        name: the plugin's registered name, or ``module:attribute``.
        settings: settings of ``loss_fn`` that override those of every trial.

    Raises:
        PluginError: the name can't be loaded.
        ConfigError: the settings are invalid.
    """
    for trial, trial_settings in testing.trials(name).items():
        try:
            for promise, violation in testing.broken_promises({**trial_settings, **settings}):
                yield TrialResult(trial, promise.name, violation)
        except ConfigError as error:
            if "masks" in settings or trial_settings.get("masks") != [{"preset": name}]:
                raise
            # A mask preset is tried with its default settings, but some of this preset's fields have no default.
            fields = [key.rpartition(".")[2] for problem in error.problems for key in problem.keys]
            mask = ", ".join([f"preset: {name}", *(f"{field}: …" for field in fields)])
            fix = f"give the preset's settings: nemo-geomask test-variant {name} 'masks=[{{{mask}}}]'"
            raise ConfigError(*error.problems, fix) from None
