"""Hidden states in the place of logits: real megatron-core models over gloo, run as NeMo-RL's workers run them."""

import types
import warnings

import numpy as np
import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.parallel.local_processes import run_ranks
from tests.helpers import megatron_models as models

pytest.importorskip("megatron.core", reason="needs megatron-core, the extra 'megatron'")

pytestmark = pytest.mark.slow

TEMPERATURE = 0.9
CAUSAL = torch.ones(models.WIDTH, models.WIDTH, dtype=torch.bool).triu(1)[None, None]
# (experts, tensor-parallel, context-parallel, sequence-parallel)
LAYOUTS = {
    1: [(4, 1, 1, False)],
    2: [(None, 2, 1, False), (None, 2, 1, True), (4, 1, 2, False)],
    4: [(None, 2, 2, True)],
}


class _Loss:
    def __init__(self, loss_fn):
        self.loss_fn = loss_fn


class _Logprobs:
    def __init__(self, packed, top_k=None):
        self.cfg = {"sequence_packing": {"enabled": packed}}
        self.sampling_params = types.SimpleNamespace(top_k=top_k, top_p=1.0)

    def __call__(self, data_dict, input_ids, cu_seqlens_padded):
        raise AssertionError("logits were asked for")


def _train():
    """NeMo-RL's module, as far as it matters: what runs the model and divides by the temperature."""
    train = types.SimpleNamespace(LogprobsPostProcessor=type("LogprobsPostProcessor", (_Logprobs,), {}))

    def model_forward(model, ids, packed_seq_params=None, attention_mask=None):
        return model(ids, None, attention_mask, packed_seq_params=packed_seq_params)

    def call(self, data_dict, input_ids, cu_seqlens_padded):
        return lambda output: "of logits"

    def forward_with_post_processing_fn(ids, model, post_processing_fn, params=None, mask=None, draft_model=None):
        return train.model_forward(model, ids, params, mask).div_(TEMPERATURE), post_processing_fn

    train.LogprobsPostProcessor.__call__ = call
    train.model_forward, train.forward_with_post_processing_fn = model_forward, forward_with_post_processing_fn
    return train


def _prepared():
    from nemo_geomask.hosts.nemo_rl import hidden_megatron, patch

    train = _train()
    call = hidden_megatron.wrap_logprobs_post_processor
    patch.apply_all(
        [
            patch.attribute(train, "forward_with_post_processing_fn", hidden_megatron.wrap_forward),
            patch.attribute(train, "model_forward", hidden_megatron.wrap_model_forward),
            patch.attribute(train.LogprobsPostProcessor, "__call__", call),
        ]
    )
    return train


def _trained(train, backend, layout):
    """Loss, metrics and gradients of a packed row under a back end."""
    from megatron.core import parallel_state

    from nemo_geomask.hosts.megatron import packed_segments
    from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss

    data, seqs, toks = models.rows()
    params = models.packing(data)
    model = models.model(*layout)
    ids = models.packed_ids(data, params)[:, packed_segments(params).token_index]
    loss_fn = LogitLoss(build_loss({**models.CONFIG, "logprob_backend": backend}))
    output, post = train.forward_with_post_processing_fn(ids, model, _Loss(loss_fn), params)
    size = output.shape[-1]
    loss, metrics = post.loss_fn.packed(
        output,
        data,
        seqs,
        toks,
        cu_seqlens_q=params.cu_seqlens_q,
        cu_seqlens_q_padded=params.cu_seqlens_q_padded,
        vocab_parallel_group=parallel_state.get_tensor_model_parallel_group(),
        context_parallel_group=parallel_state.get_context_parallel_group(),
    )
    loss.backward()
    return size, loss.item(), dict(metrics), models.gradients(model)


def _scored(train, layout):
    """Log-probs of a packed row as a forward pass for ``prev_logprobs`` has them, and by torch from whole logits."""
    from nemo_geomask.hosts.megatron import packed_segments

    data, *_ = models.rows()
    params = models.packing(data)
    model = models.model(*layout)
    whole = models.packed_ids(data, params)
    ids = whole[:, packed_segments(params).token_index]
    with torch.no_grad():
        output, post = train.forward_with_post_processing_fn(ids, model, train.LogprobsPostProcessor(True), params)
        found = post(data, whole, params.cu_seqlens_q_padded)(output)[1]["logprobs"]
    return found.numpy()


