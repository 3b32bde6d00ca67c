"""``logprob_backend: geomask_linear`` in NeMo-RL's Megatron workers: they hand over what the output layer is given.

Megatron's model is run with an output layer that passes its input on, so that whatever belongs to the layer's call (the
gathering of its parameters, under ``overlap_param_gather``) still happens. What takes the place of the logits on their
way through NeMo-RL is the hidden states [B, S, H], which know their head. NeMo-RL divides them by the temperature as it
would the logits, which is the same. In a process that was prepared for it, the forward passes for ``prev_logprobs`` and
the reference policy's go the same way.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.integrations.nemo_rl import patch
from nemo_geomask.integrations.nemo_rl.hidden import (
    Hidden,
    OutputLayer,
    handing_on,
    refuse_altered,
    refuse_if,
    telling,
    wanted,
)
from nemo_geomask.integrations.nemo_rl.worker import filtering
from nemo_geomask.integrations.packing import IGNORE
from nemo_geomask.segments import PackedSegments

__all__ = ["patches"]


def patches(train: Any, takes_hidden: Callable[[Any], bool]) -> list[patch.Patch]:
    """What lets Megatron's forward passes put out hidden states.

    Args:
        train: NeMo-RL's module ``models.megatron.train``.
        takes_hidden: whether a loss is one that takes them.
    """
    wants = functools.partial(_wants, train, takes_hidden)
    return [
        patch.attribute(train, "forward_with_post_processing_fn", functools.partial(telling, wants)),
        patch.attribute(train, "model_forward", _passing_on),
        patch.attribute(train.LogprobsPostProcessor, "__call__", _scoring),
    ]


def _wants(train: Any, takes_hidden: Callable[[Any], bool], given: Mapping[str, Any]) -> bool:
    post = given["post_processing_fn"]
    trains = takes_hidden(getattr(post, "loss_fn", None))
    refuse_if(trains and given.get("draft_model") is not None and "a draft model, which learns from the logits")
    return trains or isinstance(post, train.LogprobsPostProcessor)


def _passing_on(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def model_forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        core = given.arguments["model"]
        while hasattr(core, "module"):
            core = core.module
        if not wanted.get() or not getattr(core, "post_process", True):
            return original(*args, **kwargs)
        layer = _checked_layer(core)
        seen: list[OutputLayer] = []
        if "output_processor" in inspect.signature(core.forward).parameters:
            processor = functools.partial(_processed, seen)
            given.arguments["model"] = functools.partial(given.arguments["model"], output_processor=processor)
            output = original(*given.args, **given.kwargs)
        else:
            mtp = getattr(core.config, "mtp_num_layers", None)
            refuse_if(mtp and "multi-token prediction in a Megatron without output_processor")
            with handing_on(layer, _forward(layer, seen)):
                output = original(*args, **kwargs)
        refuse_if(not seen and "a model that does not call its output layer, as with NeMo-RL's fused linear log-probs")
        seen[-1].mark(output)
        return output

    return model_forward


def _processed(
    seen: list[OutputLayer],
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    scale_logits: Callable[[Tensor], Tensor],
    **_: Any,
) -> Tensor:
    """Megatron's ``output_processor``: [B, S, H] from [S, B, H]."""
    with handing_on(output_layer, _forward(output_layer, seen)):
        states, _bias = output_layer(hidden_states, weight=output_weight)
    return scale_logits(states).transpose(0, 1).contiguous()


