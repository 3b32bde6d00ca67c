"""State spaces in plain torch against the recurrence that they are, token by token in float64."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from nemo_geomask.tools.rehearse.cpu_shims.mamba_shim import chunk_scan, conv, gated_norm, split_conv_scan

HEADS, WIDTH, GROUPS, STATES, KERNEL, TOKENS = 4, 3, 2, 5, 4, 9


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def silu(value):
    return value * torch.sigmoid(value)


def recurrence(zxbcdt, weight, bias, dt_bias, decay, skip, sequence):
    """[B, T, inner]: state ← exp(dt A) state + dt x Bᵀ, y = state C + D x, then silu(z) y; anew in each sequence."""
    inner, rows = HEADS * WIDTH, []
    for row, sequences in zip(zxbcdt, sequence, strict=True):
        states, tokens = [torch.zeros(WIDTH, STATES, dtype=torch.float64)] * HEADS, []
        for at, token in enumerate(row):
            terms = [
                weight[:, KERNEL - 1 - back] * row[at - back, inner:-HEADS]
                for back in range(min(KERNEL, at + 1))
                if sequences[at - back] == sequences[at]
            ]
            mixed = silu(bias + sum(terms))
            x, (b, c) = mixed[:inner].view(HEADS, WIDTH), mixed[inner:].view(2, GROUPS, STATES)
            step = torch.log1p(torch.exp(token[-HEADS:] + dt_bias))
            kept = at == 0 or bool(sequences[at] == sequences[at - 1])
            states = [
                (torch.exp(step[head] * decay[head]) * state if kept else 0)
                + step[head] * torch.outer(x[head], b[head * GROUPS // HEADS])
                for head, state in enumerate(states)
            ]
            y = torch.stack(
                [state @ c[head * GROUPS // HEADS] + skip[head] * x[head] for head, state in enumerate(states)]
            )
            tokens.append(y.flatten() * silu(token[:inner]))
        rows.append(torch.stack(tokens))
    return torch.stack(rows)


@pytest.fixture
def inputs():
    channels = HEADS * WIDTH + 2 * GROUPS * STATES
    zxbcdt, weight, bias, dt_bias, skip = tensors(
        (2, TOKENS, HEADS * WIDTH + channels + HEADS), (channels, KERNEL), (channels,), (HEADS,), (HEADS,)
    )
    return zxbcdt, weight, bias, dt_bias, -torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64), skip


@pytest.mark.parametrize("ends", [[TOKENS], [4, TOKENS], [1, 2, 6, TOKENS]])
def test_scan_of_packed_sequences_is_the_recurrence_of_each(inputs, ends):
    sequence = torch.bucketize(torch.arange(TOKENS), torch.tensor(ends), right=True).expand(2, -1)
    expected = recurrence(*inputs, sequence)
    packed = None if len(ends) == 1 else sequence
    got = split_conv_scan(*inputs, 4, seq_idx=packed, headdim=WIDTH, ngroups=GROUPS)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_recurrence(inputs):
    leaves = [value.clone().requires_grad_() for value in inputs]
    sequence = (torch.arange(TOKENS) >= 4).long().expand(2, -1)
    goal = tensors((2, TOKENS, HEADS * WIDTH), seed=1)[0]
    expected = torch.autograd.grad((recurrence(*leaves, sequence) * goal).sum(), leaves)
    got = torch.autograd.grad(
        (split_conv_scan(*leaves, 4, seq_idx=sequence, headdim=WIDTH, ngroups=GROUPS) * goal).sum(), leaves
    )
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3)


def test_convolution_without_bias_or_activation():
    x, weight = tensors((1, 2, 3), (2, 4))
    got = conv(x, weight)
    assert torch.allclose(got[0, :, 2], (x[0] * weight[:, 1:]).sum(1), atol=1e-6)
    assert torch.allclose(got[0, :, 0], x[0, :, 0] * weight[:, 3], atol=1e-6)


@pytest.mark.parametrize("before", [True, False])
def test_gated_norm_of_groups(before):
    x, weight, z = tensors((2, 6), (6,), (2, 6))
    gate = silu(z)
    value = x if before else x * gate
    groups = value.view(2, 2, 3)
    normed = (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(2, 6) * weight
    expected = normed * gate if before else normed
    got = gated_norm(x, weight, z=z, group_size=3, norm_before_gate=before)
    assert torch.allclose(got, expected, atol=1e-6)


def test_states_that_a_trainer_does_not_have_are_refused(inputs):
    zxbcdt, *rest = inputs
    with pytest.raises(NotImplementedError, match="neither continues from a state"):
        split_conv_scan(zxbcdt, *rest, 4, headdim=WIDTH, ngroups=GROUPS, return_final_states=True)


def test_norm_and_projection_come_after_the_gate(inputs):
    """As in Nemotron's layers, which pass both to the kernel."""
    norm, projection = tensors((HEADS * WIDTH,), (3, HEADS * WIDTH), seed=1)
    sizes = {"headdim": WIDTH, "ngroups": GROUPS}
    layer = {"rmsnorm_weight": norm, "outproj_weight": projection, "norm_before_gate": False}
    normed = gated_norm(split_conv_scan(*inputs, 4, **sizes), norm, eps=1e-6, group_size=HEADS * WIDTH // GROUPS)
    assert torch.allclose(split_conv_scan(*inputs, 4, **sizes, **layer), normed @ projection.T, rtol=1e-4, atol=1e-5)


def test_the_packages_are_there_once_registered():
    code = """
import nemo_geomask.tools.rehearse.cpu_shims as shims; shims.register()
from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined
from mamba_ssm.ops.triton.layernorm_gated import RMSNorm
from causal_conv1d import causal_conv1d_fn
import torch
print(RMSNorm(4, group_size=2)(torch.ones(1, 4), torch.ones(1, 4)).shape == (1, 4))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["True"], done.stderr


def test_a_scan_without_a_step_bias_takes_dt_as_it_is():
    x, b, c = tensors((1, 1, 1, 2), (1, 1, 1, 3), (1, 1, 1, 3))
    dt, decay = torch.full((1, 1, 1), 0.5, dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    got = chunk_scan(x, dt, decay, b, c, 4)
    assert torch.allclose(got, 0.5 * x * (b * c).sum(), atol=1e-6)
