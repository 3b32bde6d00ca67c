"""Times of the output layer measured on one GPU, from which ``bench scale`` extrapolates."""

from __future__ import annotations

import reprlib
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
_SMALLEST, _LARGEST = 1e-9, 1e15
"""Bounds of what was measured. The estimates from numbers within them are finite."""
_MAX_TEXT = 200
"""Length of a text that describes the machine."""


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
        linear: JSON of ``bench linear``. Errors name its key ``file``, if it has one.
        logprobs: JSON of ``bench logprobs``, likewise.
        peak: peak of the GPU in FLOP/s; see :class:`Costs`.

    Raises:
        ConfigError: there is no such case, a path was not measured in it, or a value that is needed is missing, of
            another type or out of range.
    """
    linear_case, where_linear = _plain_case(linear, "linear")
    logits_case, where_logits = _plain_case(logprobs, "logprobs")
    machine, where_machine = _object(linear, "machine", f"{_file_of(linear, 'linear')}: ")
    name, torch_version, date = (_text(machine, key, f"{where_machine}.") for key in ("name", "torch", "date"))
    case, where_case = _object(linear_case, "case", f"{where_linear}.")
    shape, where_shape = _object(logits_case, "case", f"{where_logits}.")
    tokens, vocab, tp, hidden = (_count(case, key, f"{where_case}.") for key in ("tokens", "vocab", "tp", "hidden"))
    logit_tokens, logit_vocab, logit_tp = (_count(shape, key, f"{where_shape}.") for key in ("tokens", "vocab", "tp"))
    return Costs(
        f"{name}, torch {torch_version}, {date}",
        peak,
        _number(linear_case, "products_tflop_s", f"{where_linear}.") * 1e12,
        _nanoseconds_per(logits_case, where_logits, _PATHS_WITH_LOGITS, logit_tokens * logit_vocab / logit_tp / 1e6),
        _nanoseconds_per(linear_case, where_linear, _PATHS_WITHOUT_LOGITS, tokens * vocab / tp * hidden / 1e9),
    )


def _file_of(result: Mapping[str, Any], name: str) -> str:
    return str(result.get("file", f"{name}-*.json"))


def _plain_case(result: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], str]:
    """Return the first case in which all tokens train, at temperature 1 and without entropy, and where it is."""
    file = _file_of(result, name)
    for case, where in _objects(result, "cases", f"{file}: "):
        if "error" in case:
            continue
        fields, _ = _object(case, "case", f"{where}.")
        if fields.get("fraction") == fields.get("temperature", 1) == 1 and not fields.get("entropy"):
            return case, where
    raise ConfigError(
        f"--measured: {file} has no case in which all tokens train, without entropy; run nemo-geomask bench {name} "
        "with --fractions 1 and --entropy off on the GPU"
    )


def _nanoseconds_per(
    case: Mapping[str, Any], where: str, names: Mapping[str, str], unit: float
) -> dict[str, tuple[float, float]]:
    """Return the nanoseconds of the forward and of the backward pass of each method per unit of its work.

    Args:
        case: the case.
        where: its place in the file.
        names: name of the measured path of each method.
        unit: work of the case, in units.
    """
    rows = {row.get("path"): (row, place) for row, place in _measured_rows(case, where)}
    nanoseconds = {}
    for method, path in names.items():
        if path not in rows:
            raise ConfigError(
                f"--measured: '{path}' was not measured in {where}; run nemo-geomask bench, without --paths, on the "
                "GPU where NeMo-RL is importable"
            )
        row, place = rows[path]
        forward, backward = (
            _number(times, "median", f"{times_place}.") * 1e6 / unit
            for times, times_place in (_object(row, key, f"{place}.") for key in ("forward_ms", "backward_ms"))
        )
        nanoseconds[method] = forward, backward
    return nanoseconds


def _measured_rows(case: Mapping[str, Any], where: str) -> list[tuple[Mapping[str, Any], str]]:
    return [
        (row, place)
        for row, place in _objects(case, "paths", f"{where}.")
        if row.get("status") == "measured" and isinstance(row.get("path"), str)
    ]


def _invalid(parent: Mapping[str, Any], key: str, where: str, expected: str) -> ConfigError:
    """Return the error of a value.

    Args:
        parent: object that should hold the value.
        key: its key.
        where: what precedes the key in the message: the file and the place of the object in it.
        expected: what the value must be.
    """
    actual = f"is {reprlib.repr(parent[key])}" if key in parent else "is missing"
    return ConfigError(
        f"--measured: {where}{key} {actual}, but must be {expected}; measure again with nemo-geomask bench"
    )


def _object(parent: Mapping[str, Any], key: str, where: str) -> tuple[Mapping[str, Any], str]:
    """Return an object of JSON and its place in the file."""
    value = parent.get(key)
    if not isinstance(value, Mapping):
        raise _invalid(parent, key, where, "an object")
    return value, f"{where}{key}"


def _objects(parent: Mapping[str, Any], key: str, where: str) -> list[tuple[Mapping[str, Any], str]]:
    """Return the objects of a list of JSON, each with its place in the file."""
    values = parent.get(key)
    if not isinstance(values, list) or not all(isinstance(value, Mapping) for value in values):
        raise _invalid(parent, key, where, "a list of objects")
    return [(value, f"{where}{key}[{index}]") for index, value in enumerate(values)]


def _number(parent: Mapping[str, Any], key: str, where: str) -> float:
    value = parent.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _SMALLEST <= value <= _LARGEST:
        raise _invalid(parent, key, where, f"a number from {_SMALLEST:g} to {_LARGEST:g}")
    return float(value)


def _count(parent: Mapping[str, Any], key: str, where: str) -> int:
    value = parent.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise _invalid(parent, key, where, f"a whole number from 1 to {_LARGEST:g}")
    return value


def _text(parent: Mapping[str, Any], key: str, where: str) -> str:
    value = parent.get(key)
    if not isinstance(value, str) or not value.isprintable() or len(value) > _MAX_TEXT:
        raise _invalid(parent, key, where, f"printable text of up to {_MAX_TEXT} characters")
    return value


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
