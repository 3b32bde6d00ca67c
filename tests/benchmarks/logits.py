"""``logprobs``: every path from logits to log-probs and to the gradient of the logits, beside a copy of the logits."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.tools.bench.logprob_paths import IGNORE, SPREAD
from nemo_geomask.tools.bench.meters import count_work, extra_memory, metered
from nemo_geomask.tools.bench.peers import Setting, select
from nemo_geomask.tools.bench.results import PATH, TIMES, Row, figure, format_rows
from nemo_geomask.tools.bench.timing import Clock, Lap, compare, free_memory, measure_cases
from tests.benchmarks.collectives import count_path_collectives
from tests.benchmarks.logit_paths import PATHS, LogitCase, LogitPath, LogitSample, Output

_COPY = "copy"
COLUMNS = (
    PATH,
    *TIMES,
    figure("B/el", "bytes_per_element"),
    figure("of a copy", "of_copy", form="{:.0%}"),
    figure("extra MB", "extra_bytes", scale=1e6),
    figure("launches", "launches"),
    figure("error logp", "errors", "logprob", form="{:.0e}"),
    figure("gradient", "errors", "gradient", form="{:.0e}"),
)


class Inputs:
    """Random inputs of a case, in two buffers that runs use in turn, or in one if a GPU has too little memory."""

    def __init__(self, case: LogitCase, device: torch.device, *, seed: int = 0) -> None:
        self._case, self._device = case, device
        self._draw = torch.Generator(device).manual_seed(seed)
        logits_bytes, count = case.tokens * case.width * case.dtype.itemsize, 2
        if device.type == "cuda":
            free_memory()
            count = 2 if 8 * logits_bytes < torch.cuda.mem_get_info(device)[0] else 1
        self._buffers = [torch.empty(case.tokens, case.width, dtype=case.dtype, device=device) for _ in range(count)]
        self.refresh()

    def refresh(self) -> None:
        """Draw new inputs."""
        case, options = self._case, {"device": self._device, "generator": self._draw}
        for buffer in self._buffers:
            buffer.normal_(0.0, SPREAD, generator=self._draw)
        labels = torch.randint(0, case.width, (case.tokens,), **options)
        order = torch.randperm(case.tokens, **options)
        is_trained = torch.ones(case.tokens, dtype=torch.bool, device=self._device)
        is_trained[order[round(case.fraction * case.tokens) :]] = False
        gradients = torch.randn(2, case.tokens, dtype=torch.float32, **options) * is_trained
        self._rest = labels.where(is_trained, IGNORE), labels.where(is_trained, 0), is_trained, *gradients

    def take(self, turn: int, *, copy: bool = False) -> LogitSample:
        """Return the inputs of run number ``turn``, with a copy of the logits for a path that overwrites them."""
        logits = self._buffers[turn % len(self._buffers)]
        return LogitSample((logits.clone() if copy else logits.detach()).requires_grad_(), *self._rest)


def measure(
    case: LogitCase, setting: Setting, paths: Mapping[str, LogitPath], repeats: int, seed: int
) -> dict[str, Any]:
    """Measure every path in one case, in mixed order, with the bandwidth of a copy in the same rounds.

    The fraction ``of_copy`` is that of the path's bandwidth if it moved the least possible number of bytes: trained
    rows are read twice, and the gradient is written once.
    """
    inputs = Inputs(case, setting.device, seed=seed)
    clock = Clock(setting.device, preallocated_bytes=4 * case.logits_bytes)

    def candidate(path: LogitPath) -> Callable[[int], Lap]:
        def run(turn: int) -> Lap:
            sample = inputs.take(turn, copy=path.overwrites)
            return clock.lap(lambda: path.run(sample, case, setting), lambda output: output.gradient(sample))

        return run

    candidates = {name: candidate(path) for name, path in paths.items()}
    candidates[_COPY] = _copy_candidate(inputs, clock)
    rows = compare(candidates, repeats, before=inputs.refresh, warmup=2)
    del candidates  # frees the target of the copy
    copy = rows.pop(_COPY)["ms"]
    bandwidth = 2 * case.logits_bytes / (copy["median"] / 1e3)
    floor = case.dtype.itemsize * (2 * case.fraction + 1)
    for name, row in rows.items():
        if row["status"] == "measured":
            seconds = row["ms"]["median"] / 1e3
            has_model = case.dtype.itemsize == 2 and not case.entropy
            traffic = paths[name].bytes_per_element(case.fraction) if has_model else None
            row["bytes_per_element"] = traffic
            row["of_copy"] = floor * case.tokens * case.width / seconds / bandwidth
            row |= metered(functools.partial(_measure_resources, paths[name], case, setting, inputs))
    return {
        "copy_ms": copy,
        "copy_gb_s": bandwidth / 1e9,
        "floor_bytes": floor,
        "paths": [{"path": name, **row} for name, row in rows.items()],
    }


def _copy_candidate(inputs: Inputs, clock: Clock) -> Callable[[int], Lap]:
    target = torch.zeros_like(inputs.take(0).logits, requires_grad=False)
    return lambda turn: clock.lap(lambda: target.copy_(inputs.take(turn).logits.detach()))


def _measure_resources(path: LogitPath, case: LogitCase, setting: Setting, inputs: Inputs) -> dict[str, Any]:
    def run(sample: LogitSample) -> Tensor:
        return path.run(sample, case, setting).gradient(sample)

    def fresh() -> LogitSample:
        return inputs.take(0, copy=path.overwrites)

    free_memory()
    sample = fresh()
    output = path.run(sample, case, setting)
    # The path may have overwritten the sample's logits, so the reference uses the buffer that they were copied from.
    errors = measure_errors(inputs.take(0), case, output, output.gradient(sample))
    del output
    sample = fresh()
    extra = extra_memory(lambda: run(sample), sample.logits)
    per_token = None if extra is None else extra / case.tokens
    work = count_work(lambda: run(fresh()), setting.device)
    return {"errors": errors, "extra_bytes": extra, "extra_bytes_per_token": per_token, **work}


def measure_errors(sample: LogitSample, case: LogitCase, output: Output, gradient: Tensor) -> dict[str, float]:
    """Return the largest errors against float64 in a few rows, without the last, which some paths do not compute.

    Returns:
        ``logprob`` and ``entropy`` in nats; ``gradient`` relative to the largest entry of its row, or absolute if that
        entry is 0.
    """
    trained, masked = (flags[:-1].nonzero()[:, 0] for flags in (sample.is_trained, ~sample.is_trained))
    rows = torch.cat([trained[:: max(1, len(trained) // 6)], masked[:2]])
    logp = (sample.logits.detach()[rows].double() / case.temperature).log_softmax(1)
    p, target, is_trained = logp.exp(), sample.labels[rows].unsqueeze(1), sample.is_trained[rows]
    entropy = -(p * logp).sum(1)
    expected = sample.g[rows].double().unsqueeze(1) * (torch.zeros_like(p).scatter_(1, target, 1.0) - p)
    if case.entropy:
        expected -= sample.h[rows].double().unsqueeze(1) * p * (logp + entropy.unsqueeze(1))
    expected /= case.temperature
    scale = expected.abs().amax(1, keepdim=True)
    errors = {"gradient": (gradient[rows].double() - expected) / scale.where(scale > 0, 1.0)}
    if output.logprobs is not None:
        errors["logprob"] = (output.logprobs[rows].double() - logp.gather(1, target).squeeze(1))[is_trained]
    if output.entropy is not None:
        errors["entropy"] = (output.entropy[rows].double() - entropy)[is_trained]
    # max() does not return NaN on every backend.
    return {
        key: float("nan") if bool(values.isnan().any()) else float(values.abs().max()) for key, values in errors.items()
    }


def cases_on(device: torch.device) -> list[LogitCase]:
    """Return the cases that are measured on a device."""
    first = LogitCase(8192 if device.type == "cuda" else 256, 0, 151_936)
    cases = [first._replace(tp=tp, entropy=entropy) for tp, entropy in itertools.product([1, 8], [False, True])]
    changes = [{"fraction": 0.2}, {"vocab": 32_768}]
    changes += (
        [{"tokens": 2048}, {"fraction": 0.5}, {"temperature": 0.7}] if device.type == "cuda" else [{"tokens": 64}]
    )
    return cases + [first._replace(**change) for change in changes]


def format_title(case: Row) -> str:
    return f"{case['title']}; a copy moves {case['copy_gb_s']:.1f} GB/s"


def run(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    paths = select(PATHS, options.paths)
    results = measure_cases(
        options.cases or cases_on(setting.device),
        lambda case: measure(case, setting, paths, options.repeats, options.seed),
        lambda case: format_rows(format_title(case), COLUMNS, case["paths"]),
    )
    models = [
        {"path": name, "bytes_per_element": path.bytes_per_element(1.0), "counted": path.source}
        for name, path in paths.items()
    ]
    return {"cases": results, "models": models, "collectives": count_path_collectives("logprobs", list(paths))}
