"""Times of the output layer measured on one GPU, from which ``bench scale`` extrapolates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe.input_limits import parse_text, read_text
from nemo_geomask.tools.check import OutputWork

_WITH_LOGITS = ("NeMo-RL", "NeMo-RL, in chunks", "geomask")
_FUSED = "NeMo-RL, fused"


class Costs(NamedTuple):
    """Times measured on one GPU.

    Attributes:
        with_logits: for each method with logits, nanoseconds of the forward and of the backward pass over a million
            logits.
        without_logits: for each method without logits, nanoseconds of the forward and of the backward pass for rows ×
            columns × hidden size of a billion.
    """

    gpu: str  # name, software version and date
    peak: float  # FLOP/s of dense half-precision products in its specification
    products: float  # measured FLOP/s of the output layer's matrix products
    with_logits: Mapping[str, tuple[float, float]]
    without_logits: Mapping[str, tuple[float, float]]


H100 = Costs(
    gpu="NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, 2026-11-27",
    peak=989e12,
    products=746e12,
    with_logits={
        "NeMo-RL": (17_479, 8_523),
        "NeMo-RL, in chunks": (16_165, 41_363),
        "geomask": (745, 1_479),
        "geomask_linear": (745, 1_479),
    },
    without_logits={"NeMo-RL, fused": (6_335, 102_527)},
)
"""Costs of the results in docs/performance; a test computes them again."""


def read_costs(folder: Path, *, peak: float) -> Costs:
    """Return the costs from the JSON of ``bench logprobs`` in a folder.

    They are from its first case in which all tokens train, at temperature 1 and without entropy. What a method with
    logits takes beyond its three matrix products counts as passes over the logits.

    Args:
        folder: folder of the result, ``logprobs-*.json``.
        peak: peak of the GPU in FLOP/s; see :class:`Costs`.

    Raises:
        ConfigError: the folder does not have one such file, it exceeds a limit of what is read, a method was not
            measured, or a value that is needed is missing, of another type or out of range.
    """
    paths = sorted(folder.glob("logprobs-*.json"))
    if len(paths) != 1:
        raise ConfigError(
            f"--measured {folder}: has {len(paths)} files logprobs-*.json, but needs exactly one; write it with "
            f"nemo-geomask bench logprobs --out {folder} on the GPU"
        )
    (path,) = paths
    try:
        result = parse_text(json.loads, read_text(path), f"--measured: {path}", format_name="JSON")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--measured: {path} can't be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return _costs_of(result, path, peak)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(
            f"--measured: {path} is not what nemo-geomask bench logprobs --out {folder} writes "
            f"({type(error).__name__}: {error}); measure again"
        ) from None


def _costs_of(result: Mapping[str, Any], path: Path, peak: float) -> Costs:
    case = next(filter(_is_plain, result["cases"]), None)
    if case is None:
        raise ConfigError(
            f"--measured: {path} has no case in which all tokens train, without entropy; run nemo-geomask bench "
            "logprobs with --fractions 1 and --entropy off on the GPU"
        )
    rows = {row["path"]: row for row in case["paths"]}
    for method in (*_WITH_LOGITS, _FUSED):
        if rows.get(method, {}).get("status") != "measured":
            raise ConfigError(
                f"--measured: '{method}' was not measured in {path}; run nemo-geomask bench logprobs, without --paths, "
                "on the GPU where NeMo-RL is importable"
            )
    sizes = case["case"]
    logits = _positive(sizes["tokens"]) * _positive(sizes["vocab"]) / _positive(sizes["tp"])
    product = _positive(case["products"]["ms"]["median"]) / 4

    def nanoseconds(method: str, unit: float, products: tuple[int, int]) -> tuple[float, float]:
        forward, backward = (
            max(0.0, _positive(rows[method][key]["median"]) - count * product) * 1e6 / unit
            for key, count in zip(("forward_ms", "backward_ms"), products, strict=True)
        )
        return forward, backward

    with_logits = {method: nanoseconds(method, logits / 1e6, (1, 2)) for method in _WITH_LOGITS}
    machine = [str(result["machine"][key])[:200] for key in ("name", "torch", "date")]
    return Costs(
        "{}, torch {}, {}".format(*machine),
        peak,
        _positive(case["products_tflop_s"]) * 1e12,
        {**with_logits, "geomask_linear": with_logits["geomask"]},
        {_FUSED: nanoseconds(_FUSED, logits * _positive(sizes["hidden"]) / 1e9, (0, 0))},
    )


def _is_plain(case: Mapping[str, Any]) -> bool:
    sizes = case["case"]
    return "error" not in case and sizes["fraction"] == sizes["temperature"] == 1 and not sizes["entropy"]


def _positive(value: Any) -> float:
    """Return a number within bounds in which all estimates from such numbers are finite."""
    if isinstance(value, bool) or not 1e-9 <= float(value) <= 1e15:
        raise ValueError(f"{value!r:.40} is not a number above 0")
    return float(value)


def method_seconds(method: str, head: OutputWork, costs: Costs) -> tuple[float, float]:
    """Return the seconds of a method on a microbatch in training (forward and backward) and in scoring (forward).

    They include the matrix products of the output layer, one of which is in the forward pass: three with logits, four
    without.
    """
    if method in costs.without_logits:
        forward, backward = (cost * 1e-18 * head.columns * head.hidden for cost in costs.without_logits[method])
        return head.rows * (forward + backward), head.scored * forward
    forward, backward = (cost * 1e-15 * head.columns for cost in costs.with_logits[method])
    product = 2 * head.columns * head.hidden / costs.products
    scoring = head.scored * (product + forward)
    if head.v1 and method == "geomask_linear":
        scoring = method_seconds("geomask", head, costs)[1]
    if method == "geomask_linear":
        return head.trained * head.rows * (4 * product + forward + backward), scoring
    if method == "geomask":
        # Rows that do not train are not read, and their gradient is filled with zeros.
        forward, backward = head.trained * forward, (1 + head.trained) / 2 * backward
    return head.rows * (3 * product + forward + backward), scoring
