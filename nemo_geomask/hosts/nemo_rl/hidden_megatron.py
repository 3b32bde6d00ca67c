"""``logprob_backend: geomask_linear`` in NeMo-RL's Megatron workers.

During a forward pass, the output layer's ``forward`` is replaced by one that returns its input. The layer is still
called, because hooks depend on the call: under ``overlap_param_gather`` they gather the layer's parameters. The model
then returns hidden states [B, S, H] in place of logits, marked with their output layer, see
:mod:`nemo_geomask.hosts.nemo_rl.hidden_states`. In a worker process that
:func:`nemo_geomask.hosts.nemo_rl.prepare_worker` has patched, the forward passes for ``prev_logprobs`` and the
reference policy do the same.
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

from nemo_geomask.hosts.nemo_rl.facts import describe_filter
from nemo_geomask.hosts.nemo_rl.hidden_states import (
    HiddenStates,
    OutputLayer,
    computes_logprobs,
    hidden_states_requested,
    refuse_altered,
    refuse_if,
    replaced_forward,
    takes_hidden_states,
    wrap_post_processing,
)
from nemo_geomask.losses.packing import IGNORE
from nemo_geomask.segments import PackedSegments


def wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward_with_post_processing_fn`` of Megatron workers to request hidden states."""
    return wrap_post_processing(_needs_hidden_states, original)


def _needs_hidden_states(arguments: Mapping[str, Any]) -> bool:
    post_processor = arguments["post_processing_fn"]
    is_training = takes_hidden_states(getattr(post_processor, "loss_fn", None))
    has_draft_model = arguments.get("draft_model") is not None
    refuse_if(is_training and has_draft_model, "a draft model, which learns from the logits")
    return is_training or computes_logprobs(post_processor)


def wrap_model_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``model_forward`` to return hidden states, marked with their output layer, if they are requested."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def model_forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        core = bound.arguments["model"]
        while hasattr(core, "module"):
            core = core.module
        # Pipeline stages before the last have no output layer.
        if not hidden_states_requested.get() or not getattr(core, "post_process", True):
            return original(*args, **kwargs)
        layer = _checked_layer(core)
        layers: list[OutputLayer] = []
        if "output_processor" in inspect.signature(core.forward).parameters:
            processor = functools.partial(_process_output, layers)
            bound.arguments["model"] = functools.partial(bound.arguments["model"], output_processor=processor)
            output = original(*bound.args, **bound.kwargs)
        else:
            has_mtp = getattr(core.config, "mtp_num_layers", None)
            refuse_if(has_mtp, "multi-token prediction in a Megatron without output_processor")
            with replaced_forward(layer, _identity_forward(layer, layers)):
                output = original(*args, **kwargs)
        refuse_if(not layers, "a model that does not call its output layer, as with NeMo-RL's fused linear log-probs")
        layers[-1].mark(output)
        return output

    return model_forward


def _process_output(
    layers: list[OutputLayer],
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    scale_logits: Callable[[Tensor], Tensor],
    **_: Any,
) -> Tensor:
    """Return hidden states [B, S, H] from [S, B, H]; passed to Megatron's model as its ``output_processor``.

    It calls the output layer with a ``forward`` that returns its input and appends the layer to ``layers``.
    """
    with replaced_forward(output_layer, _identity_forward(output_layer, layers)):
        states, _bias = output_layer(hidden_states, weight=output_weight)
    return scale_logits(states).transpose(0, 1).contiguous()


