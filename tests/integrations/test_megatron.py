"""Real megatron-core models over gloo: parameter gradients under tensor and sequence parallelism equal the unsharded
model's under the padded loss."""

import functools
import warnings

import numpy as np
import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import DataError, GeomaskError, ShapeError
from nemo_geomask.processes import run
from tests.helpers import batches

pytest.importorskip("megatron.core", reason="needs megatron-core, the extra 'megatron'")

pytestmark = pytest.mark.slow

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


def _model(experts, tp=1, cp=1, sequence_parallel=False, packed=True):
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
        share_embeddings_and_output_weights=False,
    )


def _packed_ids(data, params):
    """Token ids of the packed row."""
    starts, lengths = params.cu_seqlens_q_padded.tolist(), params.cu_seqlens_q.diff().tolist()
    ids = torch.zeros(1, starts[-1], dtype=torch.int64)
    for i, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        ids[0, start : start + length] = data["input_ids"][i, :length]
    return ids


def _gradients(model):
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


# (experts, tensor-parallel, context-parallel, sequence-parallel). Megatron itself refuses experts under tensor
# parallelism without sequence parallelism.
LAYOUTS = {
    1: [(4, 1, 1, False)],
    2: [(None, 2, 1, False), (None, 2, 1, True), (None, 1, 2, False), (4, 2, 1, True), (4, 1, 2, False)],
    4: [(None, 2, 2, False), (None, 2, 2, True), (4, 2, 2, True)],
}


def _logits(count):
    """Of a packed row, each of whose log-probs is near an untrained model's."""
    return 0.1 * torch.randn(1, count, PADDED_VOCAB, generator=torch.Generator().manual_seed(3))


def _sequence_parallel(world):
    """Loss, metrics, and the gradient of this rank's share of the tokens, over the whole vocabulary."""
    from megatron.core import parallel_state

    from nemo_geomask.integrations.megatron import packed_segments, policy_loss

    parallel_state.initialize_model_parallel(2, context_parallel_size=world // 2)
    data, seqs, toks = _rows()
    params = _packing(data)
    segments = packed_segments(params, sequence_parallel=True)
    shard = _logits(params.max_seqlen_q * 99)[:, segments.token_index].requires_grad_()
    loss, metrics = policy_loss(
        build_loss(CONFIG),
        shard,
        data,
        params,
        global_valid_seqs=seqs,
        global_valid_toks=toks,
        vocab_size=VOCAB,
        temperature=0.9,
        sequence_parallel=True,
        host_offsets=params.cu_seqlens_q_padded.tolist(),
    )
    loss.backward()
    return loss.item(), metrics, segments.token_index.numpy(), shard.grad.numpy()


def _train(rank, world):
    """Loss, metrics and parameter gradients of each layout; and what :func:`_sequence_parallel` gives."""
    warnings.simplefilter("ignore")
    from tests.helpers import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.core import parallel_state

    from nemo_geomask.integrations.megatron import packed_segments, policy_loss

    data, seqs, toks = _rows()
    params = _packing(data)
    found = []
    for experts, tp, cp, sequence_parallel in LAYOUTS[world]:
        parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
        model = _model(experts, tp, cp, sequence_parallel)
        ids = _packed_ids(data, params)[:, packed_segments(params).token_index]
        logits = model(ids, None, None, packed_seq_params=params)
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
        found.append((loss.item(), metrics, _gradients(model)))
        parallel_state.destroy_model_parallel()
    return found, _sequence_parallel(world) if world > 1 else None


def _reference(rank, world):
    """The unsharded models on padded rows, torch's log_softmax, the padded loss."""
    warnings.simplefilter("ignore")
    from tests.helpers import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(1)
    data, seqs, toks = _rows()
    found = {}
    for experts in (None, 4):
        model = _model(experts, packed=False)
        causal = torch.ones(WIDTH, WIDTH, dtype=torch.bool).triu(1)[None, None]
        logits = model(data["input_ids"], None, causal)[:, :-1, :VOCAB].float() / 0.9
        curr = torch.log_softmax(logits, dim=-1).gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
        loss, metrics = build_loss(CONFIG)(curr, data, seqs, toks)
        loss.backward()
        found[experts] = (loss.item(), metrics, _gradients(model))
    return found


@pytest.fixture(scope="module")
def reference():
    return run(1, _reference)[0]


@functools.cache
def _trained(world):
    return run(world, _train)


@pytest.mark.parametrize("world", LAYOUTS)
def test_parameter_gradients_equal_the_unsharded_models(world, reference):
    for _, metrics, gradients in reference.values():
        assert any(np.abs(grad).max() > 1e-4 for grad in gradients.values())
        assert 0 < metrics["geomask/kept_tokens"] < metrics["probs_ratio"]
    for results, _ in _trained(world):
        for layout, (loss, metrics, gradients) in zip(LAYOUTS[world], results, strict=True):
            true_loss, true_metrics, true_gradients = reference[layout[0]]
            assert loss == pytest.approx(true_loss, rel=1e-4, abs=1e-6), layout
            for name, value in true_metrics.items():
                assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (layout, name)
            assert set(gradients) == set(true_gradients)
            for name, grad in true_gradients.items():
                np.testing.assert_allclose(gradients[name], grad, rtol=1e-3, atol=2e-6, err_msg=f"{layout} {name}")


@pytest.mark.parametrize("world", [2, 4])
def test_sequence_parallel_shares_equal_the_whole_row(world):
    from nemo_geomask.integrations.megatron import pack_batch
    from nemo_geomask.parallel import vocab_parallel_logprobs
    from nemo_geomask.segments import PackedSegments

    data, seqs, toks = _rows()
    params = _packing(data)
    segments = PackedSegments(params.cu_seqlens_q_padded)
    logits = _logits(params.max_seqlen_q * 99)[:, : len(segments.token_index)].requires_grad_()
    packed = pack_batch(data, params, segments)
    logprobs = vocab_parallel_logprobs(logits[0], packed["targets"], temperature=0.9, vocab_size=VOCAB)
    loss, metrics = build_loss(CONFIG).packed(logprobs, packed, segments, seqs, toks)
    loss.backward()
    seen = []
    for _, (value, found, index, grad) in _trained(world):
        assert value == pytest.approx(loss.item(), rel=1e-5)
        assert found == pytest.approx(metrics, rel=1e-5, abs=1e-7)
        np.testing.assert_allclose(grad, logits.grad[:, index], rtol=1e-4, atol=1e-8)
        seen += index.tolist()
    assert sorted(seen) == list(range(logits.shape[1]))


def _against_megatron(rank, world):
    warnings.simplefilter("ignore")
    from tests.helpers import megatron_on_cpu

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


@pytest.mark.parametrize("world", [1, 2])
def test_logprobs_are_megatrons_cross_entropy_negated(world):
    for ours, theirs in run(world, _against_megatron):
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-5)


