"""Segments: sums, extremes and spreading for padded rows, packed tokens and context-parallel shares."""

import itertools
import math

import numpy as np
import pytest
import torch

from nemo_geomask.errors import ArgumentError, RanksDisagreeError, ShapeError
from nemo_geomask.parallel.local_processes import run_ranks
from nemo_geomask.segments import PackedSegments, PaddedSegments
from nemo_geomask.segments.rank_comparison import checksum
from tests.helpers.shares import shares

# An empty sequence among them, and one whose second run begins in another sequence-parallel slice than it ends in.
OFFSETS = [0, 8, 8, 48, 56, 80]


@pytest.mark.parametrize("sp", [1, 2, 5])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_shares_cover_every_token_once(cp, sp):
    found = []
    for rank, sp_rank in itertools.product(range(cp), range(sp)):
        segments = PackedSegments(OFFSETS, cp_rank=rank, cp_size=cp, sp_rank=sp_rank, sp_size=sp)
        places = shares(OFFSETS, rank, cp, sp_rank, sp)
        assert segments.token_index.tolist() == [place for place, _ in places]
        assert segments.position.tolist() == [position for _, position in places]
        found += segments.token_index.tolist()
    assert sorted(found) == list(range(OFFSETS[-1]))


def test_packed_rows_of_odd_length_need_no_padding():
    segments = PackedSegments([0, 3, 3, 8])
    assert segments.token_index.tolist() == list(range(8))
    assert segments.position.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_packed_statistics_equal_loops():
    values = torch.randn(OFFSETS[-1], generator=torch.Generator().manual_seed(0))
    segments = PackedSegments(torch.tensor(OFFSETS, dtype=torch.int32))
    assert segments.cu_seqlens.dtype == torch.int64
    pooled = segments.pool({"a": values, "b": 2 * values}, {"a": values}, {"a": values, "b": -values})
    for i, (start, end) in enumerate(itertools.pairwise(OFFSETS)):
        part = values[start:end].double()
        assert pooled.sums["a"][i].item() == pytest.approx(part.sum().item(), abs=1e-6)
        assert pooled.sums["b"][i].item() == pytest.approx(2 * part.sum().item(), abs=1e-6)
        assert pooled.lowest["a"][i] == (part.min() if end > start else torch.inf)
        assert pooled.highest["a"][i] == (part.max() if end > start else -torch.inf)
        assert pooled.highest["b"][i] == (-part.min() if end > start else -torch.inf)
    assert segments.spread(pooled.sums["a"]).tolist() == [
        pooled.sums["a"][i].item() for i, (s, e) in enumerate(itertools.pairwise(OFFSETS)) for _ in range(s, e)
    ]


def _layouts():
    """The same values in rows and packed, with the segments of each."""
    rows = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [(PaddedSegments(), rows), (PackedSegments([0, 8, 16, 24]), rows.reshape(-1))]


def test_packed_equals_padded_with_gradient():
    results = []
    for segments, rows in _layouts():
        values = rows.clone().requires_grad_()
        pooled = segments.pool({"x": values, "y": values.square()}).sums
        (segments.spread(pooled["x"]).exp() * values + segments.spread(pooled["y"])).sum().backward()
        results.append(values.grad.reshape(-1))
    torch.testing.assert_close(results[0], results[1])


def test_sum_of_one_tensor():
    for segments, rows in _layouts():
        torch.testing.assert_close(segments.sum(rows), rows.view(3, 8).sum(-1))
        assert segments.sum(rows.float()).dtype == torch.float32


def test_gradcheck():
    segments = PackedSegments([0, 2, 2, 5])
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: tuple(segments.pool({"x": x, "y": x.square()}).sums.values()), values)
    torch.autograd.gradcheck(segments.spread, torch.randn(3, dtype=torch.float64, requires_grad=True))


def test_rows_of_no_tokens():
    empty = torch.zeros(2, 0)
    pooled = PaddedSegments().pool({}, {"x": empty}, {"x": empty})
    assert pooled.lowest["x"].tolist() == [torch.inf] * 2
    assert pooled.highest["x"].tolist() == [-torch.inf] * 2
    assert PackedSegments([0]).sum(torch.zeros(0)).shape == (0,)
    assert PackedSegments([0, 0, 0]).sum(torch.zeros(0)).tolist() == [0.0, 0.0]
    assert PackedSegments([0, 4]).pool({}) == ({}, {}, {})


