"""The Triton kernels that :mod:`nemo_geomask.kernels.gpu` launches.

Exponentials are to base 2, which is what the hardware computes: ``base2_scale`` is log2(e)/T. Arguments named
``stride_…`` and ``out_…`` (``out_row``, ``out_column``, ``out_field``) are strides of the input and of the output, in
elements. A field is one of the statistics of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _accumulate(x, max_logit, sum_exp, moment, base2_scale, ENTROPY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a tile x [DEPTH, LANES, VECTOR] of logits to the running statistics [LANES], and return these.

    ``max_logit`` is the largest logit, unscaled: only the distances from it are scaled, so that rounding does not
    depend on the size of the logits. ``moment`` is the sum of each exponential times its base-2 exponent.
    """
    new_max = tl.maximum(max_logit, tl.max(tl.max(x, axis=2), axis=0))
    exponent = (x - new_max[None, :, None]) * base2_scale
    exponential = tl.exp2(exponent)
    sum_exp, moment = _rebase(sum_exp, moment, (max_logit - new_max) * base2_scale, ENTROPY)
    sum_exp += tl.sum(tl.sum(exponential, axis=2), axis=0)
    if ENTROPY:
        # Filtered columns (-inf) have no part in the entropy, but 0 · -inf would be NaN.
        moment += tl.sum(tl.sum(exponential * tl.maximum(exponent, -1.0e30), axis=2), axis=0)
    return new_max, sum_exp, moment


