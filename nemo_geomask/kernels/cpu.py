"""Row-blocked kernels in plain torch: the CPU's own, and what runs where Triton does not.

A block of a few rows stays in cache between the steps of softmax, so that the logits are read from memory once in
each direction and nothing of their size is allocated but the gradient. On a CPU threads share the blocks, not each
operation on a block: they meet once, at the end.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FIELDS", "Incoming", "empty_gradient", "fold", "row_gradients", "row_statistics"]

FIELDS = 4
"""Statistics of a row: peak, mass, the target's logit, entropy."""

_LN_2 = math.log(2)
_LOG2_E = math.log2(math.e)
_LOWEST = -1.0e30  # stands for -inf where a product with 0 must be 0
_HUGE = 1 << 25  # bytes above which glibc returns memory to the system at once
_BLOCK_ELEMENTS = 1 << 20  # 4 MB of float32: a block and its exponentials fit the caches of two cores
_BLOCKS_A_THREAD = 4  # at least: 5 ms of work, beside which starting a thread and waiting for it is little
_DEVICE_BLOCK_ELEMENTS = 1 << 28  # elsewhere there is no such cache, and each block costs launches


def row_statistics(
    logits: Tensor, targets: Tensor, *, start: int, ignore_index: int, inverse_temperature: float, entropy: bool
) -> Tensor:
    r"""Softmax statistics of each row over the columns of one vocabulary shard.

    With :math:`x` the logits in float32 and :math:`1/T` the ``inverse_temperature``. The peak is subtracted before
    anything is scaled and never added to a logarithm, so that no digit depends on the size of the logits.

    Args:
        logits: [N, V], floating point: the valid columns of the shard.
        targets: [N] int64, in the numbering of the whole vocabulary.
        start: number of the shard's first column.
        ignore_index: rows with this target are not read.
        inverse_temperature: factor on the logits, applied in float32.
        entropy: whether the last statistic is wanted.

    Returns:
        [4, N] float32: the peak :math:`m = \max_j x_j` (-inf where there is no mass), the mass
        :math:`s = \sum_j e^{(x_j - m)/T}`, the target's :math:`x` (0 where it is in another shard), and the shard's own
        entropy :math:`\log s - \frac1s\sum_j e^{(x_j - m)/T}(x_j - m)/T` in nats (0 without mass; of no meaning unless
        wanted). Rows not read hold 0.
    """
    count, width = logits.shape
    result = torch.zeros(FIELDS, count, dtype=torch.float32, device=logits.device)
    local = targets - start
    inside = (local >= 0) & (local < width)
    column = local.clamp(0, max(width - 1, 0))
    counted = targets != ignore_index
    if width == 0:
        result[0] = torch.where(counted, -torch.inf, 0.0)
        return result

    def take(rows: Tensor | slice, z: Tensor) -> None:
        own = z.gather(1, column[rows].unsqueeze(1)).squeeze(1)
        peak = z.amax(dim=1)
        exponent = _exponent(z, _finite(peak), inverse_temperature)
        weight = torch.exp2(exponent, out=None if entropy else exponent)
        mass = weight.sum(dim=1)
        result[0, rows] = peak
        result[1, rows] = mass
        result[2, rows] = torch.where(inside[rows], own, 0.0)
        if entropy:
            # 0 · -inf would be NaN, but a filtered column has no part in the entropy.
            moment = exponent.clamp_(min=_LOWEST).mul_(weight).sum(dim=1)
            result[3, rows] = torch.where(mass == 0, 0.0, mass.log() - moment * _LN_2 / mass)

    _for_blocks(take, logits, _selection(counted))
    return result


def fold(parts: Tensor, inverse_temperature: float) -> Tensor:
    r"""Statistics over several shards from those over each.

    With :math:`w_r = s_r\,e^{(m_r - m)/T}` the mass of shard r under the common peak :math:`m = \max_r m_r`:
    :math:`s = \sum_r w_r`, and with the shares :math:`q_r = w_r/s`, :math:`H = \sum_r q_r (H_r - \log q_r)`.

    Args:
        parts: [P, 4, N] float32, as :func:`row_statistics` returns them, in the order in which they are added up.
        inverse_temperature: the one they were made with.

    Returns:
        [4, N], the same statistics over all columns.

    Source: Milakov and Gimelshein, arXiv:1805.02867; the entropy by its chain rule.
    """
    if len(parts) == 1:
        return parts[0]
    peaks, masses, targets, entropies = parts.unbind(1)
    peak = peaks.amax(dim=0)
    weight = masses * torch.exp((peaks - _finite(peak)) * inverse_temperature)
    mass = weight.sum(dim=0)
    share = weight / torch.where(mass == 0, 1.0, mass)
    entropy = share * entropies + torch.special.entr(share)
    return torch.stack([peak, mass, targets.sum(dim=0), entropy.sum(dim=0)])


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


class Incoming(NamedTuple):
    """What a backward pass knows of each row, [N]; the statistics are over the whole vocabulary.

    Attributes:
        targets: int64, as for :func:`row_statistics`.
        peak: float32 m, finite.
        mass: float32 s.
        entropy: float32 H, where ``grad_entropy`` is given.
        grad_logprobs: g, incoming gradient of the log-prob.
        grad_entropy: h, incoming gradient of the entropy, or None.
    """

    targets: Tensor
    peak: Tensor
    mass: Tensor
    entropy: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor | None

    def part(self, rows: slice) -> Incoming:
        """Those of some rows."""
        return Incoming._make(None if value is None else value[rows] for value in self)