def _megatron():
    """What shares its ranks out, in this process, on a CPU."""
    warnings.simplefilter("ignore")
    from tests.helpers import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.core import parallel_state

    return parallel_state


def _both(rank, world):
    parallel_state = _megatron()
    train = _prepared()
    found = []
    for layout in LAYOUTS[world]:
        parallel_state.initialize_model_parallel(layout[1], context_parallel_size=layout[2])
        results = [_trained(train, backend, layout) for backend in ("geomask", "geomask_linear")]
        found.append((*results, _scored(train, layout)))
        parallel_state.destroy_model_parallel()
    return found


def _padded(rank, world):
    """Padded rows on one rank: the same comparison, the rows' log-probs by torch, and what is refused."""
    _megatron().initialize_model_parallel(1)

    from nemo_geomask.errors import WorkerError
    from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss

    train = _prepared()
    data, seqs, toks = models.rows()
    groups = {"vocab_parallel_group": None, "context_parallel_group": None}

    def plain():
        model = models.model(None, packed=False)
        return model, list(model.named_parameters())

    found = _compared(train, plain)
    model, loss_fn = plain()[0], LogitLoss(build_loss({**models.CONFIG, "logprob_backend": "geomask_linear"}))
    with torch.no_grad():
        logits = model(data["input_ids"], None, CAUSAL)
        given = (data["input_ids"], model)
        output, post = train.forward_with_post_processing_fn(*given, train.LogprobsPostProcessor(False), mask=CAUSAL)
        scored = post(data, None, None)(output)[1]["logprobs"]
        assert train.LogprobsPostProcessor(False)(data, None, None)(logits) == "of logits"
        with pytest.raises(ConfigError, match="sampling with top_k: 5, top_p: 1.0; set logprob_backend: geomask"):
            train.LogprobsPostProcessor(False, top_k=5)(data, None, None)(output)
        with pytest.raises(WorkerError, match="hidden states of a worker that is prepared"):
            loss_fn(logits, data, seqs, toks, **groups)
        stray = {**data, "input_ids": data["input_ids"].clone()}
        stray["input_ids"][0, 5] = 77
        odd = post(stray, None, None)(output)[1]["logprobs"]
        assert odd[0, 5].isnan()
        assert int(odd.isnan().sum()) == 1
        layer, config = model.output_layer, model.config
        for where, name, value, message in (
            (layer, "bias", torch.nn.Parameter(torch.zeros(48)), "an output layer with a bias"),
            (layer, "gather_output", True, "gathers its output"),
            (layer, "output_dtype", torch.float32, "logits in torch.float32"),
            (layer, "forward", layer.forward, "other code has replaced"),
            (config, "defer_embedding_wgrad_compute", True, "defer_embedding_wgrad_compute"),
            (config, "mtp_num_layers", 1, "multi-token prediction"),
            (model, "output_layer", torch.nn.Linear(32, 48), "output layer of type Linear"),
        ):
            before = vars(where).get(name, getattr(where, name, None))
            setattr(where, name, value)
            with pytest.raises(ConfigError, match=message):
                train.forward_with_post_processing_fn(*given, _Loss(loss_fn), mask=CAUSAL)
            if name == "forward":
                del layer.forward
            else:
                setattr(where, name, before)
        with pytest.raises(ConfigError, match="a draft model"):
            train.forward_with_post_processing_fn(*given, _Loss(loss_fn), mask=CAUSAL, draft_model=model)
        train.forward_with_post_processing_fn(*given, _Loss(loss_fn), mask=CAUSAL)
    expected = (logits[:, :-1] / TEMPERATURE).log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
    np.testing.assert_allclose(scored[:, 1:], expected, rtol=1e-5, atol=1e-5)
    assert not scored[:, 0].any()
    return found, scored.numpy()


