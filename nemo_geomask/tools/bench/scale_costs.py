"""Times of the output layer measured on one GPU, from which ``bench scale`` extrapolates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nemo_geomask.tools.check import OutputWork


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