def test_offsets_on_the_host_read_nothing_back():
    # A tensor without data raises where its value is asked for.
    segments = PackedSegments(OFFSETS, device="meta", cp_rank=1, cp_size=2)
    assert segments.cu_seqlens.device.type == "meta"
    assert segments.token_index.shape == (OFFSETS[-1] // 2,)
    assert segments.spread(torch.zeros(5, device="meta")).shape == (OFFSETS[-1] // 2,)


def _prefixes(segments, values):
    """Sum, minimum and maximum over each token's prefix."""
    named = {"x": values}
    prefix = segments.prefix(named, named, named)
    found = segments.global_prefix(prefix, segments.pool(*prefix.run_totals))
    return [statistics["x"] for statistics in found]


def _by_loops(values, offsets):
    """The same, float64, one token at a time."""
    found = []
    for start, end in itertools.pairwise(offsets):
        total, low, high = 0.0, math.inf, -math.inf
        for value in values[start:end].tolist():
            total, low, high = total + value, min(low, value), max(high, value)
            found.append((total, low, high))
    return torch.tensor(found, dtype=torch.float64).T


def _turn_sums(segments, values):
    """Sums over turns; most tokens are members, so that turns are long and some pass through a whole run."""
    turns = segments.turns(values.detach() > -1.2)
    local = segments.turn_sums(turns, {"x": values})
    return segments.global_turn_sums(turns, local, segments.pool(local.run_totals.sums))["x"]


def _turns_by_loops(values, offsets):
    found = [0.0] * len(values)
    for start, end in itertools.pairwise(offsets):
        turn = []
        for t in range(start, end + 1):
            if t < end and values[t] > -1.2:
                turn.append(t)
                continue
            for member in turn:
                found[member] = sum(values[turn].tolist())
            turn = []
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_turns_equal_loops(layout):
    offsets = OFFSETS if layout == "packed" else [0, 40, 80]
    values = torch.randn(80, generator=torch.Generator().manual_seed(4))
    packed = layout == "packed"
    found = _turn_sums(
        PackedSegments(offsets) if packed else PaddedSegments(), values if packed else values.view(2, 40)
    )
    torch.testing.assert_close(found.flatten(), _turns_by_loops(values.double(), offsets))
    assert PaddedSegments().turns(torch.zeros(2, 0, dtype=torch.bool)).start.shape == (2, 0)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_prefixes_equal_loops(layout):
    offsets = OFFSETS if layout == "packed" else [0, 40, 80]
    values = torch.randn(80, generator=torch.Generator().manual_seed(4))
    expected = _by_loops(values, offsets)
    packed = layout == "packed"
    segments = PackedSegments(offsets) if packed else PaddedSegments()
    values = values if packed else values.view(2, 40)
    found = _prefixes(segments, values)
    torch.testing.assert_close(torch.stack([value.flatten().double() for value in found]), expected)
    assert torch.equal(segments.prefix_sums({"x": values})["x"], found[0])
    assert segments.prefix({"x": values}).run_totals == ({}, {}, {})  # no other rank needs them


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 17])
def test_prefixes_of_one_sequence_of_any_length(length):
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    expected = _by_loops(values, [0, length])
    torch.testing.assert_close(torch.stack(_prefixes(PackedSegments([0, length]), values)), expected)


@pytest.mark.slow
def test_prefixes_of_131072_tokens_keep_their_digits():
    # Sums that wander, as log-ratios' do; beside them a sequence whose values would cost a common sum all its digits.
    values = 0.05 * torch.randn(131072, generator=torch.Generator().manual_seed(5)) - 0.01
    offsets = [0, 8, 60000, 131072]
    values[:8] = 1e25
    total, low, high = _prefixes(PackedSegments(offsets), values)
    expected = _by_loops(values, offsets)
    assert (total - expected[0])[8:].abs().max() < 1e-9
    assert torch.equal(torch.stack([low, high]), expected[1:])


QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


def _quantiles(segments, values, counted):
    return torch.stack([segments.quantile(values, counted, share) for share in QUANTILES])


def _of_each(values, counted, offsets):
    """torch's own, [q, S], of each sequence's values that count."""
    found = [values[s:e][counted[s:e] > 0].double() for s, e in itertools.pairwise(offsets)]
    none = torch.zeros(1, dtype=torch.float64)
    return torch.stack([torch.stack([torch.quantile(v if len(v) else none, q) for v in found]) for q in QUANTILES])


