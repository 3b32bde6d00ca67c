"""Hidden states in the place of logits in DTensor workers: FSDP and tensor-parallel plans over gloo."""

import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError, WorkerError
from nemo_geomask.hosts.nemo_rl import forward_logprobs, hidden_dtensor, host_patches, patch
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
from nemo_geomask.parallel.local_processes import run_ranks
from tests.helpers import megatron_models as models

pytestmark = pytest.mark.slow

TEMPERATURE = 0.9
SIZE, VOCAB = 32, models.PADDED_VOCAB
# (data-parallel, tensor-parallel, sequence-parallel, tied, the head is an FSDP group of its own)
LAYOUTS = {
    1: [(1, 1, False, False, False), (1, 1, False, True, False)],
    2: [
        (2, 1, False, True, False),
        (2, 1, False, False, True),
        (1, 2, False, False, False),
        (1, 2, True, False, False),
    ],
    4: [(2, 2, False, False, False)],
}


class Output(NamedTuple):
    logits: Any


class Model(torch.nn.Module):
    """What of a transformers model counts here: the head is the last that is called."""

    def __init__(self, tied=False, after=None):
        super().__init__()
        torch.manual_seed(7)
        self.embed = torch.nn.Embedding(VOCAB, SIZE)
        self.up, self.down = torch.nn.Linear(SIZE, 48, bias=False), torch.nn.Linear(48, SIZE, bias=False)
        self.norm = torch.nn.LayerNorm(SIZE)
        self.lm_head = torch.nn.Linear(SIZE, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        with torch.no_grad():
            self.lm_head.weight.mul_(0.02 if tied else 0.1)  # nearly uniform, as the rows' prev log-probs are
        self.after = after

    def forward(self, ids):
        states = self.embed(ids)
        states = self.norm(states + self.down(torch.relu(self.up(states))))
        logits = self.lm_head(states)
        return Output(logits if self.after is None else self.after(logits))


def _model(data, tensor, sequence_parallel, tied, grouped):
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    model = Model(tied)
    if tensor > 1:
        shared = Shard(1) if sequence_parallel else Replicate()
        parts = {"input_layouts": shared} if sequence_parallel else {}
        rows = RowwiseParallel(output_layouts=shared, use_local_output=not sequence_parallel)
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=shared, use_local_output=False),
            "up": ColwiseParallel(**parts),
            "down": rows,
            "lm_head": ColwiseParallel(**parts, output_layouts=Shard(-1), use_local_output=False),
        }
        if sequence_parallel:
            plan["norm"] = SequenceParallel()
        else:
            plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=shared)
        parallelize_module(model, mesh["tp"], plan)
    # As NeMo-RL: what the model puts out is cast.
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float64)
    for module in [model.lm_head] if grouped else []:
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False), mesh


def _worker(model, version="", module="nemo_rl.models.policy.workers.dtensor_policy_worker"):
    """As Ray makes them: a subclass of NeMo-RL's, of that name and of a module of its own."""
    base = type("DTensorPolicyWorker", (), {"__module__": f"{module}{version}"})
    actor = type("Actor", (base,), {})()
    actor.model = model
    return actor


def _prepare(model, backend="geomask_linear", **which):
    host_patches.prepare_model(_worker(model, **which), backends={backend})


def _whole(value):
    return value.full_tensor().numpy() if isinstance(value, DTensor) else value.numpy()


