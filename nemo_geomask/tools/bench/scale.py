"""``bench scale``: estimate of the log-probs' cost in a recipe's step on up to 4,096 GPUs, from times of one H100.

Nothing is run. The time of a method on one microbatch consists of its matrix products and its passes over the logits,
both scaled from the measured times. Memory is estimated by :mod:`nemo_geomask.tools.check`. The time of the rest of the
step follows from the size of the model; see :func:`step_seconds` and :data:`ASSUMPTIONS`.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.recipe import Recipe, read_recipe
from nemo_geomask.recipe.shipped_files import find_recipe
from nemo_geomask.tools.bench.scale_costs import H100, method_seconds
from nemo_geomask.tools.check import (
    GPU_BYTES,
    LOGPROB_METHODS,
    ModelShape,
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
from nemo_geomask.tools.shared.json_output import to_json
from nemo_geomask.tools.shared.terminal_tables import format_table

GPUS = (8, 64, 512, 4096)
_SMALL_MEMORY = 0.1  # fraction of a GPU's memory; of the methods that take less, the fastest is recommended

ASSUMPTIONS = (
    "the model runs at {mfu:.0%} of the GPU's {peak:.0f} TFLOP/s, attention included, a backward pass at twice the "
    "forward's work and once more under activation checkpointing",
    "sequences have the longest length that the recipe allows, and fill their microbatches; a rank has at least one "
    "microbatch, so the batch is larger than the recipe's if there are more ranks than microbatches",
    "tokens are spread evenly over the experts, stages are equal except for the output layer, and the schedule is "
    "one forward, one backward: a step takes the time of (m + p - 1) stages and m output layers, for m microbatches "
    "and p stages",
    "{trained:.0%} of the tokens train; scoring computes all of them",
    "a method's time is proportional to its matrix products and to the logits that it passes over, as on one {gpu}",
    "not counted: sampling, gradient and parameter collectives, the optimiser, and the loss's own collectives (two "
    "numbers a token over TP, a few a sequence over CP)",
)
"""Assumptions of the estimate, as templates that :func:`estimate_scale` fills in."""


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
    recipe: Recipe, *, gpus: Sequence[int] = GPUS, mfu: float = 0.3, trained: float = 1.0
) -> dict[str, Any]:
    """Estimate memory and time of every method in a recipe's step.

    Args:
        recipe: the recipe.
        gpus: numbers of GPUs that train. The recipe's number is added; numbers that the layout
            does not divide are left out.
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
    if head is None or length is None or batch is None:
        keys = ("policy.train_global_batch_size", "policy.max_total_sequence_length")
        raise ConfigError(Problem(keys, "the estimate needs both of these keys; set them"))
    for key, count in (("policy.train_global_batch_size", batch), ("policy.max_total_sequence_length", length)):
        if count <= 0:
            raise ConfigError(Problem((key,), f"{count:g} must be above 0"))
    layout = layout_of(facts)
    recompute = facts.is_true(f"policy.{'megatron' if facts.uses_megatron else 'dtensor'}_cfg.activation_checkpointing")
    passes = scoring_passes(facts)
    tokens = batch * length
    stage = [
        model_flops(shape, rows * layout.cp, length) / layout.ranks_per_replica / (mfu * H100.peak) for rows in head[:2]
    ]
    times = {method: method_seconds(method, head, H100) for method in LOGPROB_METHODS}
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
            line.format(mfu=mfu, peak=H100.peak / 1e12, trained=trained, gpu=H100.gpu) for line in ASSUMPTIONS
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


def run(options: Namespace) -> int:
    """Print the estimate that the options of ``bench scale`` ask for, and write it into ``options.out``."""
    recipe = read_recipe(find_recipe(options.recipe), options.overrides, leave=("data", "env", "logger"))
    estimate = estimate_scale(recipe, gpus=options.gpus or GPUS, mfu=options.mfu, trained=options.fractions)
    print(format_estimate(estimate))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"scale-{recipe.path.stem}.json"
        path.write_text(to_json(estimate) + "\n", encoding="utf-8")
        print(path)
    return 0
