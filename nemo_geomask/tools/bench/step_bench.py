"""``bench step``: forward and backward pass of a decoder to the loss, with NeMo-RL's functions and with ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.tools.bench.paths import Absent, Setting
from nemo_geomask.tools.bench.paths.step_paths import PATHS, REFERENCE
from nemo_geomask.tools.bench.resource_meters import peak_memory
from nemo_geomask.tools.bench.step_cases import (
    HeadLoss,
    StepBatch,
    StepCase,
    StepDecoder,
    build_decoder,
    draw_step_batch,
    step_gradients,
)
from nemo_geomask.tools.bench.timing import (
    Clock,
    Lap,
    describe_error,
    free_memory,
    interleave,
    measure_cases,
    short_collections,
    summarise,
)

__all__ = ["TOLERANCE", "benchmark", "find_longest", "find_longest_steps"]

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of loss and gradients from those of :data:`REFERENCE`, by the type of the weights."""
_COMPARED_TOKENS = 256  # length of the sequence on which the paths are compared
_DECODER = "decoder alone"  # candidate without output layer and loss
_SHORTEST = 16  # the search for the longest sequence tries none that is shorter
_LONGEST = 1 << 20  # and none that is longer


def benchmark(
    cases: Sequence[StepCase],
    setting: Setting,
    *,
    repeats: int,
    paths: Sequence[str] = tuple(PATHS),
    seed: int = 0,
    report: Callable[[dict[str, Any]], object] = lambda case: None,
) -> list[dict[str, Any]]:
    """Measure time and peak memory of a step on paths of :mod:`nemo_geomask.tools.bench.paths.step_paths`.

    A path that disagrees with :data:`REFERENCE` by more than :data:`TOLERANCE` has failed and is not timed.

    Args:
        cases: the cases.
        setting: device and process group.
        repeats: number of measured rounds for each case.
        paths: names of the paths.
        seed: seed of weights and inputs.
        report: function that is called with each case's result.
    """
    return measure_cases(cases, lambda case: _measure(case, setting, paths, repeats, seed), report)


def _measure(case: StepCase, setting: Setting, paths: Sequence[str], repeats: int, seed: int) -> dict[str, Any]:
    """Measure every path in one case, in mixed order, and the decoder without output layer and loss.

    Returns:
        The case, the tolerance, the times of the decoder alone, and a row for every path. Its status is measured,
        absent or failed. ``peak_bytes`` is the peak memory beyond weights and batch; it includes the weights'
        gradients. ``of_decoder`` is the time of the path, divided by that of the decoder alone.
    """
    device, tolerance = setting.device, TOLERANCE[case.dtype]
    decoder = build_decoder(case, device, seed)
    rows: dict[str, dict[str, Any]] = {name: {"path": name} for name in paths}
    losses = _prepare(paths, setting, rows)
    for name, errors in _compare(decoder, losses, min(case.tokens, _COMPARED_TOKENS), setting, seed, rows).items():
        rows[name]["errors"] = errors
        if not max(errors.values()) <= tolerance:
            difference = " and ".join(f"{quantity} by {error:.1e}" for quantity, error in errors.items())
            reason = f"differs from '{REFERENCE}' in {difference}; the tolerance is {tolerance:g}"
            rows[name] |= {"status": "failed", "reason": reason}
    losses = {name: loss for name, loss in losses.items() if "status" not in rows[name]}
    batch = draw_step_batch(decoder, case.tokens, seed)
    clock = Clock(device, preallocated_bytes=4 * case.logits_bytes)
    candidates = {name: _path_candidate(clock, decoder, loss, batch) for name, loss in losses.items()}
    laps, failures = interleave({**candidates, _DECODER: _decoder_candidate(clock, decoder, batch)}, repeats)
    if _DECODER in failures:  # no path fits where the decoder alone does not
        raise torch.OutOfMemoryError(f"{_DECODER}: {failures[_DECODER]}")
    decoder_times = summarise(laps.pop(_DECODER), device, has_backward=True)
    for name, reason in failures.items():
        rows[name] |= {"status": "failed", "reason": reason}
    for name in laps:
        rows[name] |= {"status": "measured", **summarise(laps[name], device, has_backward=True)}
        rows[name]["of_decoder"] = rows[name]["ms"]["median"] / decoder_times["ms"]["median"]
        free_memory()
        try:
            rows[name]["peak_bytes"] = _peak_of_step(decoder, losses[name], batch)
        except Exception as error:  # a peer that fails under a meter keeps its times
            rows[name]["meters"] = describe_error(error)
    return {
        "case": case.describe(),
        "title": str(case),
        "logits_bytes": case.logits_bytes,
        "tolerance": tolerance,
        "decoder": decoder_times,
        "paths": list(rows.values()),
    }


def _prepare(paths: Sequence[str], setting: Setting, rows: dict[str, dict[str, Any]]) -> dict[str, HeadLoss]:
    """Return the loss of each path that can run here; write the others' reason into their rows."""
    losses = {}
    for name in paths:
        try:
            losses[name] = PATHS[name](setting)
        except Absent as error:
            rows[name] |= {"status": "absent", "reason": str(error)}
    return losses