def _identity_forward(layer: Any, layers: list[OutputLayer]) -> Callable[..., Any]:
    """Return a ``forward`` that returns its input, and appends the layer with its current weight to ``layers``."""

    def forward(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        group = getattr(layer, "tp_group", None)
        ranks = dist.get_world_size(group) if group is not None else int(layer.world_size)
        weight = layer.weight if weight is None else weight
        layers.append(OutputLayer(weight, bool(layer.sequence_parallel), ranks))
        # NeMo-RL divides by the temperature in place, and the preceding norm may have saved its output for backward.
        return input_.clone(), None

    return forward


def _checked_layer(core: Any) -> Any:
    layer: Any = getattr(core, "output_layer", None)
    config = core.config
    layer_type = importlib.import_module("megatron.core.tensor_parallel.layers").ColumnParallelLinear
    refuse_if(type(layer) is not layer_type, f"an output layer of type {type(layer).__name__}")
    refuse_altered(layer, "an output layer")
    refuse_if(layer.gather_output, "an output layer that gathers its output")
    output_dtype = getattr(layer, "output_dtype", None)
    refuse_if(output_dtype, f"logits in {output_dtype}")
    refuse_if(getattr(config, "defer_embedding_wgrad_compute", False), "defer_embedding_wgrad_compute")
    refuse_if((getattr(layer, "gtp_remat_size", None) or 1) > 1, "generalized tensor parallelism")
    # Multi-token prediction calls the same layer. With fused accumulation, that call's backward pass marks the weight's
    # gradient as accumulated already, so that the gradient that this package computes for the weight would be lost.
    has_mtp = getattr(config, "mtp_num_layers", None)
    fuses_accumulation = getattr(config, "gradient_accumulation_fusion", False)
    refuse_if(has_mtp and fuses_accumulation, "multi-token prediction with gradient_accumulation_fusion; turn that off")
    return layer


def wrap_logprobs_post_processor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of ``LogprobsPostProcessor`` to compute log-probs from hidden states."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        process_logits = original(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments

        def process(output: Any) -> Any:
            hidden = HiddenStates.of(output)
            if hidden is None:
                return process_logits(output)
            description = describe_filter(self.sampling_params)
            refuse_if(description, f"sampling with {description}")
            is_packed = self.cfg["sequence_packing"]["enabled"]
            offsets = arguments["cu_seqlens_padded"] if is_packed else None
            logprobs = _row_logprobs(hidden, arguments["data_dict"]["input_ids"], arguments["input_ids"], offsets)
            logprobs = torch.nn.functional.pad(logprobs, (1, 0))  # the first token has no log-prob
            return torch.zeros((), dtype=torch.float32, device=logprobs.device), {"logprobs": logprobs}

        return process

    return call


def _row_logprobs(hidden: HiddenStates, ids: Tensor, packed_ids: Tensor, offsets: Tensor | None) -> Tensor:
    """Compute log-probs [B, T-1] of ``ids[:, 1:]`` for the complete rows, on every rank.

    A token outside the vocabulary gets NaN. If rows are packed, columns after the end of a sequence get 0.

    Args:
        hidden: hidden states of the rows, or of this rank's context-parallel shard of the packed row.
        ids: token ids of the rows, [B, T].
        packed_ids: token ids of the packed row, [1, N].
        offsets: [B+1], start of each sequence in the packed row and the end of the last; None if rows are not packed.
    """
    state = importlib.import_module("megatron.core.parallel_state")
    group = state.get_tensor_model_parallel_group()
    if offsets is None:
        return hidden.next_token_logprobs(ids, group)
    width = ids.shape[1]
    context = state.get_context_parallel_group()
    size = dist.get_world_size(context)
    offsets = offsets.cpu()
    segments = PackedSegments(offsets, device=hidden.device, cp_rank=dist.get_rank(context), cp_size=size)
    starts, ends = segments.cu_seqlens[:-1], segments.cu_seqlens[1:]
    position = segments.token_index  # in the packed row
    # The last token of a sequence predicts nothing.
    predicts = position + 1 < ends[segments.spread(torch.arange(segments.count, device=hidden.device))]
    next_ids = packed_ids.reshape(-1)[torch.where(predicts, position + 1, 0)].to(torch.int64)
    targets = torch.where(predicts, next_ids, IGNORE).view(1, -1)
    # No validation: context-parallel ranks hold different tokens. If only some ranks raised an error, the others would
    # wait for them in the all_reduce below.
    shard: Tensor = (
        hidden.first(targets.shape[1]).logprobs(targets, group=group, ignore_index=IGNORE, validate=False).reshape(-1)
    )
    packed = shard.new_zeros(int(offsets[-1])).index_copy_(0, position, shard)
    if size > 1:
        dist.all_reduce(packed, group=context)
    columns = starts.unsqueeze(1) + torch.arange(width - 1, device=hidden.device)
    inside = columns < ends.unsqueeze(1) - 1
    return torch.where(inside, packed[torch.where(inside, columns, 0)], 0.0)
