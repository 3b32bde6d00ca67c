"""Sums of weights by group, and what one side of a refit alone has quantised, lacks or has kept.

A refit renames weights (q, k and v become one matrix in vLLM, and so do experts) and casts them to the engine's dtype.
The checksum of a group of weights is therefore its sum and its sum of absolute values in float64: neither fusion nor
order changes them. A group is a module of a layer, with fused projections and experts as one; a layer, if trainer and
engine name its modules differently; or one weight outside of the layers. The decay of a state space is a group of its
own, because vLLM stores A = -exp(A_log) where the trainer has A_log. The weights that are sent are cast to each dtype
that the engine may have, and summed in each. Both sides then agree to float64's rounding, and even a single outdated
bfloat16 shows. Weights that the engine has quantised are dequantised, and may differ by as much as that rounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Sums = dict[str, dict[str, list[float]]]
"""By group and dtype: the sum, the sum of absolute values and the number of elements."""
Precision = dict[str, dict[str, str]]
"""``quantised``: formats of quantised groups; ``rounded``: bits of groups whose values are rounded; ``routers``: the
dtypes that routers compute in."""

LOG_DECAY, DECAY = "A_log", "A"
ENGINE_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of an engine; the weights that are sent are cast to each, exactly as the engine would cast them."""
_LAYER = re.compile(r"(?:^|\.)layers\.\d+(?:\.|$)")
_TOLERANCE = 1e-10
"""Largest difference of two sums that float64's rounding explains, relative to the sum of absolute values."""
_ROUNDING = {"float32": 0.0, "float16": 2.0**-12, "bfloat16": 2.0**-9, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
"""By dtype: largest rounding of a value, either way, relative to it."""
_BIAS = 2.0**-9
"""Share of a sum that rounding to 8 bits moves one way; 7e-4 was measured on normally distributed weights."""
_FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"} | dict.fromkeys(
    ("q_proj", "k_proj", "v_proj"), "qkv_proj"
)
"""Names of modules that vLLM fuses, and the name that the fused one has there."""
KEPT = "weights in"  # before the dtype of a router's weights, if the model does not say what the router computes in
BLOCK = 128  # rows and columns that share a scale in NeMo-RL's fp8 weights
PART = 1 << 24  # values that are converted at once


def group_of(name: str) -> str:
    """Return the group of a weight by its name: its layer and module, or, outside of layers, its name's last parts."""
    match, last = _LAYER.search(name), name.rpartition(".")[2]
    if not match:
        return ".".join(name.split(".")[-2:])
    layer, modules = match[0].strip("."), name[match.end() :].split(".")[:-1]
    if last in (LOG_DECAY, DECAY):
        return f"{layer}.{last}"
    if "experts" in modules:
        modules, last = modules[: modules.index("experts") + 1], "weight"
    return ".".join([layer, *(_FUSED.get(module, module) for module in modules), *([last] * (last != "weight"))])


def layer_of(group: str) -> str:
    """Return the layer of a group; the group itself outside of layers and for the decay of a state space."""
    is_whole = not _LAYER.match(group) or group.rpartition(".")[2] in (LOG_DECAY, DECAY)
    return group if is_whole else ".".join(group.split(".")[:2])


def sums_of(tensor: Any, dtype: str) -> list[float]:
    """Return sum, sum of absolute values and number of a tensor's values in a dtype, without a whole copy of it."""
    total = [0.0, 0.0, float(tensor.numel())]
    for part in tensor.detach().reshape(-1).split(PART):
        values = part.to(getattr(torch, dtype)).double()
        total[0] += float(values.sum())
        total[1] += float(values.abs().sum())
    return total


def increase(total: list[float], values: Sequence[float]) -> None:
    """Add values to a total, in place."""
    for index, value in enumerate(values):
        total[index] += value


def add_sums(sums: Sums, group: str, dtype: str, values: Sequence[float]) -> None:
    """Add sum, sum of absolute values and number to those of a group in a dtype."""
    increase(sums.setdefault(group, {}).setdefault(dtype, [0.0, 0.0, 0.0]), values)


def merge_precisions(precisions: Iterable[Mapping[str, Mapping[str, str]]]) -> Precision:
    """Return the precision of a model whose parts or copies several modules or processes hold."""
    merged: Precision = {"quantised": {}, "rounded": {}, "routers": {}}
    for precision in precisions:
        for kind, groups in precision.items():
            merged[kind] |= groups
    return merged


