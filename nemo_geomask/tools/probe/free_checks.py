"""Checks that need no further start: whether both sides score the same tokens with the same weights and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nemo_geomask.optional import require
from nemo_geomask.tools.probe.gap_statistics import k3_of
from nemo_geomask.tools.probe.ledger import NEGLIGIBLE_K3
from nemo_geomask.tools.probe.scored_arms import FrozenTokens

numpy: Any = require("numpy", "the probe's statistics need", "diagnose")

_MIN_TOKENS = 50
_SHIFT_FACTOR = 4.0
_DECODE_FACTOR = 4.0


@dataclass(frozen=True)
class FreeCheck:
    """Result of a check."""

    name: str  # what is checked
    # ``fine``; ``fault``, with which the ledger means nothing; ``noted``, which the ledger may explain; or ``not
    # judged`` where there is not enough data
    outcome: Literal["fine", "fault", "noted", "not judged"]
    message: str  # what was found
    fix: str = ""  # the way out, or what it means; empty if all is fine


def free_checks(
    tokens: FrozenTokens,
    decode: Any,
    prefill: Any,
    trainer: Any,
    *,
    trainer_again: Any,
    is_training: bool,
    weights: Sequence[str] | None,
    is_neutral: bool,
    trainer_error: str = "",
    adapters: Mapping[str, Any] | None = None,
) -> list[FreeCheck]:
    """Return the checks of the baseline.

    Args:
        trainer_again: the same, of the same batch once more, [N].
        is_training: True if a module of the trainer's model was in training mode while it scored.
        weights: groups of weights that differ after the refit; None if they were not compared.
        is_neutral: True if temperature, top-p and top-k of the recipe leave the distribution as it is.
        trainer_error: why the trainer sampled no tokens; empty if it did.
        adapters: number of the trainer's adapters, and whether a refit delivers them; None if that is not known.
    """
    checks = [
        FreeCheck("token ids", "fine", "the engine decoded exactly the frozen tokens"),
        _origin_check(tokens, trainer_error),
        *_adapter_checks(adapters),
        _weights_check(weights),
        *(
            _sampled_check(side, tokens.sampled[is_its], logprobs[is_its])
            for side, is_its, logprobs in (
                ("decode", ~tokens.by_trainer, decode),
                ("trainer", tokens.by_trainer, trainer),
            )
            if is_its.any()
        ),
        _evaluation_check(trainer, trainer_again, is_training),
    ]
    if len(decode) < _MIN_TOKENS:
        few = f"{len(decode)} tokens; {_MIN_TOKENS} are needed"
        return [*checks, *(FreeCheck(name, "not judged", few) for name in ("shift", "decode and prefill"))]
    return [*checks, _shift_check(tokens, decode, trainer), _triangle_check(decode, prefill, trainer, is_neutral)]


def _adapter_checks(adapters: Mapping[str, Any] | None) -> list[FreeCheck]:
    """Say whether a refit delivers adapters; nothing if the trainer has none."""
    if adapters is None or not adapters["count"]:
        return []
    name, count = "adapters", f"{adapters['count']} adapters of the trainer"
    if adapters["is_delivered"]:
        return [FreeCheck(name, "fine", f"{count} were given values, and the refit changed the engine by them")]
    return [
        FreeCheck(
            name,
            "fault",
            f"{count} were given values, and the engine's weights are the same after the refit",
            "the engine samples without the adapters: find out why the refit does not merge or send them",
        )
    ]


def _weights_check(weights: Sequence[str] | None) -> FreeCheck:
    name = "weights after the refit"
    if weights is None:
        return FreeCheck(name, "not judged", "trainer and engine were not compared")
    if not weights:
        return FreeCheck(name, "fine", "trainer and engine have the same weights, layer by layer")
    listed = ", ".join(weights[:4]) + (f" and {len(weights) - 4} more" if len(weights) > 4 else "")
    return FreeCheck(
        name,
        "fault",
        f"trainer and engine differ in {listed}",
        "find out why the refit does not deliver them, before any switch: policy.generation.refit_transport, adapters",
    )


def _origin_check(tokens: FrozenTokens, trainer_error: str) -> FreeCheck:
    """Say who has sampled the frozen tokens."""
    name = "origin of the tokens"
    if trainer_error:
        return FreeCheck(
            name,
            "noted",
            f"all were sampled by the engine, since the trainer could not: {trainer_error}",
            "what the engine excludes, and the trainer does not, may be missed",
        )
    count = int(tokens.by_trainer.sum())
    return FreeCheck(name, "fine", f"{len(tokens.by_trainer) - count} sampled by the engine, {count} by the trainer")


def _sampled_check(side: str, sampled: Any, scored: Any) -> FreeCheck:
    """Compare the scores of a side's own samples with the log-probs that it reported as it sampled."""
    name = f"{side} repeats the samples"
    k3 = float(k3_of(scored - sampled).mean())
    if k3 <= NEGLIGIBLE_K3:
        return FreeCheck(name, "fine", f"k3 {k3:.2g} between sampling and scores")
    if side == "trainer":
        difference = "the trainer's get_logprobs and its get_topk_logits, from which its samples were drawn, differ"
        meaning = "log-probs of the trainer depend on the path or on the padding, which was shorter while it sampled"
    else:
        difference = "the engine gives its own samples other log-probs when it decodes them again"
        meaning = "its log-probs depend on the batch: the rows of the ledger are only as exact as that"
    return FreeCheck(name, "noted", f"{difference}: k3 {k3:.2g} nats a token", meaning)