@triton.jit
def _rebase(sum_exp, moment, exponent, ENTROPY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Express the sum of exponentials and the moment relative to a larger maximum.

    ``exponent`` is the old maximum less the new one, times ``base2_scale``.
    """
    shrink = tl.exp2(exponent)
    if ENTROPY:
        moment = shrink * (moment + sum_exp * tl.maximum(exponent, -1.0e30))
    return sum_exp * shrink, moment


@triton.jit
def row_statistics_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    statistics,
    count,
    width,
    columns,
    start,
    ignore_index,
    base2_scale,
    stride_row,
    stride_column,
    ENTROPY: tl.constexpr,
    NUM_STATISTICS: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Compute :func:`nemo_geomask.kernels.cpu.row_statistics`, with one program for each row and split.

    A split is a range of ``columns`` columns of the row. ``statistics`` is [splits, NUM_STATISTICS, count], where
    ``count`` is the number of rows. Each lane has a maximum and a sum of its own. The lanes are merged once, at the end
    of the row, so that nothing in the loop waits for another thread.
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    out = statistics + split.to(tl.int64) * NUM_STATISTICS * count + row
    target = tl.load(targets + row)
    if target == ignore_index:
        for field in tl.static_range(NUM_STATISTICS):
            tl.store(out + field * count, 0.0)
    else:
        TILE: tl.constexpr = DEPTH * LANES * VECTOR
        base = logits + row.to(tl.int64) * stride_row
        depth = tl.arange(0, DEPTH)[:, None, None]
        lane = tl.arange(0, LANES)[None, :, None]
        vector = tl.arange(0, VECTOR)[None, None, :]
        offsets = (depth * LANES + lane) * VECTOR + vector
        step = tl.cast(stride_column, tl.int64) * TILE
        # The maximum starts from a finite number: in a lane with only -inf, subtracting a maximum of -inf gives NaN.
        lane_max = tl.full([LANES], -3.0e38, tl.float32)
        lane_sum_exp = tl.zeros([LANES], tl.float32)
        lane_moment = tl.zeros([LANES], tl.float32)
        first_column = split * columns
        end_column = tl.minimum(first_column + columns, width)
        full_tiles_end = first_column + tl.maximum(end_column - first_column, 0) // TILE * TILE
        tile_pointers = base + (first_column + offsets).to(tl.int64) * stride_column
        for _ in range(first_column, full_tiles_end, TILE):
            tile = tl.load(tile_pointers, eviction_policy="evict_first")
            lane_max, lane_sum_exp, lane_moment = _accumulate(
                tile.to(tl.float32), lane_max, lane_sum_exp, lane_moment, base2_scale, ENTROPY
            )
            tile_pointers += step
        if full_tiles_end < end_column:
            tile = tl.load(tile_pointers, mask=full_tiles_end + offsets < end_column, other=float("-inf"))
            lane_max, lane_sum_exp, lane_moment = _accumulate(
                tile.to(tl.float32), lane_max, lane_sum_exp, lane_moment, base2_scale, ENTROPY
            )
        max_logit = tl.max(lane_max, axis=0)
        lane_sum_exp, lane_moment = _rebase(lane_sum_exp, lane_moment, (lane_max - max_logit) * base2_scale, ENTROPY)
        sum_exp = tl.sum(lane_sum_exp, axis=0)
        # In a row with only -inf the maximum is still the number that it started from.
        tl.store(out, tl.where(sum_exp == 0, float("-inf"), max_logit))
        tl.store(out + count, sum_exp)
        local = target - start
        is_local = (local >= first_column) & (local < end_column)
        target_logit = tl.load(base + tl.where(is_local, local, 0) * stride_column, mask=is_local, other=0.0)
        tl.store(out + 2 * count, tl.where(is_local, target_logit.to(tl.float32), 0.0))
        LN_2: tl.constexpr = 0.6931471805599453
        entropy = 0.0
        if ENTROPY:
            entropy = tl.where(sum_exp == 0, 0.0, (tl.log2(sum_exp) - tl.sum(lane_moment, axis=0) / sum_exp) * LN_2)
        tl.store(out + 3 * count, entropy)


@triton.jit
def fold_kernel(  # type: ignore[no-untyped-def]
    parts,
    statistics,
    count,
    base2_scale,
    stride_part,
    stride_field,
    stride_row,
    out_field,
    out_row,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute :func:`nemo_geomask.kernels.cpu.fold`, with one program for every ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = row < count
    max_logit = tl.full([ROWS], float("-inf"), tl.float32)
    target_logit = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(PARTS):
        pointers = parts + part * stride_part + row * stride_row
        max_logit = tl.maximum(max_logit, tl.load(pointers, mask=in_range, other=0.0))
        target_logit += tl.load(pointers + 2 * stride_field, mask=in_range, other=0.0)
    finite_max = tl.where(max_logit == float("-inf"), 0.0, max_logit)
    sum_exp = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(PARTS):
        pointers = parts + part * stride_part + row * stride_row
        part_sum_exp = tl.load(pointers + stride_field, mask=in_range, other=1.0)
        part_max = tl.load(pointers, mask=in_range, other=0.0)
        sum_exp += part_sum_exp * tl.exp2((part_max - finite_max) * base2_scale)
    LN_2: tl.constexpr = 0.6931471805599453
    entropy = tl.zeros([ROWS], tl.float32)
    safe_sum_exp = tl.where(sum_exp == 0, 1.0, sum_exp)
    for part in tl.static_range(PARTS):
        pointers = parts + part * stride_part + row * stride_row
        part_sum_exp = tl.load(pointers + stride_field, mask=in_range, other=1.0)
        part_max = tl.load(pointers, mask=in_range, other=0.0)
        q = part_sum_exp * tl.exp2((part_max - finite_max) * base2_scale) / safe_sum_exp
        part_entropy = tl.load(pointers + 3 * stride_field, mask=in_range, other=0.0)
        # 0 · log 0 would be NaN.
        entropy += tl.where(q == 0, 0.0, q * (part_entropy - tl.log2(q) * LN_2))
    out = statistics + row * out_row
    tl.store(out, max_logit, mask=in_range)
    tl.store(out + out_field, sum_exp, mask=in_range)
    tl.store(out + 2 * out_field, target_logit, mask=in_range)
    tl.store(out + 3 * out_field, entropy, mask=in_range)


@triton.jit
def row_gradients_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    out,
    max_logits,
    sums_exp,
    grads_logprob,
    entropies,
    grads_entropy,
    width,
    valid,
    start,
    ignore_index,
    scale,
    base2_scale,
    stride_row,
    stride_column,
    out_row,
    out_column,
    ENTROPY: tl.constexpr,
    STRIPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute :func:`nemo_geomask.kernels.cpu.row_gradients`, with one program for each row and STRIPE columns.

    ``scale`` is 1/T.
    """
    row = tl.program_id(0)
    first_column = tl.program_id(1) * STRIPE
    target = tl.load(targets + row)
    g = tl.load(grads_logprob + row).to(tl.float32)
    is_active = g != 0
    if ENTROPY:
        h = tl.load(grads_entropy + row).to(tl.float32)
        entropy = tl.load(entropies + row)
        is_active = is_active | (h != 0)
    offsets = tl.arange(0, TILE)
    out_pointers = out + row.to(tl.int64) * out_row + (first_column + offsets).to(tl.int64) * out_column
    out_step = tl.cast(out_column, tl.int64) * TILE
    if is_active & (target != ignore_index):
        tile_pointers = logits + row.to(tl.int64) * stride_row + (first_column + offsets).to(tl.int64) * stride_column
        step = tl.cast(stride_column, tl.int64) * TILE
        LN_2: tl.constexpr = 0.6931471805599453
        max_logit = tl.load(max_logits + row)
        log2_sum_exp = tl.log2(tl.load(sums_exp + row))
        local = (target - start).to(tl.int32)
        for column in range(first_column, tl.minimum(first_column + STRIPE, width), TILE):
            columns = column + offsets
            tile = tl.load(tile_pointers, mask=columns < valid, other=float("-inf"), eviction_policy="evict_first")
            exponent = (tile.to(tl.float32) - max_logit) * base2_scale - log2_sum_exp
            p = tl.exp2(exponent)
            gradient = -g * p
            if ENTROPY:
                # As in the forward pass, 0 · -inf would be NaN.
                gradient -= h * p * tl.maximum(exponent * LN_2 + entropy, -1.0e30)
            gradient = (gradient + tl.where(columns == local, g, 0.0)) * scale
            tl.store(out_pointers, gradient.to(out.dtype.element_ty), mask=columns < width)
            tile_pointers += step
            out_pointers += out_step
    else:
        zeros = tl.zeros([TILE], tl.float32).to(out.dtype.element_ty)
        for column in range(first_column, tl.minimum(first_column + STRIPE, width), TILE):
            tl.store(out_pointers, zeros, mask=column + offsets < width)
            out_pointers += out_step
