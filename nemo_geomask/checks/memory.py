r"""GM4, second part: what the way from hidden states to log-probs takes of a GPU's memory.

Peak bytes of forward and backward together, beyond the model, its activations and its gradients: logits, their
gradient and working memory. Of a rank of the last pipeline stage, whose microbatch is R rows of H numbers and which
has W = V/TP columns of the vocabulary; logits in two bytes, c rows in a chunk, f of the rows train:

=========================================== ===========================================================
NeMo-RL                                     14 R W: logits 2, in float32 4, log-probs 4, their exp 4
NeMo-RL, ``logprob_chunk_size``             4 R W + 24 c W: logits and gradient; of a chunk float32 4, log-probs 4,
                                            exp 4, int64 one-hot 8, gradient 4
NeMo-RL, ``use_fused_linear_logprobs``      10 W H + 20 c W + 8 R H: the weight's gradient three times, twice in float32
``geomask``                                 4 R W: logits and gradient
``geomask_linear``                          min(tile, 2 f R W) + (2 + 6 f) R H + 2 W H: a tile; the hidden states' copy
                                            and their gradient in float32; the weight's gradient, before it is added up
=========================================== ===========================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.checks.gates import fused_needs, logit_needs
from nemo_geomask.checks.layout import layout_of
from nemo_geomask.checks.rule import Hit, Rule
from nemo_geomask.checks.shapes import Shape, shape_of
from nemo_geomask.parallel.linear import TILE_BYTES

__all__ = ["GPU_BYTES", "METHODS", "RULES", "OutputWork", "head_of", "method_of", "refused"]

GPU_BYTES = 80 * 10**9
"""Memory of the GPU to reckon with: an H100's."""
_SHARE = 0.2  # of it, from which on the logits are worth a note
_CHUNK = 1024  # rows, where a method needs a number that the recipe does not give


class OutputWork(NamedTuple):
    """The output layer's work on a microbatch, of one rank.

    Attributes:
        rows: R, of training.
        scored: of the forward passes for ``prev_logprobs`` and the reference.
        hidden: H.
        columns: W = V/TP.
        chunk: c, ``logprob_chunk_size`` times the sequences side by side.
        trained: f, share of the rows that train.
    """

    rows: int
    scored: int
    hidden: int
    columns: int
    chunk: int = _CHUNK
    trained: float = 1.0

    @property
    def logits(self) -> int:
        """R W."""
        return self.rows * self.columns


METHODS: Mapping[str, tuple[str, Callable[[OutputWork], float]]] = {
    "NeMo-RL": ("logprob_backend: nemo_rl", lambda head: 14 * head.logits),
    "NeMo-RL, in chunks": (
        "policy.logprob_chunk_size",
        lambda head: 4 * head.logits + 24 * min(head.chunk, head.rows) * head.columns,
    ),
    "NeMo-RL, fused": (
        "policy.megatron_cfg.use_fused_linear_logprobs: true",
        lambda head: (10 * head.hidden + 20 * min(head.chunk, head.rows)) * head.columns + 8 * head.rows * head.hidden,
    ),
    "geomask": ("logprob_backend: geomask", lambda head: 4 * head.logits),
    "geomask_linear": (
        "logprob_backend: geomask_linear",
        lambda head: (
            min(TILE_BYTES["cuda"], 2 * head.trained * head.logits)
            + (2 + 6 * head.trained) * head.rows * head.hidden
            + 2 * head.columns * head.hidden
        ),
    ),
}
"""Names, the setting that chooses each, and its peak bytes on a GPU; see the module."""


def head_of(facts: RecipeFacts, shape: Shape, *, trained: float = 1.0) -> OutputWork | None:
    """The work of a recipe's largest microbatches; None where the recipe does not tell their size."""
    layout = layout_of(facts)
    by_tokens = [part for part in ("sequence_packing", "dynamic_batching") if facts.on(f"policy.{part}.enabled")]

    def tokens(budget: str, sequences: str) -> float | None:
        if by_tokens:
            return facts.number(f"policy.{by_tokens[0]}.{budget}")
        length = facts.number("policy.max_total_sequence_length")
        return length and length * (facts.number(f"policy.{sequences}") or 1)

    rows = tokens("train_mb_tokens", "train_micro_batch_size")
    if not rows:
        return None
    beside = 1 if by_tokens else facts.number("policy.train_micro_batch_size") or 1
    return OutputWork(
        rows=math.ceil(rows / layout.cp),
        scored=math.ceil((tokens("logprob_mb_tokens", "logprob_batch_size") or rows) / layout.cp),
        hidden=shape.hidden,
        columns=math.ceil(shape.vocab / layout.tp),
        chunk=int((facts.number("policy.logprob_chunk_size") or _CHUNK) * beside),
        trained=trained,
    )


def method_of(facts: RecipeFacts) -> str:
    """That of :data:`METHODS` which a recipe uses now."""
    backend = facts.config.logprob_backend
    if backend != "nemo_rl":
        return backend if backend in METHODS else "NeMo-RL"
    if facts.megatron and facts.on("policy.megatron_cfg.use_fused_linear_logprobs"):
        return "NeMo-RL, fused"
    return "NeMo-RL, in chunks" if facts.number("policy.logprob_chunk_size") else "NeMo-RL"


def refused(method: str, facts: RecipeFacts) -> str:
    """What a recipe would have to change for a method, in words; empty where it goes as it is."""
    if method.startswith("geomask"):
        return ", ".join(logit_needs(facts, method))
    return ", ".join(fused_needs(facts)) if method == "NeMo-RL, fused" else ""


def _logits(facts: RecipeFacts) -> Iterator[Hit]:
    shape = shape_of(str(facts.get("policy.model_name", "")))
    head = None if shape is None else head_of(facts, shape)
    if head is None or "lab" in facts.recipe.data:
        return
    now = METHODS[method_of(facts)][1](head)
    if now < _SHARE * GPU_BYTES:
        return
    others = {name: peak(head) for name, (_, peak) in METHODS.items() if not refused(name, facts)}
    best = min(others, key=lambda name: others[name])
    way_out = "lower the tokens of a microbatch, or raise the context- or tensor-parallel size"
    if others[best] < 0.5 * now:
        way_out = f"with {METHODS[best][0]} it is {others[best] / 1e9:.3g} GB"
    yield Hit(
        "loss_fn.logprob_backend",
        f"{facts.config.logprob_backend}: a microbatch of {head.rows} rows by {head.columns} columns a GPU has logits "
        f"of {2 * head.logits / 1e9:.3g} GB, and with their gradient and working memory takes {now / 1e9:.3g} GB of "
        f"the {GPU_BYTES / 1e9:g} GB of an H100; {way_out}",
    )


RULES = (
    Rule("GM408", "note", "logits that take a large share of a GPU's memory", "docs/performance.md#at-scale", _logits),
)