def _trained(backend, layout):
    """Loss, metrics and gradients of padded rows, and the last dimension of what the model puts out."""
    model, mesh = _model(*layout)
    data, seqs, toks = models.rows()
    if layout[2]:  # a length that the ranks divide
        data = {
            key: torch.nn.functional.pad(value, (0, 1)) if value.dim() > 1 else value for key, value in data.items()
        }
    rows = slice(mesh["dp"].get_local_rank(), None, layout[0])
    data = {key: value[rows] for key, value in data.items()}
    _prepare(model, backend)
    model.train()
    output = model(data["input_ids"]).logits
    assert output.dtype == torch.float64
    width = output.shape[-1]
    output = output.div_(TEMPERATURE)
    loss_fn = LogitLoss(build_loss({**models.CONFIG, "logprob_backend": backend}))
    groups = {} if isinstance(output, DTensor) else {"vocab_parallel_group": None, "context_parallel_group": None}
    loss, metrics = loss_fn(output, data, seqs, toks, **groups)
    loss.backward()
    gradients = {name: _whole(value.grad) for name, value in model.named_parameters()}
    return width, loss.item(), dict(metrics), gradients


def _both(rank, world):
    found = []
    for layout in LAYOUTS[world]:
        found.append([_trained(backend, layout) for backend in ("geomask", "geomask_linear")])
    return found


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_losses_equal_those_of_logits(world):
    for results in run_ranks(world, _both):
        for layout, (logits, linear) in zip(LAYOUTS[world], results, strict=True):
            (columns, loss, metrics, gradients), (size, mine, found, own) = logits, linear
            assert (columns, size) == (VOCAB, SIZE * layout[1])  # the second had hidden states
            assert mine == pytest.approx(loss, rel=1e-5, abs=1e-7)
            assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)
            assert all(np.abs(gradient).max() > 1e-5 for gradient in gradients.values())
            for name, gradient in gradients.items():
                np.testing.assert_allclose(own[name], gradient, rtol=1e-3, atol=2e-6, err_msg=f"{layout} {name}")


def _packed(backend):
    data, seqs, toks = models.rows()
    lengths = [int(row.nonzero().max()) + 1 if row.any() else 1 for row in data["token_mask"]]
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    ids = torch.cat([row[:length] for row, length in zip(data["input_ids"], lengths, strict=True)])
    model = Model()
    _prepare(model, backend)
    # Filled up to a minimal length, as NeMo-RL does.
    output = model(torch.nn.functional.pad(ids, (0, 5)).unsqueeze(0)).logits
    loss_fn = LogitLoss(build_loss({**models.CONFIG, "logprob_backend": backend}))
    loss, metrics = loss_fn.packed(output, data, seqs, toks, cu_seqlens_q=offsets, cu_seqlens_q_padded=None)
    loss.backward()
    return loss.item(), dict(metrics), [value.grad for value in model.parameters()]


def test_packed_rows_equal_those_of_logits():
    (loss, metrics, gradients), (mine, found, own) = (_packed(backend) for backend in ("geomask", "geomask_linear"))
    assert mine == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(own, gradients, rtol=1e-3, atol=2e-6)


class _Scores:
    """DTensor v2's post-processor of a forward pass, as far as it matters."""

    cp_size = 1

    def __init__(self, top_k=None):
        self.sampling_params = types.SimpleNamespace(top_k=top_k, top_p=1.0)

    def _compute_local_logprobs(self, logits, input_ids):
        assert logits.shape[-1] == VOCAB
        return "NeMo-RL's own"


def _of_v2():
    """NeMo-RL's module of these workers, as far as it matters, prepared."""
    train = types.ModuleType("nemo_rl.models.automodel.train")
    train.LogprobsPostProcessor = type("LogprobsPostProcessor", (_Scores,), {})
    train.get_logprobs_from_vocab_parallel_logits = lambda logits, ids, chunk_size=None: "NeMo-RL's own"
    train.forward_with_post_processing_fn = lambda model, post_processing_fn, ids: model(ids).logits.div_(TEMPERATURE)
    wrap_scores = forward_logprobs.wrap_full_vocabulary_logprobs
    patch.apply_all(
        [
            patch.attribute(train, "forward_with_post_processing_fn", hidden_dtensor.wrap_forward),
            patch.attribute(train, "get_logprobs_from_vocab_parallel_logits", hidden_dtensor.wrap_shard_logprobs),
            patch.attribute(train.LogprobsPostProcessor, "_compute_local_logprobs", wrap_scores),
        ]
    )
    return train


