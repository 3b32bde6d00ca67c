"""Times of several candidates in mixed order, by the device's clock and by the processor time of this process.

``torch.utils.benchmark.Timer`` can't replace it: it reads the host's clock around a loop over one statement. That rules
out fresh inputs, cold caches, separate forward and backward times, and rounds of all candidates in mixed order.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from nemo_geomask.kernels.cpu import empty_gradient
from nemo_geomask.tools.bench.peers import Absent
from nemo_geomask.tools.shared.progress_bar import print_time_left

_Name = TypeVar("_Name")
_FirstOutput = TypeVar("_FirstOutput")
_Case = TypeVar("_Case", bound=Any)
_BUSY_CYCLES = 30_000_000  # 15 ms at 2 GHz: the launches of 1,000 kernels
CACHE_BYTES = 1 << 27
"""Size of a buffer that no cache of a processor holds."""
_PROGRESS_SECONDS = 10.0  # between two lines on the terminal


class Lap(NamedTuple):
    """Seconds of one run, in one or two stages."""

    first: float  # time of the first stage, by the device's clock
    second: float | None  # time of the second stage, such as the backward pass; None if there is none
    processor: float | None  # processor time of this process in all stages; None on a GPU


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
        size = CACHE_BYTES
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

    def lap(self, first: Callable[[], _FirstOutput], second: Callable[[_FirstOutput], object] | None = None) -> Lap:
        """Run ``second(first())`` and return the times of both stages."""
        self._prepare()
        if self.device.type != "cuda":
            start, processor = time.perf_counter(), time.process_time()
            output = first()
            middle = end = time.perf_counter()
            if second is not None:
                second(output)
                end = time.perf_counter()
            return Lap(middle - start, None if second is None else end - middle, time.process_time() - processor)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        events[0].record()
        output = first()
        events[1].record()
        if second is not None:
            second(output)
        events[2].record()
        events[2].synchronize()
        seconds = [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events)]
        return Lap(seconds[0], None if second is None else seconds[1], None)


def compare(
    candidates: Mapping[_Name, Callable[[int], Lap]],
    rounds: int,
    *,
    before: Callable[[], object] = lambda: None,
    warmup: int = 1,
) -> dict[_Name, dict[str, Any]]:
    """Run every candidate once in each round, in a new random order.

    Changes of the clock rate and load by other processes therefore affect all candidates alike.

    Args:
        candidates: functions by name; each is called with the number of runs before it in the round.
        rounds: number of measured rounds.
        before: function that is called before each round, to draw fresh inputs.
        warmup: number of rounds before the measured rounds; their times are discarded.

    Returns:
        For each candidate a row with its ``status``: ``measured``, with times as in :func:`summarise`; ``absent`` or
        ``not applicable``, if it raised :class:`Absent`; ``failed``, if it raised another error. The last three have a
        ``reason``.
    """
    laps: dict[_Name, list[Lap]] = {name: [] for name in candidates}
    rows: dict[_Name, dict[str, Any]] = {}
    names = list(candidates)
    order = random.Random(0)
    began = printed = time.monotonic()
    for round_ in range(warmup + rounds):
        before()
        order.shuffle(names)
        for turn, name in enumerate(names):
            if name in rows:
                continue
            try:
                lap = candidates[name](turn)
            except Exception as error:  # a failing peer is reported and does not end the benchmark
                rows[name] = describe_failure(error)
                free_memory()
            else:
                laps[name] += [lap] if round_ >= warmup else []
        if time.monotonic() - printed > _PROGRESS_SECONDS:
            printed = time.monotonic()
            print_time_left(round_ + 1, warmup + rounds, printed - began, "rounds")
    return {name: rows.get(name) or {"status": "measured", **summarise(laps[name])} for name in candidates}


def summarise(laps: Sequence[Lap]) -> dict[str, Any]:
    """Return medians and quartiles of laps in milliseconds.

    ``ms`` is of the run, ``forward_ms`` and ``backward_ms`` of its two stages, and ``processor_ms`` of the processor.
    """
    times = {
        "ms": [lap.first + (lap.second or 0.0) for lap in laps],
        "forward_ms": [lap.first for lap in laps if lap.second is not None],
        "backward_ms": [lap.second for lap in laps if lap.second is not None],
        "processor_ms": [lap.processor for lap in laps if lap.processor is not None],
    }
    return {key: quartiles([value * 1e3 for value in values]) for key, values in times.items() if values}


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """Return the median and quartiles of the values, and the number of values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "runs": len(values)}


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
    cases: Sequence[_Case],
    measure: Callable[[_Case], dict[str, Any]],
    format_case: Callable[[dict[str, Any]], str],
) -> list[dict[str, Any]]:
    """Measure the cases one after another, and print each result at once.

    Args:
        cases: cases with a method ``describe()``; ``str`` of a case is its title.
        measure: function that returns the result of one case.
        format_case: function that returns the text of a result.

    Returns:
        The results. The result of a case that does not fit into memory has the error and no paths.
    """
    results = []
    began = time.monotonic()
    for done, case in enumerate(cases, start=1):
        result: dict[str, Any] = {"case": case.describe(), "title": str(case)}
        try:
            result |= measure(case)
        except torch.OutOfMemoryError as error:
            result |= {"error": describe_error(error), "paths": []}
        free_memory()
        results.append(result)
        print(f"{case}: {result['error']}\n" if "error" in result else format_case(result), flush=True)
        print_time_left(done, len(cases), time.monotonic() - began, "cases")
    return results


def free_memory() -> None:
    """Return the memory of earlier runs to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe_failure(error: Exception) -> dict[str, str]:
    """Return the ``status`` of a path that raised an error, and the ``reason``."""
    if isinstance(error, Absent):
        return {"status": error.status, "reason": str(error)}
    return {"status": "failed", "reason": describe_error(error)}


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
