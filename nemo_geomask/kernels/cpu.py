"""Kernels in plain torch that work on blocks of rows: for the CPU, and for GPUs without Triton.

A block of a few rows stays in the cache through all steps of the softmax. The logits are therefore read from memory
once in the forward and once in the backward pass, and the only allocation of their size is the gradient. On a CPU each
thread takes whole blocks, so the threads synchronise once, at the end, and not after each operation.
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

NUM_STATISTICS = 4
"""Number of statistics of a row: largest logit, sum of exponentials, the target's logit, entropy."""

_LN_2 = math.log(2)
_LOG2_E = math.log2(math.e)
_LOWEST = -1.0e30  # used for -inf where the product with 0 must be 0 and not NaN
# The sizes below are those that were fastest in the timings of docs/background/performance.md, "What was tried".
_HUGE_PAGES_FROM = 1 << 25  # bytes; above this glibc returns freed memory to the system at once
_BLOCK_ELEMENTS = 1 << 20  # 4 MB of float32: a block and its exponentials fit the caches of two cores
_MIN_BLOCKS_PER_THREAD = 4  # 5 ms of work, long compared with starting a thread and waiting for it
_DEVICE_BLOCK_ELEMENTS = 1 << 28  # for GPUs: blocks need not fit a cache there, and each costs kernel launches


def row_statistics(
    logits: Tensor, targets: Tensor, *, start: int, ignore_index: int, inverse_temperature: float, entropy: bool
) -> Tensor:
    r"""Compute the softmax statistics of each row over the columns of one vocabulary shard.

    Below, :math:`x` are the logits in float32 and :math:`1/T` is the ``inverse_temperature``. The largest logit is
    subtracted before the temperature is applied, and the sum :math:`m/T + \log s` is never formed, so that the
    precision does not depend on the size of the logits.

    Args:
        logits: [N, V], floating point: the valid columns of the shard.
        targets: [N] int64, token ids of the global vocabulary.
        start: token id of the shard's first column.
        ignore_index: rows with this target are not read.
        inverse_temperature: 1/T, factor on the logits, applied in float32.
        entropy: whether to compute the last of the four statistics.

    Returns:
        [4, N] float32:

        - the largest logit :math:`m = \max_j x_j`, -inf where no logit is finite;
        - the sum of exponentials :math:`s = \sum_j e^{(x_j - m)/T}`, 0 where no logit is finite;
        - the target's logit :math:`x_y`, 0 where the target is in another shard;
        - the shard's entropy :math:`\log s - \frac1s\sum_j e^{(x_j - m)/T}(x_j - m)/T` in nats, 0 where s is 0, and
          undefined without ``entropy``.

        Rows that are not read hold 0.
    """
    count, width = logits.shape
    statistics = torch.zeros(NUM_STATISTICS, count, dtype=torch.float32, device=logits.device)
    is_counted = targets != ignore_index
    if width == 0:
        statistics[0] = torch.where(is_counted, -torch.inf, 0.0)
        return statistics
    column, is_local = _target_columns(targets - start, width)

    def reduce_block(rows: Tensor | slice, x: Tensor) -> None:
        target_logit = x.gather(1, column[rows].unsqueeze(1)).squeeze(1)
        max_logit = x.amax(dim=1)
        exponent = _base_2_exponent_(x, _finite_or_zero(max_logit), inverse_temperature)
        # The entropy needs the exponents again; without it the exponentials overwrite them.
        exponential = torch.exp2(exponent, out=None if entropy else exponent)
        sum_exp = exponential.sum(dim=1)
        statistics[0, rows] = max_logit
        statistics[1, rows] = sum_exp
        statistics[2, rows] = torch.where(is_local[rows], target_logit, 0.0)
        if entropy:
            # Filtered columns (-inf) have no part in the entropy, but 0 · -inf would be NaN.
            moment = exponent.clamp_(min=_LOWEST).mul_(exponential).sum(dim=1)
            statistics[3, rows] = torch.where(sum_exp == 0, 0.0, sum_exp.log() - moment * _LN_2 / sum_exp)

    _for_each_block(reduce_block, logits, _indices_unless_all(is_counted))
    return statistics


def fold(parts: Tensor, inverse_temperature: float) -> Tensor:
    r"""Merge the statistics of several shards into those over all their columns.

    With :math:`w_r = s_r\,e^{(m_r - m)/T}`, the sum of exponentials of shard r relative to the common maximum
    :math:`m = \max_r m_r`: :math:`s = \sum_r w_r`, and with :math:`q_r = w_r/s`,
    :math:`H = \sum_r q_r (H_r - \log q_r)`.

    Args:
        parts: [P, 4, N] float32, results of :func:`row_statistics` for P shards, in the order of summation.
        inverse_temperature: 1/T, as passed to :func:`row_statistics`.

    Returns:
        [4, N] float32, the same statistics over all columns.

    Source: Milakov and Gimelshein, arXiv:1805.02867; H follows from the chain rule of the entropy.
    """
    if len(parts) == 1:
        return parts[0]
    max_logits, sums_exp, target_logits, entropies = parts.unbind(1)
    max_logit = max_logits.amax(dim=0)
    weight = sums_exp * torch.exp((max_logits - _finite_or_zero(max_logit)) * inverse_temperature)
    sum_exp = weight.sum(dim=0)
    q = weight / torch.where(sum_exp == 0, 1.0, sum_exp)
    entropy = q * entropies + torch.special.entr(q)
    return torch.stack([max_logit, sum_exp, target_logits.sum(dim=0), entropy.sum(dim=0)])