def _expected(ids):
    with torch.no_grad():
        logp = (Model()(ids).logits / TEMPERATURE).log_softmax(-1)
    return logp[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


def _scored_on_shards(rank, world):
    model, _ = _model(1, world, False, False, False)
    _prepare(model, version="_v2")
    train, ids = _of_v2(), models.rows()[0]["input_ids"]
    with torch.no_grad():
        output = train.forward_with_post_processing_fn(model.eval(), train.LogprobsPostProcessor(), ids)
        found = train.get_logprobs_from_vocab_parallel_logits(output, ids, chunk_size=7)
        assert output.to_local().shape[-1] == SIZE
        # Other post-processors get logits, and what they make of them is NeMo-RL's.
        output = train.forward_with_post_processing_fn(model, types.SimpleNamespace(), ids)
        assert train.get_logprobs_from_vocab_parallel_logits(output, ids) == "NeMo-RL's own"
    return found.numpy()


def test_forward_passes_on_shards():
    expected = _expected(models.rows()[0]["input_ids"])
    for found in run_ranks(2, _scored_on_shards):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["geomask", "geomask_linear"])
def test_forward_passes_of_whole_vocabularies(backend):
    model, ids = Model().eval(), models.rows()[0]["input_ids"]
    _prepare(model, backend, version="_v2")
    train = _of_v2()
    try:
        with torch.no_grad():
            for post in (train.LogprobsPostProcessor(), train.LogprobsPostProcessor(top_k=5)):
                output = train.forward_with_post_processing_fn(model, post, ids)
                found = post._compute_local_logprobs(output, ids)
                if post.sampling_params.top_k is None:
                    torch.testing.assert_close(found, _expected(ids), rtol=1e-5, atol=1e-5)
                    assert output.shape[-1] == (SIZE if backend == "geomask_linear" else VOCAB)
                else:
                    assert found == "NeMo-RL's own"
    finally:
        patch.undo_all()


def test_only_what_trains_puts_out_hidden_states():
    model, ids = Model(), models.rows()[0]["input_ids"]
    with torch.no_grad():
        model.embed.weight[int(ids[0, -1])] = torch.nan  # the last token trains nothing
    for _ in range(2):  # the second time does nothing
        _prepare(model)
    output = model(ids).logits
    assert output.shape[-1] == SIZE
    assert output.isnan().any()
    groups = {"vocab_parallel_group": None, "context_parallel_group": None}
    data, seqs, toks = models.rows()
    with pytest.raises(WorkerError, match="the loss gspo takes logits.*set logprob_backend: geomask there"):
        LogitLoss(build_loss({**models.CONFIG, "logprob_backend": "geomask"}))(output, data, seqs, toks, **groups)
    with torch.no_grad():
        assert model(ids).logits.shape[-1] == VOCAB
    assert model.eval()(ids).logits.shape[-1] == VOCAB
    patch.undo_all()
    assert "forward" not in vars(model)
    assert not model._forward_hooks
    assert model.train()(ids).logits.shape[-1] == VOCAB


def _as_shards(rank, world):
    """What of DTensor v1's whole logits becomes the one shard of a vocabulary."""
    mesh, ids = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))["tp"], models.rows()[0]["input_ids"]

    def actor(version="", **attributes):
        found = _worker(Model(), version)
        found.model.forward = _mutable(found.model.forward)
        vars(found).update({"tp_mesh": mesh, "optimizer": object(), **attributes})
        return found

    for backend in ("geomask", "geomask_linear"):
        one = actor()
        for _ in range(2):
            host_patches.prepare_model(one, backends={backend})
        with torch.no_grad():
            logits = one.model(ids).logits
            assert isinstance(logits, DTensor)
            assert logits.device_mesh.get_group("tp").size() == 1
            torch.testing.assert_close(logits.to_local(), Model()(ids).logits)
        assert not isinstance(one.model(ids).logits, DTensor)  # what trains
    others = [actor("_v2"), actor(optimizer=None), actor(_is_reward_model=True), actor(tp_mesh=None)]
    for other in others:
        host_patches.prepare_model(other, backends={"geomask"})
    theirs = actor()
    host_patches.prepare_model(theirs, backends={"nemo_rl", "mcore"})
    with torch.no_grad():
        assert not any(isinstance(other.model(ids).logits, DTensor) for other in (*others, theirs))


