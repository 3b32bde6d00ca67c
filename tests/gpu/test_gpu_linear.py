"""Log-probs from hidden states on a GPU against float64: types, tiles, memory, bits, and what makes the host wait."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from nemo_geomask.parallel import linear_logprobs
from nemo_geomask.tools.bench.meters import count_host_syncs
from tests.helpers.memory import peak_memory

DEVICE = "cuda"
IGNORE = -100

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def case(rows, width, size, dtype, seed=0):
    draw = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, device=DEVICE)

    hidden, weight = normal(rows, size).to(dtype), (normal(width, size) * 3 * size**-0.5).to(dtype)
    targets = torch.randint(0, width, (rows,), generator=draw, device=DEVICE)
    targets[::5] = IGNORE
    return hidden, weight, normal(width).to(dtype), targets, *normal(2, rows)


def truth(hidden, weight, bias, targets, g, h, temperature, softcap):
    leaves = [value.detach().double().requires_grad_() for value in (hidden, weight, bias)]
    x = leaves[0] @ leaves[1].T + leaves[2]
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    logp = (x / temperature).log_softmax(1)
    kept = targets != IGNORE
    own = logp.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    own, entropy = (torch.where(kept, value, 0.0) for value in (own, -(logp.exp() * logp).sum(1)))
    grads = torch.autograd.grad([own, entropy], leaves, [g.double(), h.double()])
    return [own.detach(), entropy.detach(), *grads]


def ours(hidden, weight, bias, targets, g, h, **options):
    leaves = [value.detach().requires_grad_() for value in (hidden, weight, bias)]
    found = linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2], entropy=True, **options)
    return [value.detach() for value in found] + list(torch.autograd.grad(found, leaves, [g, h]))


@pytest.mark.parametrize("tile_bytes", [1 << 18, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width", "size"), [(300, 20_000, 64), (5000, 1031, 128), (7, 3, 8)])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 20.0)])
def test_equals_float64(rows, width, size, dtype, temperature, softcap, tile_bytes):
    inputs = case(rows, width, size, dtype)
    found = ours(*inputs, temperature=temperature, softcap=softcap, tile_bytes=tile_bytes)
    expected = truth(*inputs, temperature, softcap)
    # Logits of size 10 in the weight's type, and what that does to a gradient whose terms cancel.
    eps = torch.finfo(dtype).eps
    for mine, true in zip(found[:2], expected[:2], strict=True):
        assert float((mine.double() - true).abs().max()) <= 20 * eps / temperature + 2e-5
    for mine, true in zip(found[2:], expected[2:], strict=True):
        assert float((mine.double() - true).norm() / true.norm()) <= 6 * eps / temperature + 1e-5


def test_rows_that_do_not_train_are_not_read():
    hidden, *rest = case(300, 20_000, 64, torch.bfloat16)
    clean = ours(hidden, *rest)
    poisoned = hidden.clone()
    poisoned[::5] = math.nan
    for mine, other in zip(ours(poisoned, *rest), clean, strict=True):
        assert torch.equal(mine, other)


def test_same_bits_every_time():
    inputs = case(2048, 50_000, 256, torch.bfloat16)
    first = ours(*inputs, tile_bytes=1 << 26)
    for _ in range(9):
        for mine, other in zip(ours(*inputs, tile_bytes=1 << 26), first, strict=True):
            assert torch.equal(mine, other)


def test_main_grad_holds_what_the_gradient_would():
    for rows, width in ((300, 20_000), (5000, 1031)):
        hidden, weight, bias, targets, g, h = case(rows, width, 64, torch.bfloat16)
        expected = truth(hidden, weight, bias, targets, g, h, 1.0, None)[3]
        main = torch.ones(weight.shape, device=DEVICE)
        leaf = weight.requires_grad_()
        found = linear_logprobs(hidden, leaf, targets, bias=bias, entropy=True, main_grad=main, tile_bytes=1 << 22)
        torch.autograd.backward(found, [g, h])
        assert leaf.grad is None
        assert float((main.double() - 1 - expected).norm() / expected.norm()) <= 0.02


def test_memory_is_a_tile_and_not_the_logits():
    rows, width, size = 8192, 151_936, 256
    hidden, weight, _, targets, g, _ = case(rows, width, size, torch.bfloat16)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def step():
        return torch.autograd.grad(linear_logprobs(*leaves, targets, tile_bytes=1 << 27), leaves, g)[1]

    extra = peak_memory(step, weight)
    # The tile, the hidden states' gradient in float32 and in its type, the trained rows.
    assert extra <= (1 << 27) + 10 * rows * size + 64 * rows + (1 << 20)


@pytest.mark.parametrize("validate", [False, True])
def test_the_host_waits_for_the_number_of_rows_alone(validate):
    """The check of the targets waits for its own copy."""
    hidden, weight, _, targets, g, _ = case(512, 5000, 64, torch.bfloat16)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def step():
        found = linear_logprobs(*leaves, targets, validate=validate, tile_bytes=1 << 20)
        return torch.autograd.grad(found, leaves, g)[0]

    step()
    assert count_host_syncs(step) == 1
