"""Log-prob and entropy of rows of logits: a case, the answer by loops in float64, ours, and their comparison."""

import math

import numpy as np
import torch

from nemo_geomask.parallel import vocab_parallel_logprobs

IGNORE = -100


def loops(logits, targets, g, h, *, temperature=1.0, valid=None):
    """Log-prob, entropy and gradient of Σ g·logp + h·H, row by row in float64."""
    rows, width = logits.shape
    valid = width if valid is None else valid
    logp, entropy, grad = np.zeros(rows), np.zeros(rows), np.zeros((rows, width))
    for i in range(rows):
        if targets[i] == IGNORE:
            continue
        z = [float(logits[i, j]) / temperature for j in range(valid)]
        peak = max(z)
        lse = peak + math.log(sum(math.exp(value - peak) for value in z))
        p = [math.exp(value - lse) for value in z]
        logp[i] = z[targets[i]] - lse
        entropy[i] = -sum(q * (value - lse) for q, value in zip(p, z, strict=True) if q > 0)
        for j in range(valid):
            own = 1.0 if j == targets[i] else 0.0
            curve = p[j] * (z[j] - lse + entropy[i]) if p[j] > 0 else 0.0
            grad[i, j] = (g[i] * (own - p[j]) - h[i] * curve) / temperature
    return logp, entropy, grad


def case(seed, rows=13, width=37, scale=4.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, generator=generator) * scale
    targets = torch.randint(0, width, (rows,), generator=generator)
    targets[rows // 3] = IGNORE
    g, h = torch.randn(2, rows, generator=generator)
    g[rows // 2] = h[rows // 2] = 0.0  # a row that a mask removed
    return logits, targets, g, h


def ours(logits, targets, g, h, **options):
    leaf = logits.clone().requires_grad_()
    logp, entropy = vocab_parallel_logprobs(leaf, targets, entropy=True, ignore_index=IGNORE, **options)
    ((logp * g).sum() + (entropy * h).sum()).backward()
    return logp.detach().numpy(), entropy.detach().numpy(), leaf.grad.float().numpy()


def check(found, expected, tolerance=2e-5):
    for mine, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, true, rtol=tolerance, atol=tolerance)


def shifted(seed, offset, **shape):
    """A case whose logits lie around ``offset``."""
    logits, *rest = case(seed, scale=3.0, **shape)
    return (logits + offset, *rest)


def check_digits(found, expected, temperature):
    """To 1e-5 of the value; near 0, where float32 itself ends, to 2e-6 nats, of the gradient to as much times 1/T."""
    for index, (mine, true) in enumerate(zip(found, expected, strict=True)):
        floor = 2e-6 * (max(1.0, 1 / temperature) if index == 2 else 1.0)
        np.testing.assert_allclose(mine, true, rtol=1e-5, atol=floor)
