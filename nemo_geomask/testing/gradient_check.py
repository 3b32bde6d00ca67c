"""Comparison of a surrogate's gradient from autograd with finite differences in float64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, TOKEN_MASK
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.objectives.variant import SurrogateInputs

_STEP = 1e-6  # step of the finite differences


class _DetachReplay(TorchFunctionMode):
    """Record the detached tensors of one call, and return the same tensors in later calls.

    Autograd treats detached tensors as constants. Finite differences do so only if the tensors keep their values when
    an input is shifted. Detached tensors are the results of ``detach`` and ``.data``, and everything that is computed
    under ``torch.no_grad``.

    Attributes:
        recorded: copies of the detached tensors, in the order of their computation.
        position: index in ``recorded`` of the next tensor to return; set it to 0 before each replay. None: record.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Any] = []
        self.position: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        detaches = func in (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
        if not (detaches or not torch.is_grad_enabled()) or not isinstance(result, Tensor):
            return result
        if self.position is None:
            self.recorded.append(result.clone())
            return result
        self.position += 1
        return self.recorded[self.position - 1]


def find_gradient_error(loss: PolicyLoss, batch: Mapping[str, Tensor]) -> str:
    """Return a message if a token's gradient from autograd differs from its central difference in float64, else "".

    The gradient is that of the variant's own functions, without importance-sampling weights and rejection masks.
    """
    variant, batch64 = loss.variant, {key: value.double() for key, value in batch.items()}
    mask = (batch64[TOKEN_MASK] * batch64["sample_mask"].unsqueeze(1))[:, 1:]
    is_trained = mask != 0
    anchor = batch64[GENERATION_LOGPROBS if loss.config.ratio_anchor == "gen" else PREV_LOGPROBS][:, 1:]
    coefficient = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    replay = _DetachReplay()

    def total(curr: Tensor) -> Tensor:
        """Return the sum of the tokens' losses, each times its own random coefficient."""
        curr = torch.where(is_trained, curr, 0.0)
        log_ratio = torch.where(is_trained, curr - anchor, 0.0)
        advantages = torch.where(is_trained, batch64["advantages"][:, 1:], 0.0)
        inputs = SurrogateInputs(curr, log_ratio, advantages, loss.config, loss.options)
        pooled = variant.pool(inputs) if variant.pool is not None else {}
        count = mask.sum(1, keepdim=True).clamp(min=1) if variant.pooled_by == "mean" else 1.0
        means = {name: ((value * mask).sum(1, keepdim=True) / count).expand_as(mask) for name, value in pooled.items()}
        surrogate = variant.surrogate(inputs, means)
        per_token = surrogate.loss if surrogate.penalty is None else surrogate.loss + surrogate.penalty
        return (mask * coefficient * per_token).sum()

    def central_difference(token: list[int], mode: Any) -> float:
        """Return the derivative of ``total`` by the log-prob of ``token`` (row, column), computed within ``mode``."""
        values = []
        for step in (_STEP, -_STEP):
            shifted = curr.detach().clone()
            shifted[tuple(token)] += step
            replay.position = 0
            with mode:
                values.append(total(shifted.requires_grad_()).item())
        return (values[0] - values[1]) / (2 * _STEP)

    curr = batch64["curr"][:, 1:].clone().requires_grad_()
    with replay:
        value = total(curr)
    (gradient,) = torch.autograd.grad(value, curr)
    largest_error = 0.0
    for token in is_trained.nonzero().tolist():
        derivative = gradient[tuple(token)].item()
        # If a detached tensor is a factor, autograd treats it as constant, and only differences under the replay agree.
        # If it chooses between branches that meet continuously, only plain differences agree. One of them must agree.
        errors = [abs(central_difference(token, mode) - derivative) for mode in (replay, contextlib.nullcontext())]
        # A comparison with NaN is False, so that max and min could return the other number.
        error = min((error for error in errors if not math.isnan(error)), default=math.inf)
        largest_error = max(largest_error, error)
    size = gradient.abs().max().item()
    if largest_error <= 1e-4 * max(size, 1e-3):
        return ""
    return f"the gradient differs from finite differences by up to {largest_error:.2g}, and is {size:.2g} at most"
