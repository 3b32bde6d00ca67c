"""Segments: sums, extremes and spreading for padded rows, packed tokens and context-parallel shares."""

import functools
import itertools
import operator

import numpy as np
import pytest
import torch
from gloo import run

from nemo_geomask.errors import ShapeError
from nemo_geomask.segments import PackedSegments, PaddedSegments

OFFSETS = [0, 8, 8, 40, 48, 80]  # an empty sequence among them


def shares(offsets, rank, size):
    """Megatron's load-balanced split as a loop: chunks r and 2·size−1−r of 2·size equal ones of each sequence."""
    positions = []
    for start, end in itertools.pairwise(offsets):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            positions += range(start + number * chunk, start + (number + 1) * chunk)
    return positions


@pytest.mark.parametrize("size", [1, 2, 4])
def test_share_is_megatrons_split_and_covers_every_token_once(size):
    found = [PackedSegments(OFFSETS, cp_rank=rank, cp_size=size).token_index.tolist() for rank in range(size)]
    if size > 1:
        assert found == [shares(OFFSETS, rank, size) for rank in range(size)]
    assert sorted(functools.reduce(operator.iadd, found, [])) == list(range(OFFSETS[-1]))


def test_packed_statistics_equal_loops():
    values = torch.randn(OFFSETS[-1], generator=torch.Generator().manual_seed(0))
    segments = PackedSegments(torch.tensor(OFFSETS, dtype=torch.int32))
    sums = segments.sum({"a": values, "b": 2 * values})
    (low,), (high,) = (part.values() for part in segments.extremes({"a": values}, {"a": values}))
    for i, (start, end) in enumerate(itertools.pairwise(OFFSETS)):
        part = values[start:end].double()
        assert sums["a"][i].item() == pytest.approx(part.sum().item(), abs=1e-6)
        assert sums["b"][i].item() == pytest.approx(2 * part.sum().item(), abs=1e-6)
        assert low[i] == (part.min() if end > start else torch.inf)
        assert high[i] == (part.max() if end > start else -torch.inf)
    assert segments.spread(sums["a"]).tolist() == [
        sums["a"][i].item() for i, (s, e) in enumerate(itertools.pairwise(OFFSETS)) for _ in range(s, e)
    ]


def test_packed_equals_padded_with_gradient():
    rows = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for segments, values in (
        (PaddedSegments(), rows.clone().requires_grad_()),
        (PackedSegments([0, 8, 16, 24]), rows.reshape(-1).clone().requires_grad_()),
    ):
        pooled = segments.sum({"x": values, "y": values.square()})
        (segments.spread(pooled["x"]).exp() * values + segments.spread(pooled["y"])).sum().backward()
        results.append(values.grad.reshape(-1))
    torch.testing.assert_close(results[0], results[1])


def test_gradcheck():
    segments = PackedSegments([0, 2, 2, 5])
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: segments.sum({"x": x, "y": x.square()})["y"], values)
    torch.autograd.gradcheck(segments.spread, torch.randn(3, dtype=torch.float64, requires_grad=True))


def test_rows_of_no_tokens():
    empty = torch.zeros(2, 0)
    low, high = PaddedSegments().extremes({"x": empty}, {"x": empty})
    assert low["x"].tolist() == [torch.inf] * 2
    assert high["x"].tolist() == [-torch.inf] * 2
    assert PackedSegments([0]).sum({"x": torch.zeros(0)})["x"].shape == (0,)


@pytest.mark.parametrize(
    ("offsets", "size", "message"),
    [
        ([1, 2], 1, "start at 0"),
        ([0, 5, 3], 1, "non-decreasing"),
        ([0, 6], 2, "multiple of 2·2"),
        ([], 1, "start at 0"),
    ],
)
def test_offsets_that_make_no_sense_are_refused(offsets, size, message):
    with pytest.raises(ShapeError, match=message):
        PackedSegments(offsets, cp_size=size)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_group_is_refused(rank):
    with pytest.raises(ShapeError, match="cp_rank must be from 0 to cp_size - 1 = 1"):
        PackedSegments([0, 8], cp_rank=rank, cp_size=2)


def _over_ranks(rank, world):
    import torch.distributed as dist

    whole = torch.randn(OFFSETS[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    segments = PackedSegments(OFFSETS, cp_rank=rank, cp_size=world, groups=(dist.group.WORLD,))
    mine = whole[segments.token_index].requires_grad_()
    pooled = segments.sum({"x": mine, "y": mine.square()})
    part = (segments.spread(pooled["x"]).tanh() * mine + segments.spread(pooled["y"]).sin()).sum()
    total = segments.whole(part)
    total.backward()
    low, high = segments.extremes({"x": mine}, {"x": mine})
    peaks = segments.whole_extremes(mine.detach().amin(), mine.detach().amax())
    tensors = (segments.token_index, mine.grad, total.detach(), low["x"], high["x"], *peaks)
    return [tensor.numpy() for tensor in tensors]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_sharded_equals_whole(world):
    whole = torch.randn(OFFSETS[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for start, end in itertools.pairwise(OFFSETS):
        part = whole[start:end]
        total = total + (part.sum().tanh() * part).sum() + (end - start) * part.square().sum().sin()
    total.backward()
    ends = [(s, e) for s, e in itertools.pairwise(OFFSETS)]
    for index, grad, value, low, high, lowest, highest in run(world, _over_ranks):
        np.testing.assert_allclose(grad, whole.grad[index], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(value, total.detach(), rtol=1e-10)
        assert low.tolist() == [whole[s:e].min().item() if e > s else np.inf for s, e in ends]
        assert high.tolist() == [whole[s:e].max().item() if e > s else -np.inf for s, e in ends]
        assert (lowest, highest) == (whole.min().item(), whole.max().item())
