"""``bench logprobs``: from hidden states to log-probs and the gradients of both operands, by each method of a recipe.

A recipe chooses between our log-probs without logits and with them, NeMo-RL's, which may work in chunks or be fused
with the output layer, and those of megatron-core and transformer-engine.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.bench.logprob_paths import PATHS, LogprobCase, LogprobSample, Path, draw, gradients
from nemo_geomask.tools.bench.meters import count_host_syncs, extra_memory, metered
from nemo_geomask.tools.bench.peers import Setting, select
from nemo_geomask.tools.bench.results import PATH, TIMES, Row, figure, format_number, format_rows
from nemo_geomask.tools.bench.timing import Clock, Lap, compare, free_memory, measure_cases

_CHECKED_ROWS = 8  # rows that are compared with float64
_PRODUCTS = "the four matrix products alone"

COLUMNS = (
    PATH,
    *TIMES,
    figure("of the products", "of_products", form="{:.0%}"),
    figure("extra MB", "extra_bytes", scale=1e6),
    figure("of the logits", "of_logits", form="{:.1%}"),
    figure("error logp", "errors", "logprob", form="{:.0e}"),
    figure("gradient", "errors", "gradient", form="{:.0e}"),
)


def measure(case: LogprobCase, setting: Setting, paths: Mapping[str, Path], repeats: int, seed: int) -> dict[str, Any]:
    """Measure times, memory beyond inputs and gradients, errors against float64, and the matrix products alone.

    No path without logits can avoid four matrix products. ``of_products`` is the time of these products alone, divided
    by the time of the path.
    """
    sample = draw(case, setting.device, seed)
    clock = Clock(setting.device, preallocated_bytes=4 * case.logits_bytes)

    def candidate(path: Path) -> Callable[[int], Lap]:
        return lambda turn: clock.lap(lambda: path(sample, case, setting), lambda outputs: gradients(outputs, sample))

    candidates = {name: candidate(path) for name, path in paths.items()}
    rows = compare({**candidates, _PRODUCTS: _product_candidate(sample, clock)}, repeats)
    products = rows.pop(_PRODUCTS)
    if "reason" in products:  # the products hold all logits, which may not fit into memory
        raise torch.OutOfMemoryError(f"{_PRODUCTS}: {products['reason']}")
    product_seconds = products["ms"]["median"] / 1e3
    flops = 8.0 * round(case.fraction * case.tokens) * case.hidden * case.width
    reference = _float64_reference(sample, case)
    for name, row in rows.items():
        if row["status"] == "measured":
            row["of_products"] = product_seconds / (row["ms"]["median"] / 1e3)
            row["tflop_s"] = flops / (row["ms"]["median"] / 1e3) / 1e12
            row |= metered(functools.partial(_measure_resources, paths[name], sample, case, setting, reference))
    return {
        "logits_bytes": case.logits_bytes,
        "products": products,
        "products_tflop_s": flops / product_seconds / 1e12,
        "paths": [{"path": name, **row} for name, row in rows.items()],
    }


def _product_candidate(sample: LogprobSample, clock: Clock) -> Callable[[int], Lap]:
    """Return a candidate that runs four matrix products over the trained rows: logits twice, each gradient once.

    They have the type in which our path without logits runs them, which is float32 on a CPU.
    """
    dtype = torch.float32 if clock.device.type == "cpu" else sample.hidden.dtype
    hidden, weight = sample.hidden.detach()[sample.is_trained].to(dtype), sample.weight.detach().to(dtype)

    def multiply() -> Tensor:
        logits = hidden @ weight.T
        torch.mm(hidden, weight.T, out=logits)
        return (logits @ weight).sum() + (logits.T @ hidden).sum()

    return lambda turn: clock.lap(multiply)


def _float64_reference(sample: LogprobSample, case: LogprobCase) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of a few trained rows, and their log-probs and hidden-state gradients in float64."""
    rows = sample.is_trained.nonzero().squeeze(1)[:_CHECKED_ROWS]
    weight = sample.weight.detach()
    gradient = torch.zeros(len(rows), case.hidden, dtype=torch.float64, device=weight.device)
    hidden, chunks = sample.hidden.detach()[rows].double(), torch.split(weight, 8192)  # in float64 a chunk fits
    logits = torch.cat([hidden @ chunk.double().T for chunk in chunks], dim=1)
    logp = (logits / case.temperature).log_softmax(1)
    p, target = logp.exp(), sample.targets[rows].unsqueeze(1)
    one_hot = torch.zeros_like(p).scatter_(1, target, 1.0)
    logit_gradient = sample.g[rows].double().unsqueeze(1) * (one_hot - p) / case.temperature
    if case.entropy:
        entropy = -(p * logp).sum(1, keepdim=True)
        logit_gradient -= sample.h[rows].double().unsqueeze(1) * p * (logp + entropy) / case.temperature
    for chunk, chunk_gradient in zip(chunks, torch.split(logit_gradient.T, 8192), strict=True):
        gradient += chunk_gradient.T @ chunk.double()
    return rows, logp.gather(1, target).squeeze(1), gradient


