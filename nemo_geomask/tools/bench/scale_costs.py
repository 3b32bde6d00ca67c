"""Times of the output layer measured on one GPU, from which ``bench scale`` extrapolates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.check import OutputWork

__all__ = ["H100", "Costs", "method_seconds", "read_costs"]

_PATHS_WITH_LOGITS = {
    "NeMo-RL": "NeMo-RL DistributedLogprob of logits.float()",
    "NeMo-RL, in chunks": "NeMo-RL ChunkedDistributedLogprob(256)",
    "geomask": "nemo_geomask",
    "geomask_linear": "nemo_geomask",
}
_PATHS_WITHOUT_LOGITS = {"NeMo-RL, fused": "NeMo-RL fused linear (1024)"}


class Costs(NamedTuple):
    """Times measured on one GPU.

    Attributes:
        gpu: name, software version and date.
        peak: FLOP/s of dense half-precision products in its specification.
        products: measured FLOP/s of the output layer's matrix products.
        with_logits: for each method with logits, nanoseconds of the forward and of the backward pass over a million
            logits.
        without_logits: for each method without logits, nanoseconds of the forward and of the backward pass for
            rows × columns × hidden size of a billion.
    """

    gpu: str
    peak: float
    products: float
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
"""Costs that :func:`read_costs` returns for the JSON in docs/performance."""


def read_costs(linear: Mapping[str, Any], logprobs: Mapping[str, Any], *, peak: float) -> Costs:
    """Return the costs from the JSON of ``bench linear`` and ``bench logprobs`` on a GPU.

    They are from the first case of each in which all tokens train, the temperature is 1 and there is no entropy.

    Args:
        linear: JSON of ``bench linear``.
        logprobs: JSON of ``bench logprobs``.
        peak: peak of the GPU in FLOP/s; see :class:`Costs`.

    Raises:
        ConfigError: there is no such case, or a path was not measured in it.
    """

    def first_of(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        for case in result.get("cases", ()):
            fields = case["case"]
            is_plain = fields["fraction"] == fields.get("temperature", 1) == 1 and not fields["entropy"]
            if "error" not in case and is_plain:
                return dict(case)
        raise ConfigError(
            f"--measured: {name}-*.json has no case in which all tokens train, without entropy; run nemo-geomask bench "
            f"{name} with --fractions 1 and --entropy off on the GPU"
        )

    def nanoseconds_per(
        result: Mapping[str, Any], names: Mapping[str, str], unit: float
    ) -> dict[str, tuple[float, float]]:
        rows = {row["path"]: row for row in result["paths"] if row["status"] == "measured"}
        if missing := [path for path in names.values() if path not in rows]:
            raise ConfigError(
                f"--measured: '{missing[0]}' was not measured in {result['title']}; run nemo-geomask bench, without "
                "--paths, on the GPU where NeMo-RL is importable"
            )
        return {
            name: (rows[path]["forward_ms"]["median"] * 1e6 / unit, rows[path]["backward_ms"]["median"] * 1e6 / unit)
            for name, path in names.items()
        }

    linear_case, logits_case = first_of(linear, "linear"), first_of(logprobs, "logprobs")
    case, shape = linear_case["case"], logits_case["case"]
    machine = linear["machine"]
    return Costs(
        f"{machine['name']}, torch {machine['torch']}, {machine['date']}",
        peak,
        linear_case["products_tflop_s"] * 1e12,
        nanoseconds_per(logits_case, _PATHS_WITH_LOGITS, shape["tokens"] * shape["vocab"] / shape["tp"] / 1e6),
        nanoseconds_per(
            linear_case, _PATHS_WITHOUT_LOGITS, case["tokens"] * case["vocab"] / case["tp"] * case["hidden"] / 1e9
        ),
    )


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
