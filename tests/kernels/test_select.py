"""Selection: where a token does not train, 0 and gradient 0, whatever stands there."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_geomask.kernels.select import count_finite, select, where_finite

BAD = [math.nan, math.inf, -math.inf, 1e30, -0.0, 2.5]
KEEP = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])


def test_select_is_where_without_ever_multiplying():
    x = torch.tensor(BAD, requires_grad=True)
    y = select(KEEP, x)
    assert y.tolist() == [0.0] * 5 + [2.5]
    assert not torch.signbit(y[:5]).any()
    (grad,) = torch.autograd.grad(y, x, torch.tensor(BAD))
    assert grad.tolist() == [0.0] * 5 + [2.5]
    assert not torch.signbit(grad[:5]).any()


@pytest.mark.parametrize("value", BAD)
def test_what_is_kept_is_kept_to_the_bit(value):
    x = torch.full((6,), value, requires_grad=True)
    assert torch.equal(select(torch.ones(6), x).view(torch.int32), x.view(torch.int32))
    (grad,) = torch.autograd.grad(select(torch.ones(6), x), x, torch.full((6,), value))
    assert torch.equal(grad.view(torch.int32), x.view(torch.int32))


def test_a_slice_and_an_expanded_gradient():
    wide = torch.ones(2, 7, requires_grad=True)
    select(KEEP.expand(2, 6).contiguous(), wide[:, 1:]).sum().backward()
    assert wide.grad.tolist() == [[0.0] * 6 + [1.0]] * 2


def test_without_gradient_nothing_is_recorded():
    assert not select(KEEP, torch.tensor(BAD)).requires_grad


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("flag", [1.0, 0.5])
def test_finite_is_told_from_what_is_not(monkeypatch, flag, compiling):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    flags = torch.full((6,), flag)
    assert where_finite(flags, torch.tensor(BAD)).tolist() == [0.0] * 3 + [flag] * 3
    assert count_finite(flags, torch.tensor(BAD)).item() == 3 * flag
