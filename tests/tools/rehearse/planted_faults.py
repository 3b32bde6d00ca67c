"""Faults in the plugin's own path, planted in NeMo-RL's workers: ``loss_fn.name=planted_faults:gspo``.

A worker that unpickles the loss imports this module, which plants the fault that ``GEOMASK_PLANTED_FAULT`` names. The
processes that judge the rehearsal compute the loss as it should be.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys

import torch
import torch.distributed as dist

from nemo_geomask.hosts.nemo_rl.current_logprobs import KeepingLoss
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.objectives.gspo import GSPO

VARIABLE = "GEOMASK_PLANTED_FAULT"
TEMPERATURE = 0.7


def _surrogate(inputs, means):
    return GSPO.surrogate(inputs, means)


gspo = dataclasses.replace(GSPO, surrogate=_surrogate)  # a worker finds ``_surrogate`` by importing this module


def changing(change):
    """Return a wrapper of a loss's call that passes on what ``change`` returns of log-probs and batch."""

    def wrap(original):
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args, **named):
            bound = signature.bind(*args, **named)
            loss, logprobs, data, *others = bound.args
            return original(loss, *change(logprobs, data), *others, **bound.kwargs)

        return call

    return wrap


def shift_curr(curr, data):
    """The loss gets the log-prob of the token before."""
    return curr.roll(1, -1), data


def other_temperature(logits, targets):
    """The log-probs that train are of another temperature."""
    return logits / TEMPERATURE, targets


def previous_rows():
    """The loss gets the rows of the microbatch before; the first one's are rolled."""
    last = {}

    def change(curr, data):
        own = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        rolled = {key: value.roll(1, 0) for key, value in own.items()}
        before = {key: last.get(key, value) for key, value in rolled.items()}
        last.clear()
        last.update(own)
        fits = all(value.shape == own[key].shape for key, value in before.items())
        return curr, {**data, **(before if fits else rolled)}

    return change


def mask_of_wrong_rank(curr, data):
    """Every rank but the first has another one's mask."""
    return curr, {**data, "token_mask": data["token_mask"].roll(1, 0)} if dist.get_rank() else data


def _both(cls, change):
    return [(cls, name, change) for name in ("__call__", "packed")]


FAULTS = {
    "shift": _both(KeepingLoss, shift_curr),
    "temperature": [(LogitLoss, "_logprobs_and_entropy", other_temperature)],
    "rows": _both(PolicyLoss, previous_rows()),
    "mask of another rank": _both(PolicyLoss, mask_of_wrong_rank),
}

# Ray starts its workers with this file.
if sys.argv[0].endswith("default_worker.py") and VARIABLE in os.environ:
    for owner, name, change in FAULTS[os.environ[VARIABLE]]:
        setattr(owner, name, changing(change)(getattr(owner, name)))
