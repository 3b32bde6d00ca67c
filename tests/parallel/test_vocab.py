"""Vocabulary-parallel log-probs and entropy: loops in float64, real ranks, every shard's gradient."""

import math

import numpy as np
import pytest
import torch

from nemo_geomask.errors import ConfigError, DataError, ShapeError
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.parallel.processes import run
from tests.helpers.logprobs import IGNORE, case, check, loops, ours


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("valid", [None, 30])
def test_one_rank_equals_loops(temperature, valid):
    logits, targets, g, h = case(0)
    targets = targets.where(targets < 30, torch.tensor(7))
    found = ours(logits, targets, g, h, temperature=temperature, vocab_size=valid)
    check(found, loops(logits, targets, g, h, temperature=temperature, valid=valid))


def test_gradcheck():
    logits, targets, *_ = case(1, rows=4, width=6, scale=1.0)

    def both(x):
        # float32 inside, so the step of the difference quotient is wide and the tolerance honest.
        return vocab_parallel_logprobs(x, targets, entropy=True, temperature=0.8)

    torch.autograd.gradcheck(both, logits.double().requires_grad_(), eps=1e-2, atol=2e-3, rtol=1e-2)


def test_leading_shape_is_kept_and_entropy_is_optional():
    logits, targets, *_ = case(2, rows=12)
    alone = vocab_parallel_logprobs(logits.reshape(3, 4, -1), targets.reshape(3, 4))
    assert alone.shape == (3, 4)
    assert alone.dtype == torch.float32
    assert torch.equal(alone.reshape(-1), vocab_parallel_logprobs(logits, targets, entropy=True)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    logits, targets, g, h = case(3)
    half = logits.to(dtype)
    leaf = half.clone().requires_grad_()
    logp, entropy = vocab_parallel_logprobs(leaf, targets, entropy=True, temperature=0.7)
    ((logp * g).sum() + (entropy * h).sum()).backward()
    true_logp, true_entropy, true_grad = loops(half.double(), targets, g, h, temperature=0.7)
    np.testing.assert_allclose(logp.detach(), true_logp, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(entropy.detach(), true_entropy, rtol=2e-5, atol=2e-5)
    assert leaf.grad.dtype == dtype
    # Half a unit in the last place of the gradient's own type, plus float32's error.
    unit = torch.finfo(dtype).eps
    error = np.abs(leaf.grad.double().numpy() - true_grad)
    assert (error <= 0.51 * unit * np.abs(true_grad) + 1e-6).all()


def test_ignored_rows_are_not_read():
    logits, targets, g, h = case(4)
    poisoned = logits.clone()
    poisoned[targets == IGNORE] = math.nan
    clean = ours(logits, targets, g, h)
    for mine, other in zip(ours(poisoned, targets, g, h), clean, strict=True):
        assert np.array_equal(mine, other)
    assert clean[0][len(clean[0]) // 3] == 0


def test_filtered_vocabulary_keeps_finite_gradients():
    logits, targets, g, h = case(5)
    logits[:, 5:20] = -math.inf
    targets = targets.where((targets < 5) | (targets >= 20), torch.tensor(1))
    check(ours(logits, targets, g, h), loops(logits, targets, g, h))


def test_all_rows_ignored_is_zero():
    logits, targets, g, h = case(6)
    for values in ours(logits, torch.full_like(targets, IGNORE), g, h):
        assert not values.any()


def test_infinite_logit_at_the_target_is_not_taken_for_a_stray_one():
    logits, targets, *_ = case(8)
    logits[0, targets[0]] = math.inf
    logp = vocab_parallel_logprobs(logits, targets)
    assert logp[0].isnan()
    assert logp[1:].isfinite().all()


def test_unvalidated_stray_target_is_nan():
    logits, targets, *_ = case(8)
    targets[1] = -1
    logp = vocab_parallel_logprobs(logits, targets, validate=False)
    assert logp[1].isnan()
    assert logp[2:].isfinite().all()


def test_leading_dimensions_that_do_not_merge():
    logits, targets, g, h = case(9, rows=15, width=21)
    padded = torch.full((3, 7, 21), math.nan)
    padded[:, :5] = logits.reshape(3, 5, 21)
    views = (padded[:, :5], padded[:, :5].transpose(0, 1).contiguous().transpose(0, 1))
    for view in views:
        leaf = view.detach().requires_grad_()
        logp, entropy = vocab_parallel_logprobs(leaf, targets.reshape(3, 5), entropy=True)
        ((logp * g.reshape(3, 5)).sum() + (entropy * h.reshape(3, 5)).sum()).backward()
        found = logp.detach().reshape(-1), entropy.detach().reshape(-1), leaf.grad.reshape(15, 21)
        check([value.numpy() for value in found], loops(logits, targets, g, h))


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("valid", [None, 30])
def test_gradient_in_place_has_the_same_bits(kernel, valid):
    if kernel == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    logits, targets, g, h = case(13)
    targets = targets.where(targets < (valid or 37), torch.tensor(7))
    expected = ours(logits, targets, g, h, vocab_size=valid, kernel=kernel)
    leaf = logits.clone().requires_grad_()
    model_output = leaf * 1.0
    place = model_output.data_ptr()
    logp, entropy = vocab_parallel_logprobs(
        model_output, targets, entropy=True, vocab_size=valid, inplace_gradient=True, kernel=kernel
    )
    loss = (logp * g).sum() + (entropy * h).sum()
    (gradient,) = torch.autograd.grad(loss, model_output, retain_graph=True)
    assert gradient.data_ptr() == place
    assert np.array_equal(gradient.numpy(), expected[2])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradient_in_place_reaches_the_model():
    logits, targets, g, h = case(14)
    expected = ours(logits, targets, g, h)
    leaf = logits.clone().requires_grad_()
    logp, entropy = vocab_parallel_logprobs(leaf + 0.0, targets, entropy=True, inplace_gradient=True)
    ((logp * g).sum() + (entropy * h).sum()).backward()
    assert np.array_equal(leaf.grad.numpy(), expected[2])


@pytest.mark.parametrize("first", [True, False])
def test_gradient_in_place_is_refused_where_autograd_needs_the_logits(first):
    logits, targets, g, _ = case(15)
    leaf = logits.clone().requires_grad_()
    capped = torch.tanh(leaf)  # saves its output
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (vocab_parallel_logprobs(capped, targets, inplace_gradient=True) * g).sum().backward()
    shared = leaf * 1.0
    mine = (vocab_parallel_logprobs(shared, targets, inplace_gradient=True) * g).sum()
    other = shared.square().sum()
    losses = (mine, other) if first else (other, mine)
    losses[0].backward(retain_graph=True)
    if first:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[1].backward()
    else:
        # The other consumer is done by then.
        losses[1].backward()
        alone = logits.clone().requires_grad_()
        ((vocab_parallel_logprobs(alone, targets) * g).sum() + alone.square().sum()).backward()
        torch.testing.assert_close(leaf.grad, alone.grad)


def test_gradient_in_place_refuses_leaves_and_overlaps():
    logits, targets, *_ = case(16)
    with pytest.raises(ConfigError, match="no operation produced"):
        vocab_parallel_logprobs(logits.requires_grad_(), targets, inplace_gradient=True)
    rows = (logits[:1] * 1.0).expand(13, -1)
    with pytest.raises(ConfigError, match=r"their strides are \[0, 1\]"):
        vocab_parallel_logprobs(rows, targets, inplace_gradient=True)


def test_target_outside_the_vocabulary_is_an_error():
    logits, targets, *_ = case(7)
    targets[2] = 37
    with pytest.raises(DataError, match="1 targets are in no vocabulary shard, the first is 37"):
        vocab_parallel_logprobs(logits, targets)
    targets[2] = 33
    with pytest.raises(DataError, match="the first is 3"):
        vocab_parallel_logprobs(logits, targets, vocab_size=30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(4, 5)}, "logits must be floating point"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, "torch.int32"),
        ({"temperature": 0.0}, "temperature must be above 0 and finite"),
        ({"shard_sizes": [2, 3]}, "one entry for each of the 1 ranks"),
        ({"shard_sizes": [4]}, "must be its 5 columns"),
    ],
)
def test_misfits_are_named(change, message):
    arguments = {"logits": torch.zeros(3, 5), "targets": torch.zeros(3, dtype=torch.int64), **change}
    with pytest.raises(ShapeError, match=message):
        vocab_parallel_logprobs(**arguments)


