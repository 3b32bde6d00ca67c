"""Log-probs from hidden states: loops in float64, every tile shape, real ranks, what is never read."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nemo_geomask.errors import ArgumentError, DataError, RanksDisagreeError, ShapeError
from nemo_geomask.parallel import linear_logprobs, vocab_parallel_logprobs
from nemo_geomask.parallel.linear import TILE_BYTES
from nemo_geomask.parallel.local_processes import run_ranks
from nemo_geomask.parallel.logit_tiles import TileBuffer, iterate_tiles, to_product_dtype
from tests.helpers.linear import by_loops, case, check, ours
from tests.helpers.logprobs import IGNORE
from tests.helpers.memory import peak_memory

# One logit at a time, tiles that don't fit evenly, one for all.
TILES = [1, 300, 777, 1 << 20]


@pytest.mark.parametrize("tile_bytes", TILES)
@pytest.mark.parametrize("shape", [(13, 37), (37, 13)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_loops(shape, temperature, tile_bytes):
    rows, width = shape
    problem = case(0, rows, width)
    found = ours(problem, temperature=temperature, tile_bytes=tile_bytes)
    check(found, by_loops(problem, temperature=temperature))


@pytest.mark.parametrize("tile_bytes", [777, 1 << 20])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0, 0.5])
@pytest.mark.parametrize("valid", [None, 30])
def test_bias_softcap_and_padded_vocabulary(bias, softcap, valid, tile_bytes):
    problem = case(1)
    problem = problem._replace(targets=problem.targets.where(problem.targets < 30, torch.tensor(7)))
    found = ours(problem, bias=bias, softcap=softcap, vocab_size=valid, tile_bytes=tile_bytes)
    check(
        found, by_loops(problem, bias=bias, softcap=softcap, valid=valid)[: 5 if bias else 4] + (() if bias else (0,))
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(13, 37), (37, 13)])
def test_gradcheck(shape):
    rows, width = shape
    hidden, weight, bias, targets, *_ = case(2, rows // 3, width // 3, size=3, scale=0.5)

    def both(*leaves):
        return linear_logprobs(
            leaves[0], leaves[1], targets, bias=leaves[2], entropy=True, temperature=0.8, softcap=4.0, tile_bytes=64
        )

    leaves = [value.double().requires_grad_() for value in (hidden, weight, bias)]
    torch.autograd.gradcheck(both, leaves, eps=1e-2, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile_bytes", [777, 1 << 20])
def test_half_precision_loses_what_its_type_rounds(dtype, tile_bytes):
    problem = case(3, dtype=dtype)
    found = ours(problem, tile_bytes=tile_bytes)
    expected = by_loops(problem)
    # On a CPU the logits are float32's: only the gradients are rounded, each once.
    check(found[:2], expected[:2])
    for mine, true in zip(found[2:], expected[2:], strict=True):
        assert (np.abs(mine - true) <= 0.51 * torch.finfo(dtype).eps * np.abs(true) + 2e-5).all()


@pytest.mark.parametrize("shape", [(13, 37), (37, 13)])
def test_rows_that_do_not_train_are_never_read(shape):
    problem = case(4, *shape)
    targets = problem.targets.clone()
    targets[::2] = IGNORE
    problem = problem._replace(targets=targets)
    clean = ours(problem, tile_bytes=777)
    hidden = problem.hidden.clone()
    hidden[targets == IGNORE] = math.nan
    for mine, other in zip(ours(problem._replace(hidden=hidden), tile_bytes=777), clean, strict=True):
        assert np.array_equal(mine, other)
    assert not clean[0][::2].any()
    assert not clean[2][::2].any()
    check(clean, by_loops(problem))


def test_the_default_device_plays_no_part():
    problem = case(4)
    expected = ours(problem)
    logits = (problem.hidden @ problem.weight.T).requires_grad_()
    logp = vocab_parallel_logprobs(logits, problem.targets, ignore_index=IGNORE)
    with torch.device("meta"):
        found = ours(problem)
        again = vocab_parallel_logprobs(logits, problem.targets, ignore_index=IGNORE)
    assert all(map(np.array_equal, found, expected))
    assert torch.equal(again, logp)


def test_only_trained_rows_enter_the_products(monkeypatch):
    problem = case(5, rows=64)
    targets = torch.full_like(problem.targets, IGNORE)
    targets[10:23] = problem.targets[10:23]
    seen = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **more: (seen.append(len(a)), mm(a, b, **more))[1])
    linear_logprobs(problem.hidden, problem.weight, targets, tile_bytes=4000)
    assert set(seen) == {12}  # of the 13, one is the case's own


def test_no_row_trains():
    problem = case(6)
    for value in ours(problem._replace(targets=torch.full_like(problem.targets, IGNORE))):
        assert not value.any()


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e4, -1e4])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_digits_do_not_depend_on_the_size_of_the_logits(offset, temperature):
    # Whole numbers: the product itself is exact.
    draw = torch.Generator().manual_seed(7)
    problem = case(7)
    hidden = torch.randint(-3, 4, problem.hidden.shape, generator=draw).float()
    weight = torch.randint(-2, 3, problem.weight.shape, generator=draw).float()
    problem = problem._replace(hidden=hidden, weight=weight, bias=torch.full_like(problem.bias, offset))
    found = ours(problem, temperature=temperature, tile_bytes=300)
    expected = by_loops(problem, temperature=temperature)
    check(found[:2], expected[:2], 1e-5)
    check(found[2:], expected[2:], 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_default_dtype_changes_nothing(default_dtype, dtype):
    problem = case(8)
    expected = ours(problem, tile_bytes=777)
    default_dtype(dtype)
    for mine, other in zip(ours(problem, tile_bytes=777), expected, strict=True):
        assert np.array_equal(mine, other)


def test_equals_the_function_of_logits():
    problem = case(9, rows=12)
    mine = linear_logprobs(problem.hidden.view(3, 4, -1), problem.weight, problem.targets.view(3, 4), temperature=0.7)
    assert mine.shape == (3, 4)
    assert mine.dtype == torch.float32
    logits = problem.hidden @ problem.weight.T
    torch.testing.assert_close(mine.view(-1), vocab_parallel_logprobs(logits, problem.targets, temperature=0.7))


def test_weight_gradient_goes_into_main_grad():
    for shape in ((13, 37), (37, 13)):
        problem = case(10, *shape, dtype=torch.bfloat16)
        main = torch.full(problem.weight.shape, 0.25)
        found = ours(problem, main_grad=main, tile_bytes=300)
        expected = by_loops(problem)
        assert not found[3].any()
        np.testing.assert_allclose(main.double().numpy() - 0.25, expected[3], rtol=2e-5, atol=2e-5)
        check(found[:2], expected[:2])


def test_frozen_tensors_cost_nothing():
    problem = case(11)
    hidden = problem.hidden.clone().requires_grad_()
    logp = linear_logprobs(hidden, problem.weight, problem.targets, tile_bytes=300)
    logp.sum().backward()
    assert hidden.grad is not None
    assert not linear_logprobs(problem.hidden, problem.weight, problem.targets).requires_grad


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_each_gradient_by_itself(trained):
    problem = case(11)
    tensors = {name: getattr(problem, name).clone() for name in ("hidden", "weight", "bias")}
    tensors[trained].requires_grad_()
    logp = linear_logprobs(tensors["hidden"], tensors["weight"], problem.targets, bias=tensors["bias"], tile_bytes=300)
    logp.backward(problem.g)
    no_entropy = problem._replace(h=torch.zeros_like(problem.h))
    expected = dict(zip(("hidden", "weight", "bias"), by_loops(no_entropy)[2:], strict=True))
    np.testing.assert_allclose(tensors[trained].grad.numpy(), expected[trained], rtol=2e-5, atol=2e-5)
    assert all(value.grad is None for name, value in tensors.items() if name != trained)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_half_precision_bias_is_summed_in_float32(dtype):
    # Thousands of rows in many tiles, each with a gradient of about -1 + 1/2: half precision would stop at 256 or 2048.
    rows = 8192
    hidden, weight = torch.zeros(rows, 4), torch.zeros(2, 4)
    bias = torch.zeros(2, dtype=dtype).requires_grad_()
    logp = linear_logprobs(hidden, weight, torch.ones(rows, dtype=torch.int64), bias=bias, tile_bytes=64)
    logp.sum().backward()
    assert bias.grad.dtype == dtype
    assert bias.grad.tolist() == [-rows / 2, rows / 2]


def test_hidden_states_of_another_type_are_taken_as_the_layer_would():
    problem = case(12, dtype=torch.bfloat16)
    wide = (1.001 * problem.hidden.float()).requires_grad_()  # more digits than bfloat16 has
    logp = linear_logprobs(wide, problem.weight, problem.targets)
    logp.sum().backward()
    assert wide.grad.dtype == torch.float32
    assert torch.equal(logp.detach(), linear_logprobs(wide.detach().bfloat16(), problem.weight, problem.targets))


def test_matrix_products_are_in_float32_where_a_cpu_is_slow():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert to_product_dtype(torch.ones(2, 3, dtype=dtype)).dtype == torch.float32
    assert to_product_dtype(torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float64


# Rows, columns, weight of another type, tile_bytes; then the side that is divided, and the length of its steps. A tile
# has the whole shorter side, which counts as the next power of two, and 4 bytes for each logit.
TILE_SIZES = {
    "multiples of 256 columns": (100, 1000, False, 4 * 128 * 600, "columns", 512),
    "exactly two multiples": (100, 1000, False, 4 * 128 * 512, "columns", 512),
    "of rows": (1000, 100, False, 4 * 128 * 600, "rows", 512),
    "fewer than 256": (100, 1000, False, 4 * 128 * 100, "columns", 100),
    "at least one": (100, 1000, False, 1, "columns", 1),
    "no more than there are": (100, 1000, False, 1 << 30, "columns", 1000),
    "a square by columns": (300, 300, False, 4 * 512 * 100, "columns", 100),
    "a power of two": (128, 1000, False, 4 * 128 * 512, "columns", 512),
    "one more than a power of two": (129, 1000, False, 4 * 256 * 512, "columns", 512),
    "with two copies of the weight's rows": (100, 1000, True, 4 * (128 + 2 * 64) * 512, "columns", 512),
    "of rows, with the weight copied once": (1000, 100, True, 4 * 128 * 512, "rows", 512),
}


@pytest.mark.parametrize("name", TILE_SIZES)
@pytest.mark.parametrize("backward", [False, True])
def test_a_tile_has_the_size_that_it_was_given(name, backward):
    rows, columns, is_converted, tile_bytes, divided, step = TILE_SIZES[name]
    weight = torch.ones(columns, 64, dtype=torch.bfloat16 if is_converted else torch.float32)
    buffer = TileBuffer()
    options = {"valid_columns": columns, "tile_bytes": tile_bytes, "softcap": None, "backward": backward}
    starts = []
    for tile in iterate_tiles(torch.ones(rows, 64), weight, None, buffer, **options):
        starts.append(getattr(tile, divided).start)
        whole = tile.rows if divided == "columns" else tile.columns
        assert whole == slice(0, min(rows, columns))
        # What the backward pass has overwritten is no tile of a forward pass any more.
        assert buffer.start == (None if backward else starts[-1])
    assert sorted(starts) == list(range(0, max(rows, columns), step))
    assert starts == sorted(starts, reverse=backward)
    assert len(buffer.memory) == min(rows, columns) * step


def test_the_size_of_a_tile_is_by_default_that_of_the_device(monkeypatch):
    problem = case(22)
    products = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **more: (products.append(b.shape), mm(a, b, **more))[1])
    for size, is_divided in ((300, True), (1 << 20, False)):
        monkeypatch.setitem(TILE_BYTES, "cpu", size)
        products.clear()
        linear_logprobs(problem.hidden, problem.weight, problem.targets)
        assert (len(products) > 1) == is_divided


def test_same_bits_every_time():
    problem = case(13, rows=64, width=300)
    first = ours(problem, tile_bytes=5000)
    for mine, other in zip(ours(problem, tile_bytes=5000), first, strict=True):
        assert np.array_equal(mine, other)


@pytest.mark.slow
def test_memory_is_a_tile_and_not_the_logits():
    rows, width, size = 1024, 40_000, 64
    draw = torch.Generator().manual_seed(14)
    hidden = torch.randn(rows, size, generator=draw).requires_grad_()
    weight = (torch.randn(width, size, generator=draw) / 8).requires_grad_()
    targets = torch.randint(0, width, (rows,), generator=draw)

    def step():
        return torch.autograd.grad(linear_logprobs(hidden, weight, targets).sum(), [hidden, weight])[1]

    extra = peak_memory(step, weight)
    assert extra <= 0.5 * rows * width * 4  # three tensors of the logits' size where they exist


@pytest.mark.slow
def test_float32_copies_count_as_part_of_the_tile():
    rows, width, size = 64, 20_000, 512
    draw = torch.Generator().manual_seed(15)
    hidden = torch.randn(rows, size, generator=draw).bfloat16().requires_grad_()
    weight = (torch.randn(width, size, generator=draw) / 8).bfloat16().requires_grad_()
    targets = torch.randint(0, width, (rows,), generator=draw)

    def step():
        logprobs = linear_logprobs(hidden, weight, targets, tile_bytes=4 << 20)
        return torch.autograd.grad(logprobs.sum(), [hidden, weight])[1]

    extra = peak_memory(step, weight)
    # Its part of the weight and that part's gradient alone would be 64 MB where the tile of logits is 4.
    assert extra <= 16 << 20


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(13, 7)}, ShapeError, r"hidden must be \[\.\.\., H\], weight \[V/TP, H\].*\[13, 7\]"),
        ({"weight": torch.zeros(37)}, ShapeError, r"weight \[V/TP, H\]"),
        ({"hidden": torch.zeros(8)}, ShapeError, r"hidden must be \[\.\.\., H\].*\[8\]"),
        ({"targets": torch.zeros(12, dtype=torch.int64)}, ShapeError, r"the same leading shape.* and \[12\]$"),
        *(
            ({name: [0.0]}, ShapeError, f"^{name} must be a tensor, but it is a list")
            for name in ("hidden", "weight", "targets", "bias", "main_grad")
        ),
        ({"targets": torch.zeros(13)}, ShapeError, "targets int64"),
        ({"hidden": torch.zeros(13, 8, dtype=torch.int64)}, ShapeError, "must be floating point"),
        ({"bias": torch.zeros(36)}, ShapeError, r"bias must be floating point \[37\]"),
        ({"main_grad": torch.zeros(37, 8, dtype=torch.bfloat16)}, ShapeError, r"main_grad must be float32 \[37, 8\]"),
        ({"weight": torch.zeros(37, 8, device="meta")}, ShapeError, "hidden is on cpu, weight is on meta; move them"),
        ({"bias": torch.zeros(37, device="meta")}, ShapeError, "hidden is on cpu, bias is on meta; move them"),
        (
            {"weight": torch.zeros(37, 8, device="meta"), "bias": torch.zeros(37, device="meta")},
            ShapeError,
            "hidden is on cpu, weight is on meta, bias is on meta; move them",
        ),
        (
            {
                "hidden": torch.zeros(13, 8, device="meta"),
                "weight": torch.zeros(37, 8, device="meta"),
                "targets": torch.zeros(13, dtype=torch.int64, device="meta"),
            },
            ShapeError,
            "must be on one device that holds data, but hidden is on meta; move them",
        ),
        ({"temperature": 0.0}, ArgumentError, "temperature must be above 0"),
        ({"softcap": 0.0}, ArgumentError, "softcap must be above 0"),
        ({"softcap": math.inf}, ArgumentError, "softcap must be above 0 and finite"),
        ({"softcap": -1.0}, ArgumentError, "softcap must be above 0"),
        ({"tile_bytes": 0}, ArgumentError, "tile_bytes must be above 0"),
        ({"vocab_size": 38}, ArgumentError, "vocab_size must be from 1 to the 37"),
        ({"sequence_parallel": True}, ArgumentError, "group is None"),
        ({"kernel": "fast"}, ArgumentError, "kernel must be one of"),
        ({"targets": torch.full((13,), 37)}, DataError, "13 targets are in no vocabulary shard"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, error, message):
    problem = case(15)
    given = {"hidden": problem.hidden, "weight": problem.weight, "targets": problem.targets, **change}
    with pytest.raises(error, match=message):
        linear_logprobs(given.pop("hidden"), given.pop("weight"), given.pop("targets"), **given)


@pytest.mark.slow
def test_interpreted_kernels_equal_loops():
    pytest.importorskip("triton", reason="triton is not installed")
    from nemo_geomask.kernels import gpu

    if not gpu.INTERPRETED:
        pytest.skip("triton runs without its interpreter here")
    problem = case(16)
    found = ours(problem, temperature=0.7, vocab_size=36, tile_bytes=777, kernel="triton")
    check(found, by_loops(problem, temperature=0.7, valid=36))


# Columns of each rank, valid ones, sequence-parallel.
LAYOUTS = {
    1: [([37], None, True)],
    2: [([20, 17], None, False), ([30, 7], 35, True), ([37, 0], None, False)],
    4: [([10, 9, 9, 9], None, True), ([12, 12, 12, 1], 30, False)],
}


def _problem(valid):
    problem = case(17, rows=16, dtype=torch.float32)
    return problem._replace(targets=problem.targets.where(problem.targets < (valid or 37), torch.tensor(3)))


def _sharded(rank, world):
    found = []
    for sizes, valid, sequence_parallel in LAYOUTS[world]:
        problem = _problem(valid)
        columns = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        rows = problem.hidden.chunk(world)[rank] if sequence_parallel else problem.hidden
        mine = problem._replace(hidden=rows, weight=problem.weight[columns], bias=problem.bias[columns])
        found.append(
            ours(
                mine,
                temperature=0.7,
                vocab_size=valid,
                shard_sizes=sizes,
                sequence_parallel=sequence_parallel,
                group=dist.group.WORLD,
                tile_bytes=300 if rank else 777,
            )
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_sharded_equals_whole_on_every_rank(world):
    results = run_ranks(world, _sharded)
    for index, (sizes, valid, sequence_parallel) in enumerate(LAYOUTS[world]):
        logp, entropy, of_hidden, of_weight, of_bias = by_loops(_problem(valid), temperature=0.7, valid=valid)
        for rank in range(world):
            mine = results[rank][index]
            columns = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            rows = slice(rank * 16 // world, (rank + 1) * 16 // world) if sequence_parallel else slice(None)
            check(mine, (logp, entropy, of_hidden[rows], of_weight[columns], of_bias[columns]))
            assert np.array_equal(mine[0], results[0][index][0])


def _two_groups(rank, world):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    place, columns = rank % 2, slice(19 * (rank % 2), 37 if rank % 2 else 19)
    problem = case(21 + rank // 2, rows=16)
    options = {"shard_sizes": [19, 18], "group": groups[rank // 2], "tile_bytes": 300}
    shard = problem._replace(weight=problem.weight[columns], bias=problem.bias[columns])
    whole_rows = ours(shard, **options)
    shard = shard._replace(hidden=problem.hidden.chunk(2)[place])
    return whole_rows, ours(shard, **options, sequence_parallel=True)


@pytest.mark.slow
def test_sharded_equals_whole_on_every_rank_of_two_groups():
    for rank, (whole_rows, shard_of_rows) in enumerate(run_ranks(4, _two_groups)):
        logp, entropy, of_hidden, of_weight, of_bias = by_loops(case(21 + rank // 2, rows=16))
        columns = slice(19 * (rank % 2), 37 if rank % 2 else 19)
        rows = slice(8 * (rank % 2), 8 * (rank % 2) + 8)
        check(whole_rows, (logp, entropy, of_hidden, of_weight[columns], of_bias[columns]))
        check(shard_of_rows, (logp, entropy, of_hidden[rows], of_weight[columns], of_bias[columns]))


def _disagreeing(rank, world):
    problem = case(18, width=16)
    targets = problem.targets.clone()
    targets[5:7] = IGNORE if rank else 3
    columns = slice(8 * rank, 8 * rank + 8)
    with pytest.raises(RanksDisagreeError, match="are not rank 0's"):
        linear_logprobs(problem.hidden, problem.weight[columns], targets, group=dist.group.WORLD)
    options = {"group": dist.group.WORLD, "sequence_parallel": True}
    with pytest.raises(ShapeError, match=r"and \[13\]; under sequence_parallel targets are 2 times as long$"):
        linear_logprobs(problem.hidden, problem.weight[columns], targets, **options)


@pytest.mark.slow
def test_ranks_that_train_other_rows_are_told():
    run_ranks(2, _disagreeing)


def _counted(rank, world):
    from torch.distributed.tensor.debug import CommDebugMode  # imported here, since it takes a second

    problem = case(19, rows=16, width=16)
    found = []
    for sequence_parallel in (False, True):
        rows = problem.hidden.chunk(world)[rank] if sequence_parallel else problem.hidden
        hidden = rows.clone().requires_grad_()
        weight = problem.weight[8 * rank : 8 * rank + 8].clone().requires_grad_()
        options = {"group": dist.group.WORLD, "sequence_parallel": sequence_parallel, "tile_bytes": 100}
        with CommDebugMode() as forward:
            logp = linear_logprobs(hidden, weight, problem.targets, **options)
        with CommDebugMode() as backward:
            logp.sum().backward()
        found.append((forward.get_total_counts(), backward.get_total_counts()))
    return found


@pytest.mark.slow
def test_two_collectives_forward_and_one_backward():
    # Sequence parallelism's own gathering of the hidden states is one more.
    assert run_ranks(2, _counted) == [[(2, 1), (3, 1)]] * 2


def test_a_second_backward_pass_finds_the_same(monkeypatch):
    """The last tile of the forward pass is taken over by the first backward pass alone."""
    problem = case(20)
    hidden, weight = problem.hidden.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    products = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **more: (products.append(b.shape), mm(a, b, **more))[1])
    logp = linear_logprobs(hidden, weight, problem.targets, tile_bytes=777)
    forward = sum(shape[0] == hidden.shape[1] for shape in products)
    products.clear()
    first = torch.autograd.grad(logp, [hidden, weight], problem.g, retain_graph=True)
    assert forward > 2
    assert sum(shape[0] == hidden.shape[1] for shape in products) == forward - 1
    for mine, other in zip(torch.autograd.grad(logp, [hidden, weight], problem.g), first, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("logits", [False, True])
def test_a_second_derivative_is_refused(logits):
    """autograd takes the incoming gradient of a plain sum for constant, and the second derivative for 0."""
    problem = case(21)
    hidden = problem.hidden.clone().requires_grad_()
    if logits:
        logp = vocab_parallel_logprobs(hidden @ problem.weight.T, problem.targets)
    else:
        logp = linear_logprobs(hidden, problem.weight, problem.targets)
    with pytest.raises(ArgumentError, match="differentiated once"):
        torch.autograd.grad(logp.sum(), hidden, create_graph=True)