def empty_gradient(logits: Tensor) -> Tensor:
    """Allocate uninitialised memory for the gradient of ``logits``: same shape and type, contiguous.

    On a CPU, large gradients are placed on huge pages where the system has them. The allocator does not keep so large a
    block between steps, and the first write to new memory in 4 KB pages takes longer than computing the gradient (31 to
    39 ms, against 7 to 9 ms on huge pages, for 256 rows of 151,936 columns: "What was tried" in
    docs/background/performance.md).
    """
    size = logits.numel() * logits.element_size()
    if logits.device.type != "cpu" or size < _HUGE_PAGES_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # This is only a hint: a system that refuses it still gives the memory.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=logits.dtype).view(logits.shape)


class RowGradientInputs(NamedTuple):
    """Values that the gradient of a row of logits depends on, each [N]; the statistics are over the global vocabulary.

    Attributes:
        targets: y, int64, as for :func:`row_statistics`.
        max_logit: m, float32, finite.
        sum_exp: s, float32.
        entropy: H, float32; read only if there is a ``grad_entropy``.
        grad_logprobs: g, incoming gradient of the log-prob.
        grad_entropy: h, incoming gradient of the entropy, or None.
    """

    targets: Tensor
    max_logit: Tensor
    sum_exp: Tensor
    entropy: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor | None

    def slice_rows(self, rows: slice) -> RowGradientInputs:
        """Return the inputs of the rows in this slice."""
        return RowGradientInputs._make(None if value is None else value[rows] for value in self)


def row_gradients(
    logits: Tensor,
    inputs: RowGradientInputs,
    *,
    start: int,
    valid: int,
    ignore_index: int,
    inverse_temperature: float,
    out: Tensor,
) -> None:
    r"""Compute the gradient of a shard's logits, rounded once to the type of ``out``.

    .. math::
        \frac{\partial L}{\partial x_j} = \frac1T\Bigl(g\,(\mathbb 1[j = y] - p_j) - h\,p_j(\log p_j + H)\Bigr),
        \qquad p_j = e^{(x_j - m)/T} / s

    Args:
        logits: [N, V], all columns of the shard.
        inputs: y, m, s, H, g and h of each row.
        start: as for :func:`row_statistics`.
        valid: number of columns that take part; the gradient of the columns after them (vocabulary padding) is 0.
        ignore_index: as for :func:`row_statistics`.
        inverse_temperature: as for :func:`row_statistics`.
        out: [N, V], receives the gradient in every element; may be ``logits`` itself.

    The logits of rows whose g and h are both 0, such as rows that a mask removed, are not read.
    """
    targets, max_logit, sum_exp, entropy, grad_logprobs, grad_entropy = inputs
    is_active = (targets != ignore_index) & (grad_logprobs != 0)
    if grad_entropy is not None:
        is_active = is_active | ((targets != ignore_index) & (grad_entropy != 0))
    active_rows = _indices_unless_all(is_active)
    if active_rows is not None:
        # The rows can be zeroed first even if ``out`` is ``logits``, because inactive rows are not read below.
        _zero_rows(out, ~is_active)
    out[:, valid:] = 0.0
    logits, out = logits[:, :valid], out[:, :valid]
    if valid == 0:
        return
    column, is_local = _target_columns(targets - start, valid)
    target_gradient = torch.where(is_local, grad_logprobs * inverse_temperature, 0.0)
    # The factor that turns the exponential e^{(x_j - m)/T} into -p_j/T.
    scale = -inverse_temperature / sum_exp

    def differentiate_block(rows: Tensor | slice, x: Tensor) -> None:
        exponent = _base_2_exponent_(x, max_logit[rows], inverse_temperature)
        if grad_entropy is None:
            gradient = exponent.exp2_().mul_((grad_logprobs[rows] * scale[rows]).unsqueeze(1))
        else:
            # With log p = exponent·ln 2 - log s:
            # -(g + h·(log p + H))·p/T = (h·exponent·ln 2 + (g + h·(H - log s))) · scale · exponential
            h = grad_entropy[rows]
            constant = (grad_logprobs[rows] + h * (entropy[rows] - sum_exp[rows].log())) * scale[rows]
            exponential = exponent.exp2()
            exponent.clamp_(min=_LOWEST).mul_((h * scale[rows] * _LN_2).unsqueeze(1)).add_(constant.unsqueeze(1))
            gradient = exponent.mul_(exponential)
        gradient.scatter_add_(1, column[rows].unsqueeze(1), target_gradient[rows].unsqueeze(1))
        if isinstance(rows, slice):
            out[rows].copy_(gradient)
        else:
            out.index_copy_(0, rows, gradient.to(out.dtype))

    _for_each_block(differentiate_block, logits, active_rows)


