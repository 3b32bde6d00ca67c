"""Run a NeMo-RL script with the loss of its recipe."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_geomask.checks.gates import readers_of_prev
from nemo_geomask.errors import ConfigError, GeomaskError
from nemo_geomask.integrations.nemo_rl.dispatch import install
from nemo_geomask.losses import build_loss
from nemo_geomask.recipe import ROOT_VARIABLE, load_recipe, nemo_rl_root

__all__ = ["launch"]


def launch(script: str, arguments: Sequence[str]) -> None:
    """Run ``script`` as ``python script arguments...`` would, after :func:`~nemo_geomask.install`.

    The script is ``__main__``, ``sys.argv`` is what it expects and its folder is first on ``sys.path``.

    Raises:
        ConfigError: there is no such script; or the loss that the recipe names can't be built, which would else show
            after Ray, the tokenizer and the data sets have been started and loaded.
        SeamError, MissingDependencyError: see :func:`~nemo_geomask.install`.
    """
    if not Path(script).is_file():
        raise ConfigError(
            f"{script}: there is no such script; give one of NeMo-RL's, such as examples/run_grpo.py, by its path"
        )
    # Our recipes name NeMo-RL's by this variable.
    root = nemo_rl_root()
    if root is not None:
        os.environ.setdefault(ROOT_VARIABLE, str(root))
    install()
    _build(arguments)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _build(arguments: Sequence[str]) -> None:
    """Build the recipe's loss once, ahead of the script."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config")
    try:
        known, rest = parser.parse_known_args(list(arguments))
        recipe = load_recipe(known.config, rest) if known.config else {}
    except (argparse.ArgumentError, GeomaskError):
        # What the script makes of its arguments is its own, and so is the error.
        return
    settings = recipe.get("loss_fn")
    if isinstance(settings, Mapping) and settings.get("name") is not None:
        with warnings.catch_warnings(action="ignore"):  # they come with the loss that trains
            config = build_loss(settings).config
        if problems := tuple(readers_of_prev(recipe)) if config.skips_prev else ():
            raise ConfigError(*problems)
