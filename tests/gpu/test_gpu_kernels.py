"""The compiled kernels on a GPU against float64: types, shapes, strides, large indices, poisoned memory, races."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from nemo_geomask.kernels import cpu, gpu
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.tools.bench.meters import count_host_syncs
from tests.helpers.memory import peak_memory

DEVICE = "cuda"
IGNORE = -100
VOCAB = 151_936
TYPES = [torch.float32, torch.bfloat16, torch.float16]
KERNELS = ["triton", "torch"]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def case(rows, width, dtype=torch.bfloat16, *, valid=None, seed=0, scale=4.0):
    """Logits, targets with an ignored row, incoming gradients with a row that a mask removed."""
    draw = torch.Generator(DEVICE).manual_seed(seed)
    logits = (torch.randn(rows, width, generator=draw, device=DEVICE) * scale).to(dtype)
    targets = torch.randint(0, valid or width, (rows,), generator=draw, device=DEVICE)
    g, h = torch.randn(2, rows, generator=draw, device=DEVICE)
    targets[-1] = (valid or width) - 1
    if rows > 3:
        targets[rows // 3] = IGNORE
        g[rows // 2] = h[rows // 2] = 0.0
    return logits, targets, g, h


def truth(logits, targets, g, h, *, temperature=1.0, valid=None):
    """Log-prob, entropy, gradient of Σ g·logp + h·H in float64, and the sum of the sizes of the gradient's terms."""
    found = []
    for part in zip(*(value.split(64) for value in (logits, targets, g, h)), strict=True):
        x, y, a, b = part
        kept = (y != IGNORE).double()
        z = x.double() / temperature
        if valid is not None:
            z[:, valid:] = -math.inf
        logp = z.log_softmax(1)
        p = logp.exp()
        curve = p * torch.where(p > 0, logp, 0.0)
        entropy = -curve.sum(1)
        own = y.where(y != IGNORE, torch.zeros_like(y)).unsqueeze(1)
        hot = torch.zeros_like(z).scatter_(1, own, 1.0)
        a, b = (a * kept).unsqueeze(1), (b * kept).unsqueeze(1)
        grad = (hot - p) * a - b * (curve + p * entropy.unsqueeze(1))
        size = (hot + p) * a.abs() + b.abs() * (p * entropy.unsqueeze(1) - curve)
        found.append((logp.gather(1, own).squeeze(1) * kept, entropy * kept, grad / temperature, size / temperature))
    return [torch.cat(values) for values in zip(*found, strict=True)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_default_device_plays_no_part(kernel):
    logits, targets, g, h = case(7, 300)
    expected = ours(logits, targets, g, h, kernel=kernel)
    with torch.device(DEVICE):
        found = ours(logits, targets, g, h, kernel=kernel)
    assert all(map(torch.equal, found, expected))


def ours(logits, targets, g, h, **options):
    leaf = logits.detach().requires_grad_()
    logp, entropy = vocab_parallel_logprobs(leaf, targets, entropy=True, ignore_index=IGNORE, **options)
    (grad,) = torch.autograd.grad([logp, entropy], leaf, [g, h])
    return logp.detach(), entropy.detach(), grad


def check(found, expected):
    """Log-prob and entropy to float32's accuracy; the gradient rounded once, to its own type."""
    for mine, true in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=2e-5, atol=2e-5)
    mine, true, size = found[2], *expected[2:]
    kind = torch.finfo(mine.dtype)
    # Half a unit in the last place, or half of the smallest step, and float32's error before terms cancel.
    allowed = 0.51 * kind.eps * (true.abs() + kind.tiny) + 2e-5 * size
    error = (mine.double() - true).abs()
    assert bool((error <= allowed).all()), float((error - allowed).max())


