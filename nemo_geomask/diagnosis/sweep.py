"""What each correction and mask would have done to a run's own batches, by the loss itself.

Each candidate is a ``loss_fn``; its loss gets the recorded batch, and what the gradient at each token is, against that
of the same loss without correction on samples of π_old itself (gen = prev), is the token's coefficient c: the weight
times what the masks keep. From c follows all that is compared: see :data:`DEFINITIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_geomask.config.strict import inline_yaml
from nemo_geomask.diagnosis.candidates import CANDIDATES, NOTHING, OF_RECIPE, Candidate
from nemo_geomask.diagnosis.read import Array, RecordBlock
from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.losses import BeforeStep, PolicyLoss, build_loss
from nemo_geomask.losses.prestep import valid_counts

__all__ = ["DEFINITIONS", "PARTS", "Outcome", "as_batch", "fitting", "front", "loss_block", "recommend", "replay"]

REPLICATES = 100

PARTS = ("all", "training engine likelier", "generation engine likelier", "good", "bad", "short", "long")
"""Tokens with Δ above and below 0, A above and below 0, of responses up to the step's median and beyond."""


DEFINITIONS = {
    "removed": "share of tokens with c = 0",
    "bias": "Σ |c − ρ| |g| / Σ ρ |g|, ρ = exp(Δ): how far the gradient is from that of samples of the policy "
    "that trains, token by token",
    "variance": "Σ (c g)² / Σ g²: the gradient's square against that without correction",
    "ess": "(Σ c)² / (n Σ c²)",
    "advantage": "Σ c A / Σ c less the mean A: what is kept of the good and of the bad",
}
"""Of what is compared; c is a token's coefficient, g the gradient there without correction and without mismatch."""

_SUMS = ("n", "removed", "off", "mass", "square", "plain", "c", "c2", "ca", "a")


