"""NeMo-RL's loss class, answering with the loss that ``loss_fn.name`` selects."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

import nemo_geomask
from nemo_geomask.errors import MissingDependencyError
from nemo_geomask.integrations.nemo_rl import before_step, patch, prev_logprobs, recipe, record, seams, source, worker
from nemo_geomask.integrations.nemo_rl.workers import Workers
from nemo_geomask.losses import PolicyLoss, available, build_loss

if TYPE_CHECKING:
    from nemo_geomask.integrations.nemo_rl.logits import LogitLoss

__all__ = ["install", "installed", "uninstall"]

_log = logging.getLogger("nemo_geomask")


def install() -> None:
    """Let NeMo-RL's trainers build the loss that a recipe's ``loss_fn.name`` selects.

    Every place in NeMo-RL that builds a policy loss calls ``ClippedPGLossFn(config)``; from now on that call returns
    :func:`nemo_geomask.build_loss` of the configuration if it has a ``name``, and NeMo-RL's own object if not. The
    class itself stays what it is, for pickling, ``isinstance`` and subclasses, and it does not matter who imported it
    when.
    Workers that are to receive one of our losses are checked for being able to open it before they start, and prepared
    for it when they have.

    To be called in the driver before NeMo-RL's ``setup``; calling it again does nothing. Undone by :func:`uninstall`.

    Raises:
        MissingDependencyError: NeMo-RL or one of its requirements is not importable.
        SeamError: the installed NeMo-RL is not as known; nothing is changed.
    """
    seams.require()
    try:
        target = getattr(importlib.import_module(seams.LOSS_MODULE), source.LOSS_CLASS)
        groups = Workers()
        patches = [_answering(target, groups), *groups.patches()]
    except ImportError as error:
        raise MissingDependencyError(f"NeMo-RL {source.version()} can't be imported here: {error}") from error
    if installed():
        return
    patch.apply_all(patches)
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)
    _log.info(
        "nemo_geomask %s on NeMo-RL %s: loss_fn.name selects the loss", nemo_geomask.__version__, source.version()
    )


def uninstall() -> None:
    """Undo whatever was changed in this process's NeMo-RL; without :func:`install`, do nothing.

    Losses that were built keep their settings, and what was prepared for them in worker processes ends with these; a
    loss that needs a look before the step refuses batches from then on.
    """
    patch.undo_all()


def installed() -> bool:
    """Whether :func:`install` is in force."""
    target = getattr(sys.modules.get(seams.LOSS_MODULE), source.LOSS_CLASS, None)
    return target is not None and patch.in_force(target, "__class__")


def _answering(target: Any, groups: Workers) -> patch.Patch:
    # Trainers hold the class under names of their own, so the one thing that all of them share is its call, which the
    # metaclass decides. A __new__ on the class would do as well, but can't be taken away again without a trace.
    original: type = type(target)
    say = _Log()

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # A subclass is somebody's own loss.
        loss = _build(target, groups, say, *args, **kwargs) if cls is target else None
        return original.__call__(cls, *args, **kwargs) if loss is None else loss

    def apply() -> None:
        target.__class__ = type(f"Answering{original.__name__}", (original,), {"__call__": call})

    def undo() -> None:
        target.__class__ = original

    return patch.Patch(target, "__class__", apply, undo)


def _build(
    target: Any, groups: Workers, say: _Log, cfg: Any, use_fused_linear_logprobs: bool = False
) -> PolicyLoss | LogitLoss | None:
    given = recipe.settings(cfg)
    if not recipe.selects(given, _fields_of(target)):
        say("loss_fn.name is not set: NeMo-RL's own %s", source.LOSS_CLASS)
        return None
    built = build_loss(given, use_fused_linear_logprobs=use_fused_linear_logprobs)
    recipe.check_agreement(cfg, built.config)
    loss: PolicyLoss | LogitLoss = built
    if loss.config.logprob_backend != "nemo_rl":
        from nemo_geomask.integrations.nemo_rl import logits

        # Its import brings DTensor.
        loss = logits.LogitLoss(built)
    entries = available().get(loss.config.name, ())
    say(
        "policy loss: %s (%s), nemo_geomask %s, NeMo-RL %s; not at its default: %s",
        loss.config.name,
        entries[0].distribution if entries else "module:attribute",
        nemo_geomask.__version__,
        source.version(),
        loss.config.model_dump(mode="json", exclude_defaults=True, exclude={"name"}),
    )
    before_step.watch(loss)
    record.follow(loss)
    prev_logprobs.follow(loss)
    worker.prepare(backends=(loss.config.logprob_backend,))
    groups.loss_built(loss)
    return loss


def _fields_of(target: Any) -> set[str]:
    config = getattr(sys.modules[target.__module__], "ClippedPGLossConfig", None)
    if isinstance(config, type) and issubclass(config, BaseModel):
        return set(config.model_fields)
    return set(getattr(config, "__annotations__", {}))


class _Log:
    """Says each thing once; a run may build its loss more than once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, message: str, *values: object) -> None:
        text = message % values
        if text not in self._said:
            self._said.add(text)
            _log.info("%s", text)