def _target_columns(column: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return each target's ``column`` clamped into the shard's ``width`` columns, and whether it was in the shard."""
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


def _finite_or_zero(max_logit: Tensor) -> Tensor:
    """Replace infinite maxima by 0, so that they can be subtracted; a row with only filtered columns has -inf."""
    return torch.where(torch.isinf(max_logit), 0.0, max_logit)


def _base_2_exponent_(x: Tensor, max_logit: Tensor, inverse_temperature: float) -> Tensor:
    """Turn x into (x - max_logit)/T·log2(e), in place.

    The base is 2 because torch's exp2 is three times as fast as its exp on a CPU ("What was tried" in
    docs/background/performance.md).
    """
    return x.sub_(max_logit.unsqueeze(1)).mul_(inverse_temperature * _LOG2_E)


def _zero_rows(out: Tensor, is_zero: Tensor) -> None:
    """Set the rows of ``out`` [N, V] where ``is_zero`` [N] is True to 0."""
    if out.device.type != "cpu":
        out[is_zero] = 0.0
        return
    # Row by row is twelve times as fast as writing through a mask ("What was tried" in docs/background/performance.md).
    pending = iter(is_zero.nonzero().squeeze(1).tolist())

    def work() -> None:
        for row in pending:
            out[row].zero_()

    _run_on_threads(work, int(is_zero.sum()) * out.shape[1] // _BLOCK_ELEMENTS)


def _indices_unless_all(mask: Tensor) -> Tensor | None:
    """Return the indices at which the mask is True, or None if that is everywhere."""
    return None if bool(mask.all()) else mask.nonzero().squeeze(1)


def _for_each_block(process: Callable[[Tensor | slice, Tensor], None], logits: Tensor, rows: Tensor | None) -> None:
    """Call ``process`` for each block of rows.

    Args:
        process: called with the block's rows, as a slice or as indices, and with a float32 copy of their logits
            [rows, V], which it may overwrite.
        logits: [N, V].
        rows: indices of the rows to process; None for all.
    """
    count, width = logits.shape[0] if rows is None else rows.numel(), logits.shape[1]
    on_cpu = logits.device.type == "cpu"
    step = max(1, (_BLOCK_ELEMENTS if on_cpu else _DEVICE_BLOCK_ELEMENTS) // width)
    # All threads draw from this iterator; Python's global lock ensures that each block goes to one of them.
    pending = iter(range(0, count, step))

    def work() -> None:
        buffer = torch.empty(min(step, count), width, dtype=torch.float32, device=logits.device)
        for start in pending:
            stop = min(start + step, count)
            block_rows = slice(start, stop) if rows is None else rows[start:stop]
            block = buffer[: stop - start]
            block.copy_(logits[block_rows])
            process(block_rows, block)

    if on_cpu:
        _run_on_threads(work, -(-count // step))
    else:
        work()


def _run_on_threads(work: Callable[[], None], blocks: int) -> None:
    """Run ``work`` on several threads, each of which executes torch's operations without further threads.

    Torch's own threads synchronise at the end of every operation. On a busy machine each synchronisation waits for the
    scheduler, which takes far longer than an operation on a block. The threads of this function synchronise once (the
    table of threads in docs/background/performance.md: 183 against 3594 ms).

    Args:
        work: draws blocks from an iterator that all threads share.
        blocks: number of blocks of work. There are at most as many threads as torch may use, and fewer if a thread
            would get less than ``_MIN_BLOCKS_PER_THREAD`` blocks.
    """
    threads = torch.get_num_threads()
    extra_threads = range(min(threads, blocks // _MIN_BLOCKS_PER_THREAD) - 1)
    # The setting applies to the calling thread, and to the new threads, which use torch for the first time below.
    torch.set_num_threads(1)
    try:
        if not extra_threads:
            _run_in_inference_mode(work)
            return
        with ThreadPoolExecutor(len(extra_threads)) as pool:
            futures = [pool.submit(_run_in_inference_mode, work) for _ in extra_threads]
            _run_in_inference_mode(work)
        for future in futures:
            future.result()
    finally:
        torch.set_num_threads(threads)


def _run_in_inference_mode(work: Callable[[], None]) -> None:
    # A new thread has torch's default mode, not that of the thread that started it.
    with torch.inference_mode():
        work()
