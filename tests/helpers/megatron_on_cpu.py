"""What megatron-core 0.16.1 needs to run over gloo on a CPU, without Transformer Engine. Each patch names the failure
that it removes. To be installed after ``init_process_group`` and before a model is built."""

import contextlib
import copy

import torch
import torch.distributed as dist

from tests.helpers.shares import shares


class _Stream:
    def __init__(self, *args, **options):
        pass

    def wait_stream(self, stream):
        pass

    def synchronize(self):
        pass

    def record_event(self, *args):
        return self


def install():
    # Fused functions are compiled at import, which takes long; this must precede other imports of megatron.
    from megatron.core import jit

    jit.jit_fuser = jit.noop_decorator if hasattr(jit, "noop_decorator") else (lambda function: function)
    # Tensors are made on torch.cuda.current_device().
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    # The tracker of CUDA's generators.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # a NameError in the router without Transformer Engine
    from megatron.core.transformer import torch_norm

    original = torch_norm.WrappedTorchNorm.__new__

    def new(cls, config, *args, **options):
        # "sequence parallel not supported by torch LayerNorm": it works on any share of the tokens.
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **options)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = new
    # The all-to-all dispatcher works on CUDA streams, and leaves split sizes as tensors off CUDA.
    torch.cuda.Stream, torch.cuda.current_stream = _Stream, lambda *args: _Stream()
    torch.cuda.stream = lambda *args: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


class PackedAttention(torch.nn.Module):
    """In the place of Transformer Engine's attention: "Packed sequence is not supported by DotProductAttention", nor is
    context parallelism. Each rank's queries see the keys and values of all ranks' shares."""

    def __init__(self, config, *args, **options):
        super().__init__()
        self.scale = config.kv_channels**-0.5

    def forward(self, query, key, value, attention_mask, *args, packed_seq_params, **options):
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        offsets = packed_seq_params.cu_seqlens_q_padded.tolist()
        held = [torch.tensor(shares(offsets, rank, group.size())) for rank in range(group.size())]
        # Places in the packed row order the tokens within a sequence too.
        queries, keys = held[group.rank()][:, :1], torch.cat(held)[:, 0]
        sequence = torch.repeat_interleave(torch.arange(len(offsets) - 1), torch.tensor(offsets).diff())
        visible = (sequence[queries] == sequence[keys]) & (keys <= queries)
        # [N, heads, width], as Megatron hands packed tokens over.
        everyone = [_Gathered.apply(part, group) for part in (key, value)]
        scores = torch.einsum("qhd,khd->hqk", query, everyone[0]) * self.scale
        return torch.einsum("hqk,khd->qhd", scores.where(visible, -torch.inf).softmax(dim=-1), everyone[1])


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None
