"""``batch_veto`` and ``denominator: kept`` in NeMo-RL: a look at the whole batch between advantages and training.

NeMo-RL's trainers hand the batch of a step to ``Policy.train`` (GRPO, async GRPO, PPO), or the keys of one that lies in
its data plane to ``TQPolicy.train_from_meta`` (synchronous GRPO), or those of its parts, as they are generated, to
``TQPolicy.train_microbatches_from_meta`` between the beginning of a step and its end (the single controller). All are
wrapped once a loss asks for it, in the process that calls them; calls with other losses pass through.
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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.errors import BatchVetoError
from nemo_geomask.integrations.nemo_rl import seams
from nemo_geomask.losses import BeforeStep, Decision, PolicyLoss, Review
from nemo_geomask.losses.loss import PREPARED
from nemo_geomask.losses.prestep import untrained_metrics

__all__ = ["unwatch", "watch"]

_log = logging.getLogger("nemo_geomask")
_ORIGINAL = "_nemo_geomask_original"


class _Gate(BeforeStep):
    """Travels with the loss: NeMo-RL's single controller trains in a process of its own."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _wrap_all(imported_only=True)


def watch(loss: Any) -> None:
    """Look at each batch before ``loss`` trains on it, if its settings ask for that, here and where it is sent.

    Args:
        loss: a loss of ours, as NeMo-RL will pass it on.

    Raises:
        SeamError: NeMo-RL's policy is not as known.
    """
    gate = _Gate(loss.config)
    if gate.needed:
        _wrap_all(imported_only=False)
        _policy_loss(loss).before_step = gate


def unwatch() -> None:
    """Take the wrappers away. Losses that need them refuse batches from then on."""
    for seam in _SEAMS:
        target = getattr(sys.modules.get(seam.module), seam.owner, None)
        wrapped = vars(target).get(seam.method) if target is not None else None
        if hasattr(wrapped, _ORIGINAL):
            setattr(target, seam.method, getattr(wrapped, _ORIGINAL))


def _policy_loss(loss: Any) -> Any:
    return getattr(loss, "loss", loss)


def _gate(loss: Any) -> _Gate | None:
    gate = getattr(_policy_loss(loss), "before_step", None)
    return gate if isinstance(gate, _Gate) else None


def _train(original: Any) -> Any:
    signature = inspect.signature(original)

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        loss, data = given.arguments["loss_fn"], given.arguments["data"]
        gate = _gate(loss)
        if gate is None:
            return original(self, *args, **kwargs)

        def step(changes: Mapping[str, Tensor]) -> Any:
            # A copy: the trainer goes on with the batch as it came.
            changed = copy.copy(data)
            changed.update(changes)
            given.arguments["data"], given.arguments["loss_fn"] = changed, loss.for_prepared_batches()
            return original(*given.args, **given.kwargs)

        return _step(gate, loss, data, step, evaluate=given.arguments.get("eval_mode", False))

    return train