def _forward(layer: Any, seen: list[OutputLayer]) -> Callable[..., Any]:
    """A forward of the layer's that returns its input; what it would have multiplied with goes into ``seen``."""

    def forward(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        group = getattr(layer, "tp_group", None)
        ranks = dist.get_world_size(group) if group is not None else int(layer.world_size)
        weight = layer.weight if weight is None else weight
        seen.append(OutputLayer(weight, bool(layer.sequence_parallel), ranks))
        # NeMo-RL divides by the temperature in place, and the norm before the layer may keep its output.
        return input_.clone(), None

    return forward


def _checked_layer(core: Any) -> Any:
    layer: Any = getattr(core, "output_layer", None)
    config = core.config
    known = importlib.import_module("megatron.core.tensor_parallel.layers").ColumnParallelLinear
    refuse_if(type(layer) is not known and f"an output layer of type {type(layer).__name__}")
    refuse_altered(layer, "an output layer")
    refuse_if(layer.gather_output and "an output layer that gathers its output")
    refuse_if(getattr(layer, "output_dtype", None) and f"logits in {getattr(layer, 'output_dtype', None)}")
    refuse_if(getattr(config, "defer_embedding_wgrad_compute", False) and "defer_embedding_wgrad_compute")
    refuse_if((getattr(layer, "gtp_remat_size", None) or 1) > 1 and "generalized tensor parallelism")
    # The layer's other use marks the weight as summed up already, and its gradient from here would be left out.
    mtp = getattr(config, "mtp_num_layers", None) and getattr(config, "gradient_accumulation_fusion", False)
    refuse_if(mtp and "multi-token prediction with gradient_accumulation_fusion; turn that off")
    return layer


def _scoring(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        process = original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments

        def processor(output: Any) -> Any:
            hidden = Hidden.of(output)
            if hidden is None:
                return process(output)
            filters = filtering(self.sampling_params)
            refuse_if(filters and f"sampling with {filters}")
            packed = self.cfg["sequence_packing"]["enabled"]
            offsets = given["cu_seqlens_padded"] if packed else None
            rows = _rows(hidden, given["data_dict"]["input_ids"], given["input_ids"], offsets)
            found = torch.nn.functional.pad(rows, (1, 0))  # the first token has no log-prob
            return torch.zeros((), dtype=torch.float32, device=found.device), {"logprobs": found}

        return processor

    return call


def _rows(hidden: Hidden, ids: Tensor, row: Tensor, offsets: Tensor | None) -> Tensor:
    """Log-probs [B, T-1] of all tokens of ``ids`` [B, T] but the first, on every rank; NaN outside the vocabulary.

    Args:
        hidden: of the rows, or of this rank's context-parallel share of the packed row.
        ids: the rows.
        row: [1, N], packed.
        offsets: [B+1], of the sequences in it; None: nothing is packed.
    """
    state = importlib.import_module("megatron.core.parallel_state")
    group = state.get_tensor_model_parallel_group()
    if offsets is None:
        return hidden.following(ids, group)
    width = ids.shape[1]
    context = state.get_context_parallel_group()
    size = dist.get_world_size(context)
    offsets = offsets.cpu()
    segments = PackedSegments(offsets, device=hidden.device, cp_rank=dist.get_rank(context), cp_size=size)
    # Of each position, the end of its sequence: the last predicts nothing.
    starts, ends = segments.cu_seqlens[:-1], segments.cu_seqlens[1:]
    place = segments.token_index
    predicts = place + 1 < ends[segments.spread(torch.arange(segments.count, device=hidden.device))]
    following = row.reshape(-1)[torch.where(predicts, place + 1, 0)].to(torch.int64)
    targets = torch.where(predicts, following, IGNORE).view(1, -1)
    # Not validated: an error on the ranks of one share would leave those of the others waiting below.
    share = hidden.first(targets.shape[1])
    found: Tensor = share.logprobs(targets, group=group, ignore_index=IGNORE, validate=False).reshape(-1)
    whole = found.new_zeros(int(offsets[-1])).index_copy_(0, place, found)
    if size > 1:
        dist.all_reduce(whole, group=context)
    columns = starts.unsqueeze(1) + torch.arange(width - 1, device=hidden.device)
    inside = columns < ends.unsqueeze(1) - 1
    return torch.where(inside, whole[torch.where(inside, columns, 0)], 0.0)