@pytest.fixture
def empty_is_nan():
    """``torch.empty`` and its kin return NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("rows", "width", "valid", "temperature"),
    [
        (37, VOCAB, None, 1.0),
        (37, VOCAB, 151_669, 0.7),
        (65, 5001, 4100, 1.3),
        (9, 65_537, None, 0.6),
        (5, 1, None, 1.0),
    ],
)
def test_equals_float64(kernel, dtype, rows, width, valid, temperature):
    inputs = case(rows, width, dtype, valid=valid)
    found = ours(*inputs, temperature=temperature, vocab_size=valid, kernel=kernel)
    check(found, truth(*inputs, temperature=temperature, valid=valid))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_few_rows(kernel, rows):
    inputs = case(rows, VOCAB, seed=rows)
    check(ours(*inputs, kernel=kernel), truth(*inputs))


def test_no_rows():
    logits, targets, g, h = (value[:0] for value in case(4, 100))
    logp, entropy, grad = ours(logits, targets, g, h, kernel="triton")
    assert logp.shape == entropy.shape == (0,)
    assert grad.shape == (0, 100)


@pytest.mark.parametrize("dtype", TYPES)
def test_columns_and_rows_may_lie_anywhere(dtype):
    logits, targets, g, h = case(12, 4501, dtype)
    expected = truth(logits, targets, g, h)
    wide = torch.zeros(12, 9002, dtype=dtype, device=DEVICE)
    wide[:, 1::2] = logits
    turned = logits.T.contiguous().T
    margin = torch.cat([logits, logits], dim=1)[:, :4501]
    shifted = torch.cat([logits.new_zeros(1), logits.reshape(-1)])[1:].view(12, 4501)
    for layout in (turned, wide[:, 1::2], margin, shifted):
        check(ours(layout, targets, g, h, kernel="triton"), expected)
    # Leading dimensions that can't be merged.
    split = torch.stack([logits.view(3, 4, -1), logits.view(3, 4, -1)])[0].transpose(0, 1)
    order = torch.arange(12, device=DEVICE).view(3, 4).T
    mine = ours(split, *(value[order] for value in (targets, g, h)), kernel="triton")
    check([value.flatten(0, 1) for value in mine], [value[order].flatten(0, 1) for value in expected])


def test_filtered_vocabulary():
    logits, targets, g, h = case(16, 9000)
    logits[:, 2000:7000] = -math.inf
    targets = targets.where((targets < 2000) | (targets >= 7000), torch.full_like(targets, 5))
    logits[3, 4100:] = -math.inf
    targets[3] = 17
    check(ours(logits, targets, g, h, kernel="triton"), truth(logits, targets, g, h))


def test_rows_that_do_not_train_are_not_read():
    logits, targets, g, h = case(24, VOCAB)
    clean = ours(logits, targets, g, h, kernel="triton")
    logits[targets == IGNORE] = math.nan
    for mine, other in zip(ours(logits, targets, g, h, kernel="triton"), clean, strict=True):
        assert torch.equal(mine, other)
    assert not clean[2][targets == IGNORE].any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_every_element_is_written(empty_is_nan, dtype, in_place):
    """What a kernel left out would be NaN."""
    assert torch.empty(1, dtype=dtype, device=DEVICE).isnan()
    inputs = case(64, 20_000, dtype, valid=19_000)
    expected = truth(*inputs, valid=19_000)
    leaf = inputs[0].clone().requires_grad_()
    logits = leaf * 1 if in_place else leaf
    logp, entropy = vocab_parallel_logprobs(
        logits, inputs[1], entropy=True, vocab_size=19_000, inplace_gradient=in_place, kernel="triton"
    )
    (grad,) = torch.autograd.grad([logp, entropy], logits, inputs[2:])
    check((logp.detach(), entropy.detach(), grad), expected)
    assert not grad[:, 19_000:].any()
    assert (grad.data_ptr() == logits.data_ptr()) == in_place


def test_gradient_in_place_is_the_same_to_the_bit():
    logits, targets, g, h = case(48, VOCAB)
    expected = ours(logits, targets, g, h, kernel="triton")
    leaf = logits.clone().requires_grad_()
    made = leaf * 1
    logp, entropy = vocab_parallel_logprobs(made, targets, entropy=True, inplace_gradient=True, kernel="triton")
    (grad,) = torch.autograd.grad([logp, entropy], leaf, [g, h])
    for mine, other in zip((logp.detach(), entropy.detach(), grad), expected, strict=True):
        assert torch.equal(mine, other)


def test_same_bits_every_time():
    inputs = case(512, VOCAB)
    first = ours(*inputs, kernel="triton")
    for _ in range(19):
        for mine, other in zip(ours(*inputs, kernel="triton"), first, strict=True):
            assert torch.equal(mine, other)


def test_row_alone_equals_row_in_a_batch_bit_for_bit():
    inputs = case(300, VOCAB)
    whole = ours(*inputs, kernel="triton")
    for row in (0, 7, 150, 299):
        alone = ours(*(value[row : row + 1] for value in inputs), kernel="triton")
        for mine, other in zip(alone, whole, strict=True):
            assert torch.equal(mine, other[row : row + 1])


def test_fold_of_shards():
    logits, targets, g, h = case(100, 8192)
    options = {"ignore_index": IGNORE, "inverse_temperature": 1 / 0.8, "entropy": True}
    parts = [
        gpu.row_statistics(shard, targets, start=1024 * index, **options)
        for index, shard in enumerate(logits.split(1024, dim=1))
    ]
    max_logit, sum_exp, target_logit, mean = merged = gpu.fold(torch.stack(parts), 1 / 0.8)
    torch.testing.assert_close(merged, cpu.fold(torch.stack(parts), 1 / 0.8), rtol=1e-5, atol=1e-5)
    logp, entropy, *_ = truth(logits, targets, g, h, temperature=0.8)
    kept = targets != IGNORE
    logprobs = (target_logit - max_logit) / 0.8 - sum_exp.log()
    torch.testing.assert_close(logprobs[kept].double(), logp[kept], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(mean[kept].double(), entropy[kept], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("offset", [0.0, 30.0, 1e3, 1e4, -1e4])
def test_digits_do_not_depend_on_the_size_of_the_logits(kernel, offset, temperature):
    logits, *rest = case(33, VOCAB, torch.float32, scale=3.0)
    inputs = (logits + offset, *rest)
    found = ours(*inputs, temperature=temperature, kernel=kernel)
    expected = truth(*inputs, temperature=temperature)
    for mine, true in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=2e-6)
    assert bool(((found[2].double() - expected[2]).abs() <= 1e-5 * expected[3] + 2e-6 / temperature).all())


ROWS_BEYOND_32_BITS = 16_384


def test_more_than_two_to_the_31_logits():
    rows = ROWS_BEYOND_32_BITS
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 5 * rows * VOCAB:
        pytest.skip("needs 12 GB of free GPU memory")
    assert DEVICE == "cpu" or rows * VOCAB > 2**31
    draw = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.empty(rows, VOCAB, dtype=torch.bfloat16, device=DEVICE).normal_(0, 4, generator=draw)
    _, targets, g, h = case(rows, 100)
    found = ours(logits, targets, g, h, kernel="triton")
    some = torch.tensor([0, 1, rows // 3, rows // 2, rows - 2, rows - 1], device=DEVICE)
    check([value[some] for value in found], truth(logits[some], targets[some], g[some], h[some]))
    for part in found[2].split(1024):
        assert bool(part.isfinite().all())


@pytest.mark.parametrize("width", [VOCAB, VOCAB // 8])
def test_extra_memory_is_a_few_bytes_a_token(width):
    rows = 4096
    logits, targets, g, _ = case(rows, width)
    leaf = logits.requires_grad_()

    def step():
        return torch.autograd.grad(
            vocab_parallel_logprobs(leaf, targets, ignore_index=IGNORE, kernel="triton"), leaf, g
        )[0]

    extra = peak_memory(step, leaf)
    assert extra <= 64 * rows


@pytest.mark.parametrize("validate", [False, True])
def test_the_host_never_waits_for_all_that_was_launched(validate):
    """The check of the targets waits for its own copy alone, which goes before the kernel."""
    logits, targets, g, _ = case(64, 1000)
    leaf = logits.requires_grad_()

    def step():
        found = vocab_parallel_logprobs(leaf, targets, ignore_index=IGNORE, validate=validate, kernel="triton")
        return torch.autograd.grad(found, leaf, g)[0]

    step()
    assert count_host_syncs(step) == 0