def dequantised_sums(weight: Any, scale: Any) -> list[float]:
    """Return the sums of an fp8 weight [..., N, K] times its scale: of blocks, of rows, or one.

    The sums are NaN if the layout is another, as of packed four-bit values.
    """
    factors = torch.as_tensor(math.nan if scale is None or weight.dim() < 2 else scale).detach().float()
    if weight.dim() > 1 and factors.dim() >= 2:
        for dim in (-2, -1):
            if factors.shape[dim] == -(-weight.shape[dim] // BLOCK):
                factors = factors.repeat_interleave(BLOCK, dim).narrow(dim, 0, weight.shape[dim])
    try:
        rows = factors.expand(weight.shape).flatten(0, -2).split(1024)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return [math.nan, math.nan, float(weight.numel())]
    total = [0.0, 0.0, 0.0]
    for values, scales in zip(weight.detach().flatten(0, -2).split(1024), rows, strict=True):
        increase(total, sums_of(values.float() * scales, "float32"))
    return total


def rounded_bits(weight: Any) -> str:
    """Return "8 bits" or "4 bits" if the values of a matrix are rounded to them, and an empty text if not.

    Values under one scale then have at most 2^(bits - 1) sizes: in blocks of 128 by 128 values, or, for four bits, in
    16 neighbours. Random values in bfloat16 have about 400 sizes among 512, and 15 among 16.
    """
    if weight.dim() < 2 or not weight.is_floating_point():
        return ""
    block = weight.detach().reshape(-1, weight.shape[-1])[:BLOCK, :BLOCK].float().abs()
    if block.numel() < 4 * BLOCK or (count := block.unique().numel()) < 4:
        return ""
    neighbours = block[:, : block.shape[1] // 16 * 16].reshape(-1, 16).sort(dim=-1).values
    if len(neighbours) and int(((neighbours[:, 1:] != neighbours[:, :-1]).sum(-1) + 1).median()) <= 8:
        return "4 bits"
    return "8 bits" if count <= BLOCK + 1 else ""


def merge_processes(processes: Sequence[Sums]) -> Sums:
    """Return the sums by group of an engine whose processes hold shards or copies of its parameters.

    A parameter with equal sums in all processes that hold it is a copy, which counts once; shards add up. A copy that
    one process has not updated makes them differ, so that the group does.
    """
    merged: Sums = {}
    for name in dict.fromkeys(name for process in processes for name in process):
        parts = [process[name] for process in processes if name in process]
        for part in parts[:1] if all(part == parts[0] for part in parts) else parts:
            for dtype, values in part.items():
                add_sums(merged, group_of(name), dtype, values)
    return merged


@dataclass(frozen=True)
class Difference:
    """A group of weights that differs between trainer and engine."""

    group: str  # the module of a layer, the layer, or the weight
    sent: float  # the trainer's sum of absolute values, in the engine's dtype
    in_engine: float  # the engine's sum of absolute values
    size: float  # the larger difference of both sums, relative to the trainer's sum of absolute values
    why: str = ""  # that a side lacks it, or that the engine has kept it; empty if the values alone differ


def common_groups(sent: Sums, engine: Sums, before: Sums) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], bool]]:
    """Yield each group with its sums on both sides, and whether the engine's are those from before the refit.

    The modules of a layer are one group if the two sides name them differently.
    """
    named = [
        {layer: {group for group in side if layer_of(group) == layer} for layer in map(layer_of, side)}
        for side in (sent, engine)
    ]
    for layer in dict.fromkeys([*named[0], *named[1]]):
        groups = [side.get(layer, set()) for side in named]
        for group in sorted(groups[0]) if groups[0] == groups[1] else [layer]:
            parts = [[group] if groups[0] == groups[1] else sorted(each) for each in groups]
            totals: list[Sums] = [{group: {}}, {group: {}}]
            for side, names, total in zip((sent, engine), parts, totals, strict=True):
                for dtype, values in ((dtype, values) for name in names for dtype, values in side[name].items()):
                    add_sums(total, group, dtype, values)
            is_kept = all(engine[name] == before.get(name) for name in parts[1])
            yield group, totals[0][group], totals[1][group], is_kept


def compare(sent: Sums, engine: Sums, before: Sums | None = None) -> tuple[list[Difference], list[str], list[str]]:
    """Compare the sums of both sides of a refit.

    A layer that is not sent, or that the engine does not have, differs by its whole size. Another weight that one side
    lacks (a tied embedding) is not compared.

    Args:
        before: the engine's sums before the refit.

    Returns: the differences, the groups that were compared, and those that can't be: the engine has them quantised in
    a layout that is not known.
    """
    differences, compared, unknown = [], [], []
    for group, in_sent, in_engine, is_kept in common_groups(sent, engine, before or {}):
        if not (in_sent and in_engine):
            if _LAYER.fullmatch(group):
                sizes = [max((sums[1] for sums in side.values()), default=0.0) for side in (in_sent, in_engine)]
                differences.append(
                    Difference(group, sizes[0], sizes[1], 1.0, "not in the engine" if in_sent else "not sent")
                )
            continue
        if any(
            dtype not in _ROUNDING or (dtype not in ENGINE_DTYPES and math.isnan(sums[0]))
            for dtype, sums in in_engine.items()
        ):
            unknown.append(group)
            continue
        compared.append(group)
        # A group whose weights have several dtypes, as a layer's may: the cast of each weight is not known.
        dtype = next(iter(in_engine)) if len(in_engine) == 1 else "float32"
        total, absolute, count = in_sent.get(dtype, in_sent["float32"])
        held = [sum(sums[index] for sums in in_engine.values()) for index in range(2)]
        tolerance = _TOLERANCE
        if len(in_engine) > 1 or dtype not in in_sent:
            rounding = max(map(_ROUNDING.__getitem__, in_engine))
            tolerance += 6 * rounding / math.sqrt(max(count, 1.0)) + _BIAS * (rounding > _ROUNDING["bfloat16"])
        size = max(abs(total - held[0]), abs(absolute - held[1])) / max(absolute, 1e-30)
        is_nan = math.isnan(absolute) and math.isnan(held[1])  # as the trainer's own weights are
        if not (size <= tolerance or is_nan):
            differences.append(Difference(group, absolute, held[1], size, "as before the refit" if is_kept else ""))
    return differences, compared, unknown
