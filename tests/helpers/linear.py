"""Log-prob and entropy from hidden states: a case, the answer by loops in float64, ours."""

import math
from typing import NamedTuple

import numpy as np
import torch

from nemo_geomask.parallel import linear_logprobs
from tests.helpers.logprobs import IGNORE, loops


class Case(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    targets: torch.Tensor
    g: torch.Tensor
    h: torch.Tensor


def case(seed, rows=13, width=37, size=8, scale=1.0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, size, generator=draw) * scale
    weight, bias = torch.randn(width, size, generator=draw), torch.randn(width, generator=draw)
    targets = torch.randint(0, width, (rows,), generator=draw)
    targets[rows // 3] = IGNORE
    g, h = torch.randn(2, rows, generator=draw)
    g[rows // 2] = h[rows // 2] = 0.0  # a row that a mask removed
    return Case(hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets, g, h)


def by_loops(problem, *, bias=True, temperature=1.0, valid=None, softcap=None):
    """Log-prob, entropy and the gradients of Σ g·logp + h·H of hidden states, weight and bias."""
    hidden, weight, offset = (value.double().numpy() for value in problem[:3])
    rows, width = len(hidden), len(weight)
    logits, slope = np.zeros((rows, width)), np.ones((rows, width))
    for i in range(rows):
        for j in range(width):
            x = sum(a * b for a, b in zip(hidden[i], weight[j], strict=True)) + (offset[j] if bias else 0.0)
            if softcap is not None:
                slope[i, j] = 1 - math.tanh(x / softcap) ** 2
                x = softcap * math.tanh(x / softcap)
            logits[i, j] = x
    logp, entropy, grad = loops(
        logits, problem.targets, problem.g.double(), problem.h.double(), temperature=temperature, valid=valid
    )
    grad = grad * slope
    of_hidden, of_weight = np.zeros_like(hidden), np.zeros_like(weight)
    for i in range(rows):
        for j in range(width):
            of_hidden[i] += grad[i, j] * weight[j]
            of_weight[j] += grad[i, j] * hidden[i]
    return logp, entropy, of_hidden, of_weight, grad.sum(axis=0)


def ours(problem, *, bias=True, **options):
    leaves = [value.clone().requires_grad_() for value in problem[:3]]
    hidden, weight, offset = leaves
    logp, entropy = linear_logprobs(
        hidden,
        weight,
        problem.targets,
        bias=offset if bias else None,
        entropy=True,
        ignore_index=IGNORE,
        **options,
    )
    ((logp * problem.g).sum() + (entropy * problem.h).sum()).backward()
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [value.detach().double().numpy() for value in (logp, entropy, *grads)]


def check(found, expected, tolerance=2e-5):
    for mine, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, true, rtol=tolerance, atol=tolerance)
