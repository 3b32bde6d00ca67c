"""A prepared worker process: which calls are replaced for which losses; against a NeMo-RL of a few lines."""

from __future__ import annotations

import importlib
import pickle
import sys
import types

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import HostAPIError, WorkerError
from nemo_geomask.hosts.nemo_rl import prepare_worker, uninstall
from nemo_geomask.hosts.nemo_rl.hidden_states import OutputLayer
from nemo_geomask.hosts.nemo_rl.host_patches import needs_preparation
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
from nemo_geomask.hosts.nemo_rl.patch import in_force

WRAPPERS = ("SequencePackingLossWrapper", "SequencePackingFusionLossWrapper")


def packing_wrappers():
    return importlib.import_module("nemo_rl.algorithms.loss.wrapper")


def packing_calls():
    return {name: getattr(packing_wrappers(), name).__call__ for name in WRAPPERS}


def test_preparing_is_explicit_idempotent_and_undone(host):
    host()
    before = packing_calls()
    # A loss that arrives changes nothing.
    for loss in (build_loss({}), LogitLoss(build_loss({"logprob_backend": "geomask"}))):
        pickle.loads(pickle.dumps(loss))
    for backend in ("nemo_rl", "mcore", "geomask", "geomask_linear"):
        assert prepare_worker(backends=(backend,), has_packed_rows=False)
    assert packing_calls() == before
    for _ in range(2):  # for rows that are packed later in the same process
        assert prepare_worker()
        assert {name: call.__wrapped__ for name, call in packing_calls().items()} == before
    uninstall()
    assert packing_calls() == before


@pytest.mark.parametrize(
    ("settings", "has_packed_rows", "expected"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"metrics": "nemo_rl"}, True, False),
        ({"metrics": "nemo_rl", "logprob_backend": "mcore"}, True, True),
        ({"logprob_backend": "mcore"}, False, False),
        ({"logprob_backend": "geomask"}, False, True),
        ({"metrics": "nemo_rl", "logprob_backend": "geomask_linear"}, False, True),
    ],
)
def test_which_losses_need_a_prepared_worker(settings, has_packed_rows, expected):
    config = build_loss(settings).config
    assert needs_preparation(config, has_packed_rows=has_packed_rows) is expected


def test_other_losses_are_not_affected(host):
    host()
    prepare_worker()
    for name in WRAPPERS:
        wrapper = getattr(packing_wrappers(), name)(types.SimpleNamespace(), None, None)
        assert wrapper("logits", "data", 1, 2) == "NeMo-RL's own"


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_loss_that_takes_logits_gets_the_packed_row_with_its_groups(host, name):
    host()
    prepare_worker()
    calls = []

    class SpyingLoss(LogitLoss):
        def packed(self, *args, **kwargs):
            calls.append((args, kwargs))
            return "loss", "metrics"

    wrapper = getattr(packing_wrappers(), name)(SpyingLoss(build_loss({"logprob_backend": "geomask"})), None, "offsets")
    wrapper.cu_seqlens_q, wrapper.cu_seqlens_q_padded = "offsets", "padded offsets"
    wrapper.vocab_parallel_group, wrapper.context_parallel_group = "tp", "cp"
    arguments = {"data": "rows", "global_valid_seqs": 4, "global_valid_toks": 50}
    assert wrapper("logits", **arguments) == ("loss", "metrics")
    assert calls == [
        (
            ("logits", "rows", 4, 50),
            {
                "cu_seqlens_q": "offsets",
                "cu_seqlens_q_padded": "padded offsets",
                "vocab_parallel_group": "tp",
                "context_parallel_group": "cp",
            },
        )
    ]


def test_other_losses_get_no_hidden_states_in_packed_rows(host):
    host()
    prepare_worker()
    logits = torch.zeros(1, 4, 8)
    OutputLayer(torch.zeros(16, 8), sequence_parallel=False, ranks=1).mark(logits)
    for name in WRAPPERS:
        for loss in (types.SimpleNamespace(), build_loss({})):
            wrapper = getattr(packing_wrappers(), name)(loss, None, None)
            with pytest.raises(WorkerError, match=f"the loss {type(loss).__name__} takes logits"):
                wrapper(logits, "data", 1, 2)


def make_actor(namespace):
    """A worker whose method came by value, as Ray sends a decorated one: its globals are a copy, of no module."""
    namespace |= {"__builtins__": __builtins__, "__name__": "nemo_rl.models.policy.workers.megatron_policy_worker"}
    exec("def train(self, rows): return forward_with_post_processing_fn(iter(rows), str, 'post-processor')", namespace)
    method = namespace["train"]
    return type("Actor", (), {"train": lambda self, rows: method(self, rows)})()


