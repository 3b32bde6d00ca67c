"""Other libraries' kernels behind our arguments: the same log-probs and gradients, at tensor-parallel size 1 and 2."""

import sys

import numpy as np
import pytest
import torch

from nemo_geomask.errors import ConfigError, DataError, MissingDependencyError
from nemo_geomask.hosts.logprob_libraries import LOGPROB_BACKENDS, logprob_backend
from nemo_geomask.parallel.local_processes import run_ranks
from tests.helpers.logprobs import IGNORE, case, loops

TEMPERATURE, VALID = 0.7, 35


def _importable(name):
    try:
        logprob_backend(name)
    except MissingDependencyError:
        return False
    return True


def _compute(rank, world, name):
    import torch.distributed as dist

    assert _importable(name)
    group = dist.group.WORLD if world > 1 else None
    if name == "mcore":
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(world)
        group = parallel_state.get_tensor_model_parallel_group()
    logits, targets, g, _ = case(2, width=36)
    targets = targets.where(targets < VALID, torch.tensor(1))
    width = 36 // world
    leaf = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    before = leaf.detach().clone()
    logprobs = logprob_backend(name)(
        leaf, targets, group=group, temperature=TEMPERATURE, vocab_size=VALID, ignore_index=IGNORE
    )
    (logprobs * g).sum().backward()
    assert torch.equal(leaf.detach(), before)
    return logprobs.detach().numpy(), leaf.grad.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", list(LOGPROB_BACKENDS))
def test_backends_equal_loops(name, world):
    if not _importable(name):
        pytest.skip(f"the library of backend '{name}' is not importable here")
    logits, targets, g, h = case(2, width=36)
    targets = targets.where(targets < VALID, torch.tensor(1))
    logp, _, grad = loops(logits, targets, g, 0 * h, temperature=TEMPERATURE, valid=VALID)
    parts = run_ranks(world, _compute, name)
    for mine, _ in parts:
        np.testing.assert_allclose(mine, logp, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(np.concatenate([part[1] for part in parts], axis=1), grad, rtol=2e-5, atol=2e-5)


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.cross_entropy", None)
    with pytest.raises(MissingDependencyError, match="backend 'mcore' needs megatron.core"):
        logprob_backend("mcore")


def test_mcore_needs_its_own_group_and_targets_within_the_vocabulary():
    if not _importable("mcore"):
        pytest.skip("megatron-core is not importable here")
    logits, targets, *_ = case(2, width=36)
    with pytest.raises(ConfigError, match="initialize_model_parallel"):
        logprob_backend("mcore")(logits, targets.clamp(min=0))
    targets[1] = 36
    with pytest.raises(DataError, match="1 targets are outside the vocabulary of 36, the first is 36"):
        logprob_backend("mcore")(logits, targets)
