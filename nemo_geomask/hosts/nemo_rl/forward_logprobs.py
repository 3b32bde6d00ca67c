"""Forward passes with this package's kernels, under ``logprob_backend: geomask`` and ``geomask_linear``.

NeMo-RL computes ``prev_logprobs`` and the reference policy's log-probs in forward passes of its own. These functions
replace the ones that it uses there, so that these log-probs equal those of training.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.hosts.nemo_rl import host_api
from nemo_geomask.hosts.nemo_rl.facts import describe_filter
from nemo_geomask.hosts.nemo_rl.hidden_states import HiddenStates
from nemo_geomask.losses.packing import IGNORE
from nemo_geomask.parallel import vocab_parallel_logprobs

_SHARD_PARAMETERS = {name for uses in host_api.FORWARD_LOGPROBS for name in uses.methods.get("forward", ())}


def forward_logprobs(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Compute log-probs [B, S] in a forward pass; 0 for targets outside the vocabulary, as in NeMo-RL.

    Args:
        logits: this rank's columns, [B, S, V/TP].
        targets: [B, S] int64.
        group: the tensor-parallel group.
    """
    inside = (targets >= 0) & (targets < logits.shape[-1] * (1 if group is None else dist.get_world_size(group)))
    # Without validation: an error on the ranks of one context-parallel share would leave the others waiting.
    return vocab_parallel_logprobs(
        logits, targets.where(inside, IGNORE), group=group, ignore_index=IGNORE, validate=False
    )


def subclass_shard_logprobs(original: Any) -> Any:
    """Subclass an autograd function of NeMo-RL that takes a vocabulary shard; forward passes then use our kernels."""

    signature = inspect.signature(original.forward)

    def apply(logits: Any, target: Any, *rest: Any) -> Any:
        arguments = signature.bind(None, logits, target, *rest).arguments  # None: autograd's context
        # A parameter that only later versions have may change the result, so such a call is left to NeMo-RL.
        has_unknown = any(
            name not in _SHARD_PARAMETERS and value is not signature.parameters[name].default
            for name, value in list(arguments.items())[1:]
        )
        if arguments.get("inference_only") is not True or has_unknown:
            return original.apply(logits, target, *rest)
        group = arguments["tp_group"] if "tp_group" in arguments else arguments["group"]
        return forward_logprobs(logits, target, group)

    return type(original.__name__, (original,), {"apply": staticmethod(apply), "__module__": original.__module__})


def wrap_full_vocabulary_logprobs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method of a DTensor v2 worker that computes log-probs of a whole vocabulary's logits.

    The wrapped method uses this package's kernels in forward passes, and also accepts hidden states in place of logits.
    """

    @functools.wraps(original)
    def compute_local_logprobs(self: Any, logits: Any, input_ids: Any) -> Any:
        hidden = HiddenStates.of(logits)
        if hidden is not None:
            return hidden.next_token_logprobs(input_ids, None)
        if describe_filter(self.sampling_params) or torch.is_grad_enabled():
            return original(self, logits, input_ids)
        targets = input_ids[:, 1:]
        return forward_logprobs(logits[:, : targets.shape[1]], targets, None)

    return compute_local_logprobs
