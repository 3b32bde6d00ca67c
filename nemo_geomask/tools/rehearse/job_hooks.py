"""Patches by which NeMo-RL's training functions run a job of another tool."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nemo_geomask.hosts.nemo_rl import patch

__all__ = ["in_place_of_training"]

_TRAINERS = (
    ("nemo_rl.algorithms.grpo", "grpo_train"),
    ("nemo_rl.algorithms.grpo", "async_grpo_train"),
    ("nemo_rl.algorithms.grpo_sync", "grpo_train_sync"),
)
"""Training functions of NeMo-RL's GRPO scripts, in the versions that have them."""


def in_place_of_training(function: str, file: str) -> Iterator[patch.Patch]:
    """Yield patches by which NeMo-RL's training functions run a job.

    Args:
        function: ``module:function``; it is called with the training function's arguments, by name, and ``file``.
        file: path of the job's own settings.
    """
    module_name, _, name = function.partition(":")
    job = getattr(importlib.import_module(module_name), name)
    for module, trainer in _TRAINERS:
        if importlib.util.find_spec(module) is not None:
            owner = importlib.import_module(module)
            yield patch.attribute(owner, trainer, functools.partial(_hosting, job, Path(file)))


def _hosting(job: Callable[..., None], file: Path, trainer: Callable[..., Any]) -> Callable[..., None]:
    signature = inspect.signature(trainer)

    @functools.wraps(trainer)
    def run(*args: Any, **kwargs: Any) -> None:
        job(**signature.bind(*args, **kwargs).arguments, file=file)

    return run