def test_batch_that_lacks_or_misshapes_a_tensor_is_refused():
    from nemo_geomask.integrations.megatron import pack_batch
    from nemo_geomask.segments import PackedSegments

    data, *_ = _rows()
    params = _packing(data)
    segments = PackedSegments(params.cu_seqlens_q_padded)
    assert "images" not in pack_batch({**data, "images": ["not a tensor"]}, params, segments)
    with pytest.raises(DataError, match=r"data\['sample_mask'\] is missing"):
        pack_batch({key: value for key, value in data.items() if key != "sample_mask"}, params, segments)
    with pytest.raises(ShapeError, match=r"data\['prev_logprobs'\] must be"):
        pack_batch({**data, "prev_logprobs": data["prev_logprobs"][:, :-1]}, params, segments)
    with pytest.raises(ShapeError, match="2 sequences"):
        pack_batch(data, params, PackedSegments([0, 8, 16]))


def _refused(rank, world):
    """What is said of batches that fit neither packing nor vocabulary, None of one that does."""
    from megatron.core import parallel_state

    from nemo_geomask.integrations.megatron import policy_loss

    parallel_state.initialize_model_parallel(1)
    data, seqs, toks = _rows()
    params = _packing(data)
    longer = data["token_mask"].clone()
    longer[1, -1] = 1
    offsets = params.cu_seqlens_q_padded
    found = []
    for change, vocab_size, host_offsets in (
        ({}, VOCAB, offsets),
        ({}, 20, offsets),
        ({}, VOCAB, 2 * offsets),
        ({"token_mask": longer}, VOCAB, offsets),
    ):
        logits = _logits(int(host_offsets[-1]))
        counts = {"global_valid_seqs": seqs, "global_valid_toks": toks}
        options = {"vocab_size": vocab_size, "host_offsets": host_offsets.tolist()}
        try:
            policy_loss(build_loss(CONFIG), logits, {**data, **change}, params, **counts, **options)
            found.append(None)
        except GeomaskError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_batch_that_does_not_fit_packing_or_vocabulary_is_refused():
    ((fine, outside, offsets, behind),) = run(1, _refused)
    assert fine is None
    assert outside.startswith("DataError")
    assert "outside the vocabulary of 20" in outside
    assert offsets.startswith("ShapeError: host_offsets are")
    assert behind.startswith("DataError")
    assert "trains 1 tokens behind the end" in behind


def test_packing_reads_nothing_back():
    from nemo_geomask.integrations.megatron import pack_batch
    from nemo_geomask.segments import PackedSegments

    # A tensor without data raises where its value is asked for.
    data, *_ = _rows()
    params = _packing(data)
    segments = PackedSegments(params.cu_seqlens_q_padded.tolist(), device="meta")
    params.cu_seqlens_q, params.cu_seqlens_q_padded = params.cu_seqlens_q.to("meta"), None
    packed = pack_batch({key: value.to("meta") for key, value in data.items()}, params, segments)
    assert packed["targets"].shape == segments.token_index.shape
