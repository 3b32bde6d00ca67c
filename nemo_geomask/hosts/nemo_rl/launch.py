"""``nemo-geomask run``: run a NeMo-RL script with the loss that its recipe names."""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_geomask.errors import ConfigError, GeomaskError
from nemo_geomask.hosts.nemo_rl import accepted_apis
from nemo_geomask.hosts.nemo_rl.facts import LOSS_CONFIG, LOSS_MODULE, neutral_values, prev_readers
from nemo_geomask.hosts.nemo_rl.loss_block import without_unread_fields
from nemo_geomask.hosts.nemo_rl.loss_dispatch import install
from nemo_geomask.losses import build_loss
from nemo_geomask.recipe import ROOT_VARIABLE, load_recipe, nemo_rl_root

__all__ = ["launch"]


def launch(script: str, arguments: Sequence[str], *, accept: Sequence[str] = ()) -> None:
    """Run ``script`` as ``python script arguments...`` would, after :func:`~nemo_geomask.install`.

    The script runs as ``__main__``, with its own ``sys.argv`` and its folder first on ``sys.path``.

    Args:
        script: path of the script.
        arguments: its arguments.
        accept: dotted names of NeMo-RL APIs that may differ from the tested versions.

    Raises:
        ConfigError: the script does not exist, an API in ``accept`` does not differ, or the loss that the recipe names
            cannot be built. The loss is checked
            here, because NeMo-RL builds it only after starting Ray and loading the tokenizer and data sets.
        HostAPIError, MissingDependencyError: see :func:`~nemo_geomask.install`.
    """
    if not Path(script).is_file():
        raise ConfigError(
            f"{script}: there is no such script; give one of NeMo-RL's, such as examples/run_grpo.py, by its path"
        )
    # This package's recipes inherit from recipes of NeMo-RL, whose folder they take from this environment variable.
    root = nemo_rl_root()
    if root is not None:
        os.environ.setdefault(ROOT_VARIABLE, str(root))
    accepted_apis.accept(accept)
    install()
    _check_recipe(arguments)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _check_recipe(arguments: Sequence[str]) -> None:
    """Check that the recipe's loss can be built, and that no other setting needs the ``prev_logprobs`` it skips."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config")
    try:
        options, overrides = parser.parse_known_args(list(arguments))
        recipe = load_recipe(options.config, overrides) if options.config else {}
    except (argparse.ArgumentError, GeomaskError):
        # The script reads its own arguments and reports its own errors.
        return
    settings = recipe.get("loss_fn")
    if isinstance(settings, Mapping) and settings.get("name") is not None:
        fields = neutral_values(getattr(importlib.import_module(LOSS_MODULE), LOSS_CONFIG, None))
        settings = without_unread_fields(settings, fields)
        with warnings.catch_warnings(action="ignore"):  # NeMo-RL builds the loss again, which repeats the warnings
            config = build_loss(settings).config
        if config.skips_prev and (problems := tuple(prev_readers(recipe))):
            raise ConfigError(*problems)
