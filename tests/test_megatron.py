"""Real megatron-core models over gloo: parameter gradients under tensor and sequence parallelism equal the unsharded
model's under the padded loss."""

import itertools
import warnings

import batches
import numpy as np
import pytest
import torch
from gloo import run

from nemo_geomask import build_loss
from nemo_geomask.errors import DataError, ShapeError

pytest.importorskip("megatron.core", reason="needs megatron-core, the extra 'megatron'")

VOCAB, PADDED_VOCAB, WIDTH = 45, 48, 23
CONFIG = {
    "name": "gspo",
    "ratio_clip_min": 0.1,
    "ratio_clip_max": 0.1,
    "use_importance_sampling_correction": True,
    "is_correction_level": "sequence_mean",
    "masks": [batches.MASKS["geometric"], batches.MASKS["opsm"]],
}


def _rows():
    """A batch whose prev log-probs are near an untrained model's, so that ratios are near 1."""
    batch = batches.rollouts(seed=5, width=WIDTH, mismatch=0.05, staleness=0.0)
    shift = -np.log(VOCAB) - batch.data["prev_logprobs"]
    data = {**batch.data, "input_ids": batch.data["input_ids"] % VOCAB}
    for key in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        data[key] = data[key] + shift
    return data, batch.seqs, batch.toks


def _packing(data, multiple=8):
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


def _model(experts, sequence_parallel, world):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        use_cpu_initialization=True,  # the whole weight is drawn, then split: the same model at any size
        tensor_model_parallel_size=world,
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
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False),
        vocab_size=PADDED_VOCAB,
        max_sequence_length=256,
        position_embedding_type="rope",
        parallel_output=True,
        share_embeddings_and_output_weights=False,
    )


def _packed_row(data, params):
    """Token ids and the block-diagonal causal mask of the packed row."""
    starts, lengths = params.cu_seqlens_q_padded.tolist(), params.cu_seqlens_q.diff().tolist()
    ids = torch.zeros(1, starts[-1], dtype=torch.int64)
    blocked = torch.ones(starts[-1], starts[-1], dtype=torch.bool)
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        ids[0, start : start + lengths[i]] = data["input_ids"][i, : lengths[i]]
        blocked[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
    return ids, None, blocked[None, None]  # rotary positions are relative, so a packed row needs no position ids


def _gradients(model, sequence_parallel):
    """Gradients of the whole parameters, put together from the ranks."""
    import torch.distributed as dist

    whole = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if sequence_parallel and getattr(parameter, "sequence_parallel", False):
            # Each rank saw its share of the tokens; Megatron's finalize step adds them up.
            dist.all_reduce(grad)
        if getattr(parameter, "tensor_model_parallel", False) and dist.get_world_size() > 1:
            parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, grad.contiguous())
            grad = torch.cat(parts, dim=parameter.partition_dim)
        whole[name] = grad.numpy()
    return whole


def _train(rank, world, experts, sequence_parallel):
    warnings.simplefilter("ignore")
    import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.core import parallel_state

    from nemo_geomask.integrations.megatron import policy_loss

    parallel_state.initialize_model_parallel(world)
    data, seqs, toks = _rows()
    params = _packing(data)
    model = _model(experts, sequence_parallel, world)
    logits = model(*_packed_row(data, params))
    loss, metrics = policy_loss(
        build_loss(CONFIG),
        logits,
        data,
        params,
        global_valid_seqs=seqs,
        global_valid_toks=toks,
        vocab_size=VOCAB,
        temperature=0.9,
    )
    loss.backward()
    return loss.item(), metrics, _gradients(model, sequence_parallel)


def _reference(rank, world, experts):
    """The unsharded model on padded rows, torch's log_softmax, the padded loss."""
    warnings.simplefilter("ignore")
    import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(1)
    data, seqs, toks = _rows()
    model = _model(experts, False, 1)
    causal = torch.ones(WIDTH, WIDTH, dtype=torch.bool).triu(1)[None, None]
    logits = model(data["input_ids"], None, causal)[:, :-1, :VOCAB].float() / 0.9
    curr = torch.log_softmax(logits, dim=-1).gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
    loss, metrics = build_loss(CONFIG)(curr, data, seqs, toks)
    loss.backward()
    return loss.item(), metrics, _gradients(model, False)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("experts", [None, 4], ids=["dense", "moe"])
def test_parameter_gradients_equal_the_unsharded_models(experts):
    (reference,) = run(1, _reference, experts)
    assert any(np.abs(grad).max() > 1e-4 for grad in reference[2].values())
    assert 0 < reference[1]["geomask/kept_tokens"] < reference[1]["probs_ratio"]
    # Megatron itself refuses experts under tensor parallelism without sequence parallelism.
    layouts = [(1, False), (2, True)] if experts else [(1, False), (2, False), (2, True)]
    for world, sequence_parallel in layouts:
        for loss, metrics, gradients in run(world, _train, experts, sequence_parallel):
            assert loss == pytest.approx(reference[0], rel=1e-4, abs=1e-6)
            for name, value in reference[1].items():
                assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
            assert set(gradients) == set(reference[2])
            for name, grad in reference[2].items():
                np.testing.assert_allclose(gradients[name], grad, rtol=1e-3, atol=2e-6, err_msg=name)


def _against_megatron(rank, world):
    warnings.simplefilter("ignore")
    import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    from nemo_geomask.parallel import vocab_parallel_logprobs

    parallel_state.initialize_model_parallel(world)
    group = parallel_state.get_tensor_model_parallel_group()
    draw = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(64, 8192, generator=draw) * 3, torch.randint(0, 8192, (64,), generator=draw)
    width = 8192 // world
    shard = logits[:, rank * width : (rank + 1) * width]
    found = []
    for compute in (
        lambda x: vocab_parallel_logprobs(x, targets, group=group),
        lambda x: -vocab_parallel_cross_entropy(x.unsqueeze(1), targets.unsqueeze(1)).squeeze(1),
    ):
        leaf = shard.clone().requires_grad_()
        logprobs = compute(leaf)
        logprobs.square().sum().backward()
        found.append((logprobs.detach().numpy(), leaf.grad.numpy()))
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [1, 2])
def test_logprobs_are_megatrons_cross_entropy_negated(world):
    for ours, theirs in run(world, _against_megatron):
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-5)


def test_batch_that_lacks_or_misshapes_a_tensor_is_refused():
    from nemo_geomask.integrations.megatron import _check_targets, pack_batch
    from nemo_geomask.segments import PackedSegments

    data, *_ = _rows()
    params = _packing(data)
    segments = PackedSegments(params.cu_seqlens_q_padded)
    assert "images" not in pack_batch({**data, "images": ["not a tensor"]}, params, segments)
    with pytest.raises(DataError, match=r"data\['sample_mask'\] is missing"):
        pack_batch({key: value for key, value in data.items() if key != "sample_mask"}, params, segments)
    with pytest.raises(ShapeError, match=r"data\['prev_logprobs'\] must be"):
        pack_batch({**data, "prev_logprobs": data["prev_logprobs"][:, :-1]}, params, segments)
    with pytest.raises(DataError, match="outside the vocabulary of 20"):
        _check_targets(data, 20)


def test_batch_that_does_not_fit_the_packing_is_refused():
    from nemo_geomask.integrations.megatron import pack_batch
    from nemo_geomask.segments import PackedSegments

    data, *_ = _rows()
    params = _packing(data)
    with pytest.raises(ShapeError, match="packs 2 sequences"):
        pack_batch(data, params, PackedSegments([0, 8, 16]))
