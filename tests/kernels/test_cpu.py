"""The row-blocked kernels: shards and their merge, and what their threads do."""

import threading

import numpy as np
import pytest
import torch

from nemo_geomask.kernels import RowGradientInputs, choose
from nemo_geomask.parallel import vocab_parallel_logprobs
from tests.helpers.logprobs import IGNORE, check_digits, loops, shifted

INTERPRETED = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
KERNELS = ["torch", pytest.param("triton", marks=INTERPRETED)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("offset", "temperature"), [(0.0, 1.0), (30.0, 10.0), (1e4, 0.1)])
def test_merge_of_eight_shards(kernel, offset, temperature):
    if kernel == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    logits, targets, g, h = shifted(3, offset, width=40)
    logits[:, 10:20] = -torch.inf  # two shards' whole shares
    logits[:, 20:25] -= 200.0  # and one that has next to none
    targets = targets.where((targets < 10) | (targets >= 20), torch.tensor(7))
    kernels = choose(logits, kernel)
    options = {"ignore_index": IGNORE, "inverse_temperature": 1 / temperature}
    shards = logits.split(5, dim=1)
    parts = [
        kernels.row_statistics(shard, targets, start=5 * index, entropy=True, **options)
        for index, shard in enumerate(shards)
    ]
    kept = targets != IGNORE
    assert parts[2][0, kept].isneginf().all()
    assert not parts[2][1:].any()
    max_logit, sum_exp, target_logit, entropy = merged = kernels.fold(torch.stack(parts), 1 / temperature)
    # In any grouping, one without mass included.
    groups = [kernels.fold(torch.stack(group), 1 / temperature) for group in (parts[:2], parts[2:4], parts[4:])]
    torch.testing.assert_close(kernels.fold(torch.stack(groups), 1 / temperature), merged, rtol=1e-5, atol=2e-6)
    gradient = torch.empty_like(logits)
    for index, shard in enumerate(shards):
        kernels.row_gradients(
            shard,
            RowGradientInputs(targets, max_logit, sum_exp, entropy, g, h),
            start=5 * index,
            valid=5,
            out=gradient[:, 5 * index : 5 * index + 5],
            **options,
        )
    logprobs = torch.where(kept, (target_logit - max_logit) / temperature - sum_exp.log(), 0.0)
    found = [value.numpy() for value in (logprobs, torch.where(kept, entropy, 0.0), gradient)]
    check_digits(found, loops(logits, targets, g, h, temperature=temperature), temperature)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def large():
    """Logits worth two threads, every fifth row without a gradient."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(96, 1 << 17, generator=draw)
    targets = torch.randint(0, 1 << 17, (96,), generator=draw)
    return logits, targets, (torch.arange(96) % 5 > 0).float()


def gradient(logits, targets, g):
    leaf = logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(leaf, targets, entropy=True)
    (found,) = torch.autograd.grad([logprobs, entropy], leaf, [g, g])
    return logprobs.detach(), entropy.detach(), found


def test_threads_share_blocks_and_not_operations(threads, monkeypatch):
    seen = set()
    both = threading.Barrier(2)  # a thread alone would not get past it
    exp2 = torch.exp2

    def spy(*arguments, **options):
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            both.wait(timeout=60)
        assert torch.get_num_threads() == 1
        return exp2(*arguments, **options)

    threads(1)
    expected = gradient(*large())
    threads(2)
    monkeypatch.setattr(torch, "exp2", spy)
    found = gradient(*large())
    assert len(seen) == 2
    assert torch.get_num_threads() == 2
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)
    assert not found[2][::5].any()


def test_an_error_in_a_thread_reaches_the_caller(threads, monkeypatch):
    caller = threading.get_ident()
    exp2 = torch.exp2

    def failing(*arguments, **options):
        if threading.get_ident() != caller:
            raise RuntimeError("in a thread")
        return exp2(*arguments, **options)

    threads(2)
    monkeypatch.setattr(torch, "exp2", failing)
    with pytest.raises(RuntimeError, match="in a thread"):
        gradient(*large())
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("count", [1, 2])
def test_logits_of_inference_mode(threads, count):
    threads(count)
    with torch.inference_mode():
        logits, targets, _ = large()
        logprobs = vocab_parallel_logprobs(logits, targets)
    reference = logits.double().log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    np.testing.assert_allclose(logprobs, reference, rtol=1e-5)
