"""A worker's process, prepared: which calls are changed for which losses; against a NeMo-RL of a few lines."""

from __future__ import annotations

import importlib
import pickle
import sys
import types

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl import HostAPIError, prepare_worker, uninstall
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss


def loss_code():
    return [importlib.import_module(f"nemo_rl.algorithms.loss.{name}") for name in ("utils", "wrapper")]


def test_preparing_is_explicit_idempotent_and_undone(host):
    host()
    utils, wrapper = loss_code()
    before = utils.prepare_loss_input, wrapper.SequencePackingLossWrapper.__call__
    # A loss that arrives changes nothing.
    for loss in (build_loss({}), LogitLoss(build_loss({"logprob_backend": "geomask"}))):
        pickle.loads(pickle.dumps(loss))
    assert (utils.prepare_loss_input, wrapper.SequencePackingLossWrapper.__call__) == before
    for _ in range(2):
        assert prepare_worker()
        assert utils.prepare_loss_input.__wrapped__ is before[0]
        assert wrapper.SequencePackingLossWrapper.__call__.__wrapped__ is before[1]
    uninstall()
    assert (utils.prepare_loss_input, wrapper.SequencePackingLossWrapper.__call__) == before


def test_other_losses_are_not_affected(host):
    host()
    prepare_worker()
    utils, wrapper = loss_code()
    theirs = types.SimpleNamespace()
    assert utils.prepare_loss_input("logits", "data", theirs) == ({"logits": "logits"}, "data")
    for kind in (wrapper.SequencePackingLossWrapper, wrapper.SequencePackingFusionLossWrapper):
        assert kind(theirs, None, None)("logits", "data", 1, 2) == "NeMo-RL's own"


def test_logits_come_with_their_groups(host):
    host()
    prepare_worker()
    utils, _ = loss_code()
    loss = LogitLoss(build_loss({"logprob_backend": "geomask"}))
    given, data = utils.prepare_loss_input("logits", "data", loss, "tp", context_parallel_group="cp")
    assert given == {"logits": "logits", "vocab_parallel_group": "tp", "context_parallel_group": "cp"}
    assert data == "data"
    sampling = types.SimpleNamespace(top_k=20, top_p=1.0)
    with pytest.raises(ConfigError, match="top_k: 20, top_p: 1.0; set logprob_backend: nemo_rl"):
        utils.prepare_loss_input("logits", "data", loss, sampling_params=sampling)


def test_methods_that_came_by_value_are_prepared_too(host):
    host()
    utils, _ = loss_code()
    # As Ray sends a worker's decorated method: code, and globals that are no module's but have its name.
    own = {"prepare_loss_input": utils.prepare_loss_input, "__builtins__": __builtins__, "__name__": "nemo_rl.worker"}
    users = {"prepare_loss_input": utils.prepare_loss_input}
    exec("def train(*args): return prepare_loss_input(*args)", own)
    train = own["train"]
    prepare_worker()
    loss = LogitLoss(build_loss({"logprob_backend": "geomask"}))
    assert set(train("logits", "data", loss)[0]) == {"logits", "vocab_parallel_group", "context_parallel_group"}
    assert users["prepare_loss_input"] is not utils.prepare_loss_input
    uninstall()
    assert set(train("logits", "data", types.SimpleNamespace())[0]) == {"logits"}
    assert own["prepare_loss_input"] is users["prepare_loss_input"] is utils.prepare_loss_input


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
    utils, wrapper = loss_code()
    del wrapper.SequencePackingFusionLossWrapper.__call__
    before = utils.prepare_loss_input
    with pytest.raises(HostAPIError, match=r"9\.9 .*FusionLossWrapper\.__call__ is not defined\. Set .*: nemo_rl"):
        prepare_worker()
    assert utils.prepare_loss_input is before
    assert not prepare_worker(backends=("nemo_rl",))
    assert utils.prepare_loss_input is before
    assert "each packed sequence will be a call of the loss" in caplog.text
