"""NeMo-RL's worker code, handing our losses a microbatch whole: logits with their groups, packed rows in one call.

NeMo-RL gives a loss of input type LOGIT the logits alone, and calls any loss once for each packed sequence. Two places
are changed, for losses of ours only: the function that prepares a loss's input, and the call of the classes that unpack
a packed row. Where our kernels make such a loss's log-probs, they make those of the forward passes for
``prev_logprobs`` and the reference policy too.

Each worker process is told to, see :mod:`nemo_geomask.integrations.nemo_rl.workers`; in one that was not, NeMo-RL calls
losses as it always does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.integrations.nemo_rl import current, packed, patch, seams, source
from nemo_geomask.losses import PolicyLoss

if TYPE_CHECKING:
    from nemo_geomask.integrations.nemo_rl.logits import LogitLoss

__all__ = ["filtering", "prepare", "prepare_model", "preparing", "scoring_whole"]

_log = logging.getLogger("nemo_geomask")
_UTILS = "nemo_rl.algorithms.loss.utils"
_WRAPPERS = "nemo_rl.algorithms.loss.wrapper"
_MEGATRON, _AUTOMODEL = "nemo_rl.models.megatron.train", "nemo_rl.models.automodel.train"
_OURS = {"geomask", "geomask_linear"}  # back ends of our kernels
_UNPACK = {
    "SequencePackingLossWrapper": packed.by_sequence,
    "SequencePackingFusionLossWrapper": packed.at_once,
}


def prepare(*, backends: Collection[str] = ("geomask",)) -> bool:
    """Prepare this process's NeMo-RL for losses of ours; again does nothing, other losses are not affected.

    Args:
        backends: their ``logprob_backend``. Any but ``nemo_rl`` takes logits, which it can't without this;
            ``geomask_linear`` takes hidden states in their place. Under both of ours the forward passes are computed
            as curr is; ``mcore`` and ``te`` leave them to NeMo-RL.

    Returns:
        Whether it is prepared: there is a NeMo-RL here, as known.

    Raises:
        SeamError: a loss takes logits, and NeMo-RL is not as known; nothing is changed.
    """
    takes_logits = any(backend != "nemo_rl" for backend in backends)
    try:
        utils, wrappers = importlib.import_module(_UTILS), importlib.import_module(_WRAPPERS)
    except ImportError:
        # Without NeMo-RL, or one whose requirements are missing, no worker of its runs here.
        return False
    own = [
        *(_of_hidden_states() if "geomask_linear" in backends else []),
        *(_of_scoring() if not _OURS.isdisjoint(backends) else []),
    ]
    if patch.in_force(utils, "prepare_loss_input"):
        patch.apply_all(own)
        return True
    try:
        for uses in seams.WORKER_CODE:
            uses.require_of(sys.modules[uses.module], otherwise="Set loss_fn.logprob_backend: nemo_rl")
    except source.SeamError as error:
        if takes_logits:
            raise
        _log.warning("each packed sequence will be a call of the loss, since %s", error)
        return False
    patch.apply_all(
        [
            *own,
            patch.rebound(utils, "prepare_loss_input", preparing),
            *(patch.attribute(getattr(wrappers, name), "__call__", _unpacking(how)) for name, how in _UNPACK.items()),
        ]
    )
    return True


def prepare_model(actor: Any, *, backends: Collection[str]) -> None:
    """Prepare a worker's model for losses of ours; again does nothing.

    Args:
        actor: the worker; of NeMo-RL's the DTensor ones have a model of transformers', to the others' models nothing is
            done.
        backends: as for :func:`prepare`.
    """
    homes = {kind.__module__ for kind in type(actor).__mro__} & set(seams.DTENSOR_WORKERS)
    model, mesh = getattr(actor, "model", None), getattr(actor, "tp_mesh", None)
    if not homes or not isinstance(model, torch.nn.Module):
        return
    from nemo_geomask.integrations.nemo_rl import hidden_dtensor

    told = any(seams.DTENSOR_WORKERS[home] for home in homes)
    patches = []
    if "geomask_linear" in backends and not patch.in_force(model, "forward"):
        patches += hidden_dtensor.of_model(model, told=told)
    # A policy's that trains: a reward model's output is no logits.
    trains = getattr(actor, "optimizer", None) is not None and not getattr(actor, "_is_reward_model", False)
    if trains and not told and mesh is not None and mesh.size() == 1 and not _OURS.isdisjoint(backends):
        patches.append(hidden_dtensor.as_shards(model, mesh))
    patch.apply_all(patches)


def _of_hidden_states() -> list[patch.Patch]:
    """What a loss that takes hidden states needs of NeMo-RL's modules; nothing of those that are not here, as in the
    driver, or of which it is in force."""
    from nemo_geomask.integrations.nemo_rl import hidden_dtensor, hidden_megatron

    found: list[patch.Patch] = []
    for name, patches in ((_MEGATRON, hidden_megatron.patches), (_AUTOMODEL, hidden_dtensor.of_workers)):
        train = _here(name, seams.HIDDEN_STATES, "forward_with_post_processing_fn", otherwise="geomask")
        if train is not None:
            found += patches(train, lambda loss: getattr(loss, "takes_hidden", False))
    return found


def _of_scoring() -> list[patch.Patch]:
    """What takes our kernels to the forward passes; nothing where NeMo-RL's code for them can't be imported, or it is
    in force."""
    found: list[patch.Patch] = []
    shards = [uses for uses in seams.SCORING if uses.module != _AUTOMODEL]
    module = _here(shards[0].module, seams.SCORING, shards[0].owner, otherwise="nemo_rl")
    if module is not None:
        found += [patch.attribute(module, uses.owner, _scoring) for uses in shards]
    train = _here(_AUTOMODEL, seams.SCORING, "LogprobsPostProcessor._compute_local_logprobs", otherwise="nemo_rl")
    if train is not None:
        found.append(patch.attribute(train.LogprobsPostProcessor, "_compute_local_logprobs", scoring_whole))
    return found


def _here(name: str, needed: Iterable[source.Uses], changed: str, *, otherwise: str) -> types.ModuleType | None:
    """NeMo-RL's module, if it can be imported, is as known and ``changed`` is not yet; ``otherwise``: the back end that
    needs none of it."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # another kind of worker's, with requirements of its own
        if not isinstance(error, ImportError):
            _log.warning("%s can't be imported and is left as it is: %s: %s", name, type(error).__name__, error)
        return None
    owner, _, attribute = changed.rpartition(".")
    if patch.in_force(getattr(module, owner, None) if owner else module, attribute):
        return None
    for uses in needed:
        if uses.module == name:
            uses.require_of(module, otherwise=f"Set loss_fn.logprob_backend: {otherwise}")
    return module


