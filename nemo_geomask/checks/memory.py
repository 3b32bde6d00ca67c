r"""GM4, second part: what the way from hidden states to log-probs takes of a GPU's memory.

Peak bytes beyond the model, its activations and its gradients, of a rank of the last pipeline stage: the larger of
training, forward and backward, and of scoring, forward without gradient. A microbatch is R rows of H numbers (S rows in
scoring) and W = V/TP columns of the vocabulary; a logit has b bytes: 4, or under ``defer_fp32_logits`` 2; where it has
4, u = 0, else u = 4 for its float32 copy. c rows in a chunk, f of the rows train. With logits, a backward pass is
either at them or, later, at the output weight, whose gradient exists in two bytes before it is added up: unless
Megatron's ``gradient_accumulation_fusion`` is on, no less than 2 R W + 2 W H.

=========================================== ===========================================================
NeMo-RL                                     (b + u + 8) R W: logits, float32 copy, log-probs 4, their exp 4; scoring so,
                                            of S rows; with ``logprob_chunk_size`` b S W + (u + 8) c W
NeMo-RL, ``logprob_chunk_size``             4 R W + 24 c W: logits and gradient; of a chunk float32 4, log-probs 4,
                                            exp 4, int64 one-hot 8, gradient 4; scoring as above
NeMo-RL, ``use_fused_linear_logprobs``      10 W H + 20 c W + 8 R H: the weight's gradient three times, twice in
                                            float32; scoring 14 c W + 4 S H
``geomask``                                 2 b R W: logits and gradient; scoring b S W, and 2 S W that they are cast
                                            from where b = 4
``geomask_linear``                          min(tile, 2 f R W) + (b + 2 f) R H + 2 W H + 4 min(f R, W) H: a tile; the
                                            hidden states' copy and those that train; the weight's gradient; the smaller
                                            of the two gradients in float32; scoring min(tile, 2 S W) + that copy,
                                            in DTensor v1 as ``geomask``
=========================================== ===========================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.checks.gates import chunk_needs, fused_key, fused_needs, logit_needs, scoring_passes
from nemo_geomask.checks.layout import layout_of
from nemo_geomask.checks.rule import Hit, Rule
from nemo_geomask.checks.shapes import Shape, shape_of
from nemo_geomask.parallel.linear import TILE_BYTES

__all__ = ["GPU_BYTES", "METHODS", "RULES", "Method", "OutputWork", "deferring", "head_of", "method_of", "refused"]

GPU_BYTES = 80 * 10**9
"""Memory of the GPU to reckon with: an H100's."""
_SHARE = 0.15  # of it, from which on the logits are worth a note
_CHUNK = 1024  # rows, where a method needs a number that the recipe does not give
_DEFERRED = "policy.megatron_cfg.defer_fp32_logits"


class OutputWork(NamedTuple):
    """The output layer's work on a microbatch, of one rank.

    Attributes:
        rows: R, of training.
        scored: S, of the forward passes for ``prev_logprobs`` and the reference; 0 where there are none.
        hidden: H.
        columns: W = V/TP.
        chunk: c, ``logprob_chunk_size`` times the sequences side by side; None where the recipe has none.
        trained: f, share of the rows that train.
        logit_bytes: b, 2 or 4.
        fused_gradient: the weight's gradient is added up as it is made.
        v1: of a DTensor v1 worker, whose forward passes have logits under ``geomask_linear`` too.
    """

    rows: int
    scored: int
    hidden: int
    columns: int
    chunk: int | None = None
    trained: float = 1.0
    logit_bytes: int = 2
    fused_gradient: bool = False
    v1: bool = False

    @property
    def logits(self) -> int:
        """R W."""
        return self.rows * self.columns

    @property
    def at_weight(self) -> int:
        """Bytes of the logits' gradient, and of the weight's that is made of it."""
        return 2 * self.logits + (0 if self.fused_gradient else 2 * self.columns * self.hidden)


class Method(NamedTuple):
    """A way from hidden states to log-probs.

    Attributes:
        setting: what chooses it.
        training: peak bytes of forward and backward; see the module.
        scoring: of a forward pass without gradient.
    """

    setting: str
    training: Callable[[OutputWork], float]
    scoring: Callable[[OutputWork], float]

    def peak(self, head: OutputWork) -> float:
        """Of both."""
        return max(self.training(head), self.scoring(head))


def _copied(head: OutputWork, rows: int, at_once: int | None) -> float:
    """NeMo-RL's forward pass, ``at_once`` of the rows."""
    each = 8 if head.logit_bytes == 4 else 12
    return (head.logit_bytes * rows + each * min(at_once or rows, rows)) * head.columns


def _cast(head: OutputWork) -> int:
    """Bytes of a number of the model's output, and of the one in half precision that it is cast from or to."""
    return 6 if head.logit_bytes == 4 else 2


def _scored(head: OutputWork) -> float:
    """A forward pass by our kernels on logits."""
    return _cast(head) * head.scored * head.columns


def _linear(head: OutputWork) -> float:
    trained = head.trained * head.rows
    return (
        min(TILE_BYTES["cuda"], 2 * trained * head.columns)
        + (head.logit_bytes * head.rows + 2 * trained) * head.hidden
        + (2 * head.columns + 4 * min(trained, head.columns)) * head.hidden
    )


