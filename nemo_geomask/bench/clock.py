"""Time by the device's own clock, of several candidates mixed so that drift and neighbours hit all of them alike."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from nemo_geomask.kernels.cpu import empty_gradient

__all__ = ["Clock", "Lap", "in_turn", "interleave", "release", "spread", "summary", "why"]

_T = TypeVar("_T")
_C = TypeVar("_C", bound=Any)
_BUSY_CYCLES = 30_000_000  # 15 ms at 2 GHz: the launches of 1,000 kernels


class Lap(NamedTuple):
    """Seconds of one run: two stages by the device's clock, both by the processor time of this process."""

    first: float
    second: float
    processor: float

    @property
    def total(self) -> float:
        """Both stages."""
        return self.first + self.second


class Clock:
    """Times a run of two stages.

    Before each run a buffer larger than the caches is written, so that no run finds its inputs there. A GPU is then
    kept busy for a while, as the model's own kernels keep it in training: the host runs ahead, and what it takes to
    launch a kernel counts for a path alone that makes the host wait for the device in between.

    Args:
        device: whose time is taken.
        settle: bytes that are written and freed before each run on a CPU. A virtual machine returns memory that a large
            run freed to its host, and the next run to touch it, whichever that is, would pay for getting it back.
    """

    def __init__(self, device: torch.device, settle: int = 0) -> None:
        self.device = device
        size = 1 << 27
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            size = max(size, 8 * int(getattr(properties, "L2_cache_size", 0)))
        self._wipe = torch.zeros(size, dtype=torch.uint8, device=device)
        self._settle = torch.empty(settle if device.type == "cpu" else 0, dtype=torch.uint8)

    def _prepare(self) -> None:
        if self._settle.numel():
            empty_gradient(self._settle).fill_(1)
        self._wipe.add_(1)
        if self.device.type == "cuda":
            torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]

    def lap(self, first: Callable[[], _T], second: Callable[[_T], object]) -> Lap:
        """Run ``second(first())``."""
        self._prepare()
        if self.device.type != "cuda":
            start, processor = time.perf_counter(), time.process_time()
            between = first()
            middle = time.perf_counter()
            second(between)
            return Lap(middle - start, time.perf_counter() - middle, time.process_time() - processor)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        processor = time.process_time()
        events[0].record()
        between = first()
        events[1].record()
        second(between)
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
    """Run every candidate once a round, in another order each time.

    Args:
        candidates: each is called with a number that counts the runs of a round.
        rounds: measured rounds.
        before: called before each round, to make fresh inputs.
        warmup: rounds before those, not kept.

    Returns:
        Laps of each candidate that ran through, and the error of each that did not.
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
            except Exception as error:  # whatever a peer raises is a result, not the end of the run
                errors[name] = why(error)
                release()
                continue
            if round_ >= warmup:
                laps[name].append(lap)
    return {name: found for name, found in laps.items() if name not in errors}, errors


def in_turn(
    cases: Sequence[_C], measure: Callable[[_C], dict[str, Any]], report: Callable[[dict[str, Any]], object]
) -> list[dict[str, Any]]:
    """What ``measure`` finds in each case, as it is reported; of one that does not fit into memory, that.

    Args:
        cases: each with ``describe()``, and a title as text.
        measure: of one case.
        report: called with each case's result as it comes.
    """
    results = []
    for case in cases:
        try:
            result = measure(case)
        except torch.OutOfMemoryError as error:
            result = {"case": case.describe(), "title": str(case), "error": why(error), "paths": []}
        release()
        results.append(result)
        report(result)
    return results


def release() -> None:
    """Give memory that a failed run held back to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def why(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, in the unit of the values, and their number."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "runs": len(values)}


def summary(laps: Sequence[Lap], stages: tuple[str, str], device: torch.device) -> dict[str, Any]:
    """Laps as milliseconds, under ``ms``, the stages' names and, on a CPU, ``processor_ms``."""
    result = {
        "ms": spread([lap.total * 1e3 for lap in laps]),
        f"{stages[0]}_ms": spread([lap.first * 1e3 for lap in laps]),
        f"{stages[1]}_ms": spread([lap.second * 1e3 for lap in laps]),
    }
    if device.type != "cuda":
        result["processor_ms"] = spread([lap.processor * 1e3 for lap in laps])
    return result
