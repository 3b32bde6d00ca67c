"""Installation in the driver: NeMo-RL's loss class builds the loss that ``loss_fn.name`` selects."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

import nemo_geomask
from nemo_geomask.errors import MissingDependencyError
from nemo_geomask.hosts.nemo_rl import (
    host_api,
    loss_block,
    patch,
    prestep_hooks,
    prev_logprobs,
    record_hooks,
    worker_hooks,
)
from nemo_geomask.hosts.nemo_rl.facts import LOSS_CLASS, LOSS_CONFIG, LOSS_MODULE, neutral_values
from nemo_geomask.hosts.nemo_rl.installed_version import describe_version
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
from nemo_geomask.hosts.nemo_rl.worker_setup import Workers
from nemo_geomask.losses import PolicyLoss, available, build_loss

__all__ = ["install", "installed", "uninstall"]

_log = logging.getLogger("nemo_geomask")


def install() -> None:
    """Let NeMo-RL's trainers build the loss that a recipe's ``loss_fn.name`` selects.

    NeMo-RL builds every policy loss by calling ``ClippedPGLossFn(config)``. From now on that call returns
    :func:`nemo_geomask.build_loss` of the configuration if it has a ``name``, and NeMo-RL's own object otherwise.
    Pickling, ``isinstance`` and subclasses of the class are not affected, and a module may import the class before or
    after this call. Workers that will receive one of this package's losses are checked before they
    start, and prepared when they have started.

    Call it in the driver before NeMo-RL's ``setup``. Calling it again does nothing; :func:`uninstall` undoes it.

    Raises:
        MissingDependencyError: NeMo-RL or one of its requirements is not importable.
        HostAPIError: the installed NeMo-RL differs from the tested versions; nothing is changed.
    """
    host_api.require_every_run()
    try:
        loss_class = getattr(importlib.import_module(LOSS_MODULE), LOSS_CLASS)
        workers = Workers()
        patches = [_dispatch_patch(loss_class, workers), *workers.patches()]
    except ImportError as error:
        raise MissingDependencyError(f"NeMo-RL {describe_version()} can't be imported here: {error}") from error
    if installed():
        return
    patch.apply_all(patches)
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)
    _log.info(
        "nemo_geomask %s on NeMo-RL %s: loss_fn.name selects the loss", nemo_geomask.__version__, describe_version()
    )


def uninstall() -> None:
    """Undo every change to NeMo-RL in this process; do nothing without :func:`install`.

    Losses that were built keep their settings. Worker processes stay prepared until they end. A loss that needs a
    pre-step pass refuses batches from then on.
    """
    patch.undo_all()


def installed() -> bool:
    """Return True if :func:`install` is in force."""
    loss_class = getattr(sys.modules.get(LOSS_MODULE), LOSS_CLASS, None)
    return loss_class is not None and patch.in_force(loss_class, "__class__")


def _dispatch_patch(loss_class: Any, workers: Workers) -> patch.Patch:
    # Trainers import the class under their own names, but all of them call it, and the metaclass decides what a call
    # returns. A __new__ on the class would work too, but could not be removed without a trace.
    metaclass: type = type(loss_class)
    log_once = _OnceLogger()

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # A subclass is another loss, which its author wants as it is.
        loss = _build(loss_class, workers, log_once, *args, **kwargs) if cls is loss_class else None
        return metaclass.__call__(cls, *args, **kwargs) if loss is None else loss

    def apply() -> None:
        loss_class.__class__ = type(f"Dispatching{metaclass.__name__}", (metaclass,), {"__call__": call})

    def undo() -> None:
        loss_class.__class__ = metaclass

    return patch.Patch(loss_class, "__class__", apply, undo)


def _build(
    loss_class: Any, workers: Workers, log_once: _OnceLogger, cfg: Any, use_fused_linear_logprobs: bool = False
) -> PolicyLoss | LogitLoss | None:
    """Build the loss that ``cfg`` names and set up the driver and the workers for it; None if it names none."""
    settings = loss_block.plain_settings(cfg)
    fields = neutral_values(getattr(sys.modules[loss_class.__module__], LOSS_CONFIG, None))
    if not loss_block.selects_loss(settings, fields):
        log_once("loss_fn.name is not set: NeMo-RL's own %s", LOSS_CLASS)
        return None
    read_settings = loss_block.without_unread_fields(settings, fields)
    if unread := {key: value for key, value in settings.items() if key not in read_settings}:
        log_once("only NeMo-RL's own loss reads these settings, and they change nothing in it: %s", unread)
    policy_loss = build_loss(read_settings, use_fused_linear_logprobs=use_fused_linear_logprobs)
    loss_block.check_agreement(cfg, policy_loss.config)
    config = policy_loss.config
    loss = policy_loss if config.logprob_backend == "nemo_rl" else LogitLoss(policy_loss)
    entries = available().get(config.name, ())
    log_once(
        "policy loss: %s (%s), nemo_geomask %s, NeMo-RL %s; not at its default: %s",
        config.name,
        entries[0].distribution if entries else "module:attribute",
        nemo_geomask.__version__,
        describe_version(),
        config.model_dump(mode="json", exclude_defaults=True, exclude={"name"}),
    )
    prestep_hooks.wrap_policy(loss)
    record_hooks.attach_recorder(loss)
    prev_logprobs.wrap_policy(loss)
    worker_hooks.prepare(backends=(config.logprob_backend,))
    workers.add_loss(loss)
    return loss


class _OnceLogger:
    """Logger that drops repeated messages, because a run may build its loss more than once."""

    def __init__(self) -> None:
        self._messages: set[str] = set()

    def __call__(self, template: str, *values: object) -> None:
        message = template % values
        if message not in self._messages:
            self._messages.add(message)
            _log.info("%s", message)