METHODS: Mapping[str, Method] = {
    "NeMo-RL": Method(
        "logprob_backend: nemo_rl",
        lambda head: max(_copied(head, head.rows, None), head.at_weight),
        lambda head: _copied(head, head.scored, head.chunk),
    ),
    "NeMo-RL, in chunks": Method(
        "policy.logprob_chunk_size",
        lambda head: max(4 * head.logits + 24 * min(head.chunk or _CHUNK, head.rows) * head.columns, head.at_weight),
        lambda head: _copied(head._replace(logit_bytes=2), head.scored, head.chunk or _CHUNK),
    ),
    "NeMo-RL, fused": Method(
        "policy.megatron_cfg.use_fused_linear_logprobs: true",
        lambda head: (10 * head.hidden + 20 * min(_CHUNK, head.rows)) * head.columns + 8 * head.rows * head.hidden,
        lambda head: 14 * min(_CHUNK, head.scored) * head.columns + 4 * head.scored * head.hidden,
    ),
    "geomask": Method(
        "logprob_backend: geomask",
        lambda head: max(2 * head.logit_bytes * head.logits, head.at_weight),
        _scored,
    ),
    "geomask_linear": Method(
        "logprob_backend: geomask_linear",
        _linear,
        lambda head: (
            _scored(head)
            if head.v1
            else min(TILE_BYTES["cuda"], 2 * head.scored * head.columns) + _cast(head) * head.scored * head.hidden
        ),
    ),
}
"""By name."""


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
    scored = (tokens("logprob_mb_tokens", "logprob_batch_size") or rows) if scoring_passes(facts) else 0
    chunk = facts.number("policy.logprob_chunk_size")
    # Of DTensor workers, FSDP casts what the model puts out to float32.
    deferred = facts.megatron and facts.on(_DEFERRED)
    return OutputWork(
        rows=math.ceil(rows / layout.cp),
        scored=math.ceil(scored / layout.cp),
        hidden=shape.hidden,
        columns=math.ceil(shape.vocab / layout.tp),
        chunk=int(chunk * beside) if chunk else None,
        trained=trained,
        logit_bytes=2 if deferred else 4,
        fused_gradient=facts.megatron and facts.on("policy.megatron_cfg.gradient_accumulation_fusion"),
        v1=not facts.megatron and not facts.on("policy.dtensor_cfg._v2"),
    )


def method_of(facts: RecipeFacts) -> str:
    """That of :data:`METHODS` which a recipe uses now."""
    backend = facts.config.logprob_backend
    if backend != "nemo_rl":
        return backend if backend in METHODS else "NeMo-RL"
    if fused_key(facts):
        return "NeMo-RL, fused"
    return "NeMo-RL, in chunks" if facts.number("policy.logprob_chunk_size") and not chunk_needs(facts) else "NeMo-RL"


def refused(method: str, facts: RecipeFacts) -> str:
    """What a recipe would have to change for a method, in words; empty where it goes as it is."""
    if method.startswith("geomask"):
        return ", ".join(logit_needs(facts, method))
    needs = {"NeMo-RL, in chunks": chunk_needs, "NeMo-RL, fused": fused_needs}
    return ", ".join(needs[method](facts)) if method in needs else ""


def deferring(method: str, facts: RecipeFacts, head: OutputWork) -> float | None:
    """Peak bytes of a method with logits in half precision; None where that is no way to less memory.

    At a temperature other than 1 such logits are rounded twice, see GM101.
    """
    if not facts.megatron or head.logit_bytes == 2 or facts.temperature != 1.0:
        return None
    found = METHODS[method].peak(head._replace(logit_bytes=2))
    return found if found < 0.75 * METHODS[method].peak(head) else None


def _logits(facts: RecipeFacts) -> Iterator[Hit]:
    shape = shape_of(str(facts.get("policy.model_name", "")))
    head = None if shape is None else head_of(facts, shape)
    if head is None or "lab" in facts.recipe.data:
        return
    method = method_of(facts)
    now = METHODS[method].peak(head)
    if now < _SHARE * GPU_BYTES:
        return
    others = {name: other.peak(head) for name, other in METHODS.items() if not refused(name, facts)}
    best = min(others, key=lambda name: others[name])
    ways = []
    if others[best] < 0.5 * now:
        ways.append(f"with {METHODS[best].setting} it is {others[best] / 1e9:.3g} GB")
    if deferred := deferring(method, facts, head):
        ways.append(f"with {_DEFERRED}: true {deferred / 1e9:.3g} GB")
    way_out = ", ".join(ways) or "lower the tokens of a microbatch, or raise the context- or tensor-parallel size"
    scoring = METHODS[method].scoring(head) == now
    rows = head.scored if scoring else head.rows
    yield Hit(
        "loss_fn.logprob_backend",
        f"{facts.config.logprob_backend}: a {'scoring ' if scoring else ''}microbatch of {rows} rows by {head.columns} "
        f"columns a GPU has logits of {head.logit_bytes * rows * head.columns / 1e9:.3g} GB, and with "
        f"{'working memory' if scoring else 'their gradient and working memory'} takes {now / 1e9:.3g} GB of the "
        f"{GPU_BYTES / 1e9:g} GB of an H100; {way_out}",
    )


RULES = (
    Rule("GM408", "note", "logits that take a large share of a GPU's memory", "docs/performance.md#at-scale", _logits),
)
