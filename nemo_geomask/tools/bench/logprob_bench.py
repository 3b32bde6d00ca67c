"""``bench logprobs``: our paths and every peer's from logits to log-probs and to the gradient of the logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.tools.bench.logprob_cases import LogprobCase, LogprobSample, PathOutput, RandomInputs, measure_errors
from nemo_geomask.tools.bench.paths import PATHS, Absent, LogprobPath, NotApplicable, Setting
from nemo_geomask.tools.bench.paths.path import ForwardPass
from nemo_geomask.tools.bench.resource_meters import (
    DispatchCounter,
    count_host_syncs,
    count_kernel_launches,
    extra_memory,
)
from nemo_geomask.tools.bench.timing import (
    Clock,
    Lap,
    describe_error,
    free_memory,
    interleave,
    measure_cases,
    summarise,
)

__all__ = ["benchmark", "measure", "sweep"]

_COPY = "copy"
_MAX_LOGITS_COPIES = 4  # most paths hold at most this many tensors of the logits' size at once


def sweep(
    *,
    tokens: Sequence[int],
    vocab: Sequence[int],
    tp: Sequence[int],
    fractions: Sequence[float],
    entropy: Sequence[bool],
    temperatures: Sequence[float],
    dtypes: Sequence[torch.dtype],
    grid: bool = False,
) -> list[LogprobCase]:
    """Return the cases to measure, without repetition.

    Args:
        tokens, vocab, tp, fractions, entropy, temperatures, dtypes: values of each field of :class:`LogprobCase`.
        grid: return all combinations. Otherwise only one field differs from its first value in each case, except that
            all values of ``tp`` and ``entropy`` are combined with each other.
    """
    # In the order of LogprobCase's fields.
    fields: list[Sequence[Any]] = [tokens, vocab, tp, fractions, entropy, temperatures, dtypes]
    return list(
        dict.fromkeys(
            LogprobCase(*values) for values in (itertools.product(*fields) if grid else _vary_one_at_a_time(fields))
        )
    )


def _vary_one_at_a_time(fields: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    base = [values[0] for values in fields]
    is_combined = (field in ("tp", "entropy") for field in LogprobCase._fields)
    yield from itertools.product(
        *(values if combined else values[:1] for values, combined in zip(fields, is_combined, strict=True))
    )
    for index, values in enumerate(fields):
        for value in values[1:]:
            yield (*base[:index], value, *base[index + 1 :])


def benchmark(
    cases: Sequence[LogprobCase],
    setting: Setting,
    *,
    repeats: int,
    paths: Sequence[LogprobPath] = PATHS,
    seed: int = 0,
    report: Callable[[dict[str, Any]], object] = lambda case: None,
) -> list[dict[str, Any]]:
    """Measure every path in every case.

    Args:
        cases: the cases.
        setting: device, kernel and process group.
        repeats: number of measured rounds for each case.
        paths: paths to measure.
        seed: seed of the inputs.
        report: function that is called with each case's result.
    """
    return measure_cases(cases, lambda case: measure(case, setting, paths=paths, repeats=repeats, seed=seed), report)


def measure(
    case: LogprobCase, setting: Setting, *, paths: Sequence[LogprobPath], repeats: int, seed: int
) -> dict[str, Any]:
    """Measure every path in one case, in mixed order.

    Returns:
        The case, the bandwidth of a copy in the same rounds, and a row for every path. Its status is measured, absent,
        not applicable or failed.
    """
    forward_passes: dict[str, ForwardPass] = {}
    rows: dict[str, dict[str, Any]] = {path.name: {"path": path.name} for path in paths}
    for path in paths:
        try:
            forward_passes[path.name] = path.prepare(case, setting)
        except Absent as error:
            rows[path.name].update(status="absent", reason=str(error))
        except NotApplicable as error:
            rows[path.name].update(status="not applicable", reason=str(error))
    clock = Clock(setting.device, preallocated_bytes=_MAX_LOGITS_COPIES * case.elements * case.dtype.itemsize)
    inputs = RandomInputs(case, setting.device, seed=seed)
    by_name = {path.name: path for path in paths}
    candidates = {
        name: _path_candidate(by_name[name], forward, case, inputs, clock) for name, forward in forward_passes.items()
    }
    candidates[_COPY] = _copy_candidate(case, inputs, clock)
    laps, failures = interleave(candidates, repeats, before=inputs.refresh, warmup=2)
    del candidates  # frees the target of the copy
    copy = summarise(laps.pop(_COPY), setting.device)["ms"]
    bandwidth = 2 * case.elements * case.dtype.itemsize / (copy["median"] / 1e3)
    for name in laps:
        rows[name].update(status="measured", **summarise(laps[name], setting.device, has_backward=True))
        rows[name].update(_bandwidth(by_name[name], case, rows[name]["ms"]["median"] / 1e3, bandwidth))
        try:
            rows[name].update(_measure_resources(by_name[name], forward_passes[name], case, inputs))
        except Exception as error:  # a peer that fails under a meter keeps its times
            rows[name]["meters"] = describe_error(error)
        free_memory()
    for name, reason in failures.items():
        rows[name].update(status="failed", reason=reason)
    return {
        "case": case.describe(),
        "title": str(case),
        "copy_ms": copy,
        "copy_gb_s": bandwidth / 1e9,
        "floor_bytes": case.min_bytes_per_element,
        "paths": list(rows.values()),
    }


def _path_candidate(
    path: LogprobPath, forward: ForwardPass, case: LogprobCase, inputs: RandomInputs, clock: Clock
) -> Callable[[int], Lap]:
    def candidate(turn: int) -> Lap:
        sample = inputs.take(turn, copy=path.overwrites)
        return clock.lap(lambda: forward(sample), lambda output: _gradient(output, sample, case))

    return candidate


def _copy_candidate(case: LogprobCase, inputs: RandomInputs, clock: Clock) -> Callable[[int], Lap]:
    target = torch.zeros(case.tokens, case.width, dtype=case.dtype, device=clock.device)
    return lambda turn: clock.lap(lambda: target.copy_(inputs.take(turn).logits.detach()))


def _gradient(output: PathOutput, sample: LogprobSample, case: LogprobCase) -> Tensor:
    return output.gradient(sample.g, sample.h if case.entropy else None)


def _bandwidth(path: LogprobPath, case: LogprobCase, seconds: float, copy_bandwidth: float) -> dict[str, Any]:
    """Return the path's traffic by its model, the bandwidth that follows, and the fraction of a copy's bandwidth.

    The fraction (``of_copy``) is computed as if the path moved the least possible number of bytes.
    """
    has_model = case.dtype.itemsize == 2 and not case.entropy
    traffic = path.traffic(case.fraction) if has_model and path.traffic is not None else None
    return {
        "bytes_per_element": traffic,
        "gb_s": None if traffic is None else traffic * case.elements / seconds / 1e9,
        "of_copy": case.min_bytes_per_element * case.elements / seconds / copy_bandwidth,
    }


def _measure_resources(
    path: LogprobPath, forward: ForwardPass, case: LogprobCase, inputs: RandomInputs
) -> dict[str, Any]:
    """Measure errors, memory, launches or operations, synchronisations and collectives, in separate runs."""

    def run(sample: LogprobSample) -> Tensor:
        return _gradient(forward(sample), sample, case)

    sample = inputs.take(0, copy=path.overwrites)
    output = forward(sample)
    # The path may have overwritten the sample's logits, so the reference uses the buffer that they were copied from.
    meters: dict[str, Any] = {"errors": measure_errors(inputs.take(0), case, output, _gradient(output, sample, case))}
    del output, sample

    sample = inputs.take(0, copy=path.overwrites)
    extra = extra_memory(lambda: run(sample), sample.logits)
    del sample
    meters["extra_bytes"] = extra
    meters["extra_bytes_per_token"] = None if extra is None else extra / case.tokens

    sample = inputs.take(0, copy=path.overwrites)
    with DispatchCounter() as counter:
        run(sample)
    meters["collectives"] = len(counter.collectives)
    if sample.logits.device.type == "cuda":
        meters["launches"] = count_kernel_launches(lambda: run(inputs.take(0, copy=path.overwrites)))
        meters["host_syncs"] = count_host_syncs(lambda: run(inputs.take(0, copy=path.overwrites)))
    else:
        meters["launches"] = counter.operations
    return meters