@dataclass
class Outcome:
    """What one candidate would have done, summed over steps.

    Attributes:
        candidate: it.
        tokens, removed: by the order of ``PARTS``.
        sums: [1 + replicates, len(_SUMS)], the first of all sequences, the others of the bootstrap's.
        skipped: steps that it would not have trained on.
        metrics: by step, what the loss reported.
    """

    candidate: Candidate
    tokens: Array = field(default_factory=lambda: np.zeros(len(PARTS)))
    removed: Array = field(default_factory=lambda: np.zeros(len(PARTS)))
    sums: Array = field(default_factory=lambda: np.zeros((1 + REPLICATES, len(_SUMS))))
    skipped: list[int] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """One of ``removed``, ``bias``, ``variance``, ``ess`` and ``advantage``; NaN where no step was trained on."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(_VALUES[name](self.sums[0]))

    def interval(self, name: str) -> tuple[float, float]:
        """95 %, over sequences."""
        with np.errstate(invalid="ignore", divide="ignore"):
            values = np.array([_VALUES[name](sums) for sums in self.sums[1:]], dtype=float)
        finite = values[np.isfinite(values)]
        if not len(finite):
            return math.nan, math.nan
        low, high = np.quantile(finite, [0.025, 0.975])
        return float(low), float(high)


def _of(name: str, sums: Array) -> Any:
    return sums[_SUMS.index(name)]


_VALUES: dict[str, Any] = {
    "removed": lambda sums: _of("removed", sums) / _of("n", sums),
    "bias": lambda sums: _of("off", sums) / _of("mass", sums),
    "variance": lambda sums: _of("square", sums) / _of("plain", sums),
    "ess": lambda sums: _of("c", sums) ** 2 / (_of("n", sums) * _of("c2", sums)) if _of("c2", sums) else 0.0,
    "advantage": lambda sums: (
        (_of("ca", sums) / _of("c", sums) if _of("c", sums) else math.nan) - _of("a", sums) / _of("n", sums)
    ),
}


def as_batch(blocks: Iterable[RecordBlock], positions: int = 2**22) -> tuple[dict[str, Tensor], int]:
    """The padded batch of a step, in NeMo-RL's keys, and the number of sequences that did not fit.

    Args:
        blocks: of the step.
        positions: rows times width, at most; what is over is left out.

    Raises: DataError: the log-probs of an engine are missing.
    """
    rows: list[dict[str, Array]] = []
    width = left = 0
    for block in blocks:
        if missing := [name for name in ("gen", "prev", "advantages") if name not in block.tokens]:
            raise DataError(f"the records have no {', '.join(missing)}, which a replay through the loss needs")
        for index in range(len(block)):
            here = slice(block.offsets[index], block.offsets[index + 1])
            longest = max(width, int(block.offsets[index + 1] - block.offsets[index]))
            if rows and longest * (len(rows) + 1) > positions:
                left += 1
                continue
            width = longest
            row = {name: block.tokens[name][here] for name in _TOKENS if name in block.tokens}
            row["sample_mask"] = block.sequences["sample_mask"][index]
            row["rewards"] = np.nan_to_num(block.sequences.get("reward", np.zeros(len(block)))[index])
            rows.append(row)
    if not rows:
        raise DataError("the records hold no sequence")
    batch: dict[str, Tensor] = {}
    for name, key in _TOKENS.items():
        if name in rows[0]:
            padded = np.zeros((len(rows), width), np.float32)
            for place, row in enumerate(rows):
                padded[place, : len(row[name])] = row[name]
            batch[key] = torch.from_numpy(padded)
    for key in ("sample_mask", "rewards"):
        batch[key] = torch.tensor([float(row[key]) for row in rows])
    return batch, left


_TOKENS = {
    "mask": "token_mask",
    "gen": "generation_logprobs",
    "prev": "prev_logprobs",
    "curr": "curr_logprobs",
    "ref": "reference_policy_logprobs",
    "advantages": "advantages",
}


def replay(
    steps: Iterable[tuple[int, Mapping[str, Tensor]]],
    candidates: Sequence[Candidate] = CANDIDATES,
    base: Mapping[str, Any] | None = None,
    *,
    at: str = "prev",
) -> list[Outcome]:
    """What each candidate would have done, in their order.

    Args:
        steps: number and batch of each, from :func:`as_batch`.
        candidates: the first of them is what the others are compared with.
        base: ``loss_fn`` under all of them, without corrections; what it records and audits is left out.
        at: whose log-probs stand for the current policy: ``prev``, or ``curr`` where they were recorded.

    Raises: ConfigError: a candidate that doesn't fit the base. DataError: ``curr`` was not recorded.
    """
    losses = [_loss(candidate, base or {}) for candidate in candidates]
    before = [BeforeStep(loss.config) for loss in losses]
    outcomes = [Outcome(candidate) for candidate in candidates]
    for step, data in steps:
        key = f"{at}_logprobs"
        if key not in data:
            raise DataError(f"the records have no {at}, the log-probs of the current policy; replay them at prev")
        # Without a mismatch no candidate corrects, and a ratio against gen is one against π_old.
        matched = {**data, "generation_logprobs": data["prev_logprobs"]}
        plain = _gradient(losses[0], before[0], matched, data[key][:, 1:])[0]
        for loss, look, outcome in zip(losses, before, outcomes, strict=True):
            gradient, metrics, trained = _gradient(loss, look, data, data[key][:, 1:])
            outcome.metrics[step] = metrics
            if trained:
                _add(outcome, step, data, plain, gradient)
            else:
                outcome.skipped.append(step)
    return outcomes


def _loss(candidate: Candidate, base: Mapping[str, Any]) -> PolicyLoss:
    settings = {key: value for key, value in base.items() if key not in _BESIDE}
    # The KL term is no part of what is corrected.
    return build_loss({**settings, **candidate.settings, "reference_policy_kl_penalty": 0, "compile": False})


_BESIDE = ("record", "audit_fraction")
"""Fields of ``loss_fn`` that change nothing of the loss."""


def fitting(candidates: Sequence[Candidate], base: Mapping[str, Any]) -> tuple[list[Candidate], dict[str, str]]:
    """Those that go with a base, and why each of the others doesn't, by its name.

    Raises: ConfigError: ``NOTHING``, or the recipe's own, is among the others: the base is at fault.
    """
    fit, unfit = [], {}
    for candidate in candidates:
        try:
            _loss(candidate, base)
            fit.append(candidate)
        except ConfigError as error:
            if candidate is NOTHING or candidate.source == OF_RECIPE:
                raise
            unfit[candidate.name] = str(error)
    return fit, unfit


def _gradient(
    loss: PolicyLoss, look: BeforeStep, data: Mapping[str, Tensor], curr: Tensor
) -> tuple[Tensor, dict[str, float], bool]:
    """Of the loss by the current log-probs [B, T-1], what it reports, and whether it would take the step."""
    decision = look(data)
    if not decision.train:
        return torch.zeros_like(curr), decision.metrics, False
    batch = {**data, **decision.changes}
    leaf = curr.clone().requires_grad_()
    value, metrics = loss(leaf, batch, *valid_counts([batch]))
    (gradient,) = torch.autograd.grad(value, leaf)
    return gradient, {**metrics.copy(), **decision.metrics}, True


def _add(outcome: Outcome, step: int, data: Mapping[str, Tensor], plain: Tensor, gradient: Tensor) -> None:
    difference = (data["prev_logprobs"] - data["generation_logprobs"])[:, 1:]
    judged = (plain != 0) & torch.isfinite(plain) & torch.isfinite(difference)
    g = plain[judged].double().numpy()
    c = gradient[judged].double().numpy() / g
    delta, advantage = (value[judged].double().numpy() for value in (difference, data["advantages"][:, 1:]))
    owner = torch.nonzero(judged)[:, 0].numpy()
    count = len(data["sample_mask"])
    lengths = (data["token_mask"] != 0).sum(dim=1).numpy()
    long = (lengths > np.median(lengths))[owner]
    gone = c == 0
    parts = (np.ones_like(gone), delta > 0, delta < 0, advantage > 0, advantage < 0, ~long, long)
    outcome.tokens += [part.sum() for part in parts]
    outcome.removed += [(part & gone).sum() for part in parts]
    size, rho = np.abs(g), np.exp(np.clip(delta, -40, 40))
    values = {
        "n": np.ones_like(c),
        "removed": gone.astype(float),
        "off": np.abs(c - rho) * size,
        "mass": rho * size,
        "square": np.square(c * g),
        "plain": np.square(g),
        "c": c,
        "c2": c * c,
        "ca": c * advantage,
        "a": advantage,
    }
    each = np.stack([np.bincount(owner, weights=values[name], minlength=count) for name in _SUMS], axis=1)
    draws = np.random.default_rng(step).poisson(1.0, (REPLICATES, count))
    outcome.sums += np.concatenate([each.sum(axis=0, keepdims=True), draws @ each])


VARIANCE = 1.1
"""By how much the gradient's square may grow for the sake of less bias."""


