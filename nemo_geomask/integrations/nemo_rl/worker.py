"""NeMo-RL's worker code, handing logits, process groups and packed rows to a loss that takes them.

NeMo-RL gives a loss of input type LOGIT the logits alone, and calls it once for each packed sequence. Two places are
changed, for losses of ours only: the function that prepares a loss's input, and the classes that unpack a packed row.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from nemo_geomask.errors import ConfigError
from nemo_geomask.integrations.nemo_rl import seams

__all__ = ["attach"]

_ATTACHED = "_nemo_geomask_attached"


def attach() -> bool:
    """Let this process's NeMo-RL call losses that take logits; once a process, other losses are not affected.

    Returns:
        Whether there is a NeMo-RL in this process.

    Raises:
        SeamError: it is not as known; nothing is changed.
    """
    try:
        utils = importlib.import_module("nemo_rl.algorithms.loss.utils")
        wrapper = importlib.import_module("nemo_rl.algorithms.loss.wrapper")
    except ImportError:
        # Without NeMo-RL, or one whose requirements are missing, no worker of its runs here.
        return False
    prepare = utils.prepare_loss_input
    if hasattr(prepare, _ATTACHED):
        return True
    _require()
    ours = _prepare(prepare)
    # Workers have imported it under this name, wherever they are.
    for module in [module for module in sys.modules.values() if isinstance(module, types.ModuleType)]:
        if module.__name__.startswith("nemo_rl") and vars(module).get("prepare_loss_input") is prepare:
            vars(module)["prepare_loss_input"] = ours
    for uses in seams.LOGITS:
        if uses.owner:
            _take_over(getattr(wrapper, uses.owner))
    return True


def _require() -> None:
    for uses in seams.LOGITS:
        module = sys.modules[uses.module]
        found = getattr(module, uses.owner, None) if uses.owner else module
        uses.require(uses.in_memory(found), otherwise="Set loss_fn.logprob_backend: nemo_rl")


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    from nemo_geomask.integrations.nemo_rl.logits import LogitLoss

    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepare_loss_input(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        loss = given["loss_fn"]
        if not isinstance(loss, LogitLoss):
            return original(*args, **kwargs)
        _refuse_filtering(loss, given.get("sampling_params"))
        groups = {key: given.get(key) for key in ("vocab_parallel_group", "context_parallel_group")}
        return {"logits": given["logits"], **groups}, given["data"]

    setattr(prepare_loss_input, _ATTACHED, True)
    return prepare_loss_input


def _take_over(original: Any) -> None:
    """Constructing the wrapper with one of our losses gives :class:`_PackedRow`."""
    from nemo_geomask.integrations.nemo_rl.logits import LogitLoss

    signature = inspect.signature(original)

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if not isinstance(given["loss_fn"], LogitLoss):
            return object.__new__(cls)
        # The wrapper's own __init__ does not run on an object of another class.
        return _PackedRow(given)

    original.__new__ = new


class _PackedRow:
    """NeMo-RL's sequence-packing wrapper, for a loss that takes the packed row whole."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._loss = given["loss_fn"]
        self._arguments = {
            key: given.get(key)
            for key in ("cu_seqlens_q", "cu_seqlens_q_padded", "vocab_parallel_group", "context_parallel_group")
        }
        settings = getattr(given["prepare_fn"], "keywords", {})
        _refuse_filtering(self._loss, settings.get("sampling_params"))

    def __call__(
        self,
        next_token_logits: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
    ) -> tuple[Tensor, dict[str, float]]:
        result: tuple[Tensor, dict[str, float]] = self._loss.packed(
            next_token_logits, data, global_valid_seqs, global_valid_toks, **self._arguments
        )
        return result


def _refuse_filtering(loss: Any, sampling: Any) -> None:
    top_k, top_p = getattr(sampling, "top_k", None), getattr(sampling, "top_p", 1.0)
    if (top_k is not None and top_k != -1) or top_p != 1.0:
        raise ConfigError(
            f"loss_fn.logprob_backend: {loss.config.logprob_backend} computes log-probs over the whole vocabulary, but "
            f"the policy samples with top_k: {top_k}, top_p: {top_p}; set logprob_backend: nemo_rl, which filters as "
            "the sampler does, or sample without top-k and top-p"
        )
