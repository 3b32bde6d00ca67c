"""Selection: where a token does not train, 0 and gradient 0, whatever stands there."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_geomask.kernels.select import selector

BAD = [math.nan, math.inf, -math.inf, 1e30, -0.0, 2.5]
KEEP = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])


def by_where(keep: torch.Tensor):
    return lambda x: torch.where(keep != 0, x, 0.0)


@pytest.mark.parametrize("selects", [selector, by_where])
def test_select_is_where_without_ever_multiplying(selects):
    # The second is what runs elsewhere than on a CPU.
    x = torch.tensor(BAD, requires_grad=True)
    y = selects(KEEP)(x)
    assert y.tolist() == [0.0] * 5 + [2.5]
    assert not torch.signbit(y[:5]).any()
    (grad,) = torch.autograd.grad(y, x, torch.tensor(BAD))
    assert grad.tolist() == [0.0] * 5 + [2.5]
    assert not torch.signbit(grad[:5]).any()


def test_a_slice_and_an_expanded_gradient():
    wide = torch.ones(2, 7, requires_grad=True)
    selector(KEEP.expand(2, 6).contiguous())(wide[:, 1:]).sum().backward()
    assert wide.grad.tolist() == [[0.0] * 6 + [1.0]] * 2


def test_without_gradient_nothing_is_recorded():
    assert not selector(KEEP)(torch.tensor(BAD)).requires_grad