def front(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those than which no other has both less bias and less variance."""
    known = [outcome for outcome in outcomes if not math.isnan(outcome.value("bias"))]
    points = [(outcome.value("bias"), outcome.value("variance")) for outcome in known]
    return [
        outcome
        for outcome, (bias, variance) in zip(known, points, strict=True)
        if not any(b <= bias and v <= variance and (b, v) != (bias, variance) for b, v in points)
    ]


def recommend(outcomes: Sequence[Outcome], base: Mapping[str, Any] | None = None) -> tuple[Outcome, str]:
    """The candidate with the least bias whose variance is at most ``VARIANCE`` times that without correction, and the
    ``loss_fn`` block that sets it, with reasons.

    A candidate whose bias is within the interval of "nothing" is no better than nothing.

    Raises: DataError: no token has a gradient.
    """
    nothing = outcomes[0]
    if not nothing.tokens[0] and not nothing.skipped:
        raise DataError("the records hold no trained token with log-probs of both engines and an advantage")
    allowed = [
        outcome
        for outcome in outcomes
        if outcome.interval("variance")[1] <= VARIANCE and not outcome.skipped and outcome.candidate.settings
    ]
    best = min(allowed, key=lambda outcome: (outcome.value("bias"), outcome.value("variance")), default=nothing)
    if best.value("bias") >= nothing.interval("bias")[0]:
        best = nothing
    return best, loss_block(best, outcomes, base or {})


def loss_block(best: Outcome, outcomes: Sequence[Outcome], base: Mapping[str, Any]) -> str:
    """The ``loss_fn`` that sets one of the candidates, on top of the base, with its numbers; the first is "nothing"."""
    nothing = outcomes[0]

    def said(outcome: Outcome, name: str, percent: bool = True) -> str:
        scale, unit = (100.0, " %") if percent else (1.0, "")
        low, high = (scale * end for end in outcome.interval(name))
        return f"{scale * outcome.value(name):.3g}{unit} ({low:.3g} to {high:.3g})"

    lines = [
        f"# {best.candidate.name} ({best.candidate.source}), of {len(outcomes)} candidates:",
        f"# bias {said(best, 'bias')} of the gradient; without correction {said(nothing, 'bias')}",
        f"# variance {said(best, 'variance', percent=False)} times that without correction, {VARIANCE:g} being allowed",
        f"# removed {said(best, 'removed')} of the tokens; mean advantage moves by {best.value('advantage'):.2g}",
        "loss_fn:",
    ]
    settings = {**base, **best.candidate.settings}
    if settings:
        settings = {"name": "clipped_pg", **settings}
        try:
            build_loss(settings)
        except ConfigError:  # what reads all of π_old needs no sample of it
            settings.pop("audit_fraction", None)
    for key, value in settings.items():
        lines.append(f"  {key}: {inline_yaml(value)}")
    return "\n".join(lines if settings else [*lines[:-1], "loss_fn: {}"])
