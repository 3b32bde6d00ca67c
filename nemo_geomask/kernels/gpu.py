"""Triton kernels: the logits are read once forward, read once and their gradient written once backward.

A row that does not train is not read in either direction. Partial results meet in an order that the vocabulary alone
decides, without atomics, so that results are deterministic and a row's do not depend on the rows beside it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_geomask.kernels.cpu import FIELDS, Incoming

__all__ = ["INTERPRETED", "empty_gradient", "fold", "row_gradients", "row_statistics", "splits"]

_LOG2_E = math.log2(math.e)

# A program reads tiles of DEPTH · LANES · VECTOR columns: each thread 16 bytes at a time, DEPTH times. Maximum and sum
# are kept a lane and meet once, at the end of the row, so that nothing in the loop waits for another thread.
_VECTOR = 8
_DEPTH = 4
_WARPS = 4
_LANES = 32 * _WARPS
_TILE = _DEPTH * _LANES * _VECTOR
# Columns that one program takes: forward, where each split costs partial results, and backward, where it costs nothing.
_SPLIT = 1 << 16
_MAX_SPLITS = 2
_STRIPE = 4 * _TILE


def splits(width: int) -> int:
    """Into how many parts a row of ``width`` columns is split: a function of the vocabulary alone."""
    return min(max(1, -(-width // _SPLIT)), _MAX_SPLITS)


def row_statistics(
    logits: Tensor, targets: Tensor, *, start: int, ignore_index: int, inverse_temperature: float, entropy: bool
) -> Tensor:
    """See :func:`nemo_geomask.kernels.cpu.row_statistics`. One launch, two where a row is split."""
    count, width = logits.shape
    parts = splits(width)
    result = torch.empty(parts, FIELDS, count, dtype=torch.float32, device=logits.device)
    if count:
        columns = triton.cdiv(triton.cdiv(width, parts), _TILE) * _TILE
        _statistics[(count, parts)](
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
            FIELDS=FIELDS,
            DEPTH=_DEPTH,
            LANES=_LANES,
            VECTOR=_VECTOR,
            num_warps=_WARPS,
        )
    return fold(result, inverse_temperature)


def fold(parts: Tensor, inverse_temperature: float) -> Tensor:
    """See :func:`nemo_geomask.kernels.cpu.fold`. One launch, none for a single part."""
    if len(parts) == 1:
        return parts[0]
    count = parts.shape[2]
    result = torch.empty(parts.shape[1:], dtype=torch.float32, device=parts.device)
    if count:
        _fold[(triton.cdiv(count, 256),)](
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
    """See :func:`nemo_geomask.kernels.cpu.empty_gradient`."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


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
    """See :func:`nemo_geomask.kernels.cpu.row_gradients`. One launch; ``out`` may be ``logits`` itself."""
    count, width = logits.shape
    if not count or not width:
        return
    grad_logprobs = rows.grad_logprobs.contiguous()
    _gradients[(count, triton.cdiv(width, _STRIPE))](
        logits,
        rows.targets,
        out,
        rows.peak,
        rows.mass,
        grad_logprobs,
        rows.entropy,
        grad_logprobs if rows.grad_entropy is None else rows.grad_entropy.contiguous(),
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
        ENTROPY=rows.grad_entropy is not None,
        STRIPE=_STRIPE,
        TILE=_TILE,
        num_warps=_WARPS,
    )


