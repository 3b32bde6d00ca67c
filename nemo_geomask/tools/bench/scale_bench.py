"""``bench scale``: estimate of the log-probs' cost in a recipe's step on up to 4,096 GPUs, from times of one GPU.

Nothing is run. The time of a method on one microbatch consists of its matrix products and its passes over the logits,
both scaled from the measured times. Memory is estimated by :mod:`nemo_geomask.tools.check`. The time of the rest of the
step follows from the size of the model; see :func:`step_seconds` and :data:`ASSUMPTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.recipe import Recipe
from nemo_geomask.tools.check import (
    GPU_BYTES,
    LOGPROB_METHODS,
    ModelShape,
    OutputWork,
    RecipeFacts,
    current_method,
    deferred_peak,
    layout_of,
    output_work_of,
    scoring_passes,
    settings_to_change,
    shape_of,
    training_gpus,
)
from nemo_geomask.tools.shared.terminal_tables import format_table

__all__ = [
    "ASSUMPTIONS",
    "GPUS",
    "H100",
    "Costs",
    "estimate_scale",
    "format_estimate",
    "method_seconds",
    "model_flops",
    "read_costs",
    "step_seconds",
]

GPUS = (8, 64, 512, 4096)
_SMALL_MEMORY = 0.1  # fraction of a GPU's memory; of the methods that take less, the fastest is recommended

_PATHS_WITH_LOGITS = {
    "NeMo-RL": "NeMo-RL DistributedLogprob of logits.float()",
    "NeMo-RL, in chunks": "NeMo-RL ChunkedDistributedLogprob(256)",
    "geomask": "nemo_geomask",
    "geomask_linear": "nemo_geomask",
}
_PATHS_WITHOUT_LOGITS = {"NeMo-RL, fused": "NeMo-RL fused linear (1024)"}


class Costs(NamedTuple):
    """Times measured on one GPU.

    Attributes:
        gpu: name, software version and date.
        peak: FLOP/s of dense half-precision products in its specification.
        products: measured FLOP/s of the output layer's matrix products.
        with_logits: for each method with logits, nanoseconds of the forward and of the backward pass over a million
            logits.
        without_logits: for each method without logits, nanoseconds of the forward and of the backward pass for
            rows × columns × hidden size of a billion.
    """

    gpu: str
    peak: float
    products: float
    with_logits: Mapping[str, tuple[float, float]]
    without_logits: Mapping[str, tuple[float, float]]


H100 = Costs(
    gpu="NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, 2026-11-22",
    peak=989e12,
    products=762e12,
    with_logits={
        "NeMo-RL": (17_471, 8_713),
        "NeMo-RL, in chunks": (16_187, 41_355),
        "geomask": (751, 1_678),
        "geomask_linear": (751, 1_678),
    },
    without_logits={"NeMo-RL, fused": (6_275, 102_430)},
)
"""Costs that :func:`read_costs` returns for the JSON in docs/performance."""

ASSUMPTIONS = (
    "the model runs at {mfu:.0%} of the GPU's {peak:.0f} TFLOP/s, attention included, a backward pass at twice the "
    "forward's work and once more under activation checkpointing",
    "sequences are of the longest length that the recipe allows, and fill their microbatches; a rank has at least one, "
    "so that the batch grows where there are more GPUs than that",
    "experts are in balance, stages are equal but for the output layer, and a step is the plain one-forward-one-"
    "backward schedule: (m + p - 1) stages and m output layers",
    "{trained:.0%} of the tokens train; scoring computes all of them",
    "a method's time grows with its matrix products and with the logits that it passes over, as on one {gpu}",
    "not counted: sampling, gradient and parameter collectives, the optimiser, and the loss's own collectives (two "
    "numbers a token over TP, a few a sequence over CP)",
)
"""Assumptions of the estimate, as templates that :func:`estimate_scale` fills in."""


def read_costs(linear: Mapping[str, Any], logprobs: Mapping[str, Any], *, peak: float) -> Costs:
    """Return the costs from the JSON of ``bench linear`` and ``bench logprobs`` on a GPU.

    They are from the first case of each in which all tokens train, the temperature is 1 and there is no entropy.

    Args:
        linear: JSON of ``bench linear``.
        logprobs: JSON of ``bench logprobs``.
        peak: peak of the GPU in FLOP/s; see :class:`Costs`.

    Raises:
        ConfigError: there is no such case, or a path was not measured in it.
    """

    def first_of(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        for case in result.get("cases", ()):
            fields = case["case"]
            is_plain = fields["fraction"] == fields.get("temperature", 1) == 1 and not fields["entropy"]
            if "error" not in case and is_plain:
                return dict(case)
        raise ConfigError(
            f"--measured: {name}-*.json has no case in which all tokens train, without entropy; run nemo-geomask bench "
            f"{name} with --fractions 1 and --entropy off on the GPU"
        )

    def nanoseconds_per(
        result: Mapping[str, Any], names: Mapping[str, str], unit: float
    ) -> dict[str, tuple[float, float]]:
        rows = {row["path"]: row for row in result["paths"] if row["status"] == "measured"}
        if missing := [path for path in names.values() if path not in rows]:
            raise ConfigError(
                f"--measured: '{missing[0]}' was not measured in {result['title']}; run nemo-geomask bench, without "
                "--paths, on the GPU where NeMo-RL is importable"
            )
        return {
            name: (rows[path]["forward_ms"]["median"] * 1e6 / unit, rows[path]["backward_ms"]["median"] * 1e6 / unit)
            for name, path in names.items()
        }

    linear_case, logits_case = first_of(linear, "linear"), first_of(logprobs, "logprobs")
    case, shape = linear_case["case"], logits_case["case"]
    machine = linear["machine"]
    return Costs(
        f"{machine['name']}, torch {machine['torch']}, {machine['date']}",
        peak,
        linear_case["products_tflop_s"] * 1e12,
        nanoseconds_per(logits_case, _PATHS_WITH_LOGITS, shape["tokens"] * shape["vocab"] / shape["tp"] / 1e6),
        nanoseconds_per(
            linear_case, _PATHS_WITHOUT_LOGITS, case["tokens"] * case["vocab"] / case["tp"] * case["hidden"] / 1e9
        ),
    )


def method_seconds(method: str, head: OutputWork, costs: Costs) -> tuple[float, float]:
    """Return the seconds of a method on a microbatch in training (forward and backward) and in scoring (forward).

    They include the matrix products of the output layer, one of which is in the forward pass: three with logits, four
    without.
    """
    if method in costs.without_logits:
        forward, backward = (cost * 1e-18 * head.columns * head.hidden for cost in costs.without_logits[method])
        return head.rows * (forward + backward), head.scored * forward
    forward, backward = (cost * 1e-15 * head.columns for cost in costs.with_logits[method])
    product = 2 * head.columns * head.hidden / costs.products
    scoring = head.scored * (product + forward)
    if head.v1 and method == "geomask_linear":
        scoring = method_seconds("geomask", head, costs)[1]
    if method == "geomask_linear":
        return head.trained * head.rows * (4 * product + forward + backward), scoring
    if method == "geomask":
        # Rows that do not train are not read, and their gradient is filled with zeros.
        forward, backward = head.trained * forward, (1 + head.trained) / 2 * backward
    return head.rows * (3 * product + forward + backward), scoring


def model_flops(shape: ModelShape, tokens: float, length: float) -> float:
    """Return the FLOPs of a forward pass over ``tokens`` in sequences of ``length``, without the output layer.

    Each token takes 2 FLOPs for each active parameter. In each layer, causal attention covers half of the sequence on
    average and takes 2 FLOPs for the scores and 2 for the values.
    """
    return tokens * (2 * shape.active + 2 * shape.layers * shape.attention * length)


def step_seconds(stage: float, head: float, *, stages: int, microbatches: int) -> float:
    """Return the seconds of a pipeline in which the last stage takes ``stage + head`` seconds and the others ``stage``.

    The last stage is the slowest and is never idle between its first and its last microbatch. The other stages fill and
    drain the pipeline.
    """
    return (microbatches + stages - 1) * stage + microbatches * head


def estimate_scale(
    recipe: Recipe, *, gpus: Sequence[int] = GPUS, costs: Costs = H100, mfu: float = 0.3, trained: float = 1.0
) -> dict[str, Any]:
    """Estimate memory and time of every method in a recipe's step.

    Args:
        recipe: the recipe.
        gpus: numbers of GPUs that train. The recipe's number is added; numbers that the layout
            does not divide are left out.
        costs: times of one GPU.
        mfu: fraction of the GPU's peak FLOP/s that the model reaches.
        trained: fraction of the tokens that train.

    Raises:
        ConfigError: the loss is invalid, the sizes of the model are unknown, or the recipe has no batch sizes.
    """
    facts = RecipeFacts.from_recipe(recipe)
    if facts.loss is None:
        raise ConfigError(*facts.problems)
    name = str(facts.get("policy.model_name", ""))
    shape = shape_of(name)
    if shape is None:
        message = (
            f"{name} is neither a folder with a config.json nor a known model name; set policy.model_name=FOLDER as an "
            "override"
        )
        raise ConfigError(Problem(("policy.model_name",), message))
    head, length = output_work_of(facts, shape, trained=trained), facts.number("policy.max_total_sequence_length")
    batch = facts.number("policy.train_global_batch_size")
    if head is None or not length or not batch:
        keys = ("policy.train_global_batch_size", "policy.max_total_sequence_length")
        raise ConfigError(Problem(keys, "the estimate needs both of these keys; set them"))
    layout = layout_of(facts)
    recompute = facts.is_true(f"policy.{'megatron' if facts.uses_megatron else 'dtensor'}_cfg.activation_checkpointing")
    passes = scoring_passes(facts)
    tokens = batch * length
    stage = [
        model_flops(shape, rows * layout.cp, length) / layout.ranks_per_replica / (mfu * costs.peak)
        for rows in head[:2]
    ]
    times = {method: method_seconds(method, head, costs) for method in LOGPROB_METHODS}
    steps: list[dict[str, Any]] = []
    recipe_gpus = training_gpus(facts) or layout.ranks
    for count in sorted({*gpus, recipe_gpus}):
        copies = count // layout.ranks_per_replica
        if count % layout.ranks_per_replica or (copies * layout.tp * layout.cp) % layout.ep:
            continue
        microbatches = [math.ceil(tokens / copies / (rows * layout.cp)) if rows else 0 for rows in head[:2]]

        def total_seconds(training: float, scoring: float, counts: Sequence[int] = microbatches) -> float:
            stage_seconds = (4 if recompute else 3) * stage[0]
            train_seconds = step_seconds(stage_seconds, training, stages=layout.pp, microbatches=counts[0])
            return train_seconds + passes * step_seconds(stage[1], scoring, stages=layout.pp, microbatches=counts[1])

        model_seconds = total_seconds(0.0, 0.0)
        steps.append(
            {
                "gpus": count,
                "dp": copies,
                "microbatches": microbatches[0],
                "model_s": model_seconds,
                "loss_s": {method: total_seconds(*times[method]) - model_seconds for method in LOGPROB_METHODS},
            }
        )
    refusals = {method: change for method in LOGPROB_METHODS if (change := settings_to_change(method, facts))}
    memory = {name: method.peak(head) for name, method in LOGPROB_METHODS.items()}
    deferred = {method: size for method in LOGPROB_METHODS if (size := deferred_peak(method, facts, head))}
    recipe_step = next((step for step in steps if step["gpus"] == recipe_gpus), None)
    return {
        "recipe": str(recipe.path),
        "model": {"name": name, **shape._asdict()},
        "layout": str(replace(layout, dp=max(1, recipe_gpus // layout.ranks_per_replica))),
        "head": head._asdict(),
        "passes": passes,
        "now": current_method(facts),
        "refused": refusals,
        "memory_bytes": memory,
        "deferred_bytes": deferred,
        "steps": steps,
        "advised": _recommended_method(memory, (recipe_step or steps[0])["loss_s"], refusals) if steps else None,
        "assumptions": [
            line.format(mfu=mfu, peak=costs.peak / 1e12, trained=trained, gpu=costs.gpu) for line in ASSUMPTIONS
        ],
    }


def _recommended_method(memory: Mapping[str, float], loss: Mapping[str, float], refusals: Mapping[str, str]) -> str:
    """Return the fastest of the methods that take little memory; if there is none, the one with the least memory."""
    possible = [method for method in memory if method not in refusals]
    small = [method for method in possible if memory[method] <= _SMALL_MEMORY * GPU_BYTES]
    return min(small or possible, key=lambda method: (0 if small else memory[method], loss[method]))


def format_estimate(estimate: Mapping[str, Any]) -> str:
    """Return the estimate of :func:`estimate_scale` as text."""
    model, head = estimate["model"], estimate["head"]
    lines = [
        f"{estimate['recipe']}",
        f"{model['name']}: H {model['hidden']}, V {model['vocab']}, {model['active'] / 1e9:.3g} B active parameters "
        f"without embeddings; {estimate['layout']}",
        f"a microbatch has {head['rows']} rows, in scoring {head['scored']}, by {head['columns']} columns on a GPU of "
        f"the last stage: {head['logit_bytes'] * head['columns'] / 1e6:.3g} MB of logits a row",
        "",
        "Peak memory from hidden states to log-probs and back, on one GPU:",
        "",
        format_table(
            ["method", "GB", "of 80 GB"],
            [
                [
                    method + (", as now" if method == estimate["now"] else ""),
                    f"{size / 1e9:.3g}",
                    f"{size / GPU_BYTES:.1%}",
                ]
                for method, size in estimate["memory_bytes"].items()
            ],
        ),
        *(f"{method} needs {change}" for method, change in estimate["refused"].items()),
        *(
            f"{method} with policy.megatron_cfg.defer_fp32_logits: true: {size / 1e9:.3g} GB"
            for method, size in estimate["deferred_bytes"].items()
        ),
        "",
        f"Seconds of this in an optimiser step, with scoring passes ({estimate['passes']}), and its share of the step:",
        "",
        format_table(
            ["GPUs", "DP", "microbatches", "model", *LOGPROB_METHODS],
            [
                [
                    str(step["gpus"]),
                    str(step["dp"]),
                    str(step["microbatches"]),
                    f"{step['model_s']:.3g} s",
                    *(
                        f"{loss_seconds:.3g} s, {loss_seconds / (loss_seconds + step['model_s']):.0%}"
                        for loss_seconds in step["loss_s"].values()
                    ),
                ]
                for step in estimate["steps"]
            ],
        ),
        "",
    ]
    if estimate["advised"]:
        lines += [f"Advised: {LOGPROB_METHODS[estimate['advised']].setting}", ""]
    else:
        lines += ["The layout divides none of these numbers of GPUs.", ""]
    return "\n".join([*lines, "Assumed:", *(f"- {line}" for line in estimate["assumptions"]), ""])