def _mutable(forward):
    """transformers' outputs take other logits."""
    return lambda ids: types.SimpleNamespace(logits=forward(ids).logits)


def test_whole_logits_are_a_shard_in_forward_passes_of_v1():
    run_ranks(1, _as_shards)


def test_who_else_has_a_model():
    """Megatron's workers, those of somebody else, and one whose model is not there yet."""
    for module in ("nemo_rl.models.policy.workers.megatron_policy_worker", "somebody.dtensor_policy_worker"):
        model = Model()
        _prepare(model, module=module)
        assert "forward" not in vars(model)
    for model in ([Model()], None):
        _prepare(model)


class _Adapted(torch.nn.Linear):
    def forward(self, states):
        return super().forward(states) * 2


def _headless(model):
    del model.lm_head
    model.lm_head = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: setattr(model, "after", lambda logits: 30 * torch.tanh(logits / 30)),
            "changes its logits after",
        ),
        (lambda model: setattr(model, "after", lambda logits: logits[:, -1:]), "changes its logits after"),
        (lambda model: setattr(model, "after", lambda logits: None), "whose output has no logits"),
        (lambda model: setattr(model, "lm_head", torch.nn.Linear(SIZE, VOCAB)), "a head with a bias"),
        (lambda model: setattr(model, "lm_head", _Adapted(SIZE, VOCAB, bias=False)), "a head of type _Adapted"),
        (lambda model: setattr(model.lm_head, "forward", model.lm_head.forward), "other code has replaced"),
        (_headless, "a Model, whose head is not known"),
    ],
)
def test_models_that_it_does_not_go_with(change, message):
    model = Model()
    change(model)
    _prepare(model)
    with pytest.raises(ConfigError, match=f"{message}.*set logprob_backend: geomask"):
        model(models.rows()[0]["input_ids"])
    # Nothing stays behind.
    assert model.lm_head is None or message == "other code has replaced" or "forward" not in vars(model.lm_head)


def test_a_cast_of_the_logits_is_no_change_unless_it_rounds():
    ids = models.rows()[0]["input_ids"]
    model = Model(after=lambda logits: logits.double())
    _prepare(model)
    assert model(ids).logits.dtype == torch.float64
    model = Model(after=lambda logits: logits.bfloat16())
    _prepare(model)
    with pytest.raises(ConfigError, match="changes its logits"):
        model(ids)


def _refused(rank, world):
    """What only several ranks can have."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    model = Model()
    parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    _prepare(model)
    ids = models.rows()[0]["input_ids"]
    with pytest.raises(ConfigError, match="does not leave the logits sharded"):
        model(ids)
    context = init_device_mesh("cpu", (world, 1), mesh_dim_names=("cp", "tp"))
    states = DTensor.from_local(torch.zeros(2, 4, SIZE), context, [Shard(1), Shard(-1)])
    loss_fn = LogitLoss(build_loss({"logprob_backend": "geomask_linear"}))
    with pytest.raises(ConfigError, match="context parallelism of DTensor workers; set logprob_backend: geomask"):
        loss_fn(states, {}, 1, 1)
    train = _of_v2()
    post = types.SimpleNamespace(loss_fn=loss_fn, cp_size=2)
    with pytest.raises(ConfigError, match="context parallelism of DTensor workers"):
        train.forward_with_post_processing_fn(model, post, ids)
    dist.barrier()


def test_layouts_that_it_does_not_go_with():
    run_ranks(2, _refused)


@pytest.fixture(autouse=True)
def _undone():
    yield
    patch.undo_all()