def _compare(
    decoder: StepDecoder,
    losses: dict[str, HeadLoss],
    tokens: int,
    setting: Setting,
    seed: int,
    rows: dict[str, dict[str, Any]],
) -> dict[str, dict[str, float]]:
    """Compare loss and gradients of the paths with those of the reference, on a sequence of ``tokens`` tokens.

    Returns:
        For each path ``loss``, the absolute difference, and ``gradient``, the largest ‖g − r‖/‖r‖ of a parameter's
        gradient g and the reference's r. A path that raises an error gets its status in ``rows`` instead.
    """
    batch = draw_step_batch(decoder, tokens, seed)

    def run(loss: HeadLoss) -> tuple[Tensor, tuple[Tensor, ...]]:
        value = loss(decoder(batch.data["input_ids"]), decoder.head.weight, batch)
        return value.detach(), step_gradients(decoder, value)

    reference_value, reference = run(PATHS[REFERENCE](setting))
    errors = {}
    for name, loss in losses.items():
        try:
            value, gradients = run(loss)
        except Exception as error:  # a failing peer is reported and does not end the benchmark
            rows[name] |= {"status": "failed", "reason": describe_error(error)}
            continue
        relative = [
            (gradient.double() - r.double()).norm() / r.double().norm().clamp(min=1e-30)
            for gradient, r in zip(gradients, reference, strict=True)
        ]
        errors[name] = {"loss": float((value - reference_value).abs()), "gradient": float(torch.stack(relative).max())}
    return errors


def _path_candidate(clock: Clock, decoder: StepDecoder, loss: HeadLoss, batch: StepBatch) -> Callable[[int], Lap]:
    return lambda turn: clock.lap(
        lambda: loss(decoder(batch.data["input_ids"]), decoder.head.weight, batch),
        lambda value: step_gradients(decoder, value),
    )


def _decoder_candidate(clock: Clock, decoder: StepDecoder, batch: StepBatch) -> Callable[[int], Lap]:
    parameters = [parameter for name, parameter in decoder.named_parameters() if not name.startswith("head.")]
    return lambda turn: clock.lap(
        lambda: decoder(batch.data["input_ids"]).mean(), lambda value: torch.autograd.grad(value, parameters)
    )


def _peak_of_step(decoder: StepDecoder, loss: HeadLoss, batch: StepBatch) -> int | None:
    def step() -> tuple[Tensor, ...]:
        return step_gradients(decoder, loss(decoder(batch.data["input_ids"]), decoder.head.weight, batch))

    return peak_memory(step, decoder.head.weight.device)


@short_collections()
def find_longest_steps(
    case: StepCase,
    setting: Setting,
    *,
    memory_limit: float | None,
    paths: Sequence[str] = tuple(PATHS),
    seed: int = 0,
    peak_of_step: Callable[[StepDecoder, HeadLoss, StepBatch], int | None] = _peak_of_step,
) -> dict[str, Any]:
    """Find for each path the longest sequence of which a step fits into memory.

    Args:
        case: the sizes; the search begins with its number of tokens.
        setting: device and process group.
        memory_limit: largest peak memory of a step in bytes, beyond weights and batch. None: a step fits unless torch's
            allocator raises out of memory.
        paths: names of the paths.
        seed: seed of weights and inputs.
        peak_of_step: function that runs a step and returns its peak memory in bytes; None if it can't be measured.

    Returns:
        ``limit_bytes``, and a row for each path with ``tokens`` and ``too_long`` as in :func:`find_longest`.
    """
    decoder = build_decoder(case, setting.device, seed)
    rows: dict[str, dict[str, Any]] = {name: {"path": name} for name in paths}
    for name, loss in _prepare(paths, setting, rows).items():
        try:
            fits = functools.partial(_fits, decoder, loss, seed, memory_limit, peak_of_step)
            tokens, too_long = find_longest(fits, case.tokens)
        except Exception as error:  # a failing peer is reported and does not end the benchmark
            rows[name] |= {"status": "failed", "reason": describe_error(error)}
        else:
            rows[name] |= {"status": "measured", "tokens": tokens, "too_long": too_long}
    return {"limit_bytes": memory_limit, "paths": list(rows.values())}


def _fits(
    decoder: StepDecoder,
    loss: HeadLoss,
    seed: int,
    memory_limit: float | None,
    peak_of_step: Callable[[StepDecoder, HeadLoss, StepBatch], int | None],
    tokens: int,
) -> bool:
    free_memory()
    try:
        peak = peak_of_step(decoder, loss, draw_step_batch(decoder, tokens, seed))
    except torch.OutOfMemoryError:
        return False
    if memory_limit is None:
        return True
    if peak is None:
        raise OSError("this system does not let a process reset its peak memory")
    return peak <= memory_limit


def find_longest(
    fits: Callable[[int], bool], start: int, *, shortest: int = _SHORTEST, longest: int = _LONGEST
) -> tuple[int, int | None]:
    """Find the greatest length that fits, by doubling or halving and then by bisection.

    Args:
        fits: function of a length; if a length fits, all shorter ones do.
        start: length that is tried first.
        shortest: no shorter length is tried unless it is ``start``, and the result may be too small by as much.
        longest: no length above this one is tried.

    Returns:
        The longest length that fit, 0 if none did, and the shortest one that did not, None if all fit. They differ by
        at most a sixteenth of the former, or by ``shortest``.
    """
    low, high, length = 0, longest + 1, start
    while high - low > max(shortest, low // 16):
        if fits(length):
            low = length
        else:
            high = length
        length = min(2 * low, (low + high) // 2) if low else max(high // 2, shortest)
    return low, high if high <= longest else None