def test_quantiles_are_exact():
    draw = torch.Generator().manual_seed(6)
    values = torch.rand(1080, generator=draw) ** 3
    counted = (torch.rand(1080, generator=draw) > 0.3).float()
    values[100:300] = values[100]  # ties
    values[300:400], values[400:410] = 0.0, 1e30
    counted[40:48] = 0.0
    counted[0], counted[1:8] = 1.0, 0.0
    offsets = [*OFFSETS, 1080]
    found = _quantiles(PackedSegments(offsets), values, counted)
    torch.testing.assert_close(found, _of_each(values, counted, offsets), rtol=1e-14, atol=0)
    rows = _quantiles(PaddedSegments(), values.view(2, 540), counted.view(2, 540))
    torch.testing.assert_close(rows, _of_each(values, counted, [0, 540, 1080]), rtol=1e-14, atol=0)


def test_a_quantile_between_equal_values_is_that_value():
    values = torch.tensor([1.0, 1.0, 2.0, -0.0, 0.0, 3.0, 3.0, 3.0])
    counted = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    for segments, shape, offsets in (
        (PackedSegments([0, 3, 8]), (8,), [0, 3, 8]),
        (PaddedSegments(), (2, 4), [0, 4, 8]),
    ):
        found = _quantiles(segments, values.view(shape), counted.view(shape))
        torch.testing.assert_close(found, _of_each(values, counted, offsets), rtol=1e-14, atol=0)


def test_negative_zero_is_a_value_as_zero():
    values = torch.tensor([-0.0, 0.0, 1.0, 2.0])
    found = _quantiles(PackedSegments([0, 4]), values, torch.ones(4))
    torch.testing.assert_close(found, _of_each(values, torch.ones(4), [0, 4]), rtol=1e-14, atol=0)


def test_a_checksum_notices_order_and_changes_that_cancel():
    values = torch.tensor([5, 7, 7, 1], dtype=torch.int64)
    others = [[7, 5, 7, 1], [6, 6, 7, 1], [5, 7, 7, 2], [5 - 2**63, 7, 7, 1], [5, 7 - 2**63, 7, 1]]
    sums = {int(checksum(torch.tensor(other, dtype=torch.int64))) for other in others}
    assert int(checksum(values)) not in sums
    assert checksum(values).shape == (1,)


def test_rows_of_no_tokens_have_no_prefixes():
    for segments, values in ((PaddedSegments(), torch.zeros(2, 0)), (PackedSegments([0, 0]), torch.zeros(0))):
        assert [value.shape for value in _prefixes(segments, values)] == [values.shape] * 3


@pytest.mark.parametrize(
    ("offsets", "sizes", "message"),
    [
        ([1, 2], {}, "start at 0"),
        ([0, 5, 3], {}, "non-decreasing"),
        ([0, 6], {"cp_size": 2}, "multiple of 2·2"),
        ([0, 6], {"sp_size": 4}, "the 6 tokens of a context-parallel rank don't divide into 4 equal"),
        ([0, 8, 12], {"cp_size": 2, "sp_size": 4}, "the 6 tokens of a context-parallel rank don't divide into 4 equal"),
        ([], {}, "start at 0"),
    ],
)
def test_offsets_that_make_no_sense_are_refused(offsets, sizes, message):
    with pytest.raises(ShapeError, match=message):
        PackedSegments(offsets, **sizes)


@pytest.mark.parametrize(
    ("wrong", "actual"), [(None, "None"), ("ab", "'ab'"), (5, r"\[\]"), ([[0, 4]], r"\[1, 2\]")], ids=str
)
def test_what_is_no_list_of_offsets_is_named(wrong, actual):
    with pytest.raises(ShapeError, match=f"cu_seqlens must be .* but it is {actual}"):
        PackedSegments(wrong)


def test_offsets_of_two_dimensions_are_refused_with_their_shape():
    with pytest.raises(ShapeError) as refused:
        PackedSegments([[0, 4], [0, 8]])
    assert str(refused.value) == "cu_seqlens must be [S+1], token offsets of S sequences, but it is [2, 2]"


@pytest.mark.parametrize("wrong", [[0.0, 8.0], torch.tensor([0.0, 8.0]), torch.tensor([False, True])], ids=str)
def test_offsets_are_integers(wrong):
    with pytest.raises(ShapeError, match="cu_seqlens must be integers"):
        PackedSegments(wrong)


