"""Expected advantage given what the context of a token shows: the reply before its turn, its prompt, its environment.

Uncorrected training moves the logits of a state s by μ_k (A_k − V) + (μ_k − π_k) V for each token k, with the sampler's
probabilities μ, the trainer's π and V(s) = E[A | s]. The second part ignores what a token does. It draws π towards μ
where V > 0 and away from it where V < 0, in every step. Its size is V times the probability that the trainer would not
have sampled the token, E_μ(1 − π/μ)₊. It can be measured where the recorded context predicts the advantage; what else a
prefix shows is not known here, so that it is a lower limit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.read.record_reader import Array, RecordBlock

MIN_RESPONSES = 8
"""Number of responses that must share a context for their mean advantage to count as what it predicts."""
MIN_ERRORS = 2.0
"""Number of standard errors by which such a mean must differ from 0; else the expected advantage is 0."""


class ContextAdvantage(NamedTuple):
    """What the context tells of the advantages of a block's N tokens; 0 where a token does not train."""

    expected: Array  # [N], V: the mean advantage of the tokens in the same context
    square: float  # Σ A² over the trained tokens
    explained: float  # unbiased estimate of the part of it that contexts explain, which may be below 0


def expect_advantages(block: RecordBlock, is_trained: Array) -> ContextAdvantage | None:
    """Return what the context tells of the advantages; None if they or the tokens were not recorded.

    The context of a turn is the environment and the tokens between it and the turn before; that of the first turn is
    the environment and the prompt. Of a context with fewer than ``MIN_RESPONSES`` responses, only environment and
    number of the turn count. Contexts are those of one block, so that a policy that learns does not blur them.

    Args:
        block: the records of one step, or of a part of it.
        is_trained: bool [N], the tokens that enter the loss.
    """
    advantages, ids = block.tokens.get("advantages"), block.tokens.get("tokens")
    if advantages is None or ids is None or not is_trained.any():
        return None
    mask = block.tokens["mask"].astype(bool)
    owner = np.repeat(np.arange(len(block)), np.diff(block.offsets))
    begins_turn = mask & ~np.concatenate([[False], mask[:-1] & (owner[1:] == owner[:-1])])
    turn = np.cumsum(begins_turn) - 1  # of all sequences together; wrong before a sequence's first turn
    starts = np.flatnonzero(begins_turn)
    ends = np.flatnonzero(mask & ~np.concatenate([mask[1:] & (owner[1:] == owner[:-1]), [False]])) + 1
    advantages = np.nan_to_num(advantages.astype(float))
    weight = np.bincount(turn[is_trained], minlength=len(starts)).astype(float)
    mean = np.bincount(turn[is_trained], advantages[is_trained], minlength=len(starts)) / np.maximum(weight, 1.0)
    context = _contexts(block, ids, owner, starts, ends)
    _, group = np.unique(context, return_inverse=True)

    def total(values: Array) -> Array:
        sums: Array = np.bincount(group, values)
        return sums

    weights = np.maximum(total(weight), 1e-12)
    means = total(weight * mean) / weights
    within = total(weight * np.square(mean - means[group]))
    # Unbiased variance of one turn's advantage, over all contexts, and with it the error of each context's mean.
    squares = total(np.square(weight))
    freedom = float((weights - squares / weights).sum())
    variance = float(within.sum()) / freedom if freedom > 0 else np.inf
    error = variance * squares / np.square(weights)
    is_known = total((weight > 0).astype(float)) >= MIN_RESPONSES
    expected = np.where(is_known & (np.square(means) > MIN_ERRORS**2 * error), means, 0.0)
    explained = float((weights * (np.square(means) - error))[is_known].sum())
    per_token = np.where(is_trained, expected[group][np.maximum(turn, 0)], 0.0)
    return ContextAdvantage(per_token, float(np.square(advantages[is_trained]).sum()), explained)


def _contexts(block: RecordBlock, ids: Array, owner: Array, starts: Array, ends: Array) -> Array:
    """Return the number of each turn's context, from the first token of each turn and the end of each turn."""
    recorded = block.sequences.get("environment", np.full(len(block), None, dtype=object))
    numbers: dict[tuple[object, ...], int] = {}
    keys: list[tuple[object, ...]] = []
    turn = 0
    for index, (start, sequence) in enumerate(zip(starts.tolist(), owner[starts].tolist(), strict=True)):
        turn = turn + 1 if index and owner[starts[index - 1]] == sequence else 0
        before = int(ends[index - 1]) if turn else int(block.offsets[sequence])
        keys.append((recorded[sequence], turn, hash(ids[before:start].tobytes())))
    counts: dict[tuple[object, ...], int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    chosen = [key if counts[key] >= MIN_RESPONSES else key[:2] for key in keys]
    return np.array([numbers.setdefault(key, len(numbers)) for key in chosen], int)
