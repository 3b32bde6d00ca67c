"""NeMo-RL's worker code, handing our losses a microbatch whole: logits with their groups, packed rows in one call.

NeMo-RL gives a loss of input type LOGIT the logits alone, and calls any loss once for each packed sequence. Two places
are changed, for losses of ours only: the function that prepares a loss's input, and the call of the classes that unpack
a packed row. Where such a loss takes logits, the forward passes for ``prev_logprobs`` and the reference policy take our
kernels too.

Each worker process is told to, see :mod:`nemo_geomask.integrations.nemo_rl.workers`; in one that was not, NeMo-RL calls
losses as it always does.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.integrations.nemo_rl import current, packed, patch, seams
from nemo_geomask.losses import PolicyLoss

if TYPE_CHECKING:
    from nemo_geomask.integrations.nemo_rl.logits import LogitLoss

__all__ = ["filtering", "prepare"]

_log = logging.getLogger("nemo_geomask")
_UTILS = "nemo_rl.algorithms.loss.utils"
_WRAPPERS = "nemo_rl.algorithms.loss.wrapper"
_MEGATRON = "nemo_rl.models.megatron.train"
_UNPACK = {
    "SequencePackingLossWrapper": packed.by_sequence,
    "SequencePackingFusionLossWrapper": packed.at_once,
}


def prepare(*, takes_logits: bool = True, takes_hidden: bool = False) -> bool:
    """Prepare this process's NeMo-RL for losses of ours; again does nothing, other losses are not affected.

    Args:
        takes_logits: whether a loss here takes logits, which it can't without this.
        takes_hidden: whether one takes Megatron's hidden states in their place.

    Returns:
        Whether it is prepared: there is a NeMo-RL here, as known.

    Raises:
        SeamError: ``takes_logits``, and NeMo-RL is not as known; nothing is changed.
    """
    try:
        utils, wrappers = importlib.import_module(_UTILS), importlib.import_module(_WRAPPERS)
    except ImportError:
        # Without NeMo-RL, or one whose requirements are missing, no worker of its runs here.
        return False
    own = [*(_of_megatron() if takes_hidden else []), *(_of_scoring() if takes_logits else [])]
    if patch.in_force(utils, "prepare_loss_input"):
        patch.apply_all(own)
        return True
    try:
        for uses in seams.WORKER_CODE:
            module = sys.modules[uses.module]
            found = getattr(module, uses.owner, None) if uses.owner else module
            uses.require(uses.in_memory(found), otherwise="Set loss_fn.logprob_backend: nemo_rl")
    except seams.SeamError as error:
        if takes_logits:
            raise
        _log.warning("each packed sequence will be a call of the loss, since %s", error)
        return False
    patch.apply_all(
        [
            *own,
            _rebound(utils, "prepare_loss_input", _preparing(utils.prepare_loss_input)),
            *(patch.attribute(getattr(wrappers, name), "__call__", _unpacking(how)) for name, how in _UNPACK.items()),
        ]
    )
    return True


def _of_megatron() -> list[patch.Patch]:
    """What a loss that takes hidden states needs; nothing where there is no Megatron, or it is in force."""
    try:
        train = importlib.import_module(_MEGATRON)
    except ImportError:
        return []  # the driver, or a worker without Megatron: the loss will say that it was given logits
    if patch.in_force(train, "model_forward"):
        return []
    for uses in seams.HIDDEN_STATES:
        found = getattr(train, uses.owner) if uses.owner else train
        uses.require(uses.in_memory(found), otherwise="Set loss_fn.logprob_backend: geomask")
    from nemo_geomask.integrations.nemo_rl import hidden

    return hidden.patches(train, lambda loss: getattr(loss, "takes_hidden", False))


def _of_scoring() -> list[patch.Patch]:
    """What takes our kernels to the forward passes; nothing where NeMo-RL's parallel code can't be imported,
    or it is in force."""
    try:
        module = importlib.import_module(seams.SCORING[0].module)
    except ImportError:
        return []
    if patch.in_force(module, seams.SCORING[0].owner):
        return []
    for uses in seams.SCORING:
        uses.require(
            uses.in_memory(getattr(module, uses.owner, None)), otherwise="Set loss_fn.logprob_backend: nemo_rl"
        )
    return [patch.attribute(module, uses.owner, _scoring) for uses in seams.SCORING]


def _scoring(original: Any) -> Any:
    """One of NeMo-RL's two functions of a vocabulary shard's logits, forward only by our kernels."""

    def apply(logits: Any, target: Any, *rest: Any) -> Any:
        *_, group, forward_only = rest
        if forward_only is not True:
            return original.apply(logits, target, *rest)
        from nemo_geomask.integrations.nemo_rl.logits import scored

        return scored(logits, target, group)

    return type(original.__name__, (original,), {"apply": staticmethod(apply), "__module__": original.__module__})


def _rebound(home: types.ModuleType, name: str, ours: Any) -> patch.Patch:
    """A function of NeMo-RL's, replaced wherever it is held under its name, then and later.

    Not only in its modules: Ray sends the methods of a worker class by value where a decorator hides their name, and
    these then have globals of their own, with the module's name.
    """
    original = vars(home)[name]

    def rebind(old: Any, new: Any) -> None:
        for holder in gc.get_referrers(old):
            ours_to_change = isinstance(holder, dict) and str(holder.get("__name__", "")).startswith("nemo_rl")
            if ours_to_change and holder.get(name) is old:
                holder[name] = new

    return patch.Patch(home, name, functools.partial(rebind, original, ours), functools.partial(rebind, ours, original))


def _preparing(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepare_loss_input(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        loss = given["loss_fn"]
        if not _takes_logits(loss):
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
            if isinstance(loss, PolicyLoss):
                current.mark(loss, given["data"])
                return how(self, given["next_token_logits"], given["data"], *counts)
            if not _takes_logits(loss):
                return original(self, *args, **kwargs)
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
