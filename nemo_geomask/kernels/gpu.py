"""Launch the Triton kernels, which read each logit once in the forward and once in the backward pass.

Rows that don't train are not read in either pass. Partial results are merged in an order that depends on the
vocabulary alone, without atomics. Results are therefore deterministic, and those of a row do not depend on the other
rows of the batch.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from nemo_geomask.kernels.cpu import NUM_STATISTICS, RowGradientInputs
from nemo_geomask.kernels.triton_kernels import fold_kernel, row_gradients_kernel, row_statistics_kernel

_LOG2_E = math.log2(math.e)

# A program reads tiles of DEPTH · LANES · VECTOR columns: each thread reads 16 bytes at a time, DEPTH times.
VECTOR = 8
DEPTH = 4
WARPS = 4
LANES = 32 * WARPS
TILE = DEPTH * LANES * VECTOR
STRIPE = 4 * TILE
"""Number of columns that one program computes in the backward pass."""
# With a row split over several programs, fewer rows suffice to keep a GPU busy, but a second launch must merge the
# programs' partial results.
_COLUMNS_PER_SPLIT = 1 << 16
_MAX_SPLITS = 2


def count_splits(width: int) -> int:
    """Return the number of programs that share a row; it depends on the row's ``width`` in columns alone."""
    return min(max(1, -(-width // _COLUMNS_PER_SPLIT)), _MAX_SPLITS)


def row_statistics(
    logits: Tensor, targets: Tensor, *, start: int, ignore_index: int, inverse_temperature: float, entropy: bool
) -> Tensor:
    """Compute :func:`nemo_geomask.kernels.cpu.row_statistics` in one launch, or in two if rows are split."""
    count, width = logits.shape
    splits = count_splits(width)
    result = torch.empty(splits, NUM_STATISTICS, count, dtype=torch.float32, device=logits.device)
    if count:
        columns = triton.cdiv(triton.cdiv(width, splits), TILE) * TILE
        row_statistics_kernel[(count, splits)](
            logits,
            targets,
            result,
            count,
            width,
            columns,
            start,
            ignore_index,
            inverse_temperature * _LOG2_E,
            logits.stride(0),
            logits.stride(1),
            ENTROPY=entropy,
            NUM_STATISTICS=NUM_STATISTICS,
            DEPTH=DEPTH,
            LANES=LANES,
            VECTOR=VECTOR,
            num_warps=WARPS,
        )
    return fold(result, inverse_temperature)


def fold(parts: Tensor, inverse_temperature: float) -> Tensor:
    """Compute :func:`nemo_geomask.kernels.cpu.fold` in one launch; return a single part as it is."""
    if len(parts) == 1:
        return parts[0]
    count = parts.shape[2]
    result = torch.empty(parts.shape[1:], dtype=torch.float32, device=parts.device)
    if count:
        fold_kernel[(triton.cdiv(count, 256),)](
            parts,
            result,
            count,
            inverse_temperature * _LOG2_E,
            *parts.stride(),
            *result.stride(),
            PARTS=parts.shape[0],
            ROWS=256,
            num_warps=4,
        )
    return result


def empty_gradient(logits: Tensor) -> Tensor:
    """Allocate uninitialised memory for the gradient of ``logits``: same shape and type, contiguous."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


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
    """Compute :func:`nemo_geomask.kernels.cpu.row_gradients` in one launch."""
    count, width = logits.shape
    if not count or not width:
        return
    grad_logprobs = inputs.grad_logprobs.contiguous()
    row_gradients_kernel[(count, triton.cdiv(width, STRIPE))](
        logits,
        inputs.targets,
        out,
        inputs.max_logit,
        inputs.sum_exp,
        grad_logprobs,
        inputs.entropy,
        grad_logprobs if inputs.grad_entropy is None else inputs.grad_entropy.contiguous(),
        width,
        valid,
        start,
        ignore_index,
        inverse_temperature,
        inverse_temperature * _LOG2_E,
        logits.stride(0),
        logits.stride(1),
        out.stride(0),
        out.stride(1),
        ENTROPY=inputs.grad_entropy is not None,
        STRIPE=STRIPE,
        TILE=TILE,
        num_warps=WARPS,
    )


INTERPRETED = not isinstance(row_statistics_kernel, triton.JITFunction)
"""Whether Triton interprets the kernels; Triton reads ``TRITON_INTERPRET`` when the kernels are defined."""