@pytest.mark.parametrize("kind", ["cp", "sp"])
@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_group_is_refused(rank, kind):
    with pytest.raises(ArgumentError, match=f"{kind}_rank must be from 0 to {kind}_size - 1 = 1"):
        PackedSegments([0, 8], **{f"{kind}_rank": rank, f"{kind}_size": 2})


def test_statistics_of_a_share_need_groups():
    segments = PackedSegments([0, 8], cp_rank=0, cp_size=2)
    for statistics in (
        lambda: segments.sum(torch.zeros(4)),
        lambda: segments.reduce_over_ranks(torch.zeros(()), torch.zeros(3), num_sums=1, num_minima=1),
    ):
        with pytest.raises(ShapeError, match="have no groups over which"):
            statistics()


def _groups(rank, cp, sp, how):
    """Groups of the ranks that share sequences: neighbours share a context-parallel rank's tokens."""
    import torch.distributed as dist

    sp_groups = [dist.new_group(list(range(c * sp, c * sp + sp))) for c in range(cp)]
    cp_groups = [dist.new_group(list(range(s, cp * sp, sp))) for s in range(sp)]
    return (dist.group.WORLD,) if how == "one" else (cp_groups[rank % sp], sp_groups[rank // sp])


LAYOUTS = {2: [(2, 1, "one"), (1, 2, "two")], 4: [(4, 1, "one"), (2, 2, "one"), (2, 2, "two")]}


def _over_ranks(rank, world):
    whole = torch.randn(OFFSETS[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = []
    for cp, sp, how in LAYOUTS[world]:
        places = {"cp_rank": rank // sp, "cp_size": cp, "sp_rank": rank % sp, "sp_size": sp}
        segments = PackedSegments(OFFSETS, **places, groups=_groups(rank, cp, sp, how))
        segments.verify()
        mine = whole[segments.token_index].requires_grad_()
        pooled = segments.pool({"x": mine, "still": mine.detach(), "y": mine.square()}, {"x": mine}, {"x": mine})
        x, still, y = map(segments.spread, pooled.sums.values())
        part = (x.tanh() * mine + y.sin() + still * mine).sum()
        ends = torch.stack([part.detach(), mine.detach().amin(), mine.detach().amax()])
        value, rest = segments.reduce_over_ranks(part, ends, num_sums=1, num_minima=1)
        value.backward()  # the gradient is that of this rank's part
        assert segments.reduce_over_ranks(part.float(), ends, num_sums=1, num_minima=1)[0].dtype == torch.float32
        # A compiled graph rebuilds the layout from its tensors.
        rebuilt = segments.with_tensors(*segments.tensors)
        prefixes = torch.stack(_prefixes(rebuilt, mine))
        assert torch.equal(rebuilt.prefix_sums({"x": mine})["x"], prefixes[0])
        assert len(segments.prefix({"x": mine}).run_totals.sums) == 2 * cp * sp
        turns = _turn_sums(rebuilt, mine)
        quantiles = _quantiles(segments, mine.detach().abs().float(), (mine.detach() > -1).float())
        tensors = (
            segments.token_index,
            mine.grad,
            pooled.lowest["x"],
            pooled.highest["x"],
            value.detach(),
            rest,
            prefixes,
            quantiles,
            turns,
        )
        found.append([tensor.numpy() for tensor in tensors])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_sharded_equals_whole(world):
    whole = torch.randn(OFFSETS[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for start, end in itertools.pairwise(OFFSETS):
        part = whole[start:end]
        total = total + (part.sum().tanh() * part).sum() + (end - start) * part.square().sum().sin()
        total = total + (part.detach().sum() * part).sum()
    total.backward()
    ends = [(s, e) for s, e in itertools.pairwise(OFFSETS)]
    for results in zip(*run_ranks(world, _over_ranks), strict=True):
        assert sorted(np.concatenate([index for index, *_ in results])) == list(range(OFFSETS[-1]))
        prefixes = _by_loops(whole.detach(), OFFSETS).numpy()
        usual = _of_each(whole.detach().abs().float(), (whole.detach() > -1).float(), OFFSETS).numpy()
        turns = _turns_by_loops(whole.detach(), OFFSETS).numpy()
        for index, grad, low, high, value, (again, lowest, highest), prefix, quantiles, turn in results:
            np.testing.assert_allclose(turn, turns[index], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(quantiles, usual, rtol=1e-14)
            np.testing.assert_allclose(prefix, prefixes[:, index], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(grad, whole.grad[index], rtol=1e-10, atol=1e-12)
            assert value == pytest.approx(total.item(), rel=1e-10)
            assert value.tobytes() == again.tobytes() == results[0][4].tobytes()
            assert low.tolist() == [whole[s:e].min().item() if e > s else np.inf for s, e in ends]
            assert high.tolist() == [whole[s:e].max().item() if e > s else -np.inf for s, e in ends]
            assert (lowest.item(), highest.item()) == (whole.min().item(), whole.max().item())


def _misfits(rank, world):
    """What each wrong set-up ends in on this rank."""
    import torch.distributed as dist

    every = dist.group.WORLD
    cp_group, sp_group = _groups(rank, 2, 2, "two")
    alone = [dist.new_group([r]) for r in range(world)][rank]
    half = {"cp_rank": rank // 2, "cp_size": 2}
    quarter = {**half, "sp_rank": rank % 2, "sp_size": 2}
    found = {}

    def attempt(name, statistics, offsets, groups, **shares):
        try:
            statistics(PackedSegments(offsets, groups=groups, **shares))
        except (ShapeError, RanksDisagreeError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    def pool(segments):
        segments.sum(torch.zeros(segments.token_index.shape))

    # Seen by each rank for itself, before any collective.
    attempt("size", pool, [0, 8], (every,), **half)
    attempt("rank", pool, [0, 8], (cp_group,), cp_rank=1 - rank // 2, cp_size=2)
    attempt("no share", pool, [0, 8], (every,))
    attempt("one of two", pool, [0, 8], (cp_group,), **quarter)
    attempt("order", pool, [0, 16], (alone, every), cp_rank=rank, cp_size=4)
    attempt("three", pool, [0, 8], (cp_group, sp_group, every), **quarter)
    # Seen by comparing, on all ranks.
    verify = PackedSegments.verify
    attempt("sequences", verify, [0, 8, 16] if rank else [0, 16], (every,), **quarter)
    attempt("lengths", verify, [0, 4, 16] if rank else [0, 12, 16], (cp_group, sp_group), **quarter)
    attempt("twice", verify, [0, 8], (every,), **half, sp_rank=0, sp_size=2)
    values = {
        "sample_mask": float(rank != 2),
        "rewards": 0.0 if rank else math.nan,
        "ages": math.nan if rank == 1 else 3,
    }
    for name, value in values.items():
        held = torch.tensor([1.0, value, math.nan])
        attempt(
            name,
            lambda segments, key=name, value=held: segments.verify(**{key: value}),
            [0, 8, 16, 24],
            (every,),
            **quarter,
        )
    PackedSegments([0, 8], groups=(every,), **quarter).verify(sample_mask=torch.ones(1), rewards=torch.zeros(1))
    assert PackedSegments([0, 8], groups=(alone,)).sum(torch.ones(8)).item() == 8  # all tokens, in a group of one rank
    return found


DIFFERING = {
    "sample_mask": "[1.0, 1.0, 0.0, 1.0]",
    "rewards": "[nan, 0.0, 0.0, 0.0]",
    "ages": "[3.0, nan, 3.0, 3.0]",
}


@pytest.mark.slow
def test_ranks_and_groups_that_do_not_fit_are_refused():
    results = run_ranks(4, _misfits)
    wrong = {"size", "rank", "no share", "one of two", "order", "three", "sequences", "lengths", "twice"}
    for rank, found in enumerate(results):
        assert set(found) == wrong | set(DIFFERING)
        assert f"(cp_rank, cp_size) is ({rank // 2}, 2)" in found["size"]
        assert "by rank, the number of sequences is [1, 2, 2, 2]; give all" in found["sequences"]
        assert "the lengths of the sequences on ranks [1, 2, 3] are not those on rank 0" in found["lengths"]
        assert (
            "hold the shards [0, 0, 1, 1] (sp_rank·cp_size + cp_rank), but together they must be 0 to 3, each"
            in (found["twice"])
        )
        compared = {"sequences", "lengths", "twice", *DIFFERING}
        assert {name for name, text in found.items() if text.startswith("RanksDisagreeError")} == compared
        for name, by_rank in DIFFERING.items():
            message = f"different {name} for the same sequences, the first is sequence 1 with {by_rank} by rank"
            assert message in found.pop(name)