@triton.jit
def _online(x, peak, mass, moment, scale2, ENTROPY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Take a tile [DEPTH, LANES, VECTOR] of logits into each lane's running statistics [LANES].

    ``peak`` is the largest logit itself: what is scaled, and rounded, is the distance from it. ``moment`` is the sum
    of the exponentials times their exponents, to base 2.
    """
    new = tl.maximum(peak, tl.max(tl.max(x, axis=2), axis=0))
    exponent = (x - new[None, :, None]) * scale2
    weight = tl.exp2(exponent)
    mass, moment = _lowered(mass, moment, (peak - new) * scale2, ENTROPY)
    mass += tl.sum(tl.sum(weight, axis=2), axis=0)
    if ENTROPY:
        # 0 · -inf would be NaN, but a filtered column has no part in the entropy.
        moment += tl.sum(tl.sum(weight * tl.maximum(exponent, -1.0e30), axis=2), axis=0)
    return new, mass, moment


@triton.jit
def _lowered(mass, moment, exponent, ENTROPY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mass and moment relative to a peak that lies ``-exponent`` (to base 2, scaled) higher than theirs."""
    shrink = tl.exp2(exponent)
    if ENTROPY:
        moment = shrink * (moment + mass * tl.maximum(exponent, -1.0e30))
    return mass * shrink, moment


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits,
    targets,
    result,
    count,
    width,
    columns,
    start,
    ignore_index,
    scale2,
    stride_row,
    stride_column,
    ENTROPY: tl.constexpr,
    FIELDS: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.program_id(1)
    out = result + split.to(tl.int64) * FIELDS * count + row
    target = tl.load(targets + row)
    if target == ignore_index:
        for field in tl.static_range(FIELDS):
            tl.store(out + field * count, 0.0)
    else:
        TILE: tl.constexpr = DEPTH * LANES * VECTOR
        base = logits + row.to(tl.int64) * stride_row
        depth = tl.arange(0, DEPTH)[:, None, None]
        lane = tl.arange(0, LANES)[None, :, None]
        vector = tl.arange(0, VECTOR)[None, None, :]
        offset = (depth * LANES + lane) * VECTOR + vector
        step = tl.cast(stride_column, tl.int64) * TILE
        # A finite floor: a lane of nothing but -inf keeps mass 0, where -inf less -inf would be NaN.
        peak = tl.full([LANES], -3.0e38, tl.float32)
        mass = tl.zeros([LANES], tl.float32)
        moment = tl.zeros([LANES], tl.float32)
        first = split * columns
        last = tl.minimum(first + columns, width)
        whole = first + tl.maximum(last - first, 0) // TILE * TILE
        here = base + (first + offset).to(tl.int64) * stride_column
        for _ in range(first, whole, TILE):
            tile = tl.load(here, eviction_policy="evict_first")
            peak, mass, moment = _online(tile.to(tl.float32), peak, mass, moment, scale2, ENTROPY)
            here += step
        if whole < last:
            tile = tl.load(here, mask=whole + offset < last, other=float("-inf"))
            peak, mass, moment = _online(tile.to(tl.float32), peak, mass, moment, scale2, ENTROPY)
        top = tl.max(peak, axis=0)
        mass, moment = _lowered(mass, moment, (peak - top) * scale2, ENTROPY)
        total = tl.sum(mass, axis=0)
        # Without any mass the peak is -inf, whatever the floor was.
        tl.store(out, tl.where(total == 0, float("-inf"), top))
        tl.store(out + count, total)
        local = target - start
        inside = (local >= first) & (local < last)
        own = tl.load(base + tl.where(inside, local, 0) * stride_column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + 2 * count, tl.where(inside, own, 0.0))
        LN_2: tl.constexpr = 0.6931471805599453
        entropy = 0.0
        if ENTROPY:
            entropy = tl.where(total == 0, 0.0, (tl.log2(total) - tl.sum(moment, axis=0) / total) * LN_2)
        tl.store(out + 3 * count, entropy)


@triton.jit
def _fold(  # type: ignore[no-untyped-def]
    parts,
    result,
    count,
    scale2,
    stride_part,
    stride_field,
    stride_row,
    out_field,
    out_row,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    target = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(PARTS):
        at = parts + part * stride_part + row * stride_row
        peak = tl.maximum(peak, tl.load(at, mask=there, other=0.0))
        target += tl.load(at + 2 * stride_field, mask=there, other=0.0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(PARTS):
        at = parts + part * stride_part + row * stride_row
        mass = tl.load(at + stride_field, mask=there, other=1.0)
        total += mass * tl.exp2((tl.load(at, mask=there, other=0.0) - base) * scale2)
    LN_2: tl.constexpr = 0.6931471805599453
    entropy = tl.zeros([ROWS], tl.float32)
    whole = tl.where(total == 0, 1.0, total)
    for part in tl.static_range(PARTS):
        at = parts + part * stride_part + row * stride_row
        mass = tl.load(at + stride_field, mask=there, other=1.0)
        share = mass * tl.exp2((tl.load(at, mask=there, other=0.0) - base) * scale2) / whole
        own = tl.load(at + 3 * stride_field, mask=there, other=0.0)
        # 0 · log 0.
        entropy += tl.where(share == 0, 0.0, share * (own - tl.log2(share) * LN_2))
    out = result + row * out_row
    tl.store(out, peak, mask=there)
    tl.store(out + out_field, total, mask=there)
    tl.store(out + 2 * out_field, target, mask=there)
    tl.store(out + 3 * out_field, entropy, mask=there)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    logits,
    targets,
    out,
    peaks,
    masses,
    grads_logprob,
    entropies,
    grads_entropy,
    width,
    valid,
    start,
    ignore_index,
    scale,
    scale2,
    stride_row,
    stride_column,
    out_row,
    out_column,
    ENTROPY: tl.constexpr,
    STRIPE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.program_id(1) * STRIPE
    target = tl.load(targets + row)
    g = tl.load(grads_logprob + row).to(tl.float32)
    active = g != 0
    if ENTROPY:
        h = tl.load(grads_entropy + row).to(tl.float32)
        entropy = tl.load(entropies + row)
        active = active | (h != 0)
    offset = tl.arange(0, TILE)
    into = out + row.to(tl.int64) * out_row + (first + offset).to(tl.int64) * out_column
    out_step = tl.cast(out_column, tl.int64) * TILE
    if active & (target != ignore_index):
        here = logits + row.to(tl.int64) * stride_row + (first + offset).to(tl.int64) * stride_column
        step = tl.cast(stride_column, tl.int64) * TILE
        LN_2: tl.constexpr = 0.6931471805599453
        peak = tl.load(peaks + row)
        log_mass = tl.log2(tl.load(masses + row))
        local = (target - start).to(tl.int32)
        for column in range(first, tl.minimum(first + STRIPE, width), TILE):
            at = column + offset
            tile = tl.load(here, mask=at < valid, other=float("-inf"), eviction_policy="evict_first")
            exponent = (tile.to(tl.float32) - peak) * scale2 - log_mass
            p = tl.exp2(exponent)
            slope = -g * p
            if ENTROPY:
                # As forward: 0 · -inf.
                slope -= h * p * tl.maximum(exponent * LN_2 + entropy, -1.0e30)
            slope = (slope + tl.where(at == local, g, 0.0)) * scale
            tl.store(into, slope.to(out.dtype.element_ty), mask=at < width)
            here += step
            into += out_step
    else:
        nothing = tl.zeros([TILE], tl.float32).to(out.dtype.element_ty)
        for column in range(first, tl.minimum(first + STRIPE, width), TILE):
            tl.store(into, nothing, mask=column + offset < width)
            into += out_step


# Triton decides when a kernel is defined whether it will be compiled or interpreted.
INTERPRETED = not isinstance(_statistics, triton.JITFunction)
