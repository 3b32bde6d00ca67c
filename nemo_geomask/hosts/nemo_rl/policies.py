"""Subclasses of NeMo-RL's policies: pre-step pass, step metrics, records and skipped forward passes.

They are importable, so that Ray pickles a policy by reference to its class: the single controller, a process of its
own, receives the policy of the driver.
"""

from __future__ import annotations

import importlib
from typing import Any

from nemo_geomask.config import LossConfig
from nemo_geomask.hosts.nemo_rl import host_api
from nemo_geomask.hosts.nemo_rl.facts import DATA_PLANE_POLICY, POLICY
from nemo_geomask.hosts.nemo_rl.policy_methods import is_subclassed, make_subclass
from nemo_geomask.hosts.nemo_rl.prev_logprobs import DataPlanePrevLogprobMethods, PrevLogprobMethods
from nemo_geomask.hosts.nemo_rl.resumed_step import remember_resumed_step
from nemo_geomask.hosts.nemo_rl.source_signature import require_targets
from nemo_geomask.hosts.nemo_rl.step_methods import DataPlaneStepMethods, StepMethods

__all__ = ["convert_policy", "geomask_class", "subclasses"]


def convert_policy(policy: Any, config: LossConfig, *, checkpoint: object = None) -> Any:
    """Make a policy of NeMo-RL train with a loss of this package, by replacing its class by a :func:`geomask_class`.

    Args:
        policy: NeMo-RL's ``Policy``, ``TQPolicy``, or an object of a subclass of them.
        config: settings of the loss that will train it.
        checkpoint: path of the checkpoint from which the run was resumed; None if it starts from the beginning.

    Returns: the policy, which is the same object.

    Raises:
        HostAPIError: the policy differs from the tested versions of NeMo-RL.
    """
    for group, remedy in (
        (host_api.PRESTEP, "Remove loss_fn.name"),
        (host_api.PREV_LOGPROBS if config.skips_prev else (), "Set loss_fn.ratio_anchor: prev"),
    ):
        require_targets(group, remedy=remedy)
    if not is_subclassed(policy):
        policy.__class__ = geomask_class(type(policy))
    policy.geomask_config = config
    remember_resumed_step(policy, checkpoint)
    return policy


subclasses: dict[type, type] = {}
"""The subclasses that this process has defined, by the policy class from which they derive."""


def geomask_class(base: type) -> type:
    """Return the subclass of one of NeMo-RL's policy classes that :func:`convert_policy` gives to a policy.

    A policy class of another package gets a subclass too, which Ray pickles by value.
    """
    if base not in subclasses:
        subclasses[base] = _define(base, f"Geomask{base.__name__}")
    return subclasses[base]


_NEMO_RL_CLASSES = {"GeomaskPolicy": POLICY, "GeomaskTQPolicy": DATA_PLANE_POLICY}
"""NeMo-RL's classes, by the name under which this module has their subclasses."""


def _define(base: type, name: str) -> type:
    holders: tuple[type, ...] = (StepMethods, PrevLogprobMethods)
    if hasattr(base, "train_from_meta"):
        holders = (DataPlaneStepMethods, DataPlanePrevLogprobMethods)
    description = f"NeMo-RL's {base.__name__} for the losses of nemo_geomask."
    return make_subclass(base, name, holders, __module__=__name__, __qualname__=name, __doc__=description)


def __getattr__(name: str) -> Any:
    # GeomaskPolicy and GeomaskTQPolicy are defined on first use, since they need NeMo-RL.
    if name in _NEMO_RL_CLASSES:
        module, class_name = _NEMO_RL_CLASSES[name]
        return geomask_class(getattr(importlib.import_module(module), class_name))
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
