"""``bench linear``: our paths and peers' from hidden states to log-probs and to the gradients of both operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.tools.bench.linear_cases import LinearCase, LinearSample, draw, gradients
from nemo_geomask.tools.bench.paths import Setting
from nemo_geomask.tools.bench.paths.linear_paths import PATHS
from nemo_geomask.tools.bench.resource_meters import count_host_syncs, extra_memory
from nemo_geomask.tools.bench.timing import (
    Clock,
    Lap,
    describe_error,
    free_memory,
    interleave,
    measure_cases,
    summarise,
)

__all__ = ["benchmark"]

_ROWS = 8  # rows that are compared with float64
_PRODUCTS, _KERNELS = "the four matrix products alone", "the log-prob kernels alone"


def benchmark(
    cases: Sequence[LinearCase],
    setting: Setting,
    *,
    repeats: int,
    paths: Sequence[str] = tuple(PATHS),
    seed: int = 0,
    report: Callable[[dict[str, Any]], object] = lambda case: None,
) -> list[dict[str, Any]]:
    """Measure paths of :mod:`nemo_geomask.tools.bench.paths.linear_paths` in every case.

    Args:
        cases: the cases.
        setting: device, kernel and process group.
        repeats: number of measured rounds for each case.
        paths: names of the paths.
        seed: seed of the inputs.
        report: function that is called with each case's result.
    """
    return measure_cases(cases, lambda case: _measure(case, setting, paths, repeats, seed), report)


def _measure(case: LinearCase, setting: Setting, paths: Sequence[str], repeats: int, seed: int) -> dict[str, Any]:
    """Measure times, memory beyond inputs and gradients, errors against float64, and the matrix products alone.

    No path without logits can avoid four matrix products. ``of_products`` is the time of these products alone, divided
    by the time of the path.
    """
    sample = draw(case, setting.device, seed)
    clock = Clock(setting.device)
    rows = {name: {"path": name} for name in paths}
    candidates: dict[str, Callable[[int], Lap]] = {}
    for name in paths:
        candidates[name] = _path_candidate(name, sample, case, setting, clock)
    candidates |= {
        _PRODUCTS: _product_candidate(sample, clock),
        _KERNELS: _kernel_candidate(sample, case, setting, clock),
    }
    laps, failures = interleave(candidates, repeats, warmup=1)
    for name in (_PRODUCTS, _KERNELS):
        if name in failures:  # these baselines hold all logits, which may not fit into memory
            raise torch.OutOfMemoryError(f"{name}: {failures[name]}")
    baselines = {name: summarise(laps.pop(name), setting.device) for name in (_PRODUCTS, _KERNELS)}
    products = baselines[_PRODUCTS]["ms"]["median"] / 1e3
    for name, reason in failures.items():
        rows[name] |= {"status": _status(reason), "reason": reason.partition(": ")[2] or reason}
    reference = _float64_reference(sample, case)
    for name in laps:
        row = {"status": "measured", **summarise(laps[name], setting.device, has_backward=True)}
        row["of_products"] = products / (row["ms"]["median"] / 1e3)
        row["tflop_s"] = 4 * case.product / (row["ms"]["median"] / 1e3) / 1e12
        try:
            row |= _measure_resources(name, sample, case, setting, reference)
        except Exception as error:  # a peer that fails under a meter keeps its times
            row["meters"] = describe_error(error)
        rows[name] |= row
        free_memory()
    return {
        "case": case.describe(),
        "title": str(case),
        "logits_bytes": case.logits_bytes,
        "products": baselines[_PRODUCTS],
        "kernels": baselines[_KERNELS],
        "products_tflop_s": 4 * case.product / products / 1e12,
        "paths": list(rows.values()),
    }


def _status(reason: str) -> str:
    """Return the status of a path that raised an error; ``reason`` begins with the error's type."""
    return {"Absent": "absent", "NotApplicable": "not applicable"}.get(reason.partition(":")[0], "failed")


def _path_candidate(
    name: str, sample: LinearSample, case: LinearCase, setting: Setting, clock: Clock
) -> Callable[[int], Lap]:
    path = PATHS[name]
    return lambda turn: clock.lap(lambda: path(sample, case, setting), lambda outputs: gradients(outputs, sample))


