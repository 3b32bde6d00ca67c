"""``bench scale``: what log-probs cost of a recipe's step, from what was measured on one GPU, on up to 4,096.

Nothing runs here. Time of a method on one microbatch is that of its matrix products and of its passes over the logits,
each in proportion to what was measured; memory is :mod:`nemo_geomask.checks.memory`'s. The step around it is reckoned
from the model's sizes, see :func:`step_seconds` and :data:`ASSUMPTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nemo_geomask.bench.report import table
from nemo_geomask.checks.cluster import training_cards
from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.checks.gates import scoring_passes
from nemo_geomask.checks.layout import layout_of
from nemo_geomask.checks.memory import GPU_BYTES, METHODS, OutputWork, deferring, head_of, method_of, refused
from nemo_geomask.checks.shapes import Shape, shape_of
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.recipe import Recipe

__all__ = [
    "ASSUMPTIONS",
    "GPUS",
    "H100",
    "Costs",
    "costs_of",
    "model_flops",
    "scale",
    "seconds",
    "step_seconds",
    "text",
]

GPUS = (8, 64, 512, 4096)
_CHEAP = 0.1  # of a GPU's memory, up to which the fastest method is advised whatever it takes

_ELEMENTS = {
    "NeMo-RL": "NeMo-RL DistributedLogprob of logits.float()",
    "NeMo-RL, in chunks": "NeMo-RL ChunkedDistributedLogprob(256)",
    "geomask": "nemo_geomask",
    "geomask_linear": "nemo_geomask",
}
_WHOLE = {"NeMo-RL, fused": "NeMo-RL fused linear (1024)"}


class Costs(NamedTuple):
    """What one GPU was measured to take.

    Attributes:
        gpu: which, and when.
        peak: FLOP/s of dense half-precision products that its maker names.
        products: FLOP/s of the output layer's matrix products.
        elements: by method, nanoseconds forward and backward of the passes over a million logits.
        whole: by method without logits, nanoseconds forward and backward a billion (row, column, hidden number)s.
    """

    gpu: str
    peak: float
    products: float
    elements: Mapping[str, tuple[float, float]]
    whole: Mapping[str, tuple[float, float]]


H100 = Costs(
    gpu="NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, 2026-11-22",
    peak=989e12,
    products=762e12,
    elements={
        "NeMo-RL": (17_471, 8_713),
        "NeMo-RL, in chunks": (16_187, 41_355),
        "geomask": (751, 1_678),
        "geomask_linear": (751, 1_678),
    },
    whole={"NeMo-RL, fused": (6_275, 102_430)},
)
"""From the JSON in docs/performance, see :func:`costs_of`."""

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
"""What the figures rest on."""


def costs_of(linear: Mapping[str, Any], logprobs: Mapping[str, Any], *, peak: float) -> Costs:
    """Costs in what ``bench linear`` and ``bench logprobs`` wrote on a GPU: of their first cases in which all tokens
    train, at temperature 1 and without entropy.

    Args:
        linear: the one's JSON.
        logprobs: the other's.
        peak: see :class:`Costs`.

    Raises:
        ConfigError: they have no such case, or not all paths were measured in it.
    """

    def first_of(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        for case in result.get("cases", ()):
            how = case["case"]
            if "error" not in case and how["fraction"] == how.get("temperature", 1) == 1 and not how["entropy"]:
                found: Mapping[str, Any] = case
                return found
        raise ConfigError(
            f"--measured: {name}-*.json has no case in which all tokens train, without entropy; run nemo-geomask bench "
            f"{name} with --fractions 1 and --entropy off on the GPU"
        )

    def per(result: Mapping[str, Any], names: Mapping[str, str], unit: float) -> dict[str, tuple[float, float]]:
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

    first, others = first_of(linear, "linear"), first_of(logprobs, "logprobs")
    case, shape = first["case"], others["case"]
    machine = linear["machine"]
    return Costs(
        f"{machine['name']}, torch {machine['torch']}, {machine['date']}",
        peak,
        first["products_tflop_s"] * 1e12,
        per(others, _ELEMENTS, shape["tokens"] * shape["vocab"] / shape["tp"] / 1e6),
        per(first, _WHOLE, case["tokens"] * case["vocab"] / case["tp"] * case["hidden"] / 1e9),
    )


def seconds(method: str, head: OutputWork, costs: Costs) -> tuple[float, float]:
    """Of a method on a microbatch: training (forward and backward), and scoring (forward alone).

    The output layer's matrix products are in it: three with logits, four without, of which one is the forward pass's.
    """
    if method in costs.whole:
        forward, backward = (cost * 1e-18 * head.columns * head.hidden for cost in costs.whole[method])
        return head.rows * (forward + backward), head.scored * forward
    forward, backward = (cost * 1e-15 * head.columns for cost in costs.elements[method])
    product = 2 * head.columns * head.hidden / costs.products
    scoring = head.scored * (product + forward)
    if head.v1 and method == "geomask_linear":
        scoring = seconds("geomask", head, costs)[1]
    if method == "geomask_linear":
        return head.trained * head.rows * (4 * product + forward + backward), scoring
    if method == "geomask":
        # Rows that don't train are not read, and zeros are written for them.
        forward, backward = head.trained * forward, (1 + head.trained) / 2 * backward
    return head.rows * (3 * product + forward + backward), scoring


def model_flops(shape: Shape, tokens: float, length: float) -> float:
    """Of a forward pass over ``tokens`` in sequences of ``length``, without the output layer.

    Two a parameter and token; each layer's scores and values two each for half of the sequence, as attention is causal.
    """
    return tokens * (2 * shape.active + 2 * shape.layers * shape.attention * length)


def step_seconds(stage: float, head: float, *, stages: int, microbatches: int) -> float:
    """Of ``microbatches`` through a pipeline whose stages take ``stage`` seconds each, and the last ``head`` more.

    The last stage is the slowest: it works without a pause, and the others fill and drain.
    """
    return (microbatches + stages - 1) * stage + microbatches * head


def scale(
    recipe: Recipe, *, gpus: Sequence[int] = GPUS, costs: Costs = H100, mfu: float = 0.3, trained: float = 1.0
) -> dict[str, Any]:
    """Memory and time of every method in a recipe's step.

    Args:
        recipe: the recipe.
        gpus: that train; those on which the layout does not fit are left out, the recipe's own are added.
        costs: of one GPU.
        mfu: share of the GPU's peak at which the model runs.
        trained: share of the tokens that train.

    Raises:
        ConfigError: an invalid loss, a model whose sizes are not known, or a recipe without batch sizes.
    """
    facts = RecipeFacts.of(recipe)
    if facts.loss is None:
        raise ConfigError(*facts.problems)
    name = str(facts.get("policy.model_name", ""))
    shape = shape_of(name)
    if shape is None:
        message = f"{name} is no folder with a config.json and no name known here; give such a folder, as an override: "
        raise ConfigError(Problem(("policy.model_name",), message + "policy.model_name=FOLDER"))
    head, length = head_of(facts, shape, trained=trained), facts.number("policy.max_total_sequence_length")
    batch = facts.number("policy.train_global_batch_size")
    if head is None or not length or not batch:
        keys = ("policy.train_global_batch_size", "policy.max_total_sequence_length")
        raise ConfigError(Problem(keys, "the size of a step is not known without them; set both"))
    layout = layout_of(facts)
    recompute = facts.on(f"policy.{'megatron' if facts.megatron else 'dtensor'}_cfg.activation_checkpointing")
    passes = scoring_passes(facts)
    tokens = batch * length
    stage = [model_flops(shape, rows * layout.cp, length) / layout.shared / (mfu * costs.peak) for rows in head[:2]]
    times = {method: seconds(method, head, costs) for method in METHODS}
    steps: list[dict[str, Any]] = []
    cards = training_cards(facts) or layout.ranks
    for count in sorted({*gpus, cards}):
        copies = count // layout.shared
        if count % layout.shared or (copies * layout.tp * layout.cp) % layout.ep:
            continue
        own = [math.ceil(tokens / copies / (rows * layout.cp)) if rows else 0 for rows in head[:2]]

        def whole(training: float, scoring: float, own: Sequence[int] = own) -> float:
            both = step_seconds((4 if recompute else 3) * stage[0], training, stages=layout.pp, microbatches=own[0])
            return both + passes * step_seconds(stage[1], scoring, stages=layout.pp, microbatches=own[1])

        alone = whole(0.0, 0.0)
        found = {method: whole(*times[method]) - alone for method in METHODS}
        steps.append({"gpus": count, "dp": copies, "microbatches": own[0], "model_s": alone, "loss_s": found})
    refusals = {method: why for method in METHODS if (why := refused(method, facts))}
    memory = {method: way.peak(head) for method, way in METHODS.items()}
    deferred = {method: size for method in METHODS if (size := deferring(method, facts, head))}
    own_step = next((step for step in steps if step["gpus"] == cards), None)
    return {
        "recipe": str(recipe.path),
        "model": {"name": name, **shape._asdict()},
        "layout": str(replace(layout, dp=max(1, cards // layout.shared))),
        "head": head._asdict(),
        "passes": passes,
        "now": method_of(facts),
        "refused": refusals,
        "memory_bytes": memory,
        "deferred_bytes": deferred,
        "steps": steps,
        "advised": _advised(memory, (own_step or steps[0])["loss_s"], refusals) if steps else None,
        "assumptions": [
            line.format(mfu=mfu, peak=costs.peak / 1e12, trained=trained, gpu=costs.gpu) for line in ASSUMPTIONS
        ],
    }


def _advised(memory: Mapping[str, float], loss: Mapping[str, float], refusals: Mapping[str, str]) -> str:
    """The fastest of those that take little memory; where none does, the one that takes least."""
    possible = [method for method in memory if method not in refusals]
    cheap = [method for method in possible if memory[method] <= _CHEAP * GPU_BYTES]
    return min(cheap or possible, key=lambda method: (0 if cheap else memory[method], loss[method]))


def text(found: Mapping[str, Any]) -> str:
    """What :func:`scale` found, to read."""
    model, head = found["model"], found["head"]
    lines = [
        f"{found['recipe']}",
        f"{model['name']}: H {model['hidden']}, V {model['vocab']}, {model['active'] / 1e9:.3g} B active parameters "
        f"without embeddings; {found['layout']}",
        f"a microbatch has {head['rows']} rows, in scoring {head['scored']}, by {head['columns']} columns on a GPU of "
        f"the last stage: {head['logit_bytes'] * head['columns'] / 1e6:.3g} MB of logits a row",
        "",
        "Peak memory of the way from hidden states to log-probs and back, on one GPU:",
        "",
        table(
            ["method", "GB", "of 80 GB"],
            [
                [
                    method + (", as now" if method == found["now"] else ""),
                    f"{size / 1e9:.3g}",
                    f"{size / GPU_BYTES:.1%}",
                ]
                for method, size in found["memory_bytes"].items()
            ],
        ),
        *(f"{method} needs {why}" for method, why in found["refused"].items()),
        *(
            f"{method} with policy.megatron_cfg.defer_fp32_logits: true: {size / 1e9:.3g} GB"
            for method, size in found["deferred_bytes"].items()
        ),
        "",
        f"Seconds of it in an optimiser step, scoring passes ({found['passes']}) included, and its share of the step:",
        "",
        table(
            ["GPUs", "DP", "microbatches", "model", *METHODS],
            [
                [
                    str(step["gpus"]),
                    str(step["dp"]),
                    str(step["microbatches"]),
                    f"{step['model_s']:.3g} s",
                    *(f"{own:.3g} s, {own / (own + step['model_s']):.0%}" for own in step["loss_s"].values()),
                ]
                for step in found["steps"]
            ],
        ),
        "",
    ]
    if found["advised"]:
        lines += [f"Advised: {METHODS[found['advised']].setting}", ""]
    else:
        lines += ["The layout fits on none of these numbers of GPUs.", ""]
    return "\n".join([*lines, "Assumed:", *(f"- {line}" for line in found["assumptions"]), ""])
