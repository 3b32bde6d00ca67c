"""Vocabulary-parallel log-probs and entropy: loops in float64, real ranks, every shard's gradient."""

import importlib.util
import math
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nemo_geomask.errors import ArgumentError, DataError, GeomaskError, RanksDisagreeError, ShapeError
from nemo_geomask.parallel import linear_logprobs, vocab_parallel_logprobs
from nemo_geomask.parallel.local_processes import run_ranks
from tests.helpers.logprobs import IGNORE, case, check, check_digits, loops, ours, shifted


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("valid", [None, 30])
def test_one_rank_equals_loops(temperature, valid):
    logits, targets, g, h = case(0)
    targets = targets.where(targets < 30, torch.tensor(7))
    found = ours(logits, targets, g, h, temperature=temperature, vocab_size=valid)
    check(found, loops(logits, targets, g, h, temperature=temperature, valid=valid))


IN_INTERPRETER = (
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of arithmetic on -inf, which the kernels mean to do
)
every_kernel = pytest.mark.parametrize("kernel", ["torch", pytest.param("triton", marks=IN_INTERPRETER)])


@every_kernel
@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("offset", [0.0, 30.0, 1e3, 1e4, -1e4])
def test_digits_do_not_depend_on_the_size_of_the_logits(offset, temperature, kernel):
    inputs = shifted(1, offset)
    found = ours(*inputs, temperature=temperature, kernel=kernel)
    check_digits(found, loops(*inputs, temperature=temperature), temperature)


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_default_dtype_changes_nothing(default_dtype, dtype, kernel):
    inputs = case(2)
    expected = ours(*inputs, kernel=kernel)
    default_dtype(dtype)
    for mine, other in zip(ours(*inputs, kernel=kernel), expected, strict=True):
        assert mine.dtype == np.float32
        assert np.array_equal(mine, other)


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


