"""Gated delta nets in plain torch against the recurrence that they are, token by token in float64."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from nemo_geomask.tools.rehearse.cpu_shims.delta_net_shim import delta_rule, normalized, short_conv
from nemo_geomask.tools.rehearse.cpu_shims.import_hook import SHIMS

HEADS, WIDTH, VALUES, TOKENS, CHANNELS, KERNEL = 3, 4, 5, 11, 6, 4
ENDS = [[TOKENS], [4, TOKENS], [1, 2, 7, TOKENS]]


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.fixture
def inputs():
    q, k, v, g, beta = tensors(
        (2, TOKENS, HEADS, WIDTH), (2, TOKENS, HEADS, WIDTH), (2, TOKENS, HEADS, VALUES), (2, TOKENS, HEADS), (HEADS,)
    )
    k = k / k.square().sum(-1, keepdim=True).sqrt()
    return q, k, v, -g.abs(), torch.sigmoid(beta).expand(2, TOKENS, HEADS)


def recurrence(q, k, v, g, beta, ends, scale):
    """[B, T, heads, VALUES]: S ← exp(g) S, S ← S + β k (v - Sᵀ k)ᵀ, o = scale · Sᵀ q; anew in each sequence."""
    rows = []
    for row in range(q.shape[0]):
        tokens = []
        for start, end in itertools.pairwise([0, *ends]):
            states = [torch.zeros(WIDTH, VALUES, dtype=torch.float64) for _ in range(HEADS)]
            for token in range(start, end):
                outputs = []
                for head in range(HEADS):
                    key = k[row, token, head]
                    decayed = torch.exp(g[row, token, head]) * states[head]
                    update = beta[row, token, head] * (v[row, token, head] - key @ decayed)
                    states[head] = decayed + key[:, None] * update[None]
                    outputs.append(scale * (q[row, token, head] @ states[head]))
                tokens.append(torch.stack(outputs))
        rows.append(torch.stack(tokens))
    return torch.stack(rows)


def offsets(ends):
    return None if len(ends) == 1 else torch.tensor([0, *ends])


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_delta_rule_is_the_recurrence_of_each_sequence(inputs, ends, scale):
    expected = recurrence(*inputs, ends, WIDTH**-0.5 if scale is None else scale)
    q, k, v, g, beta = inputs
    got, state = delta_rule(q=q, k=k, v=v, g=g, beta=beta, scale=scale, cu_seqlens=offsets(ends), initial_state=None)
    assert state is None
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_recurrence(inputs):
    ours, theirs = ([part.clone().requires_grad_() for part in inputs] for _ in range(2))
    weights = tensors((2, TOKENS, HEADS, VALUES), seed=1)[0]
    got, _ = delta_rule(*ours, cu_seqlens=offsets(ENDS[2]))
    expected = recurrence(*theirs, ENDS[2], WIDTH**-0.5)
    for mine, other in zip(
        torch.autograd.grad((got * weights).sum(), ours),
        torch.autograd.grad((expected * weights).sum(), theirs),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ends", ENDS)
def test_the_convolution_stays_within_a_sequence(ends):
    x, weight, bias = tensors((1, TOKENS, CHANNELS), (CHANNELS, KERNEL), (CHANNELS,))
    got, state = short_conv(x, weight, bias, "silu", cu_seqlens=offsets(ends), output_final_state=False)
    assert state is None
    for start, end in itertools.pairwise([0, *ends]):
        for token in range(start, end):
            mixed = bias.clone()
            for back in range(min(KERNEL, token - start + 1)):
                mixed = mixed + weight[:, KERNEL - 1 - back] * x[0, token - back]
            torch.testing.assert_close(got[0, token], mixed * torch.sigmoid(mixed), rtol=1e-5, atol=1e-5)


def test_vectors_have_norm_one():
    (x,) = tensors((2, 3, WIDTH))
    expected = torch.stack([vector / (vector @ vector + 1e-6) ** 0.5 for vector in x.reshape(-1, WIDTH)])
    torch.testing.assert_close(normalized(x).reshape(-1, WIDTH), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_megatrons_layer_gets_the_functions():
    pytest.importorskip("megatron.core.ssm.gated_delta_net.common")
    assert "megatron.core.ssm.gated_delta_net.common" in SHIMS
    code = """
import nemo_geomask.tools.rehearse.cpu_shims as shims; shims.register()
from megatron.core.ssm.gated_delta_net import common, gdn
from nemo_geomask.tools.rehearse.cpu_shims import delta_net_shim
print(common.HAVE_FLA, gdn.chunk_gated_delta_rule is delta_net_shim.delta_rule)
print(gdn.causal_conv1d is delta_net_shim.short_conv, gdn.l2norm is delta_net_shim.normalized)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True"] * 4, done.stderr
