"""Small megatron-core models, a batch for them, and their gradients put together from the ranks."""

import numpy as np
import torch

from tests.helpers import batches

VOCAB, PADDED_VOCAB, WIDTH = 45, 48, 23
CONFIG = {
    "name": "gspo",
    "ratio_clip_min": 0.1,
    "ratio_clip_max": 0.1,
    "use_importance_sampling_correction": True,
    "is_correction_level": "sequence_mean",
    "masks": [batches.MASKS["geometric"], batches.MASKS["opsm"]],
}


def rows():
    """A batch whose prev log-probs are near an untrained model's, so that ratios are near 1."""
    batch = batches.rollouts(seed=5, width=WIDTH, mismatch=0.05, staleness=0.0)
    shift = -np.log(VOCAB) - batch.data["prev_logprobs"]
    data = {**batch.data, "input_ids": batch.data["input_ids"] % VOCAB}
    for key in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        data[key] = data[key] + shift
    return data, batch.seqs, batch.toks


def packing(data, multiple=8):
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [int(row.nonzero().max()) + 1 if row.any() else 1 for row in data["token_mask"]]
    padded = [-(-length // multiple) * multiple for length in lengths]
    offsets, padded_offsets = (torch.tensor([0, *np.cumsum(values)], dtype=torch.int32) for values in (lengths, padded))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=padded_offsets,
        cu_seqlens_kv_padded=padded_offsets,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )


def model(experts, tp=1, cp=1, sequence_parallel=False, packed=True, tied=False, **stage):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.helpers import megatron_on_cpu

    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        use_cpu_initialization=True,  # the whole weight is drawn, then split: the same model at any size
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=sequence_parallel,
        num_moe_experts=experts,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
    layers = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False)
    if packed:
        layers.submodules.self_attention.submodules.core_attention = megatron_on_cpu.PackedAttention
    return GPTModel(
        config,
        layers,
        vocab_size=PADDED_VOCAB,
        max_sequence_length=256,
        position_embedding_type="rope",
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        **stage,
    )


def packed_ids(data, params):
    """Token ids of the packed row."""
    starts, lengths = params.cu_seqlens_q_padded.tolist(), params.cu_seqlens_q.diff().tolist()
    ids = torch.zeros(1, starts[-1], dtype=torch.int64)
    for i, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        ids[0, start : start + length] = data["input_ids"][i, :length]
    return ids


def gradients(model):
    """Gradients of the whole parameters, put together from the ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    tensor_group = parallel_state.get_tensor_model_parallel_group()
    context_group = parallel_state.get_context_parallel_group()
    whole = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        # Each rank saw its share of the tokens; Megatron's finalize step adds them up.
        dist.all_reduce(grad, group=context_group)
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=tensor_group)
        if getattr(parameter, "tensor_model_parallel", False) and tensor_group.size() > 1:
            parts = [torch.empty_like(grad) for _ in range(tensor_group.size())]
            dist.all_gather(parts, grad.contiguous(), group=tensor_group)
            grad = torch.cat(parts, dim=parameter.partition_dim)
        whole[name] = grad.numpy()
    return whole