def _compared(train, prepared, finish=lambda model: None):
    """Loss, metrics and gradients of padded rows under both back ends, each with the model and the tensors, by name,
    that ``prepared()`` gives."""
    from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss

    data, seqs, toks = models.rows()
    found = []
    for backend in ("geomask", "geomask_linear"):
        model, named = prepared()
        loss_fn = LogitLoss(build_loss({**models.CONFIG, "logprob_backend": backend}))
        output, made = train.forward_with_post_processing_fn(data["input_ids"], model, _Loss(loss_fn), mask=CAUSAL)
        loss, metrics = made.loss_fn(output, data, seqs, toks, vocab_parallel_group=None, context_parallel_group=None)
        loss.backward()
        finish(model)
        grads = {name: getattr(value, "main_grad", value.grad).numpy().copy() for name, value in named}
        found.append((output.shape[-1], loss.item(), dict(metrics), grads))
    return found


def _tied_and_staged(rank, world):
    """A tied embedding; the last of two pipeline stages, and the first, which has no output layer."""
    _megatron().initialize_model_parallel(1)

    train = _prepared()

    def tied():
        model = models.model(None, packed=False, tied=True)
        assert model.output_layer.weight is None
        return model, list(model.named_parameters())

    data, *_ = models.rows()
    first = models.model(None, packed=False, post_process=False)
    given = (data["input_ids"], first, train.LogprobsPostProcessor(False))
    states = train.forward_with_post_processing_fn(*given, mask=CAUSAL)[0].detach() * TEMPERATURE
    torch.testing.assert_close(states, first(data["input_ids"], None, CAUSAL))

    def last():
        model = models.model(None, packed=False, pre_process=False)
        sent = states.clone().requires_grad_()
        model.set_input_tensor(sent)
        return model, [("sent", sent), *model.named_parameters()]

    return [_compared(train, stage) for stage in (tied, last)]


def _gathering(rank, world):
    """Megatron's own data parallelism with ``overlap_param_gather``: a rank has the others' parameters by a hook of the
    layers' calls, and garbage before."""
    _megatron().initialize_model_parallel(1)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    train = _prepared()
    # Buckets so small that the output layer has one of its own.
    how = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True, bucket_size=1000
    )

    def sharded():
        core = models.model(None, packed=False)
        model = DistributedDataParallel(core.config, how, core)
        for bucket in (bucket for group in model.bucket_groups for bucket in group.buckets):
            shares = bucket.param_data.chunk(world)
            for share in shares[:rank] + shares[rank + 1 :]:
                share.fill_(float("nan"))
        return model, list(core.named_parameters())

    return [_compared(train, sharded, lambda model: model.finish_grad_sync())]


def _check(logits, linear):
    (columns, loss, metrics, gradients), (size, mine, found, own) = logits, linear
    assert (columns, size) == (columns, 32)  # the second had hidden states
    assert columns != size
    assert mine == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert any(np.abs(grad).max() > 1e-4 for grad in gradients.values())
    for name, grad in gradients.items():
        np.testing.assert_allclose(own[name], grad, rtol=1e-3, atol=2e-6, err_msg=name)


@pytest.fixture(scope="module")
def padded():
    return run_ranks(1, _padded)[0]


def test_padded_rows_equal_those_of_logits(padded):
    _check(*padded[0])


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_packed_rows_equal_those_of_logits(world, padded):
    data, *_ = models.rows()
    lengths = models.packing(data).cu_seqlens_q.diff().tolist()
    for results in run_ranks(world, _both):
        for (experts, *_), (logits, linear, scored) in zip(LAYOUTS[world], results, strict=True):
            _check(logits, linear)
            if experts is None:
                for row, length in enumerate(lengths):
                    np.testing.assert_allclose(scored[row, :length], padded[1][row, :length], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("world", "work"), [(1, _tied_and_staged), (2, _gathering)])
def test_tied_weights_stages_and_gathered_parameters(world, work):
    for results in run_ranks(world, work):
        for found in results:
            _check(*found)
