"""Row-blocked kernels in plain torch: the CPU's own, and what runs where Triton does not.

A block of a few rows stays in cache between the steps of softmax, so that the logits are read from memory once in
each direction and nothing of their size is allocated but the gradient.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["empty_gradient", "fold", "row_gradients", "row_statistics"]

_LOG2_E = math.log2(math.e)
_LOWEST = -1.0e30  # stands for -inf where a product with 0 must be 0
_HUGE = 1 << 25  # bytes above which glibc returns memory to the system at once
_BLOCK_ELEMENTS = 1 << 20  # 4 MB of float32: a block and its exponentials fit the caches of two cores
_DEVICE_BLOCK_ELEMENTS = 1 << 28  # elsewhere there is no such cache, and each block costs launches


def row_statistics(
    logits: Tensor,
    targets: Tensor,
    *,
    start: int,
    ignore_index: int,
    inverse_temperature: float,
    entropy: bool,
) -> Tensor:
    r"""Softmax statistics of each row over the columns of one vocabulary shard.

    With :math:`z` = logits · ``inverse_temperature``:

    Args:
        logits: [N, V], floating point: the valid columns of the shard.
        targets: [N] int64, in the numbering of the whole vocabulary.
        start: number of the shard's first column.
        ignore_index: rows with this target are not read.
        inverse_temperature: factor on the logits, applied in float32.
        entropy: whether the third statistic is wanted.

    Returns:
        [2 or 3, N] float32: :math:`\log\sum_j e^{z_j}` (-inf where there is no mass), the target's :math:`z` (0 where
        it is in another shard), :math:`\sum_j \mathrm{softmax}(z)_j z_j`. Rows not read hold 0.
    """
    count, width = logits.shape
    result = torch.zeros(3 if entropy else 2, count, device=logits.device)
    local = targets - start
    inside = (local >= 0) & (local < width)
    column = local.clamp(0, max(width - 1, 0))
    for rows, z in _blocks(logits, _selection(targets != ignore_index)):
        if width == 0:
            result[0, rows] = -torch.inf
            continue
        own = z.gather(1, column[rows].unsqueeze(1)).squeeze(1)
        result[1, rows] = torch.where(inside[rows], own * inverse_temperature, 0.0)
        peak = z.amax(dim=1, keepdim=True)
        # A row of -inf alone (an empty part of a filtered vocabulary) has no mass.
        peak = torch.where(torch.isinf(peak), 0.0, peak)
        weight = _exp(z, -peak, inverse_temperature, out=None if entropy else z)
        mass = weight.sum(dim=1)
        top = peak.squeeze(1) * inverse_temperature
        result[0, rows] = mass.log() + top
        if entropy:
            # 0 · -inf would be NaN, but a filtered column has no part in the entropy.
            moment = z.clamp_(min=_LOWEST).mul_(weight).sum(dim=1) * inverse_temperature
            result[2, rows] = torch.where(mass > 0, moment / mass, 0.0)
    return result


def fold(parts: Tensor) -> Tensor:
    """Statistics over several shards from those over each.

    Args:
        parts: [P, 2 or 3, N] float32, as :func:`row_statistics` returns them, in the order in which they are added up.

    Returns:
        [2 or 3, N], the same statistics over all columns.

    Source: Milakov and Gimelshein, arXiv:1805.02867.
    """
    if len(parts) == 1:
        return parts[0]
    lse = torch.logsumexp(parts[:, 0], dim=0)
    fields = [lse, parts[:, 1].sum(dim=0)]
    if parts.shape[1] == 3:
        share = torch.exp(parts[:, 0] - torch.where(torch.isneginf(lse), 0.0, lse))
        fields.append((share * parts[:, 2]).sum(dim=0))
    return torch.stack(fields)


def empty_gradient(logits: Tensor) -> Tensor:
    """Uninitialised memory for the gradient of ``logits``: same shape and type, contiguous.

    On huge pages where the system has them: the logits' gradient is far beyond what the allocator keeps between
    steps, and touching it for the first time by small pages costs more than computing what goes there.
    """
    size = logits.numel() * logits.element_size()
    if logits.device.type != "cpu" or size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A hint: a system that refuses it still gives memory.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=logits.dtype).view(logits.shape)


def row_gradients(
    logits: Tensor,
    targets: Tensor,
    *,
    start: int,
    valid: int,
    ignore_index: int,
    inverse_temperature: float,
    lse: Tensor,
    grad_logprobs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> None:
    r"""Gradient of a shard's logits, rounded once to the type of ``out``.

    .. math:: \frac{\partial L}{\partial x_j} = \frac1T\Bigl(g\,(\mathbb 1[j = y] - p_j) - h\,p_j(\log p_j + H)\Bigr)

    Args:
        logits: [N, V], all columns of the shard.
        targets, start, ignore_index, inverse_temperature: as for :func:`row_statistics`.
        valid: columns that take part; the gradient of those beyond is 0.
        lse: [N] log-sum-exp over the whole vocabulary.
        grad_logprobs: [N] g, incoming gradient of the log-prob.
        entropy: [N] H over the whole vocabulary, where ``grad_entropy`` is given.
        grad_entropy: [N] h, incoming gradient of the entropy, or None.
        out: [N, V], written everywhere; may be ``logits`` itself. Rows whose g and h are 0 (because a mask removed
            them) are not read.
    """
    active = (targets != ignore_index) & (grad_logprobs != 0)
    if grad_entropy is not None:
        active = active | ((targets != ignore_index) & (grad_entropy != 0))
    selection = _selection(active)
    if selection is not None:
        # Before the active rows: in place, these are logits that no one needs any more.
        _clear(out, ~active)
    out[:, valid:] = 0.0
    logits, out = logits[:, :valid], out[:, :valid]
    if valid == 0:
        return
    local = targets - start
    inside = (local >= 0) & (local < valid)
    column = local.clamp(0, valid - 1)
    for rows, z in _blocks(logits, selection):
        g = grad_logprobs[rows]
        at_target = torch.where(inside[rows], g, 0.0)
        shift = -lse[rows].unsqueeze(1) / inverse_temperature
        if grad_entropy is None or entropy is None:
            slope = _exp(z, shift, inverse_temperature, out=z).mul_(g.mul(-inverse_temperature).unsqueeze(1))
        else:
            p = _exp(z, shift, inverse_temperature)
            # -(g + h·(log p + H)) · p / T, with the factors of log p = z/T - lse drawn together.
            h = grad_entropy[rows] * inverse_temperature
            constant = (g + grad_entropy[rows] * (entropy[rows] - lse[rows])).mul_(-inverse_temperature)
            z.clamp_(min=_LOWEST).mul_((h * -inverse_temperature).unsqueeze(1)).add_(constant.unsqueeze(1))
            slope = z.mul_(p)
        slope.scatter_add_(1, column[rows].unsqueeze(1), (at_target * inverse_temperature).unsqueeze(1))
        if isinstance(rows, slice):
            out[rows].copy_(slope)
        else:
            out.index_copy_(0, rows, slope.to(out.dtype))


def _exp(z: Tensor, shift: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """exp((z + shift) · scale) in two passes: torch's exp2 is several times faster than its exp on a CPU."""
    factor = scale * _LOG2_E
    return torch.exp2(torch.add(shift * factor, z, alpha=factor, out=out), out=out)


def _clear(out: Tensor, rows: Tensor) -> None:
    if out.device.type != "cpu":
        out[rows] = 0.0
        return
    # Row by row, which is several times faster there than writing through a mask.
    for row in rows.nonzero().squeeze(1).tolist():
        out[row].zero_()


def _selection(active: Tensor) -> Tensor | None:
    """Indices of the active rows, None where that is all of them."""
    return None if bool(active.all()) else active.nonzero().squeeze(1)


def _blocks(logits: Tensor, rows: Tensor | None) -> Iterator[tuple[Tensor | slice, Tensor]]:
    """Row selection and its float32 logits, in a buffer that the next block overwrites."""
    count, width = logits.shape[0] if rows is None else rows.numel(), logits.shape[1]
    elements = _BLOCK_ELEMENTS if logits.device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
    step = max(1, elements // max(width, 1))
    buffer = torch.empty(min(step, count), width, dtype=torch.float32, device=logits.device)
    for start in range(0, count, step):
        stop = min(start + step, count)
        selection = slice(start, stop) if rows is None else rows[start:stop]
        block = buffer[: stop - start]
        block.copy_(logits[selection])
        yield selection, block
