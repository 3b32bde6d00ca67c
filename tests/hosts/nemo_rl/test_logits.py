"""The loss that takes logits: equal to log-probs computed apart and handed over, padded and packed."""

import pickle
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nemo_geomask import build_loss
from nemo_geomask.errors import DataError, ShapeError
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
from nemo_geomask.parallel.local_processes import run_ranks
from tests.helpers.batches import VARIANTS, rollouts

VOCAB = 23
ALONE = {"vocab_parallel_group": None, "context_parallel_group": None}


def case(padding=3):
    """A padded batch whose log-probs come from logits [B, T + padding, V]."""
    batch = rollouts(seed=3)
    draw = torch.Generator().manual_seed(1)
    rows, width = batch.data["token_mask"].shape
    ids = torch.randint(0, VOCAB, (rows, width), generator=draw)
    logits = torch.randn(rows, width + padding, VOCAB, generator=draw)
    own = logits.log_softmax(-1)[:, : width - 1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    prev = torch.zeros(rows, width)
    prev[:, 1:] = own + 0.2 * torch.randn(own.shape, generator=draw)
    near = {key: prev + 0.2 * torch.randn(prev.shape, generator=draw) for key in ("generation_logprobs", "ref")}
    data = {
        **batch.data,
        "input_ids": ids,
        "prev_logprobs": prev,
        "generation_logprobs": near["generation_logprobs"],
        "reference_policy_logprobs": near["ref"],
    }
    return logits, data, batch.seqs, batch.toks


@pytest.mark.parametrize("name", list(VARIANTS))
def test_padded_equals_logprobs_handed_over(name):
    logits, data, seqs, toks = case()
    width = data["input_ids"].shape[1]
    plain = build_loss(VARIANTS[name])
    leaf = logits.clone().requires_grad_()
    handed = leaf.log_softmax(-1)[:, : width - 1].gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
    expected, others = plain(handed, data, seqs, toks)
    expected.backward()
    mine = logits.clone().requires_grad_()
    value, metrics = LogitLoss(build_loss({**VARIANTS[name], "logprob_backend": "geomask"}))(
        mine, data=data, global_valid_seqs=seqs, global_valid_toks=toks, **ALONE
    )
    value.backward()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(mine.grad, leaf.grad, rtol=1e-4, atol=1e-7)
    assert leaf.grad.abs().max() > 1e-4
    assert metrics == pytest.approx(others, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo"])
def test_packed_equals_padded(name):
    logits, data, seqs, toks = case(padding=0)
    loss = LogitLoss(build_loss({**VARIANTS[name], "logprob_backend": "geomask"}))
    rows, width = data["input_ids"].shape
    padded = logits.clone().requires_grad_()
    expected, others = loss(padded, data, seqs, toks, **ALONE)
    expected.backward()
    # Each row's first columns, some padding behind them; what lies beyond does not train.
    lengths = torch.tensor([width] * (rows - 1) + [width - 2])
    data["token_mask"][-1, width - 2 :] = 0.0
    stride = width + 2
    row = torch.arange(rows).repeat_interleave(stride)
    column = torch.arange(stride).repeat(rows).clamp(max=width - 1)
    packed = logits[row, column].unsqueeze(0).requires_grad_()
    value, metrics = loss.packed(
        F.pad(packed, (0, 0, 0, 5), value=torch.nan),  # behind the last sequence
        data,
        seqs,
        toks,
        cu_seqlens_q=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        cu_seqlens_q_padded=torch.arange(rows + 1) * stride,
    )
    value.backward()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)
    folded = torch.zeros_like(logits).index_put((row, column), packed.grad[0], accumulate=True)
    torch.testing.assert_close(folded, padded.grad, rtol=1e-4, atol=1e-7)
    assert metrics == pytest.approx(others, rel=1e-4, abs=1e-6)


def test_a_loss_keeps_its_protocol_when_it_is_pickled():
    plain = build_loss({"name": "gspo", "logprob_backend": "geomask"})
    loss = pickle.loads(pickle.dumps(LogitLoss(plain)))
    assert loss.input_type.value == "logit"
    assert loss.loss_type.value == plain.loss_type.value
    assert loss.metric_normalizations.keys() == plain.metric_normalizations.keys()
    assert loss.reference_policy_kl_penalty == plain.reference_policy_kl_penalty
    assert loss.config == plain.config
    assert not loss.use_fused_linear_logprobs


def test_logits_and_targets_that_do_not_fit_are_named():
    logits, data, seqs, toks = case()
    loss = LogitLoss(build_loss({"logprob_backend": "geomask"}))
    with pytest.raises(ShapeError, match=r"logits must be \[8, 14 or more, V/TP\]"):
        loss(logits[:, :10], data, seqs, toks, **ALONE)
    with pytest.raises(ShapeError, match="logits must hold 112 rows"):
        loss.packed(logits[:1], data, seqs, toks, cu_seqlens_q=torch.arange(9) * 14, cu_seqlens_q_padded=None)
    data["input_ids"][0, 4] = VOCAB
    with pytest.raises(DataError, match=f"the first is {VOCAB}"):
        loss(logits, data, seqs, toks, **ALONE)


def megatron_state(**groups):
    """Megatron's module of process groups; without groups, one that is imported and not initialized."""
    state = types.ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: bool(groups)

    def get_group(name, check_initialized):
        if check_initialized:
            assert name in groups, "group is not initialized"
        return groups.get(name)

    state.get_tensor_model_parallel_group = lambda check_initialized=True: get_group("tp", check_initialized)
    state.get_context_parallel_group = lambda check_initialized=True: get_group("cp", check_initialized)
    return state


@pytest.mark.parametrize("state", [None, megatron_state()], ids=["no Megatron", "Megatron of no model"])
def test_one_process_needs_no_groups(monkeypatch, state):
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state", raising=False)
    if state is not None:
        monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    logits, data, seqs, toks = case()
    loss = LogitLoss(build_loss({"logprob_backend": "geomask"}))
    (expected, metrics), *others = (
        loss(logits, data, seqs, toks, **groups) for groups in (ALONE, {}, {"vocab_parallel_group": None})
    )
    for value, own_metrics in others:
        assert (value.item(), own_metrics) == (expected.item(), metrics)


def _megatron_workers(rank, world, tp, cp):
    """As NeMo-RL's Megatron workers call a loss that takes logits: without their groups."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    groups = {name: mesh.get_group(name) for name in ("cp", "tp")}
    # In a run without context parallelism, Megatron has no such group unless it is asked for.
    sys.modules["megatron.core.parallel_state"] = megatron_state(**(groups if cp > 1 else {"tp": groups["tp"]}))
    logits, data, seqs, toks = case(padding=2)
    logits = F.pad(logits, (0, 1), value=-30.0)
    # Head and tail chunks, as Megatron shares out its rows.
    chunks = torch.arange(logits.shape[1]).chunk(2 * cp)
    positions = torch.cat([chunks[rank // tp], chunks[2 * cp - 1 - rank // tp]])
    columns = slice(rank % tp * 24 // tp, (rank % tp + 1) * 24 // tp)
    results = {}
    for name in ("ppo", "gspo"):
        leaf = logits[:, positions, columns].clone().requires_grad_()
        loss = LogitLoss(build_loss({**VARIANTS[name], "logprob_backend": "geomask"}))
        value, metrics = loss(leaf, data, seqs, toks)
        value.backward()
        results[name] = value.item(), metrics, leaf.grad.numpy() / cp  # NeMo-RL divides the loss by this size
    return positions.numpy(), columns, results


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "cp"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_groups_that_are_not_passed_are_megatrons(tp, cp):
    _assert_equal_to_one_process(run_ranks(tp * cp, _megatron_workers, tp, cp))


def _dtensors(rank, world, tp, cp):
    """As NeMo-RL's DTensor workers call it: logits over mesh (cp, tp), input_ids sharded, all else whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    logits, data, seqs, toks = case(padding=2)
    width = logits.shape[1]
    data = {key: F.pad(value, (0, 2)) if value.dim() == 2 else value for key, value in data.items()}
    # Head and tail chunks, as torch's context parallelism deals them out.
    order = torch.arange(width).chunk(2 * cp)
    index = [torch.cat([order[r], order[2 * cp - 1 - r]]) for r in range(cp)]
    mine, columns = index[rank // tp], slice(rank % tp * 24 // tp, (rank % tp + 1) * 24 // tp)
    # An even vocabulary, as DTensor shards it here; the last column is padding.
    logits = F.pad(logits, (0, 1), value=-30.0)
    found = {}
    for name in ("ppo", "gspo"):
        leaf = logits[:, mine, columns].clone().requires_grad_()
        batch = dict(data)
        if cp > 1:
            shard = DTensor.from_local(data["input_ids"][:, mine], mesh["cp"], [Shard(1)])
            batch |= {"input_ids": shard, "seq_index": torch.cat(index)}
            sharded = DTensor.from_local(leaf, mesh["cp", "tp"], [Shard(1), Shard(-1)])
        else:
            sharded = DTensor.from_local(leaf, mesh["tp"], [Shard(-1)])
        loss = LogitLoss(build_loss({**VARIANTS[name], "logprob_backend": "geomask"}))
        value, metrics = loss(sharded, batch, seqs, toks)
        value.backward()
        found[name] = value.item(), metrics, leaf.grad.numpy()
    return mine.numpy(), columns, found


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.long)])
def test_dtensors_equal_one_process(tp, cp):
    _assert_equal_to_one_process(run_ranks(tp * cp, _dtensors, tp, cp))


def _assert_equal_to_one_process(results):
    logits, data, seqs, toks = case(padding=2)
    logits = F.pad(logits, (0, 1), value=-30.0)
    for name in ("ppo", "gspo"):
        leaf = logits.clone().requires_grad_()
        loss = LogitLoss(build_loss({**VARIANTS[name], "logprob_backend": "geomask"}))
        expected, expected_metrics = loss(leaf, data, seqs, toks, **ALONE)
        expected.backward()
        for positions, columns, rank_results in results:
            value, metrics, grad = rank_results[name]
            assert value == pytest.approx(expected.item(), rel=1e-5)
            assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)
            np.testing.assert_allclose(grad, leaf.grad[:, positions, columns], rtol=1e-4, atol=1e-7)