def test_methods_that_came_by_value_are_prepared_too(host):
    host()
    train = importlib.import_module("nemo_rl.models.megatron.train")
    original = train.forward_with_post_processing_fn
    namespace = {"forward_with_post_processing_fn": original}
    actor = make_actor(namespace)
    prepare_worker(backends=("geomask_linear",), actor=actor)
    replacement = train.forward_with_post_processing_fn
    assert replacement.__wrapped__ is original
    assert namespace["forward_with_post_processing_fn"] is replacement
    uninstall()
    assert namespace["forward_with_post_processing_fn"] is train.forward_with_post_processing_fn is original
    assert actor.train([3]) == ("3", "post-processor")


def test_a_model_forward_of_another_form_is_an_error_for_the_linear_back_end(host):
    host()
    importlib.import_module("nemo_rl.models.megatron.train").model_forward = lambda batch: batch
    with pytest.raises(HostAPIError, match=r"model_forward takes \(batch\).*Set loss_fn.logprob_backend: geomask,"):
        prepare_worker(backends=("geomask_linear",))


def test_forward_passes_take_our_kernels_where_a_loss_does(host):
    host()
    module = importlib.import_module("nemo_rl.distributed.model_utils")
    names = {"DistributedLogprob": (), "ChunkedDistributedLogprob": (4,)}
    before = {name: getattr(module, name) for name in names}
    # Where curr is Megatron's or transformer-engine's, prev is not ours.
    for backend in ("nemo_rl", "mcore", "te"):
        prepare_worker(backends=(backend,))
        assert {name: getattr(module, name) for name in names} == before
    for _ in range(2):
        prepare_worker()
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    # The second row's second target is in no vocabulary: 0, as NeMo-RL has it.
    targets = torch.tensor([[0, 6, 3], [2, 9, -1]])
    expected = logits.float().log_softmax(-1).gather(-1, targets.clamp(0, 6).unsqueeze(-1)).squeeze(-1)
    expected[1, 1:] = 0.0
    for name, chunk in names.items():
        kind = getattr(module, name)
        assert issubclass(kind, before[name])
        torch.testing.assert_close(kind.apply(logits, targets, 0, 7, *chunk, None, True), expected)
        assert kind.apply(logits, targets, 0, 7, *chunk, None, False).startswith("NeMo-RL's own")
        assert kind.apply(logits, targets, 0, 7, *chunk, None).startswith("NeMo-RL's own")
    uninstall()
    assert {name: getattr(module, name) for name in names} == before
    shards = "vocab_parallel_logits, target, vocab_start_index, vocab_end_index"
    for parameters in ("logits", f"{shards}, chunk_size, inference_only"):
        module.ChunkedDistributedLogprob.forward = eval(f"lambda ctx, {parameters}: None")
        with pytest.raises(
            HostAPIError, match=r"ChunkedDistributedLogprob\.forward.*Set loss_fn.logprob_backend: nemo_rl"
        ):
            prepare_worker()
        assert {name: getattr(module, name) for name in names} == before
        assert not in_force(packing_wrappers().SequencePackingLossWrapper, "__call__")


def test_a_forward_pass_with_an_unknown_argument_stays_nemo_rls(host):
    host()
    module = importlib.import_module("nemo_rl.distributed.model_utils")
    shards = "vocab_parallel_logits, target, vocab_start_index, vocab_end_index"
    forward = f"lambda ctx, {shards}, group, inference_only=False, scale=None: 'NeMo-RL with ' + str(scale)"
    module.DistributedLogprob.forward = staticmethod(eval(forward))
    prepare_worker()
    logits, targets = torch.zeros(1, 2, 4), torch.tensor([[0, 3]])
    apply = module.DistributedLogprob.apply
    for further in ((), (None,)):
        torch.testing.assert_close(apply(logits, targets, 0, 4, None, True, *further), torch.full((1, 2), 0.25).log())
    assert apply(logits, targets, 0, 4, None, True, 2.0) == "NeMo-RL with 2.0"


def test_without_nemo_rl_there_is_nothing_to_prepare(host, monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_rl", None)
    assert not prepare_worker()


def test_unknown_code_is_an_error_where_a_loss_takes_logits(host, caplog):
    host(version="9.9")
    module = importlib.import_module("nemo_rl.distributed.model_utils")
    del module.DistributedLogprob, module.ChunkedDistributedLogprob
    with pytest.raises(HostAPIError, match=r"DistributedLogprob\.forward is not defined"):
        prepare_worker()
    assert prepare_worker(backends=("mcore",))
    uninstall()
    del packing_wrappers().SequencePackingFusionLossWrapper.__call__
    wrapper = packing_wrappers().SequencePackingLossWrapper
    before = wrapper.__call__
    with pytest.raises(HostAPIError, match=r"9\.9 .*FusionLossWrapper\.__call__ is not defined\. Set .*: nemo_rl"):
        prepare_worker()
    assert wrapper.__call__ is before
    assert not prepare_worker(backends=("nemo_rl",))
    assert wrapper.__call__ is before
    assert "each packed sequence is a call of the loss" in caplog.text
