"""Log-probs over the sampler's kept sets, against loops in float64, on one rank and with a sharded vocabulary."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nemo_geomask.errors import ArgumentError, DataError, ShapeError
from nemo_geomask.parallel import SampledSupport, linear_logprobs, vocab_parallel_logprobs
from nemo_geomask.parallel.local_processes import run_ranks

VOCAB, WIDTH, ROWS = 11, 6, 9
IGNORED = 4


def problem():
    """Hidden states, weight, targets and kept sets of different sizes; one row is ignored and has an empty set."""
    draw = torch.Generator().manual_seed(7)
    hidden = torch.randn(ROWS, WIDTH, generator=draw)
    weight = torch.randn(VOCAB, WIDTH, generator=draw)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=draw)
    sets = [sorted({int(target), *range(row % 3, VOCAB, 2 + row % 4)}) for row, target in enumerate(targets)]
    sets[IGNORED], targets[IGNORED] = [], -100
    offsets = torch.tensor([0, *np.cumsum([len(ids) for ids in sets])])
    return hidden, weight, targets, sets, SampledSupport(torch.tensor([j for ids in sets for j in ids]), offsets)


def by_loops(logits, targets, sets, temperature):
    """Log-probs, and the gradient of their sum by the logits."""
    logprobs, gradient = np.zeros(len(logits)), np.zeros(logits.shape)
    for row, ids in enumerate(sets):
        if not ids:
            continue
        exponentials = {j: math.exp(logits[row, j] / temperature) for j in ids}
        total = sum(exponentials.values())
        logprobs[row] = logits[row, targets[row]] / temperature - math.log(total)
        for j in ids:
            gradient[row, j] = ((j == targets[row]) - exponentials[j] / total) / temperature
    return logprobs, gradient


def test_the_example():
    logits, target = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([1])
    kept = SampledSupport(torch.tensor([0, 1]), torch.tensor([0, 2]))
    assert vocab_parallel_logprobs(logits, target).item() == pytest.approx(-1.4402, abs=1e-4)
    assert vocab_parallel_logprobs(logits, target, support=kept).item() == pytest.approx(-1.3133, abs=1e-4)


def _on_rank(rank, world):
    import torch.distributed as dist

    hidden, weight, targets, _, support = problem()
    sizes = [VOCAB // world + (r < VOCAB % world) for r in range(world)]
    start = sum(sizes[:rank])
    group = dist.group.WORLD if world > 1 else None
    options = {"support": support, "temperature": 0.7, "group": group, "shard_sizes": sizes}
    columns = slice(start, start + sizes[rank])
    logits = (hidden @ weight[columns].T).requires_grad_()
    logprobs = vocab_parallel_logprobs(logits, targets, **options)
    logprobs.sum().backward()
    h, w = hidden.clone().requires_grad_(), weight[columns].clone().requires_grad_()
    again = linear_logprobs(h, w, targets, tile_bytes=4 * WIDTH * 5, **options)
    again.sum().backward()
    return [x.detach().numpy() for x in (logprobs, logits.grad, again, h.grad, w.grad)]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_values_and_gradients_equal_loops(world):
    hidden, weight, targets, sets, _ = problem()
    logits = (hidden.double() @ weight.double().T).numpy()
    logprobs, gradient = by_loops(logits, targets.tolist(), sets, 0.7)
    results = run_ranks(world, _on_rank) if world > 1 else [_on_rank(0, 1)]
    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(np.concatenate([r[1] for r in results], axis=1), gradient, **close)
    np.testing.assert_allclose(np.concatenate([r[4] for r in results]), gradient.T @ hidden.double().numpy(), **close)
    for found, _, again, by_hidden, _ in results:
        np.testing.assert_allclose(found, logprobs, **close)
        np.testing.assert_allclose(again, logprobs, **close)
        np.testing.assert_allclose(by_hidden, gradient @ weight.double().numpy(), **close)
    assert logprobs[IGNORED] == 0


def test_what_does_not_fit_is_refused():
    hidden, weight, targets, _, support = problem()
    logits = hidden @ weight.T
    with pytest.raises(ShapeError, match=r"offsets \[10\], one more than there are targets"):
        vocab_parallel_logprobs(logits, targets, support=support._replace(offsets=support.offsets[:-1]))
    with pytest.raises(DataError, match="is not among the token_ids that the sampler kept"):
        vocab_parallel_logprobs(logits, (targets + 1).clamp(min=0) % VOCAB, support=support)
    with pytest.raises(ArgumentError, match="entropy is that of the whole vocabulary"):
        vocab_parallel_logprobs(logits, targets, support=support, entropy=True)
    with pytest.raises(ArgumentError, match="support can't be combined with sequence_parallel or main_grad"):
        linear_logprobs(hidden, weight, targets, support=support, main_grad=torch.zeros_like(weight))