def _evaluation_check(trainer: Any, again: Any, is_training: bool) -> FreeCheck:
    """Tell dropout that is left on, by training mode together with scores that differ from pass to pass."""
    name = "evaluation mode"
    k3 = float(k3_of(trainer - again).mean())
    if k3 <= NEGLIGIBLE_K3:
        agreement = "the trainer scores in training mode, and the same batch twice agrees"
        return FreeCheck(name, "fine", agreement if is_training else "the trainer scores in evaluation mode")
    if not is_training:
        return FreeCheck(
            name,
            "noted",
            f"no module is in training mode, and the same batch twice differs: k3 {k3:.2g} nats a token",
            "its kernels are not deterministic: the rows of the ledger are only as exact as that",
        )
    return FreeCheck(
        name,
        "fault",
        f"the trainer scores in training mode, and the same batch twice differs: k3 {k3:.2g} nats a token",
        "set every dropout of the model to 0, or put it into evaluation mode before log-probs are computed",
    )


def _shift_check(tokens: FrozenTokens, decode: Any, trainer: Any) -> FreeCheck:
    """Look for a shift by one token: neighbours that agree better than the tokens themselves."""
    follows = tokens.positions[1:] == tokens.positions[:-1] + 1
    distance = float(numpy.median(numpy.abs(trainer - decode)))
    for shift, trainer_part, decode_part in ((1, trainer[1:], decode[:-1]), (-1, trainer[:-1], decode[1:])):
        shifted_distance = float(numpy.median(numpy.abs(trainer_part - decode_part)[follows]))
        if shifted_distance * _SHIFT_FACTOR < distance:
            return FreeCheck(
                "shift",
                "fault",
                f"the trainer's log-probs agree with the engine's of the token {'before' if shift > 0 else 'after'}: "
                f"median |Δ| {shifted_distance:.2g} in place of {distance:.2g}",
                "column t of both tensors must hold token t: look at padding, BOS and packing",
            )
    return FreeCheck("shift", "fine", "no neighbouring token agrees better")


def _triangle_check(decode: Any, prefill: Any, trainer: Any, is_neutral: bool) -> FreeCheck:
    """Name the side that the other two disagree with."""
    name = "decode and prefill"
    if not is_neutral:
        return FreeCheck(
            name,
            "not judged",
            "prefill ignores temperature, top-p and top-k, and the recipe sets one of them; "
            "set them to 1, 1 and null to compare the engine with itself",
        )
    engine, outside, both = (
        float(k3_of(difference).mean()) for difference in (decode - prefill, trainer - prefill, trainer - decode)
    )
    message = f"k3 {engine:.2g} within the engine, {outside:.2g} from prefill to trainer, {both:.2g} from decode"
    if engine > NEGLIGIBLE_K3 and engine > _DECODE_FACTOR * outside:
        return FreeCheck(
            name,
            "noted",
            f"prefill agrees with the trainer, and decode does not: {message}",
            "the fault is in the engine's decode: KV cache, CUDA graphs, log-prob mode, speculation",
        )
    return FreeCheck(name, "fine", message)