def row_gradients(
    logits: Tensor,
    rows: Incoming,
    *,
    start: int,
    valid: int,
    ignore_index: int,
    inverse_temperature: float,
    out: Tensor,
) -> None:
    r"""Gradient of a shard's logits, rounded once to the type of ``out``.

    .. math::
        \frac{\partial L}{\partial x_j} = \frac1T\Bigl(g\,(\mathbb 1[j = y] - p_j) - h\,p_j(\log p_j + H)\Bigr),
        \qquad p_j = e^{(x_j - m)/T} / s

    Args:
        logits: [N, V], all columns of the shard.
        rows: m, s, H, g, h and y of each.
        start, ignore_index, inverse_temperature: as for :func:`row_statistics`.
        valid: columns that take part; the gradient of those beyond is 0.
        out: [N, V], written everywhere; may be ``logits`` itself. Rows whose g and h are 0 (because a mask removed
            them) are not read.
    """
    targets, peak, mass, entropy, grad_logprobs, grad_entropy = rows
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
    at_target = torch.where(inside, grad_logprobs * inverse_temperature, 0.0)
    # By row: -p_j/T is this times the exponential.
    share = -inverse_temperature / mass

    def take(rows: Tensor | slice, z: Tensor) -> None:
        exponent = _exponent(z, peak[rows], inverse_temperature)
        if grad_entropy is None:
            slope = exponent.exp2_().mul_((grad_logprobs[rows] * share[rows]).unsqueeze(1))
        else:
            # -(g + h·(log p + H))·p/T, with what is constant in log p drawn together.
            h = grad_entropy[rows]
            constant = (grad_logprobs[rows] + h * (entropy[rows] - mass[rows].log())) * share[rows]
            weight = exponent.exp2()
            exponent.clamp_(min=_LOWEST).mul_((h * share[rows] * _LN_2).unsqueeze(1)).add_(constant.unsqueeze(1))
            slope = exponent.mul_(weight)
        slope.scatter_add_(1, column[rows].unsqueeze(1), at_target[rows].unsqueeze(1))
        if isinstance(rows, slice):
            out[rows].copy_(slope)
        else:
            out.index_copy_(0, rows, slope.to(out.dtype))

    _for_blocks(take, logits, selection)


def _finite(peak: Tensor) -> Tensor:
    """What to subtract from the logits: a row of -inf alone (an empty part of a filtered vocabulary) has no mass."""
    return torch.where(torch.isinf(peak), 0.0, peak)


def _exponent(z: Tensor, peak: Tensor, scale: float) -> Tensor:
    """(z - peak) · scale to base 2, in place: torch's exp2 is several times faster than its exp on a CPU."""
    return z.sub_(peak.unsqueeze(1)).mul_(scale * _LOG2_E)


def _clear(out: Tensor, rows: Tensor) -> None:
    if out.device.type != "cpu":
        out[rows] = 0.0
        return
    # Row by row, which is several times faster there than writing through a mask.
    pending = iter(rows.nonzero().squeeze(1).tolist())

    def work() -> None:
        for row in pending:
            out[row].zero_()

    _share(work, int(rows.sum()) * out.shape[1] // _BLOCK_ELEMENTS)


def _selection(active: Tensor) -> Tensor | None:
    """Indices of the active rows, None where that is all of them."""
    return None if bool(active.all()) else active.nonzero().squeeze(1)


def _for_blocks(take: Callable[[Tensor | slice, Tensor], None], logits: Tensor, rows: Tensor | None) -> None:
    """Call ``take`` with selections of rows and their float32 logits, in memory that the next call overwrites."""
    count, width = logits.shape[0] if rows is None else rows.numel(), logits.shape[1]
    on_cpu = logits.device.type == "cpu"
    step = max(1, (_BLOCK_ELEMENTS if on_cpu else _DEVICE_BLOCK_ELEMENTS) // width)
    # The threads draw from it; under the interpreter's lock each start goes to one of them.
    pending = iter(range(0, count, step))

    def work() -> None:
        buffer = torch.empty(min(step, count), width, dtype=torch.float32, device=logits.device)
        for start in pending:
            stop = min(start + step, count)
            selection = slice(start, stop) if rows is None else rows[start:stop]
            block = buffer[: stop - start]
            block.copy_(logits[selection])
            take(selection, block)

    if on_cpu:
        _share(work, -(-count // step))
    else:
        work()


def _share(work: Callable[[], None], blocks: int) -> None:
    """Run ``work`` on as many threads as torch may use and ``blocks`` are worth, each operation within its thread.

    torch's own threads meet at the end of every operation. On a machine with other work each meeting costs a turn of
    the scheduler, far more than an operation on a block; these meet once.
    """
    threads = torch.get_num_threads()
    others = range(min(threads, blocks // _BLOCKS_A_THREAD) - 1)
    # For this thread, and for those that first use torch while it stands.
    torch.set_num_threads(1)
    try:
        if not others:
            _alone(work)
            return
        with ThreadPoolExecutor(len(others)) as pool:
            started = [pool.submit(_alone, work) for _ in others]
            _alone(work)
        for other in started:
            other.result()
    finally:
        torch.set_num_threads(threads)


def _alone(work: Callable[[], None]) -> None:
    # A thread starts with torch's defaults, whatever mode its caller is in.
    with torch.inference_mode():
        work()