def _scoring(original: Any) -> Any:
    """One of NeMo-RL's two functions of a vocabulary shard's logits, forward only by our kernels."""

    def apply(logits: Any, target: Any, *rest: Any) -> Any:
        *_, group, forward_only = rest
        if forward_only is not True:
            return original.apply(logits, target, *rest)
        from nemo_geomask.integrations.nemo_rl.logits import scored

        return scored(logits, target, group)

    return type(original.__name__, (original,), {"apply": staticmethod(apply), "__module__": original.__module__})


def scoring_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """The log-probs of a whole vocabulary's logits, or of hidden states, in a forward pass of a DTensor v2 worker."""

    @functools.wraps(original)
    def call(self: Any, logits: Any, input_ids: Any) -> Any:
        from nemo_geomask.integrations.nemo_rl.hidden import Hidden
        from nemo_geomask.integrations.nemo_rl.logits import scored

        hidden = Hidden.of(logits)
        if hidden is not None:
            return hidden.following(input_ids, None)
        if filtering(self.sampling_params) or torch.is_grad_enabled():
            return original(self, logits, input_ids)
        targets = input_ids[:, 1:]
        return scored(logits[:, : targets.shape[1]], targets, None)

    return call


def preparing(original: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-RL's ``prepare_loss_input``, handing a loss that takes logits their process groups."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepare_loss_input(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        loss = given["loss_fn"]
        if not _takes_logits(loss):
            _only_logits(given["logits"], loss)
            return original(*args, **kwargs)
        _refuse_filtering(loss, given.get("sampling_params"))
        groups = {key: given.get(key) for key in ("vocab_parallel_group", "context_parallel_group")}
        return {"logits": given["logits"], **groups}, given["data"]

    return prepare_loss_input


def _unpacking(how: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The call of one of NeMo-RL's sequence-packing wrappers; ``how``: our losses' own, in one call."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            loss = self.loss_fn
            given = signature.bind(self, *args, **kwargs).arguments
            counts = (given["global_valid_seqs"], given["global_valid_toks"])
            if not _takes_logits(loss):
                _only_logits(given["next_token_logits"], loss)
                if not isinstance(loss, PolicyLoss):
                    return original(self, *args, **kwargs)
                current.mark(loss, given["data"])
                return how(self, given["next_token_logits"], given["data"], *counts)
            _refuse_filtering(loss, getattr(self.prepare_fn, "keywords", {}).get("sampling_params"))
            return loss.packed(
                given["next_token_logits"],
                given["data"],
                *counts,
                cu_seqlens_q=self.cu_seqlens_q,
                cu_seqlens_q_padded=self.cu_seqlens_q_padded,
                vocab_parallel_group=self.vocab_parallel_group,
                context_parallel_group=self.context_parallel_group,
            )

        return call

    return make


def _takes_logits(loss: Any) -> bool:
    from nemo_geomask.integrations.nemo_rl.logits import LogitLoss

    # Its import brings DTensor.
    return isinstance(loss, LogitLoss)


def _only_logits(logits: Any, loss: Any) -> None:
    from nemo_geomask.integrations.nemo_rl.hidden import Hidden

    Hidden.refused_of(logits, type(loss).__name__)


def filtering(sampling: Any) -> str:
    """What NeMo-RL's sampling parameters leave of the vocabulary, in words; empty where that is all of it."""
    top_k, top_p = getattr(sampling, "top_k", None), getattr(sampling, "top_p", 1.0)
    return f"top_k: {top_k}, top_p: {top_p}" if (top_k is not None and top_k != -1) or top_p != 1.0 else ""


def _refuse_filtering(loss: LogitLoss, sampling: Any) -> None:
    if filters := filtering(sampling):
        message = (
            f"logprob_backend: {loss.config.logprob_backend} computes log-probs over the whole vocabulary, but the "
            f"policy samples with {filters}; set logprob_backend: nemo_rl, which filters as the "
            "sampler does, or sample without top-k and top-p"
        )
        raise ConfigError(Problem(("loss_fn.logprob_backend",), message))
