"""Run a NeMo-RL script with the loss of its recipe."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_geomask.config.recipe import ROOT_VARIABLE, nemo_rl_root
from nemo_geomask.errors import ConfigError
from nemo_geomask.integrations.nemo_rl.dispatch import install

__all__ = ["launch"]


def launch(script: str, arguments: Sequence[str]) -> None:
    """Run ``script`` as ``python script arguments...`` would, after :func:`~nemo_geomask.install`.

    The script is ``__main__``, ``sys.argv`` is what it expects and its folder is first on ``sys.path``.

    Raises:
        ConfigError: there is no such script.
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
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
