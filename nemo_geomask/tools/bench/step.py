"""``bench step``: forward and backward pass of a decoder to the loss, with NeMo-RL's functions and with ours."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.bench.decoder import (
    PATHS,
    REFERENCE,
    HeadLoss,
    StepBatch,
    StepCase,
    StepDecoder,
    build_decoder,
    draw_step_batch,
)
from nemo_geomask.tools.bench.meters import metered, peak_memory
from nemo_geomask.tools.bench.peers import Setting, lazily, select
from nemo_geomask.tools.bench.results import PATH, TIMES, Row, figure, format_number, format_rows
from nemo_geomask.tools.bench.timing import (
    Clock,
    Lap,
    compare,
    describe_failure,
    free_memory,
    measure_cases,
    short_collections,
)

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of loss and gradients from those of :data:`REFERENCE`, by the type of the weights."""
_COMPARED_TOKENS = 256  # length of the sequence on which the paths are compared
_DECODER = "decoder alone"  # candidate without output layer and loss
_SHORTEST = 16  # the search for the longest sequence tries none that is shorter
_LONGEST = 1 << 20  # and none that is longer

COLUMNS = (
    PATH,
    *TIMES,
    figure("× the decoder", "of_decoder"),
    figure("peak MB", "peak_bytes", scale=1e6),
    figure("difference of the loss", "errors", "loss", form="{:.0e}"),
    figure("of the gradients", "errors", "gradient", form="{:.0e}"),
)
LONGEST_COLUMNS = (
    PATH,
    ("longest sequence", lambda row: f"{row['tokens']}" if row["too_long"] else f"≥ {row['tokens']}"),
    figure("too long", "too_long", form="{}"),
)

Losses = Mapping[str, HeadLoss]


def measure(case: StepCase, setting: Setting, losses: Losses, repeats: int, seed: int) -> dict[str, Any]:
    """Measure time and peak memory of every path's step, in mixed order, and the decoder without output layer and loss.

    A path that disagrees with :data:`REFERENCE` by more than :data:`TOLERANCE` has failed and is not timed.

    Returns:
        The tolerance, the times of the decoder alone, and a row for every path. ``peak_bytes`` is the peak memory
        beyond weights and batch; it includes the weights' gradients. ``of_decoder`` is the time of the path, divided by
        that of the decoder alone.
    """
    decoder = build_decoder(case, setting.device, seed)
    rows = _agreement(decoder, losses, min(case.tokens, _COMPARED_TOKENS), setting, seed, TOLERANCE[case.dtype])
    batch = draw_step_batch(decoder, case.tokens, seed)
    clock = Clock(setting.device, preallocated_bytes=4 * case.logits_bytes)
    parameters = [parameter for name, parameter in decoder.named_parameters() if not name.startswith("head.")]

    def candidate(loss: HeadLoss) -> Callable[[int], Lap]:
        return lambda turn: clock.lap(
            lambda: loss(decoder(batch.data["input_ids"]), decoder.head.weight, batch),
            lambda value: torch.autograd.grad(value, tuple(decoder.parameters())),
        )

    def decoder_alone(turn: int) -> Lap:
        return clock.lap(
            lambda: decoder(batch.data["input_ids"]).mean(), lambda value: torch.autograd.grad(value, parameters)
        )

    candidates = {name: candidate(losses[name]) for name, row in rows.items() if "status" not in row}
    timed = compare({**candidates, _DECODER: decoder_alone}, repeats)
    decoder_times = timed.pop(_DECODER)
    if "reason" in decoder_times:  # no path fits where the decoder alone does not
        raise torch.OutOfMemoryError(f"{_DECODER}: {decoder_times['reason']}")
    for name, times in timed.items():
        rows[name] |= times
        if times["status"] == "measured":
            rows[name]["of_decoder"] = times["ms"]["median"] / decoder_times["ms"]["median"]
            free_memory()
            rows[name] |= metered(functools.partial(_peak_of_step, decoder, losses[name], batch))
    return {
        "logits_bytes": case.logits_bytes,
        "tolerance": TOLERANCE[case.dtype],
        "decoder": {key: value for key, value in decoder_times.items() if key != "status"},
        "paths": list(rows.values()),
    }


def _agreement(
    decoder: StepDecoder, losses: Losses, tokens: int, setting: Setting, seed: int, tolerance: float
) -> dict[str, dict[str, Any]]:
    """Compare loss and gradients of the paths with those of the reference, on a sequence of ``tokens`` tokens.

    Returns:
        A row for each path. Its ``errors`` are ``loss``, the absolute difference, and ``gradient``, the largest
        ‖g − r‖/‖r‖ of a parameter's gradient g and the reference's r. A path that can't run here, raises an error or
        differs by more than the tolerance has a ``status`` and a ``reason``.
    """
    batch = draw_step_batch(decoder, tokens, seed)

    def run(loss: HeadLoss) -> tuple[Tensor, tuple[Tensor, ...]]:
        value = loss(decoder(batch.data["input_ids"]), decoder.head.weight, batch)
        return value.detach(), torch.autograd.grad(value, tuple(decoder.parameters()))

    reference_value, reference = run(PATHS[REFERENCE](setting))
    rows: dict[str, dict[str, Any]] = {name: {"path": name} for name in losses}
    for name, loss in losses.items():
        try:
            value, gradients = run(loss)
        except Exception as error:  # a failing peer is reported and does not end the benchmark
            rows[name] |= describe_failure(error)
            continue
        relative = [
            (gradient.double() - r.double()).norm() / r.double().norm().clamp(min=1e-30)
            for gradient, r in zip(gradients, reference, strict=True)
        ]
        errors = {"loss": float((value - reference_value).abs()), "gradient": float(torch.stack(relative).max())}
        rows[name]["errors"] = errors
        if not max(errors.values()) <= tolerance:
            difference = " and ".join(f"{quantity} by {error:.1e}" for quantity, error in errors.items())
            reason_text = f"differs from '{REFERENCE}' in {difference}; the tolerance is {tolerance:g}"
            rows[name] |= {"status": "failed", "reason": reason_text}
    return rows