def _measure_resources(
    path: Path, sample: LogprobSample, case: LogprobCase, setting: Setting, reference: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Any]:
    def step() -> Tensor:
        return gradients(path(sample, case, setting), sample)[1]

    rows, logprobs, gradient = reference
    outputs = path(sample, case, setting)
    hidden_gradient = gradients(outputs, sample)[0][rows].double()
    error = (hidden_gradient - gradient).abs().amax(1) / gradient.abs().amax(1).clamp(min=1e-30)
    errors = {
        "logprob": float((outputs[0].detach()[rows].double() - logprobs).abs().max()),
        "gradient": float(error.max()),
    }
    del outputs, hidden_gradient
    free_memory()
    extra = extra_memory(step, sample.weight)
    # extra_memory subtracts the weight's gradient. The gradient of the hidden states is not extra memory, either.
    extra = None if extra is None else extra - sample.hidden.nbytes
    result = {"errors": errors, "extra_bytes": extra, "of_logits": None if extra is None else extra / case.logits_bytes}
    return result | ({"host_syncs": count_host_syncs(step)} if setting.device.type == "cuda" else {})


def format_title(case: Row) -> str:
    """Return the line above the table of a case."""
    return (
        f"{case['title']}: logits of {case['logits_bytes'] / 1e6:.0f} MB; four matrix products alone take "
        f"{format_number(case['products']['ms']['median'])} ms, {case['products_tflop_s']:.3g} TFLOP/s"
    )


def cases_of(options: argparse.Namespace) -> list[LogprobCase]:
    """Return the cases that the options ask for: in each, one value at most is not the first of its option.

    Raises:
        ConfigError: the vocabulary can't be divided into equal shards.
    """
    values: list[Sequence[Any]] = [options.tokens, options.hidden, options.vocab, options.tp, options.fractions]
    values += [options.entropy, options.temperatures, [getattr(torch, name) for name in options.dtypes]]
    first = [field[0] for field in values]
    one_at_a_time = [(*first[:i], value, *first[i + 1 :]) for i, field in enumerate(values) for value in field]
    cases = dict.fromkeys(LogprobCase(*chosen) for chosen in one_at_a_time)
    for case in cases:
        if case.vocab % case.tp:
            raise ConfigError(
                f"--vocab {case.vocab} can't be divided into --tp {case.tp} equal shards; use a multiple of {case.tp}"
            )
    return list(cases)


def format_case(case: Row) -> str:
    """Return the text of a case's result."""
    return format_rows(format_title(case), COLUMNS, case["paths"])


def run(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Measure what the options ask for, and print the tables."""
    paths = select(PATHS, options.paths)

    def measure_case(case: LogprobCase) -> dict[str, Any]:
        return measure(case, setting, paths, options.repeats, options.seed)

    return {"cases": measure_cases(cases_of(options), measure_case, format_case)}
