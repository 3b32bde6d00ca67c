r"""GPU memory that each method needs to compute log-probs from hidden states.

The formulas give peak bytes on a rank of the last pipeline stage, in addition to the model, its activations and its
gradients.
The peak is the larger one of training (forward and backward) and scoring (forward without gradient). Symbols:

- R rows of a training microbatch, S rows of a scoring microbatch, H numbers in a hidden state, W = V/TP columns;
- b bytes of a logit: 2 under ``defer_fp32_logits``, else 4; u bytes of its float32 copy: 4 if b = 2, else 0;
- c rows of a chunk; f fraction of the rows that train.

A backward pass through logits has its peak when it computes the gradient of the logits or, later, that of the output
weight. The latter exists in half precision before it is accumulated, unless Megatron's
``gradient_accumulation_fusion`` is on, so the peak is at least 2 R W + 2 W H.

=========================================== ===========================================================
NeMo-RL                                     (b + u + 8) R W: logits, float32 copy, log-probs (4), their exp (4).
                                            Scoring: the same for S rows, or b S W + (u + 8) c W with
                                            ``logprob_chunk_size``
NeMo-RL, ``logprob_chunk_size``             4 R W + 24 c W: logits and gradient; for a chunk, float32 copy (4),
                                            log-probs (4), exp (4), int64 one-hot (8), gradient (4). Scoring: as above
NeMo-RL, ``use_fused_linear_logprobs``      10 W H + 20 c W + 8 R H: three copies of the weight's gradient, two of them
                                            in float32. Scoring: 14 c W + 4 S H
``geomask``                                 2 b R W: logits and gradient. Scoring: b S W, and 2 S W from which they are
                                            cast if b = 4
``geomask_linear``                          min(tile, 2 f R W) + (b + 2 f) R H + 2 W H + 4 min(f R, W) H: a tile of the
                                            logits (``TILE_BYTES``), a copy of all hidden states and one of those that
                                            train, the weight's gradient, and the smaller one of the two gradients in
                                            float32, which is not needed if all logits are one tile.
                                            Scoring: min(tile, 2 S W) and the copy of all; in DTensor v1 as
                                            ``geomask``
=========================================== ===========================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from nemo_geomask.tools.check.logprob_paths import (
    fused_key,
    missing_for_backend,
    missing_for_chunks,
    missing_for_fused,
    scoring_passes,
)
from nemo_geomask.tools.check.model_shapes import ModelShape
from nemo_geomask.tools.check.parallel_layout import layout_of
from nemo_geomask.tools.check.recipe_facts import RecipeFacts

GPU_BYTES = 80 * 10**9
"""Assumed memory of a GPU, that of an H100."""
GPU_TILE_BYTES = 512 << 20
"""``nemo_geomask.parallel.linear.TILE_BYTES`` on a GPU, whose module needs torch."""
_DEFAULT_CHUNK = 1024  # rows, if the recipe sets no logprob_chunk_size
_DEFERRED = "policy.megatron_cfg.defer_fp32_logits"


class OutputWork(NamedTuple):
    """Sizes of the output layer's largest microbatches on one rank.

    Attributes:
        chunk: c, rows of a chunk: ``logprob_chunk_size`` times the sequences of a microbatch; None if it is not set.
    """

    rows: int  # R, rows of a training microbatch
    scored: int  # S, rows of a forward pass for ``prev_logprobs`` or the reference; 0 without such passes
    hidden: int  # H, size of a hidden state
    columns: int  # W = V/TP, columns of the logits
    chunk: int | None = None
    trained: float = 1.0  # f, fraction of the rows that train
    logit_bytes: int = 2  # b, bytes of a logit, 2 or 4
    fused_gradient: bool = False  # True if the weight's gradient is accumulated while it is computed
    v1: bool = False  # True for a DTensor v1 worker, which scores from logits even with ``geomask_linear``

    @property
    def logits(self) -> int:
        """Number of logits, R W."""
        return self.rows * self.columns

    @property
    def weight_gradient_peak(self) -> int:
        """Bytes of the logits' gradient and of the weight's gradient that is computed from it."""
        return 2 * self.logits + (0 if self.fused_gradient else 2 * self.columns * self.hidden)


class LogprobMethod(NamedTuple):
    """Method to compute log-probs from hidden states.

    Attributes:
        training: function for the peak bytes of forward and backward, see the module's table.
    """

    setting: str  # setting that selects it
    training: Callable[[OutputWork], float]
    scoring: Callable[[OutputWork], float]  # function for the peak bytes of a forward pass without gradient

    def peak(self, work: OutputWork) -> float:
        """Return the larger of both peaks, in bytes."""
        return max(self.training(work), self.scoring(work))


def _nemo_rl_forward(work: OutputWork, rows: int, chunk: int | None) -> float:
    """Return the bytes of NeMo-RL's forward pass over all rows, or over chunks of them."""
    copies = 8 if work.logit_bytes == 4 else 12
    return (work.logit_bytes * rows + copies * min(chunk or rows, rows)) * work.columns


def _bytes_with_cast(work: OutputWork) -> int:
    """Return the bytes of a number in the model's output, together with its half-precision original."""
    return 6 if work.logit_bytes == 4 else 2


def _geomask_scoring(work: OutputWork) -> float:
    return _bytes_with_cast(work) * work.scored * work.columns


def _geomask_linear_training(work: OutputWork) -> float:
    trained_rows = work.trained * work.rows
    all_tiles = 2 * trained_rows * work.columns
    summed = min(trained_rows, work.columns) if all_tiles > GPU_TILE_BYTES else 0
    return (
        min(GPU_TILE_BYTES, all_tiles)
        + (work.logit_bytes * work.rows + 2 * trained_rows) * work.hidden
        + (2 * work.columns + 4 * summed) * work.hidden
    )