def _peak_of_step(decoder: StepDecoder, loss: HeadLoss, batch: StepBatch) -> dict[str, int | None]:
    def step() -> tuple[Tensor, ...]:
        value = loss(decoder(batch.data["input_ids"]), decoder.head.weight, batch)
        return torch.autograd.grad(value, tuple(decoder.parameters()))

    return {"peak_bytes": peak_memory(step, decoder.head.weight.device)}


@short_collections()
def find_longest_steps(
    case: StepCase, setting: Setting, losses: Losses, *, memory_limit: float | None, seed: int = 0
) -> dict[str, Any]:
    """Find for each path the longest sequence of which a step fits into memory.

    Args:
        case: the sizes; the search begins with its number of tokens.
        setting: the device.
        losses: the paths.
        memory_limit: largest peak memory of a step in bytes, beyond weights and batch. None: a step fits unless torch's
            allocator raises out of memory.
        seed: seed of weights and inputs.

    Returns:
        ``limit_bytes``, and a row for each path with ``tokens`` and ``too_long`` as in :func:`find_longest`.
    """
    decoder = build_decoder(case, setting.device, seed)

    def fits(loss: HeadLoss, tokens: int) -> bool:
        free_memory()
        try:
            peak = _peak_of_step(decoder, loss, draw_step_batch(decoder, tokens, seed))["peak_bytes"]
        except torch.OutOfMemoryError:
            return False
        if memory_limit is not None and peak is None:
            raise OSError("this system does not let a process reset its peak memory")
        return memory_limit is None or (peak is not None and peak <= memory_limit)

    rows: list[dict[str, Any]] = []
    for name, loss in losses.items():
        try:
            tokens, too_long = find_longest(functools.partial(fits, loss), case.tokens)
            rows.append({"path": name, "status": "measured", "tokens": tokens, "too_long": too_long})
        except Exception as error:  # a failing peer is reported and does not end the benchmark
            rows.append({"path": name, **describe_failure(error)})
    return {"limit_bytes": memory_limit, "paths": rows}


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


def format_title(case: Row) -> str:
    """Return the line above the table of a case."""
    return (
        f"{case['title']}: logits of {case['logits_bytes'] / 1e6:.0f} MB; the decoder alone takes "
        f"{format_number(case['decoder']['ms']['median'])} ms; loss and gradients of all measured paths agree within "
        f"{case['tolerance']:g}"
    )


def longest_title(longest: Row) -> str:
    """Return the line above the table of the longest sequences, which says what limits them."""
    if longest["limit_bytes"] is None:
        return "Longest sequence, in tokens, that fits: torch runs out of memory beyond it."
    limit = f"{longest['limit_bytes'] / 1e9:g} GB"
    return (
        f"Longest sequence, in tokens, of which a step takes at most {limit} beyond weights and batch, a chosen limit."
    )


def run(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Measure what the options ask for, and print the tables.

    Raises:
        ConfigError: the hidden size can't be divided among the heads, or a sequence is too short.
    """
    if options.hidden % options.heads:
        raise ConfigError(
            f"--hidden {options.hidden} can't be divided among --heads {options.heads}; use a multiple of "
            f"{options.heads}"
        )
    if (shortest := min(options.tokens)) < 2:
        raise ConfigError(f"--tokens {shortest}: bench step needs at least 2, a token and the one that it predicts")
    sizes = options.vocab, options.layers, options.hidden, options.heads, getattr(torch, options.dtypes)
    cases = [StepCase(tokens, *sizes) for tokens in options.tokens]
    losses = {
        name: lazily(functools.partial(prepare, setting)) for name, prepare in select(PATHS, options.paths).items()
    }

    def measure_case(case: StepCase) -> dict[str, Any]:
        return measure(case, setting, losses, options.repeats, options.seed)

    def format_case(case: Row) -> str:
        return format_rows(format_title(case), COLUMNS, case["paths"])

    results = measure_cases(cases, measure_case, format_case)
    limit = None if options.memory_limit is None else options.memory_limit * 1e9
    longest = find_longest_steps(cases[0], setting, losses, memory_limit=limit, seed=options.seed)
    print(format_rows(longest_title(longest), LONGEST_COLUMNS, longest["paths"]), flush=True)
    return {"cases": results, "longest": longest}