def _sharded(rank, world):
    """Every layout on this rank: its shard's results, and that a stray target raises here too."""
    import torch.distributed as dist

    found = []
    for sizes, valid, temperature in LAYOUTS[world]:
        logits, targets, g, h = case(11)
        targets = targets.where(targets < (valid or 37), torch.tensor(3))
        start = sum(sizes[:rank])
        shard = logits[:, start : start + sizes[rank]]
        options = {} if len(set(sizes)) == 1 else {"shard_sizes": sizes}
        found.append(
            ours(shard, targets, g, h, group=dist.group.WORLD, vocab_size=valid, temperature=temperature, **options)
        )
    logits, targets, *_ = case(12, width=8 * world)
    targets[0] = 8 * world
    errors = []
    # A stray target, and shards that aren't of equal width as is assumed without shard_sizes.
    uneven = slice(0, 8 * world - 3) if rank == 0 else slice(8 * world - 3, 8 * world - 2)
    wrong = [8] * world
    wrong[-1] += 1  # of the last rank alone
    equal = slice(8 * rank, 8 * rank + 8)
    for shard, goal, claimed in ((equal, targets, None), (uneven, targets.clamp(max=3), None), (equal, targets, wrong)):
        try:
            vocab_parallel_logprobs(logits[:, shard], goal, group=dist.group.WORLD, shard_sizes=claimed)
        except (DataError, ShapeError) as error:
            errors.append(str(error))
    return found, errors


# The case has 37 columns; those that a layout lacks it takes as padding beyond the valid size.
LAYOUTS = {
    1: [((37,), None, 1.0), ((37,), 30, 0.5)],
    2: [((20, 17), None, 1.0), ((18, 18), 33, 0.5), ((37, 0), None, 1.0), ((30, 7), 25, 1.3)],
    4: [((9, 10, 8, 10), None, 1.0), ((9, 9, 9, 9), 20, 0.5), ((1, 0, 30, 6), None, 2.0)],
}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sharded_equals_whole_on_every_rank(world):
    results = run(world, _sharded)
    for index, (sizes, valid, temperature) in enumerate(LAYOUTS[world]):
        logits, targets, g, h = case(11)
        targets = targets.where(targets < (valid or 37), torch.tensor(3))
        logp, entropy, grad = loops(logits, targets, g, h, temperature=temperature, valid=valid or 37)
        for rank in range(world):
            mine = results[rank][0][index]
            start = sum(sizes[:rank])
            check(mine, (logp, entropy, grad[:, start : start + sizes[rank]]))
            # The same bits everywhere, so that every rank takes the same decisions from them.
            assert np.array_equal(mine[0], results[0][0][index][0])
            assert np.array_equal(mine[1], results[0][0][index][1])
    for _, errors in results:
        assert "in no vocabulary shard" in errors[0]
        assert world == 1 or "shard_sizes=" in errors[1]
        assert world == 1 or f"shard_sizes={[8] * world} on all ranks" in errors[2]
