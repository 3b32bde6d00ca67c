"""Row-blocked CPU kernels: one pass over the logits forward, one backward, in one reused float32 block.

A block of a few rows stays in cache between the steps of softmax, so that the logits are read from memory once and
nothing of their size is allocated but the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["row_gradients", "row_statistics"]

_BLOCK_ELEMENTS = 1 << 20  # 4 MB of float32: a block and its exponentials fit the caches of two cores
_DEVICE_BLOCK_ELEMENTS = 1 << 28  # elsewhere there is no such cache, and each block costs launches


def _blocks(logits: Tensor, rows: Tensor | None, inverse_temperature: float) -> Iterator[tuple[Tensor | slice, Tensor]]:
    """Row selection and its scaled float32 logits, in a buffer that the next block overwrites."""
    count, width = logits.shape[0] if rows is None else rows.numel(), logits.shape[1]
    elements = _BLOCK_ELEMENTS if logits.device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
    step = max(1, elements // max(width, 1))
    buffer = torch.empty(min(step, count), width, dtype=torch.float32, device=logits.device)
    for start in range(0, count, step):
        stop = min(start + step, count)
        selection = slice(start, stop) if rows is None else rows[start:stop]
        block = buffer[: stop - start]
        block.copy_(logits[selection])
        if inverse_temperature != 1.0:
            block.mul_(inverse_temperature)
        yield selection, block


def row_statistics(
    logits: Tensor, targets: Tensor, rows: Tensor | None, *, inverse_temperature: float, entropy: bool
) -> Tensor:
    """Softmax statistics of each row of a vocabulary shard.

    With z = logits · inverse_temperature over the shard's columns:

    Args:
        logits: [N, V], floating point.
        targets: [N] int64, column of the target; outside [0, V) where it is not in this shard.
        rows: int64 indices of the rows to compute, or None for all.
        inverse_temperature: factor on the logits, applied in float32.
        entropy: whether the third statistic is wanted.

    Returns:
        [2 or 3, N] float32: log Σ exp z; the target's z, +inf where it is in no column; Σ softmax(z)·z. Rows not
        computed hold 0.
    """
    count, width = logits.shape
    result = torch.zeros(3 if entropy else 2, count, device=logits.device)
    inside = (targets >= 0) & (targets < width)
    column = targets.clamp(0, max(width - 1, 0))
    for selection, z in _blocks(logits, rows, inverse_temperature):
        if width == 0:
            result[0, selection], result[1, selection] = -torch.inf, torch.inf
            continue
        own = z.gather(1, column[selection].unsqueeze(1)).squeeze(1)
        result[1, selection] = torch.where(inside[selection], own, torch.inf)
        peak = z.amax(dim=1, keepdim=True)
        # A row of -inf alone (an empty part of a filtered vocabulary) has no mass.
        peak = torch.where(torch.isinf(peak), 0.0, peak)
        weight = torch.exp(z.sub_(peak)) if entropy else z.sub_(peak).exp_()
        mass = weight.sum(dim=1)
        result[0, selection] = mass.log() + peak.squeeze(1)
        if entropy:
            # 0 · -inf is 0 here: a filtered column has no part in the entropy.
            moment = torch.where(weight > 0, weight * z, 0.0).sum(dim=1)
            result[2, selection] = torch.where(mass > 0, moment / mass + peak.squeeze(1), 0.0)
    return result


def row_gradients(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | None,
    *,
    inverse_temperature: float,
    lse: Tensor,
    grad_logprobs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> None:
    r"""Gradient of the logits of a shard, into ``out``, rounded once to its dtype.

    .. math:: \frac{\partial L}{\partial x_j} = \frac1T\Bigl(g\,(\mathbb 1[j = y] - p_j) - h\,p_j(\log p_j + H)\Bigr)

    Args:
        logits, targets, rows, inverse_temperature: as for :func:`row_statistics`.
        lse: [N] log-sum-exp over the whole vocabulary.
        grad_logprobs: [N] g, incoming gradient of the log-prob.
        entropy: [N] H over the whole vocabulary, where ``grad_entropy`` is given.
        grad_entropy: [N] h, incoming gradient of the entropy, or None.
        out: [N, V], zeroed where ``rows`` does not reach.
    """
    width = logits.shape[1]
    if width == 0:
        return
    inside = (targets >= 0) & (targets < width)
    column = targets.clamp(0, width - 1)
    for selection, z in _blocks(logits, rows, inverse_temperature):
        g = grad_logprobs[selection]
        at_target = torch.where(inside[selection], g, 0.0)
        z.sub_(lse[selection].unsqueeze(1))
        if grad_entropy is None or entropy is None:
            z.exp_().mul_(-g.unsqueeze(1))
        else:
            p = torch.exp(z)
            z.add_(entropy[selection].unsqueeze(1)).mul_(-grad_entropy[selection].unsqueeze(1)).sub_(g.unsqueeze(1))
            z.mul_(p)
            # A filtered column: 0 · inf.
            z.masked_fill_(p == 0, 0.0)
        z.scatter_add_(1, column[selection].unsqueeze(1), at_target.unsqueeze(1))
        if inverse_temperature != 1.0:
            z.mul_(inverse_temperature)
        out[selection] = z.to(out.dtype)
