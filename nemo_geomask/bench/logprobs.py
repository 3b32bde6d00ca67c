"""``bench logprobs``: from logits to log-probs and back to their gradient, ours beside every peer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.bench.clock import Clock, Lap, in_turn, interleave, release, summary, why
from nemo_geomask.bench.inputs import Answer, Case, Inputs, Sample, errors
from nemo_geomask.bench.meters import Tally, extra_memory, host_syncs, kernel_launches
from nemo_geomask.bench.paths import PATHS, Absent, Path, Setting, Unfit
from nemo_geomask.bench.paths.base import Start

__all__ = ["benchmark", "measure", "sweep"]

_COPY = "copy"
_SETTLE = 4  # times the logits: what most paths hold at once


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
) -> list[Case]:
    """Cases around the first value of each setting.

    Args:
        tokens, vocab, tp, fractions, entropy, temperatures, dtypes: values of each field of :class:`Case`.
        grid: every combination. Otherwise one field at a time departs from the first values, but for ``tp`` and
            ``entropy``, which are combined.

    Returns:
        Without repetition.
    """
    fields: list[Sequence[Any]] = [tokens, vocab, tp, fractions, entropy, temperatures, dtypes]
    return list(dict.fromkeys(Case(*values) for values in (itertools.product(*fields) if grid else _star(fields))))


def _star(fields: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    base = [values[0] for values in fields]
    yield from itertools.product(*(fields[i] if i in (2, 4) else base[i : i + 1] for i in range(len(fields))))
    for index, values in enumerate(fields):
        for value in values[1:]:
            yield (*base[:index], value, *base[index + 1 :])


def benchmark(
    cases: Sequence[Case],
    setting: Setting,
    *,
    repeats: int,
    paths: Sequence[Path] = PATHS,
    seed: int = 0,
    report: Callable[[dict[str, Any]], object] = lambda case: None,
) -> list[dict[str, Any]]:
    """Measure every path in every case.

    Args:
        cases: what to measure.
        setting: where.
        repeats: measured rounds a case.
        paths: which.
        seed: of the inputs.
        report: called with each case's result as it comes.
    """
    return in_turn(cases, lambda case: measure(case, setting, paths=paths, repeats=repeats, seed=seed), report)


def measure(case: Case, setting: Setting, *, paths: Sequence[Path], repeats: int, seed: int) -> dict[str, Any]:
    """Measure every path in one case, in turn.

    Returns:
        The case, the copy bandwidth of the same run, and a row for every path: measured, absent, unfit or failed.
    """
    starts: dict[str, Start] = {}
    rows: dict[str, dict[str, Any]] = {path.name: {"path": path.name} for path in paths}
    for path in paths:
        try:
            starts[path.name] = path.open(case, setting)
        except Absent as error:
            rows[path.name].update(status="absent", reason=str(error))
        except Unfit as error:
            rows[path.name].update(status="not applicable", reason=str(error))
    clock = Clock(setting.device, settle=_SETTLE * case.elements * case.dtype.itemsize)
    inputs = Inputs(case, setting.device, seed=seed)
    by_name = {path.name: path for path in paths}
    candidates = {name: _candidate(by_name[name], start, case, inputs, clock) for name, start in starts.items()}
    candidates[_COPY] = _copying(case, inputs, clock)
    laps, failures = interleave(candidates, repeats, before=inputs.refresh, warmup=2)
    del candidates  # and with it the copy's target
    copy = summary(laps.pop(_COPY), ("copy", "nothing"), setting.device)["ms"]
    bandwidth = 2 * case.elements * case.dtype.itemsize / (copy["median"] / 1e3)
    for name in laps:
        rows[name].update(status="measured", **summary(laps[name], ("forward", "backward"), setting.device))
        rows[name].update(_traffic(by_name[name], case, rows[name]["ms"]["median"] / 1e3, bandwidth))
        try:
            rows[name].update(_meter(by_name[name], starts[name], case, inputs))
        except Exception as error:  # a meter that a peer trips over leaves its times standing
            rows[name]["meters"] = why(error)
        release()
    for name, reason in failures.items():
        rows[name].update(status="failed", reason=reason)
    return {
        "case": case.describe(),
        "title": str(case),
        "copy_ms": copy,
        "copy_gb_s": bandwidth / 1e9,
        "floor_bytes": case.floor,
        "paths": list(rows.values()),
    }


def _candidate(path: Path, start: Start, case: Case, inputs: Inputs, clock: Clock) -> Callable[[int], Lap]:
    def candidate(turn: int) -> Lap:
        sample = inputs.take(turn, copy=path.overwrites)
        return clock.lap(lambda: start(sample), lambda answer: _gradient(answer, sample, case))

    return candidate


def _copying(case: Case, inputs: Inputs, clock: Clock) -> Callable[[int], Lap]:
    target = torch.zeros(case.tokens, case.width, dtype=case.dtype, device=clock.device)
    return lambda turn: clock.lap(lambda: target.copy_(inputs.take(turn).logits.detach()), lambda _: None)


def _gradient(answer: Answer, sample: Sample, case: Case) -> Tensor:
    return answer.gradient(sample.g, sample.h if case.entropy else None)


def _traffic(path: Path, case: Case, seconds: float, bandwidth: float) -> dict[str, Any]:
    """Bandwidth by the path's own bytes, and what share of a copy's by those that have to move."""
    known = path.traffic is not None and case.dtype.itemsize == 2 and not case.entropy
    moved = path.traffic(case.fraction) if known and path.traffic is not None else None
    return {
        "bytes_per_element": moved,
        "gb_s": None if moved is None else moved * case.elements / seconds / 1e9,
        "of_copy": case.floor * case.elements / seconds / bandwidth,
    }


def _meter(path: Path, start: Start, case: Case, inputs: Inputs) -> dict[str, Any]:
    """Errors, memory, operations or launches, synchronisations and collectives, each in a run of its own."""

    def run(sample: Sample) -> Tensor:
        return _gradient(start(sample), sample, case)

    sample = inputs.take(0, copy=path.overwrites)
    answer = start(sample)
    # An overwritten sample no longer knows its logits; the buffer that it was copied from does.
    found: dict[str, Any] = {"errors": errors(inputs.take(0), case, answer, _gradient(answer, sample, case))}
    del answer, sample

    sample = inputs.take(0, copy=path.overwrites)
    extra = extra_memory(lambda: run(sample), sample.logits)
    del sample
    found["extra_bytes"] = extra
    found["extra_bytes_per_token"] = None if extra is None else extra / case.tokens

    tally = Tally()
    sample = inputs.take(0, copy=path.overwrites)
    with tally:
        run(sample)
    found["collectives"] = len(tally.collectives)
    if sample.logits.device.type == "cuda":
        found["launches"] = kernel_launches(lambda: run(inputs.take(0, copy=path.overwrites)))
        found["host_syncs"] = host_syncs(lambda: run(inputs.take(0, copy=path.overwrites)))
    else:
        found["launches"] = tally.operations
        found["operand_bytes_per_element"] = tally.operand_bytes / case.elements
    return found
