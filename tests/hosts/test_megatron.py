"""Real megatron-core models over gloo: parameter gradients under tensor and sequence parallelism equal the unsharded
model's under the padded loss."""

import functools
import warnings

import numpy as np
import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import GeomaskError
from nemo_geomask.parallel.local_processes import run_ranks
from tests.helpers import megatron_models as models

pytest.importorskip("megatron.core", reason="needs megatron-core, the extra 'megatron'")

pytestmark = pytest.mark.slow

# (experts, tensor-parallel, context-parallel, sequence-parallel). Megatron itself refuses experts under tensor
# parallelism without sequence parallelism.
LAYOUTS = {
    1: [(4, 1, 1, False)],
    2: [(None, 2, 1, False), (None, 2, 1, True), (None, 1, 2, False), (4, 2, 1, True), (4, 1, 2, False)],
    4: [(None, 2, 2, False), (None, 2, 2, True), (4, 2, 2, True)],
}


def _logits(count):
    """Of a packed row, each of whose log-probs is near an untrained model's."""
    return 0.1 * torch.randn(1, count, models.PADDED_VOCAB, generator=torch.Generator().manual_seed(3))


def _sequence_parallel(world):
    """Loss, metrics, and the gradient of this rank's share of the tokens, over the whole vocabulary."""
    from megatron.core import parallel_state

    from nemo_geomask.hosts.megatron import packed_segments, policy_loss

    parallel_state.initialize_model_parallel(2, context_parallel_size=world // 2)
    data, seqs, toks = models.rows()
    params = models.packing(data)
    segments = packed_segments(params, sequence_parallel=True)
    shard = _logits(params.max_seqlen_q * 99)[:, segments.token_index].requires_grad_()
    loss, metrics = policy_loss(
        build_loss(models.CONFIG),
        shard,
        data,
        params,
        global_valid_seqs=seqs,
        global_valid_toks=toks,
        vocab_size=models.VOCAB,
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

    from nemo_geomask.hosts.megatron import packed_segments, policy_loss

    data, seqs, toks = models.rows()
    params = models.packing(data)
    found = []
    for experts, tp, cp, sequence_parallel in LAYOUTS[world]:
        parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
        model = models.model(experts, tp, cp, sequence_parallel)
        ids = models.packed_ids(data, params)[:, packed_segments(params).token_index]
        logits = model(ids, None, None, packed_seq_params=params)
        loss, metrics = policy_loss(
            build_loss(models.CONFIG),
            logits,
            data,
            params,
            global_valid_seqs=seqs,
            global_valid_toks=toks,
            vocab_size=models.VOCAB,
            temperature=0.9,
        )
        loss.backward()
        found.append((loss.item(), metrics, models.gradients(model)))
        parallel_state.destroy_model_parallel()
    return found, _sequence_parallel(world) if world > 1 else None


def _reference(rank, world):
    """The unsharded models on padded rows, torch's log_softmax, the padded loss."""
    warnings.simplefilter("ignore")
    from tests.helpers import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(1)
    data, seqs, toks = models.rows()
    found = {}
    for experts in (None, 4):
        model = models.model(experts, packed=False)
        causal = torch.ones(models.WIDTH, models.WIDTH, dtype=torch.bool).triu(1)[None, None]
        logits = model(data["input_ids"], None, causal)[:, :-1, : models.VOCAB].float() / 0.9
        curr = torch.log_softmax(logits, dim=-1).gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
        loss, metrics = build_loss(models.CONFIG)(curr, data, seqs, toks)
        loss.backward()
        found[experts] = (loss.item(), metrics, models.gradients(model))
    return found


@pytest.fixture(scope="module")
def reference():
    return run_ranks(1, _reference)[0]


@functools.cache
def _trained(world):
    return run_ranks(world, _train)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
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


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_sequence_parallel_shares_equal_the_whole_row(world):
    from nemo_geomask.hosts.megatron import pack_batch
    from nemo_geomask.parallel import vocab_parallel_logprobs
    from nemo_geomask.segments import PackedSegments

    data, seqs, toks = models.rows()
    params = models.packing(data)
    segments = PackedSegments(params.cu_seqlens_q_padded)
    logits = _logits(params.max_seqlen_q * 99)[:, : len(segments.token_index)].requires_grad_()
    packed = pack_batch(data, params, segments)
    logprobs = vocab_parallel_logprobs(logits[0], packed["targets"], temperature=0.9, vocab_size=models.VOCAB)
    loss, metrics = build_loss(models.CONFIG).packed(logprobs, packed, segments, seqs, toks)
    loss.backward()
    seen = []
    for _, (value, found, index, grad) in _trained(world):
        assert value == pytest.approx(loss.item(), rel=1e-5)
        assert found == pytest.approx(metrics, rel=1e-5, abs=1e-7)
        np.testing.assert_allclose(grad, logits.grad[:, index], rtol=1e-4, atol=1e-8)
        seen += index.tolist()
    assert sorted(seen) == list(range(logits.shape[1]))


def _refused(rank, world):
    """What is said of batches that fit neither packing nor vocabulary, None of one that does."""
    from megatron.core import parallel_state

    from nemo_geomask.hosts.megatron import policy_loss

    parallel_state.initialize_model_parallel(1)
    data, seqs, toks = models.rows()
    params = models.packing(data)
    longer = data["token_mask"].clone()
    longer[1, -1] = 1
    offsets = params.cu_seqlens_q_padded
    found = []
    for change, vocab_size, host_offsets in (
        ({}, models.VOCAB, offsets),
        ({}, 20, offsets),
        ({}, models.VOCAB, 2 * offsets),
        ({"token_mask": longer}, models.VOCAB, offsets),
    ):
        logits = _logits(int(host_offsets[-1]))
        counts = {"global_valid_seqs": seqs, "global_valid_toks": toks}
        options = {"vocab_size": vocab_size, "host_offsets": host_offsets.tolist()}
        try:
            policy_loss(build_loss(models.CONFIG), logits, {**data, **change}, params, **counts, **options)
            found.append(None)
        except GeomaskError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_batch_that_does_not_fit_packing_or_vocabulary_is_refused():
    ((fine, outside, offsets, behind),) = run_ranks(1, _refused)
    assert fine is None
    assert outside.startswith("DataError")
    assert "outside the vocabulary of 20" in outside
    assert offsets.startswith("ShapeError: host_offsets are")
    assert behind.startswith("DataError")
    assert "trains 1 tokens behind the end" in behind


def test_packing_reads_nothing_back():
    from nemo_geomask.hosts.megatron import pack_batch
    from nemo_geomask.segments import PackedSegments

    # A tensor without data raises where its value is asked for.
    data, *_ = models.rows()
    params = models.packing(data)
    segments = PackedSegments(params.cu_seqlens_q_padded.tolist(), device="meta")
    params.cu_seqlens_q, params.cu_seqlens_q_padded = params.cu_seqlens_q.to("meta"), None
    packed = pack_batch({key: value.to("meta") for key, value in data.items()}, params, segments)
    assert packed["targets"].shape == segments.token_index.shape