def _product_candidate(sample: LinearSample, clock: Clock) -> Callable[[int], Lap]:
    """Return a candidate that runs four matrix products over the trained rows: logits twice, each gradient once.

    They have the type in which the paths run them, which is float32 on a CPU.
    """
    dtype = torch.float32 if clock.device.type == "cpu" else sample.hidden.dtype
    hidden = sample.hidden.detach()[sample.is_trained].to(dtype)
    weight = sample.weight.detach().to(dtype)

    def multiply() -> Tensor:
        logits = hidden @ weight.T
        torch.mm(hidden, weight.T, out=logits)
        return (logits @ weight).sum() + (logits.T @ hidden).sum()

    return lambda turn: clock.lap(multiply)


def _kernel_candidate(sample: LinearSample, case: LinearCase, setting: Setting, clock: Clock) -> Callable[[int], Lap]:
    """Return a candidate that runs the log-prob kernels, forward and backward, on logits that exist already."""
    hidden, targets = sample.hidden.detach()[sample.is_trained], sample.targets[sample.is_trained]
    incoming = [sample.g[sample.is_trained], sample.h[sample.is_trained]][: 1 + case.entropy]

    def forward_backward(logits: Tensor) -> Tensor:
        function: Any = vocab_parallel_logprobs
        options = {"entropy": case.entropy, "kernel": setting.kernel, "inplace_gradient": True}
        return torch.autograd.grad(function(logits, targets, **options), logits, incoming)[0]

    def lap(turn: int) -> Lap:
        # Repeat the logits of 64 rows: computing all logits would take longer than the pass over them.
        repeated = (hidden[:64] @ sample.weight.detach().T).repeat(-(-len(hidden) // 64), 1)[: len(hidden)]
        logits = repeated.requires_grad_() * 1  # the output of an operation, so that the gradient may reuse its memory
        return clock.lap(lambda: forward_backward(logits))

    return lap


def _float64_reference(sample: LinearSample, case: LinearCase) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of a few trained rows, and their log-probs and hidden-state gradients in float64."""
    rows = sample.is_trained.nonzero().squeeze(1)[:_ROWS]
    weight = sample.weight.detach()
    gradient = torch.zeros(len(rows), case.hidden, dtype=torch.float64, device=weight.device)
    logits = torch.cat(
        [sample.hidden.detach()[rows].double() @ chunk.double().T for chunk in _row_chunks(weight)], dim=1
    )
    logp = logits.log_softmax(1)
    p, target = logp.exp(), sample.targets[rows].unsqueeze(1)
    logit_gradient = -p.scatter_add(1, target, -torch.ones_like(target, dtype=p.dtype)) * sample.g[
        rows
    ].double().unsqueeze(1)
    if case.entropy:
        entropy = -(p * logp).sum(1, keepdim=True)
        logit_gradient -= sample.h[rows].double().unsqueeze(1) * p * (logp + entropy)
    for weight_rows, gradient_rows in zip(_row_chunks(weight), _row_chunks(logit_gradient.T), strict=True):
        gradient += gradient_rows.T @ weight_rows.double()
    return rows, logp.gather(1, target).squeeze(1), gradient


def _row_chunks(values: Tensor) -> Sequence[Tensor]:
    """Split a tensor by rows, so that a chunk in float64 fits into memory."""
    return torch.split(values, 8192)


def _measure_resources(
    name: str, sample: LinearSample, case: LinearCase, setting: Setting, reference: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Any]:
    def step() -> Tensor:
        return gradients(PATHS[name](sample, case, setting), sample)[1]

    rows, logprobs, gradient = reference
    outputs = PATHS[name](sample, case, setting)
    hidden_gradient = gradients(outputs, sample)[0][rows].double()
    error = (hidden_gradient - gradient).abs().amax(1) / gradient.abs().amax(1).clamp(min=1e-30)
    result: dict[str, Any] = {
        "errors": {
            "logprob": float((outputs[0].detach()[rows].double() - logprobs).abs().max()),
            "gradient": float(error.max()),
        }
    }
    del outputs, hidden_gradient
    free_memory()
    extra = extra_memory(step, sample.weight)
    # extra_memory subtracts the weight's gradient. The gradient of the hidden states is not extra memory, either.
    result["extra_bytes"] = extra = None if extra is None else extra - sample.hidden.nbytes
    result["of_logits"] = None if extra is None else extra / case.logits_bytes
    if setting.device.type == "cuda":
        result["host_syncs"] = count_host_syncs(step)
    return result