def _geomask_linear_scoring(work: OutputWork) -> float:
    if work.v1:
        return _geomask_scoring(work)
    return min(GPU_TILE_BYTES, 2 * work.scored * work.columns) + _bytes_with_cast(work) * work.scored * work.hidden


LOGPROB_METHODS: Mapping[str, LogprobMethod] = {
    "NeMo-RL": LogprobMethod(
        "logprob_backend: nemo_rl",
        lambda work: max(_nemo_rl_forward(work, work.rows, None), work.weight_gradient_peak),
        lambda work: _nemo_rl_forward(work, work.scored, work.chunk),
    ),
    "NeMo-RL, in chunks": LogprobMethod(
        "policy.logprob_chunk_size",
        lambda work: max(
            4 * work.logits + 24 * min(work.chunk or _DEFAULT_CHUNK, work.rows) * work.columns,
            work.weight_gradient_peak,
        ),
        lambda work: _nemo_rl_forward(work._replace(logit_bytes=2), work.scored, work.chunk or _DEFAULT_CHUNK),
    ),
    "NeMo-RL, fused": LogprobMethod(
        "policy.megatron_cfg.use_fused_linear_logprobs: true",
        lambda work: (
            (10 * work.hidden + 20 * min(_DEFAULT_CHUNK, work.rows)) * work.columns + 8 * work.rows * work.hidden
        ),
        lambda work: 14 * min(_DEFAULT_CHUNK, work.scored) * work.columns + 4 * work.scored * work.hidden,
    ),
    "geomask": LogprobMethod(
        "logprob_backend: geomask",
        lambda work: max(2 * work.logit_bytes * work.logits, work.weight_gradient_peak),
        _geomask_scoring,
    ),
    "geomask_linear": LogprobMethod(
        "logprob_backend: geomask_linear", _geomask_linear_training, _geomask_linear_scoring
    ),
}
"""Methods by name."""


def output_work_of(facts: RecipeFacts, shape: ModelShape, *, trained: float = 1.0) -> OutputWork | None:
    """Return the output layer's work on a recipe's largest microbatches; None if the recipe does not set their size.

    Args:
        facts: facts about the recipe.
        shape: sizes of its model.
        trained: fraction of the rows that train.
    """
    layout = layout_of(facts)
    batching = next(
        (name for name in ("sequence_packing", "dynamic_batching") if facts.is_true(f"policy.{name}.enabled")), None
    )

    def microbatch_tokens(token_budget: str, sequences: str) -> float | None:
        if batching is not None:
            return facts.number(f"policy.{batching}.{token_budget}")
        length = facts.number("policy.max_total_sequence_length")
        return length and length * (facts.number(f"policy.{sequences}") or 1)

    rows = microbatch_tokens("train_mb_tokens", "train_micro_batch_size")
    if not rows:
        return None
    scoring_rows = microbatch_tokens("logprob_mb_tokens", "logprob_batch_size") or rows
    sequences = 1 if batching is not None else facts.number("policy.train_micro_batch_size") or 1
    chunk = facts.number("policy.logprob_chunk_size")
    # In DTensor workers, FSDP casts the model's output to float32.
    is_deferred = facts.uses_megatron and facts.is_true(_DEFERRED)
    return OutputWork(
        rows=math.ceil(rows / layout.cp),
        scored=math.ceil(scoring_rows / layout.cp) if scoring_passes(facts) else 0,
        hidden=shape.hidden,
        columns=math.ceil(shape.vocab / layout.tp),
        chunk=int(chunk * sequences) if chunk else None,
        trained=trained,
        logit_bytes=2 if is_deferred else 4,
        fused_gradient=facts.uses_megatron and facts.is_true("policy.megatron_cfg.gradient_accumulation_fusion"),
        v1=not facts.uses_megatron and not facts.is_true("policy.dtensor_cfg._v2"),
    )


def current_method(facts: RecipeFacts) -> str:
    """Return the name in :data:`LOGPROB_METHODS` of the method that a recipe uses."""
    backend = facts.config.logprob_backend
    if backend != "nemo_rl":
        return backend if backend in LOGPROB_METHODS else "NeMo-RL"
    if fused_key(facts):
        return "NeMo-RL, fused"
    return (
        "NeMo-RL, in chunks"
        if facts.number("policy.logprob_chunk_size") and not missing_for_chunks(facts)
        else "NeMo-RL"
    )


def settings_to_change(method: str, facts: RecipeFacts) -> str:
    """Return the settings that a recipe has to change before it can use a method; empty if none."""
    if method.startswith("geomask"):
        return ", ".join(missing_for_backend(facts, method))
    needs = {"NeMo-RL, in chunks": missing_for_chunks, "NeMo-RL, fused": missing_for_fused}
    return ", ".join(needs[method](facts)) if method in needs else ""


def deferred_peak(method: str, facts: RecipeFacts, work: OutputWork) -> float | None:
    """Return the peak bytes of a method with half-precision logits, by ``defer_fp32_logits``.

    Returns:
        None if the trainer is not Megatron, if the logits are already in half precision, if half precision saves less
        than a quarter, or if the temperature is not 1, since half-precision logits are then rounded twice (see GM101).
    """
    if not facts.uses_megatron or work.logit_bytes == 2 or facts.temperature != 1.0:
        return None
    peak = LOGPROB_METHODS[method].peak(work._replace(logit_bytes=2))
    return peak if peak < 0.75 * LOGPROB_METHODS[method].peak(work) else None
