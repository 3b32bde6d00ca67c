"""``batch_veto`` and ``denominator: kept`` in NeMo-RL: a look at the whole batch between advantages and training.

NeMo-RL's trainers hand the batch of a step to ``Policy.train`` (GRPO, async GRPO, PPO), or the keys of one that lies in
its data plane to ``TQPolicy.train_from_meta``. Both are wrapped, on the driver, once a loss asks for it; calls with
other losses pass through.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.integrations.nemo_rl import seams
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.losses.loss import MASKS_APPLIED
from nemo_geomask.losses.prestep import BeforeStep, Decision, untrained_metrics

__all__ = ["unwatch", "watch"]

_log = logging.getLogger("nemo_geomask")
_ORIGINAL = "_nemo_geomask_original"
_gates: weakref.WeakKeyDictionary[Any, BeforeStep] = weakref.WeakKeyDictionary()


def watch(loss: Any) -> None:
    """Look at each batch before ``loss`` trains on it, if its settings ask for that.

    Args:
        loss: a loss of ours, as NeMo-RL will pass it on.

    Raises:
        SeamError: NeMo-RL's policy is not as known.
    """
    gate = BeforeStep(loss.config)
    if not gate.needed:
        return
    _gates[loss] = gate
    for module, owner, method, needed, make, optional in _SEAMS:
        _wrap(module, owner, method, needed, make, optional)


def unwatch() -> None:
    """Take the wrappers away."""
    for module, owner, method, *_ in _SEAMS:
        target = getattr(sys.modules.get(module), owner, None)
        wrapped = vars(target).get(method) if target is not None else None
        if hasattr(wrapped, _ORIGINAL):
            setattr(target, method, getattr(wrapped, _ORIGINAL))
    _gates.clear()


def _wrap(
    module: str, owner: str, method: str, needed: tuple[str, ...], make: Callable[[Any], Any], optional: bool
) -> None:
    try:
        target = getattr(importlib.import_module(module), owner)
    except (ImportError, AttributeError):
        # The data plane came after v0.6.0, and has requirements of its own.
        if optional:
            return
        raise
    original = vars(target).get(method)
    parameters = tuple(inspect.signature(original).parameters) if original is not None else ()
    if hasattr(original, _ORIGINAL):
        return
    if any(name not in parameters for name in needed):
        raise seams.SeamError(
            f"NeMo-RL {seams.version()} is not as nemo_geomask knows it (tested: {seams.TESTED}): {module}.{owner}."
            f"{method} takes ({', '.join(parameters)}), not {', '.join(needed)}. Remove loss_fn.batch_veto and set "
            "loss_fn.denominator: original, or use a tested NeMo-RL"
        )
    wrapped = functools.wraps(original)(make(original))
    setattr(wrapped, _ORIGINAL, original)
    setattr(target, method, wrapped)


def _gate(loss: Any, eval_mode: bool) -> BeforeStep | None:
    try:
        return None if eval_mode else _gates.get(loss)
    except TypeError:  # somebody's loss that has no weak references
        return None


def _train(original: Any) -> Any:
    signature = inspect.signature(original)

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        loss, data = given.arguments["loss_fn"], given.arguments["data"]
        gate = _gate(loss, given.arguments.get("eval_mode", False))
        if gate is None:
            return original(self, *args, **kwargs)
        decision = gate(data)
        if not decision.train:
            return _untrained(loss, data, decision)
        if decision.changes:
            # A copy: the trainer goes on with the batch as it came.
            data = copy.copy(data)
            data.update(decision.changes)
            given.arguments["data"] = data
        return _reported(original(*given.args, **given.kwargs), decision)

    return train


# What the decision needs of a batch in the data plane.
_FIELDS = ["generation_logprobs", "prev_logprobs", "advantages", "token_mask", "sample_mask"]


def _train_from_meta(original: Any) -> Any:
    signature = inspect.signature(original)

    def train_from_meta(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        loss, meta = given.arguments["loss_fn"], given.arguments["meta"]
        gate = _gate(loss, given.arguments.get("eval_mode", False))
        if gate is None:
            return original(self, *args, **kwargs)
        data = self.read_from_dataplane(meta, select_fields=list(_FIELDS))
        decision = gate(data)
        if not decision.train:
            return _untrained(loss, data, decision)
        if decision.changes:
            self.write_to_dataplane(meta, fields=decision.changes)
            given.arguments["train_fields"] = (*given.arguments["train_fields"], MASKS_APPLIED)
        return _reported(original(*given.args, **given.kwargs), decision)

    return train_from_meta


def _begin_train_step(original: Any) -> Any:
    signature = inspect.signature(original)

    def begin_train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = signature.bind(self, *args, **kwargs).arguments["loss_fn"]
        if _gate(loss, False) is not None:
            raise ConfigError(
                "loss_fn.batch_veto and denominator: kept look at the whole batch before the step, but the single "
                "controller of NeMo-RL streams microbatches into a step that has begun; use GRPO's synchronous or "
                "asynchronous trainer, or remove them"
            )
        return original(self, *args, **kwargs)

    return begin_train_step


_LM, _TQ = "nemo_rl.models.policy.lm_policy", "nemo_rl.models.policy.tq_policy"
_SEAMS: tuple[tuple[str, str, str, tuple[str, ...], Callable[[Any], Any], bool], ...] = (
    (_LM, "Policy", "train", ("data", "loss_fn", "eval_mode"), _train, False),
    (_TQ, "TQPolicy", "train_from_meta", ("meta", "loss_fn", "eval_mode", "train_fields"), _train_from_meta, True),
    (_TQ, "TQPolicy", "begin_train_step", ("loss_fn",), _begin_train_step, True),
)


def _untrained(loss: Any, data: Mapping[str, Any], decision: Decision) -> dict[str, Any]:
    """NeMo-RL's training results of a step that was not taken: every metric, of the policy as it is; gradient 0."""
    policy: PolicyLoss = getattr(loss, "loss", loss)
    metrics = untrained_metrics(policy, data, decision)
    # NeMo-RL's workers add these.
    metrics["global_valid_seqs"] = float(data["sample_mask"].sum())
    metrics["global_valid_toks"] = float((data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)).sum())
    _log.warning(
        "batch vetoed: mismatch KL %.4g is above loss_fn.batch_veto.max; no update", metrics["geomask/batch_kl"]
    )
    return {
        "loss": torch.zeros(1),
        "grad_norm": torch.zeros(1),
        "all_mb_metrics": {name: [value] for name, value in metrics.items()},
    }


def _reported(results: Any, decision: Decision) -> Any:
    results["all_mb_metrics"].update({name: [value] for name, value in decision.metrics.items()})
    return results