@every_kernel
def test_ignored_rows_are_not_read(kernel):
    logits, targets, g, h = case(4)
    poisoned = logits.clone()
    poisoned[targets == IGNORE] = math.nan
    clean = ours(logits, targets, g, h, kernel=kernel)
    for mine, other in zip(ours(poisoned, targets, g, h, kernel=kernel), clean, strict=True):
        assert np.array_equal(mine, other)
    assert clean[0][len(clean[0]) // 3] == 0


@every_kernel
def test_filtered_vocabulary_keeps_finite_gradients(kernel):
    logits, targets, g, h = case(5)
    logits[:, 5:20] = -math.inf
    targets = targets.where((targets < 5) | (targets >= 20), torch.tensor(1))
    check(ours(logits, targets, g, h, kernel=kernel), loops(logits, targets, g, h))


def test_row_without_mass_is_nan():
    logits, targets, *_ = case(5)
    logits[0] = -math.inf
    logp, entropy = vocab_parallel_logprobs(logits, targets, entropy=True)
    assert logp[0].isnan()
    assert entropy[0].isnan()
    assert logp[1:].isfinite().all()
    assert entropy[1:].isfinite().all()


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


@pytest.mark.parametrize("blocks", [2, 3])
@pytest.mark.parametrize("inplace", [False, True])
def test_leading_dimensions_that_do_not_merge(blocks, inplace):
    logits, targets, g, h = case(9, rows=5 * blocks, width=21)
    targets, g, h = (value[: 5 * blocks] for value in (targets, g, h))
    padded = torch.full((blocks, 7, 21), math.nan)
    padded[:, :5] = logits.reshape(blocks, 5, 21)
    shape = (blocks, 5)
    for view in (padded[:, :5], padded[:, :5].transpose(0, 1).contiguous().transpose(0, 1)):
        leaf = view.detach().requires_grad_()
        used = leaf * 1.0 if inplace else leaf  # keeps the strides
        logp, entropy = vocab_parallel_logprobs(used, targets.reshape(shape), entropy=True, inplace_gradient=inplace)
        ((logp * g.reshape(shape)).sum() + (entropy * h.reshape(shape)).sum()).backward()
        found = logp.detach().reshape(-1), entropy.detach().reshape(-1), leaf.grad.reshape(5 * blocks, 21)
        check([value.numpy() for value in found], loops(logits, targets, g, h))


def test_gradient_in_place_of_a_slice_of_the_logits():
    logits, targets, g, _ = case(9, rows=10, width=21)
    leaf = logits.reshape(2, 5, 21).clone().requires_grad_()
    wide = torch.nn.functional.pad(leaf, (0, 0, 0, 2))  # as of a model that predicts two more tokens
    logp = vocab_parallel_logprobs(wide[:, :5], targets.reshape(2, 5), inplace_gradient=True)
    (logp * g.reshape(2, 5)).sum().backward()
    expected = ours(logits, targets, g, torch.zeros_like(g))
    np.testing.assert_allclose(leaf.grad.reshape(10, 21), expected[2], rtol=1e-5, atol=1e-7)


def test_one_target_without_a_leading_dimension():
    logits = torch.tensor([0.5, -1.0, 2.0])
    logp = vocab_parallel_logprobs(logits, torch.tensor(2))
    assert logp.item() == pytest.approx(2.0 - math.log(sum(math.exp(x) for x in logits.tolist())))


@every_kernel
@pytest.mark.parametrize("valid", [None, 30])
def test_gradient_in_place_has_the_same_bits(kernel, valid):
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
    with pytest.raises(ArgumentError, match="no operation produced"):
        vocab_parallel_logprobs(logits.requires_grad_(), targets, inplace_gradient=True)
    rows = (logits[:1] * 1.0).expand(13, -1)
    with pytest.raises(ArgumentError, match=r"their strides are \[0, 1\]"):
        vocab_parallel_logprobs(rows, targets, inplace_gradient=True)
    flat = logits.detach().flatten().requires_grad_() * 1.0
    for shape, strides in (((2, 5), (0, 1)), ((2, 5), (1, 1)), ((3, 5), (4, 1))):
        with pytest.raises(ArgumentError, match="don't overlap in memory"):
            vocab_parallel_logprobs(flat.as_strided(shape, strides), targets[: shape[0]], inplace_gradient=True)
    # A stride along one entry reaches nothing.
    assert vocab_parallel_logprobs(flat.as_strided((1, 37), (0, 1)), targets[:1], inplace_gradient=True).shape == (1,)


def test_target_outside_the_vocabulary_is_an_error():
    logits, targets, *_ = case(7)
    targets[2] = 37
    message = r"1 targets are in no vocabulary shard, the first is 37; .* size \(37\), or ignore_index \(-100\)$"
    with pytest.raises(DataError, match=message):
        vocab_parallel_logprobs(logits, targets)
    targets[2] = 33
    with pytest.raises(DataError, match="the first is 3"):
        vocab_parallel_logprobs(logits, targets, vocab_size=30)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(4, 5)}, ShapeError, "logits must be floating point"),
        ({"logits": [0.0]}, ShapeError, "^logits must be a tensor, but it is a list"),
        ({"targets": [0]}, ShapeError, "^targets must be a tensor, but it is a list"),
        ({"kernel": "fast"}, ArgumentError, "kernel must be one of"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, ShapeError, "torch.int32"),
        ({"temperature": 0.0}, ArgumentError, "temperature must be above 0 and finite"),
        ({"temperature": math.inf}, ArgumentError, "temperature must be above 0 and finite"),
        ({"shard_sizes": [2, 3]}, ShapeError, "one entry for each of the 1 ranks"),
        ({"shard_sizes": [4]}, ShapeError, "must be its 5 columns"),
        (
            {"vocab_size": 6},
            ArgumentError,
            "vocab_size must be from 1 to the 5 columns that the ranks hold, but it is 6",
        ),
        ({"vocab_size": 0}, ArgumentError, "but it is 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, error, message):
    arguments = {"logits": torch.zeros(3, 5), "targets": torch.zeros(3, dtype=torch.int64), **change}
    with pytest.raises(error, match=message):
        vocab_parallel_logprobs(**arguments)


# Shards, valid columns, temperature, and where the logits lie. The case has 37 columns; those that a layout lacks it
# takes as padding beyond the valid size.
LAYOUTS = {
    1: [((37,), None, 1.0, 0.0), ((37,), 30, 0.5, 0.0), ((37,), None, 0.1, 1e4)],
    2: [
        ((20, 17), None, 1.0, 0.0),
        ((18, 18), 33, 0.5, 30.0),
        ((37, 0), None, 10.0, 1e4),
        ((30, 7), 25, 1.3, -1e3),
        ((20, 17), None, 0.1, 1e4),
    ],
    4: [
        ((9, 10, 8, 10), None, 1.0, 30.0),
        ((9, 9, 9, 9), 20, 0.5, 1e3),
        ((1, 0, 30, 6), None, 10.0, -1e4),
        ((9, 10, 8, 10), None, 0.1, 1e4),
    ],
}


def _problem(valid, offset):
    logits, targets, g, h = shifted(11, offset)
    return logits, targets.where(targets < (valid or 37), torch.tensor(3)), g, h


def _sharded(rank, world):
    """Every layout on this rank: its shard's results, without and with another default dtype."""
    found = []
    for sizes, valid, temperature, offset in LAYOUTS[world]:
        logits, *rest = _problem(valid, offset)
        start = sum(sizes[:rank])
        shard = logits[:, start : start + sizes[rank]]
        options = {} if len(set(sizes)) == 1 else {"shard_sizes": sizes}
        options |= {"group": dist.group.WORLD, "vocab_size": valid, "temperature": temperature}
        found.append(ours(shard, *rest, **options))
        torch.set_default_dtype(torch.bfloat16)
        again = ours(shard, *rest, **options)
        torch.set_default_dtype(torch.float32)
        assert all(map(np.array_equal, again, found[-1]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [1, pytest.param(2, marks=pytest.mark.quick), pytest.param(4, marks=pytest.mark.long)]
)
def test_sharded_equals_whole_on_every_rank(world):
    results = run_ranks(world, _sharded)
    for index, (sizes, valid, temperature, offset) in enumerate(LAYOUTS[world]):
        logp, entropy, grad = loops(*_problem(valid, offset), temperature=temperature, valid=valid or 37)
        for rank in range(world):
            mine = results[rank][index]
            start = sum(sizes[:rank])
            check_digits(mine, (logp, entropy, grad[:, start : start + sizes[rank]]), temperature)
            # The same bits everywhere, so that every rank takes the same decisions from them.
            assert np.array_equal(mine[0], results[0][index][0])
            assert np.array_equal(mine[1], results[0][index][1])


def _one_token(rank, world):
    logits = torch.tensor([[3.0, -1.0]])
    sizes, group = [2] * world, dist.group.WORLD
    return vocab_parallel_logprobs(logits, torch.tensor([0]), vocab_size=1, shard_sizes=sizes, group=group).item()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_hold_a_vocabulary_of_one_token(world):
    assert run_ranks(world, _one_token) == [0.0] * world


def _without_tokens(rank, world):
    group, targets = dist.group.WORLD, torch.zeros(0, dtype=torch.int64)
    logits, hidden, weight = (torch.ones(shape, requires_grad=True) for shape in ((0, 8), (0, 4), (8, 4)))
    results = [
        vocab_parallel_logprobs(logits, targets, group=group, entropy=True),
        linear_logprobs(hidden, weight, targets, group=group, entropy=True),
        linear_logprobs(hidden, weight, targets, group=group, entropy=True, sequence_parallel=True),
    ]
    sum(logprobs.sum() + entropy.sum() for logprobs, entropy in results).backward()
    shapes = [tuple(tensor.shape) for pair in results for tensor in pair]
    no_width = linear_logprobs(torch.ones(3, 0), torch.ones(8, 0), torch.tensor([0, 5, 15]), group=group)
    gradients = tuple(logits.grad.shape), tuple(hidden.grad.shape), weight.grad.abs().sum().item()
    return shapes, gradients, no_width.tolist()


@pytest.mark.slow
def test_ranks_without_tokens_or_without_hidden_width_crash_nothing():
    for shapes, gradients, no_width in run_ranks(2, _without_tokens):
        assert shapes == [(0,)] * 6
        assert gradients == ((0, 8), (0, 4), 0.0)
        assert no_width == pytest.approx([-math.log(16)] * 3)


def _other_target(targets):
    return torch.cat([targets[:5], (targets[5:6] + 1) % 16, targets[6:]])


# What rank 1 of two does differently, and what both of them are told.
DISAGREEMENTS = {
    "columns": ({"logits": slice(8, 9)}, ShapeError, r"hold \[8, 1\] columns.* shard_sizes=\[8, 1\] on all ranks"),
    "columns, with a size": (
        {"logits": slice(8, 9), "vocab_size": 9},
        ShapeError,
        r"shard_sizes=\[8, 1\] on all ranks",
    ),
    "shard_sizes": ({"shard_sizes": [9, 8]}, ShapeError, r"shard_sizes=\[8, 8\] on all ranks"),
    "vocab_size": ({"vocab_size": 15}, ShapeError, "give the same vocab_size"),
    "temperature": ({"temperature": 0.7}, RanksDisagreeError, r"by rank, temperature is \[1\.0, 0\.7\]; give the same"),
    "ignore_index": ({"ignore_index": -1}, RanksDisagreeError, r"ignore_index is \[-100, -1\]"),
    "entropy": ({"entropy": True}, RanksDisagreeError, r"entropy is \[False, True\]"),
    "validate": ({"validate": False}, RanksDisagreeError, r"validate is \[True, False\]"),
    "several": (
        {"entropy": True, "temperature": 2.0},
        RanksDisagreeError,
        r"by rank, temperature is \[1\.0, 2\.0\], entropy is \[False, True\]",
    ),
    "a target": (
        {"targets": _other_target},
        RanksDisagreeError,
        r"targets must be the same .* of ranks \[1\] are not rank 0's",
    ),
    "the targets' order": ({"targets": lambda targets: targets.flip(0)}, RanksDisagreeError, "are not rank 0's"),
    "two targets": ({"targets": lambda t: torch.cat([t[1:2], t[:1], t[2:]])}, RanksDisagreeError, "are not rank 0's"),
    "an ignored target": ({"targets": lambda t: t.where(t != IGNORE, 3)}, RanksDisagreeError, "are not rank 0's"),
    "fewer rows": ({"rows": 5}, RanksDisagreeError, r"but by rank there are \[\d+, 5\]; give all of them the same"),
}
# What all ranks do alike, and wrong.
MISTAKES = {
    "another split": ({"shard_sizes": [9, 7]}, ShapeError, r"hold \[8, 8\] columns.* assumes \[9, 7\]"),
    "more columns": ({"shard_sizes": [8, 9]}, ShapeError, r"hold \[8, 8\] columns.* assumes \[8, 9\]"),
    "a stray target": ({"targets": lambda targets: targets + 16}, DataError, "13 targets are in no vocabulary shard"),
    "vocab_size": ({"vocab_size": 17}, ArgumentError, "from 1 to the 16 columns that the ranks hold, but it is 17"),
}


def _attempt(rank, change):
    logits, targets, *_ = case(12, width=16)
    columns = change.get("logits", slice(8 * rank, 8 * rank + 8))
    targets = change["targets"](targets) if "targets" in change else targets
    rows = slice(change.get("rows"))
    options = {name: value for name, value in change.items() if name not in ("logits", "targets", "rows")}
    try:
        vocab_parallel_logprobs(logits[rows, columns], targets[rows], group=dist.group.WORLD, **options)
    except GeomaskError as error:
        return error
    return None


def _wrong(rank, world):
    """What this rank is told of each, and that it is told nothing where nothing is validated."""
    told = {name: _attempt(rank, change if rank else {}) for name, (change, *_) in DISAGREEMENTS.items()}
    told |= {f"all: {name}": _attempt(rank, change) for name, (change, *_) in MISTAKES.items()}
    for change, *_ in DISAGREEMENTS.values():
        if "rows" not in change:  # gloo would bring down the process
            assert _attempt(rank, {**(change if rank else {}), "validate": False}) is None
    rows = 2 if rank else 3
    with pytest.raises(RanksDisagreeError, match=r"by rank there are \[6, 4\]"):
        linear_logprobs(
            torch.ones(rows, 4),
            torch.ones(8, 4),
            torch.zeros(2 * rows, dtype=torch.int64),
            group=dist.group.WORLD,
            sequence_parallel=True,
        )
    return told


@pytest.mark.slow
def test_ranks_that_disagree_are_all_told():
    expected = DISAGREEMENTS | {f"all: {name}": entry for name, entry in MISTAKES.items()}
    for rank, told in enumerate(run_ranks(2, _wrong)):
        for name, (_, error, message) in expected.items():
            if name == "validate" and rank == 1:
                assert told[name] is None  # as it asked
                continue
            assert type(told[name]) is error, name
            assert re.search(message, str(told[name])), (name, str(told[name]))
