"""Timer of several candidates in mixed order, by the device's clock and by the processor time of this process.

``torch.utils.benchmark.Timer`` can't replace it: it reads the host's clock around a loop over one statement. That rules
out fresh inputs, cold caches, separate forward and backward times, and rounds of all candidates in mixed order.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from nemo_geomask.kernels.cpu import empty_gradient
from nemo_geomask.tools.shared.progress_bar import print_time_left

__all__ = [
    "Clock",
    "Lap",
    "describe_error",
    "free_memory",
    "interleave",
    "measure_cases",
    "quartiles",
    "short_collections",
    "summarise",
]

_FirstOutput = TypeVar("_FirstOutput")
_Case = TypeVar("_Case", bound=Any)
_BUSY_CYCLES = 30_000_000  # 15 ms at 2 GHz: the launches of 1,000 kernels


class Lap(NamedTuple):
    """Seconds of one run, in one or two stages.

    Attributes:
        first: time of the first stage, by the device's clock.
        second: time of the second stage, by the device's clock; 0 if there is none.
        processor: processor time of this process in all stages.
    """

    first: float
    second: float
    processor: float

    @property
    def total(self) -> float:
        """Seconds of all stages by the device's clock."""
        return self.first + self.second


class Clock:
    """Timer of runs that have one stage, or two such as forward and backward.

    Before each run, a buffer larger than the caches is written, so that no run has its inputs in a cache. A GPU is then
    kept busy for a while, as the model's kernels keep it busy in training. The host therefore launches kernels ahead of
    the GPU, and the time of a launch counts only if a path makes the host wait for the GPU.

    Args:
        device: device that is timed.
        preallocated_bytes: number of bytes that are written and freed before each run on a CPU. A virtual machine may
            return large free blocks to its host, and the next run that uses them would pay for their allocation.
    """

    def __init__(self, device: torch.device, preallocated_bytes: int = 0) -> None:
        self.device = device
        size = 1 << 27
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            size = max(size, 8 * int(getattr(properties, "L2_cache_size", 0)))
        self._larger_than_caches = torch.zeros(size, dtype=torch.uint8, device=device)
        self._preallocated = torch.empty(preallocated_bytes if device.type == "cpu" else 0, dtype=torch.uint8)

    def _prepare(self) -> None:
        if self._preallocated.numel():
            empty_gradient(self._preallocated).fill_(1)
        self._larger_than_caches.add_(1)
        if self.device.type == "cuda":
            torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]

    def lap(
        self, first: Callable[[], _FirstOutput], second: Callable[[_FirstOutput], object] = lambda output: None
    ) -> Lap:
        """Run ``second(first())`` and return the times of both stages."""
        self._prepare()
        if self.device.type != "cuda":
            start, processor = time.perf_counter(), time.process_time()
            output = first()
            middle = time.perf_counter()
            second(output)
            return Lap(middle - start, time.perf_counter() - middle, time.process_time() - processor)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        processor = time.process_time()
        events[0].record()
        output = first()
        events[1].record()
        second(output)
        events[2].record()
        processor = time.process_time() - processor
        events[2].synchronize()
        return Lap(events[0].elapsed_time(events[1]) / 1e3, events[1].elapsed_time(events[2]) / 1e3, processor)


def interleave(
    candidates: Mapping[str, Callable[[int], Lap]],
    rounds: int,
    *,
    before: Callable[[], object] = lambda: None,
    warmup: int = 1,
) -> tuple[dict[str, list[Lap]], dict[str, str]]:
    """Run every candidate once in each round, in a new random order.

    Changes of the clock rate and load by other processes therefore affect all candidates alike.

    Args:
        candidates: functions by name; each is called with the number of runs before it in the round.
        rounds: number of measured rounds.
        before: function that is called before each round, to draw fresh inputs.
        warmup: number of rounds before the measured rounds; their times are discarded.

    Returns:
        The laps of each candidate that completed all rounds, and the error of each that did not.
    """
    laps: dict[str, list[Lap]] = {name: [] for name in candidates}
    errors: dict[str, str] = {}
    names = list(candidates)
    order = random.Random(0)
    for round_ in range(warmup + rounds):
        before()
        order.shuffle(names)
        for turn, name in enumerate(names):
            if name in errors:
                continue
            try:
                lap = candidates[name](turn)
            except Exception as error:  # a failing peer is reported and does not end the benchmark
                errors[name] = describe_error(error)
                free_memory()
                continue
            if round_ >= warmup:
                laps[name].append(lap)
    return {name: laps[name] for name in laps if name not in errors}, errors


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Leave the objects that exist already, most of them of imported modules, out of Python's garbage collections.

    Otherwise each :func:`free_memory` takes a tenth of a second or more to look at them.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@short_collections()
def measure_cases(
    cases: Sequence[_Case], measure: Callable[[_Case], dict[str, Any]], report: Callable[[dict[str, Any]], object]
) -> list[dict[str, Any]]:
    """Measure the cases one after another, and report each result at once.

    Args:
        cases: cases with a method ``describe()``; ``str`` of a case is its title.
        measure: function that returns the result of one case.
        report: function that is called with each result.

    Returns:
        The results. The result of a case that does not fit into memory has the error and no paths.
    """
    results = []
    began = time.monotonic()
    for done, case in enumerate(cases, start=1):
        try:
            result = measure(case)
        except torch.OutOfMemoryError as error:
            result = {"case": case.describe(), "title": str(case), "error": describe_error(error), "paths": []}
        free_memory()
        results.append(result)
        report(result)
        print_time_left(done, len(cases), time.monotonic() - began, "cases")
    return results


def free_memory() -> None:
    """Return the memory of earlier runs to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """Return the median and quartiles of the values, and the number of values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "runs": len(values)}


def summarise(laps: Sequence[Lap], device: torch.device, *, has_backward: bool = False) -> dict[str, Any]:
    """Return the median and quartiles of laps in milliseconds.

    Args:
        laps: the laps of one candidate.
        device: device that was timed.
        has_backward: True if the two stages are a forward and a backward pass.

    Returns:
        ``ms`` for the run, with a backward pass ``forward_ms`` and ``backward_ms``, and on a CPU ``processor_ms``.
    """
    result = {"ms": quartiles([lap.total * 1e3 for lap in laps])}
    if has_backward:
        result["forward_ms"] = quartiles([lap.first * 1e3 for lap in laps])
        result["backward_ms"] = quartiles([lap.second * 1e3 for lap in laps])
    if device.type != "cuda":
        result["processor_ms"] = quartiles([lap.processor * 1e3 for lap in laps])
    return result