def _train_from_meta(original: Any) -> Any:
    signature = inspect.signature(original)

    def train_from_meta(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        loss, meta = given.arguments["loss_fn"], given.arguments["meta"]
        gate = _gate(loss)
        if gate is None:
            return original(self, *args, **kwargs)
        data = _read(self, meta, loss)

        def step(changes: Mapping[str, Tensor]) -> Any:
            given.arguments["loss_fn"] = loss.for_prepared_batches()
            columns = _columns(changes)
            self.write_to_dataplane(meta, fields=columns)
            try:
                return original(*given.args, **given.kwargs)
            finally:
                self.write_to_dataplane(meta, fields={name: data[name] for name in columns})

        return _step(gate, loss, data, step, evaluate=given.arguments.get("eval_mode", False))

    return train_from_meta


def _step(gate: _Gate, loss: Any, data: Any, step: Callable[[Mapping[str, Tensor]], Any], *, evaluate: bool) -> Any:
    if evaluate:
        return step(gate.open().add(data))
    decision = gate(data)
    if decision.train:
        return _reported(step(decision.changes), decision)
    return _untrained(loss, [{**data, **decision.changes}], decision)


@dataclass
class _OpenStep:
    """A step of the single controller: gradients add up part by part, and its end decides."""

    loss: Any
    review: Review
    parts: list[dict[str, Any]] = field(default_factory=list)


_open: weakref.WeakKeyDictionary[Any, _OpenStep] = weakref.WeakKeyDictionary()


def _begin_train_step(original: Any) -> Any:
    signature = inspect.signature(original)

    def begin_train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        loss = given.arguments["loss_fn"]
        gate = _gate(loss)
        _open.pop(self, None)
        if gate is not None:
            _open[self] = _OpenStep(loss, gate.open())
            given.arguments["loss_fn"] = loss.for_prepared_batches()
        return original(*given.args, **given.kwargs)

    return begin_train_step


def _train_microbatches_from_meta(original: Any) -> Any:
    signature = inspect.signature(original)

    def train_microbatches_from_meta(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = _open.get(self)
        if step is not None:
            meta = signature.bind(self, *args, **kwargs).arguments["meta"]
            data = _read(self, meta, step.loss)
            changes = step.review.add(data)
            if _policy_loss(step.loss).config.batch_veto is not None:
                # The data plane forgets a part once it is trained on.
                step.parts.append({**data, **changes})
            self.write_to_dataplane(meta, fields=_columns(changes))
        return original(self, *args, **kwargs)

    return train_microbatches_from_meta


def _finish_train_step(original: Any) -> Any:
    def finish_train_step(self: Any) -> Any:
        step = _open.pop(self, None)
        if step is None:
            return original(self)
        try:
            decision = step.review.decide()
        except BatchVetoError:
            self.abort_train_step()
            raise
        if decision.train:
            return _reported(original(self), decision)
        self.abort_train_step()
        return _untrained(step.loss, step.parts, decision)

    return finish_train_step


def _read(policy: Any, meta: Any, loss: Any) -> dict[str, Any]:
    """What the decision and the loss need of a batch in the data plane."""
    fields = ["generation_logprobs", "prev_logprobs", "advantages", "token_mask", "sample_mask"]
    if loss.reference_policy_kl_penalty:
        fields.append("reference_policy_logprobs")
    return dict(policy.read_from_dataplane(meta, select_fields=fields))


def _columns(changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # The data plane's columns are fixed; the loss is told instead.
    return {name: value for name, value in changes.items() if name != PREPARED}


def _untrained(loss: Any, parts: list[dict[str, Any]], decision: Decision) -> dict[str, Any]:
    """NeMo-RL's training results of a step that was not taken: every metric, of the policy as it is; gradient 0."""
    policy: PolicyLoss = _policy_loss(loss)
    metrics = untrained_metrics(policy, parts, decision)
    # NeMo-RL's workers add these.
    trained = [part["token_mask"][:, 1:] * part["sample_mask"].unsqueeze(-1) for part in parts]
    metrics["global_valid_seqs"] = [float(sum(part["sample_mask"].sum() for part in parts))]
    metrics["global_valid_toks"] = [float(sum(mask.sum() for mask in trained))]
    _log.warning(
        "batch vetoed: mismatch KL %.4g is above loss_fn.batch_veto.max: %g; no update",
        decision.metrics["geomask/batch_kl"],
        policy.config.batch_veto.max if policy.config.batch_veto is not None else 0.0,
    )
    return {"loss": torch.zeros(1), "grad_norm": torch.zeros(1), "all_mb_metrics": metrics}


def _reported(results: Any, decision: Decision) -> Any:
    results["all_mb_metrics"].update({name: [value] for name, value in decision.metrics.items()})
    return results


@dataclass(frozen=True)
class _Seam:
    """A method of NeMo-RL's that is wrapped.

    Attributes:
        needed: parameters that the wrapper relies on.
        wrap: makes the wrapper.
        optional: not every tested version has it.
    """

    module: str
    owner: str
    method: str
    needed: tuple[str, ...]
    wrap: Callable[[Any], Any]
    optional: bool = True


_TQ = ("nemo_rl.models.policy.tq_policy", "TQPolicy")
_SEAMS = (
    _Seam("nemo_rl.models.policy.lm_policy", "Policy", "train", ("data", "loss_fn"), _train, optional=False),
    _Seam(*_TQ, "train_from_meta", ("meta", "loss_fn"), _train_from_meta),
    _Seam(*_TQ, "begin_train_step", ("loss_fn",), _begin_train_step),
    _Seam(*_TQ, "train_microbatches_from_meta", ("meta",), _train_microbatches_from_meta),
    _Seam(*_TQ, "finish_train_step", ("self",), _finish_train_step),
)


def _wrap_all(*, imported_only: bool) -> None:
    for seam in _SEAMS:
        if not imported_only or seam.module in sys.modules:
            _wrap(seam)


def _wrap(seam: _Seam) -> None:
    try:
        target = getattr(importlib.import_module(seam.module), seam.owner)
    except (ImportError, AttributeError):
        # The data plane came after v0.6.0, and has requirements of its own.
        if seam.optional:
            return
        raise
    original = vars(target).get(seam.method)
    if hasattr(original, _ORIGINAL) or (original is None and seam.optional):
        return
    parameters = tuple(inspect.signature(original).parameters) if original is not None else ()
    if any(name not in parameters for name in seam.needed):
        raise seams.SeamError(
            f"NeMo-RL {seams.version()} is not as nemo_geomask knows it (tested: {seams.TESTED}): {seam.module}."
            f"{seam.owner}.{seam.method} takes ({', '.join(parameters)}), not {', '.join(seam.needed)}. Remove "
            "loss_fn.batch_veto and set loss_fn.denominator: original, or use a tested NeMo-RL"
        )
    wrapped = functools.wraps(original)(seam.wrap(original))
    setattr(wrapped, _ORIGINAL, original)
    setattr(target, seam.method, wrapped)
