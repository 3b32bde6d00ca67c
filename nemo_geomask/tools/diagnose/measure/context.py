"""Share of the advantage that the context of a token predicts: the reply before its turn, and its environment.

Uncorrected training moves the logits of a state s by μ_k (A_k − V) + (μ_k − π_k) V for each token k, with the sampler's
probabilities μ, the trainer's π and V(s) = E[A | s]. The second part ignores what a token does. It draws π towards μ
where V > 0 and away from it where V < 0, in every step. It matters as far as V makes up the advantage, and as often as
the trainer would not have sampled the token, E_μ(1 − π/μ)₊. Both can be measured where the recorded context predicts
the advantage; what else a prefix shows is not known here, so that it is a lower limit. Where too few responses share a
reply, or a length that predicts the advantage, V is not identified.
"""

from __future__ import annotations

import numpy as np

from nemo_geomask.tools.diagnose.read.record_reader import Array, RecordBlock

MIN_SHARED = 0.5
"""Share of the tokens after a reply that other prompts' responses must have got, too; if less, its length counts."""
MIN_STANDARD_ERRORS = 3.0
"""Half the width of an interval, and what a length must predict beyond the turn, in standard errors over prompts.

Each pair of prompts enters twice, once for either prompt, so this is about 2.1 standard deviations of the estimate.
"""


def explained_advantage(block: RecordBlock, is_trained: Array) -> Array | None:
    """Return [N], A Ā′ / mean A² of each token, Ā′ the mean advantage of other prompts' responses in its context.

    The advantages of other prompts are independent of a response's own, also if they are normalised over a group. So
    the mean over tokens is an unbiased estimate of E[V²] / E[A²]: 0 if the context tells nothing, whatever the noise.

    The context of a turn is the environment, the number of the turn, and its reply: the tokens between it and the turn
    before. If no other prompt's response has the reply at this turn, those at other turns count; replies that no other
    has are one context. If most replies are such, the number of bits of their length takes their place, if it predicts
    the advantage better than chance. Contexts are of one block, so that learning does not blur them.

    Args:
        block: the records of one step, or of a part of it.
        is_trained: bool [N], the tokens that enter the loss.

    Returns:
        0 for tokens that do not train. None if advantages or tokens were not recorded, or V is not identified: there is
        one prompt, or most replies are rare and their length does not predict the advantage.
    """
    recorded, ids = block.tokens.get("advantages"), block.tokens.get("tokens")
    if recorded is None or ids is None or not is_trained.any():
        return None
    advantages = np.where(is_trained, np.nan_to_num(recorded.astype(float)), 0.0)
    mask = block.tokens["mask"].astype(bool)
    owner = np.repeat(np.arange(len(block)), np.diff(block.offsets))
    begins_turn = mask & ~np.concatenate([[False], mask[:-1] & (owner[1:] == owner[:-1])])
    turn = np.maximum(np.cumsum(begins_turn) - 1, 0)  # of all sequences together
    starts = np.flatnonzero(begins_turn)
    ends = np.flatnonzero(mask & ~np.concatenate([mask[1:] & (owner[1:] == owner[:-1]), [False]])) + 1
    tokens = np.bincount(turn[is_trained], minlength=len(starts))
    mean = np.bincount(turn, advantages, minlength=len(starts)) / np.maximum(tokens, 1)
    prompt = block.sequences["group"][owner[starts]]
    has_reply, place, reply, anywhere, length = _contexts(block, ids, owner, starts, ends)

    def predict(context: Array) -> tuple[Array, Array]:
        sums, counts = _of_other_prompts(context, prompt, mean, tokens > 0)
        return sums / np.maximum(counts, 1), counts > 0

    alone, has_others = predict(place)
    if not has_others.any():
        return None
    (at_turn, is_at_turn), (elsewhere, is_elsewhere) = predict(reply), predict(anywhere)
    is_shared = is_at_turn | is_elsewhere | ~has_reply
    of_rare, _ = predict(np.where(is_shared, place.max() + 1, place))
    predicted = np.where(is_at_turn, at_turn, np.where(is_shared, elsewhere, of_rare))
    after = tokens * has_reply
    if (after * is_shared).sum() < MIN_SHARED * after.sum():
        by_length, is_known = predict(length)
        predicted = np.where(is_known, by_length, alone)
        gains = np.bincount(prompt - prompt.min(), tokens * mean * (predicted - alone))
        if gains.sum() <= MIN_STANDARD_ERRORS * np.sqrt(np.square(gains).sum()):
            return None
    square = float(np.square(advantages).sum()) / float(is_trained.sum())
    share: Array = advantages * predicted[turn] / max(square, 1e-30)
    return share


def _of_other_prompts(context: Array, prompt: Array, mean: Array, is_used: Array) -> tuple[Array, Array]:
    """Return the sum of the mean advantages of other prompts' turns in each turn's context, and their number."""
    pair = np.unique(np.stack([context, prompt]), axis=1, return_inverse=True)[1].ravel()
    totals = []
    for values in (mean * is_used, is_used.astype(float)):
        totals.append(np.bincount(context, values)[context] - np.bincount(pair, values)[pair])
    return totals[0], totals[1]


def _contexts(block: RecordBlock, ids: Array, owner: Array, starts: Array, ends: Array) -> tuple[Array, ...]:
    """Return whether turns follow a reply, and numbers of their place, reply there, reply anywhere, and length there.

    The place is the environment and the number of the turn. ``starts`` and ``ends`` are of the turns.
    """
    environment = block.sequences.get("environment", np.full(len(block), None, dtype=object))
    turn = np.arange(len(starts)) - np.searchsorted(owner[starts], owner[starts])
    before = np.where(turn > 0, np.concatenate([[0], ends[:-1]]), starts)
    number_by_key: tuple[dict[object, int], ...] = ({}, {}, {}, {})
    numbers = []
    places = zip(environment[owner[starts]].tolist(), turn.tolist(), strict=True)
    for place, begin, end in zip(places, before.tolist(), starts.tolist(), strict=True):
        text = ids[begin:end].tobytes()
        keys = place, (place, text), (place[0], text), (place, (end - begin).bit_length())
        numbers.append([each.setdefault(key, len(each)) for each, key in zip(number_by_key, keys, strict=True)])
    return turn > 0, *np.array(numbers, int).reshape(-1, 4).T
