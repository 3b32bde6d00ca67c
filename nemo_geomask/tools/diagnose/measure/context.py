"""Share of the advantage that the context of a token predicts: the reply before its turn, and its environment.

Uncorrected training moves the logits of a state s by μ_k (A_k − V) + (μ_k − π_k) V for each token k, with the sampler's
probabilities μ, the trainer's π and V(s) = E[A | s]. The second part ignores what a token does. It draws π towards μ
where V > 0 and away from it where V < 0, in every step. It matters as far as V makes up the advantage, and as often as
the trainer would not have sampled the token, E_μ(1 − π/μ)₊. Both can be measured where the recorded context predicts
the advantage; what else a prefix shows is not known here, so that it is a lower limit.
"""

from __future__ import annotations

import numpy as np

from nemo_geomask.tools.diagnose.read.record_reader import Array, RecordBlock

MIN_OTHERS = 8
"""Number of other prompts' responses in the same context whose mean advantage predicts a response's."""


def explained_advantage(block: RecordBlock, is_trained: Array) -> Array | None:
    """Return [N], A Ā′ / mean A² of each token, Ā′ the mean advantage of other prompts' responses in its context.

    The advantages of other prompts are independent of a response's own, also if they are normalised over a group. So
    the mean over tokens is an unbiased estimate of E[V²] / E[A²]: 0 if the context tells nothing, whatever the noise.

    The context of a turn is the environment, the number of the turn, and the tokens between it and the turn before; of
    a rare one, environment and number alone. Contexts are those of one block, so that learning does not blur them.

    Args:
        block: the records of one step, or of a part of it.
        is_trained: bool [N], the tokens that enter the loss.

    Returns: 0 for tokens that do not train; None if advantages or tokens were not recorded.
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
    predicted = np.zeros(len(starts))
    for context in _contexts(block, ids, owner, starts, ends):  # the narrow ones overwrite the wide ones
        sums, counts = _of_other_prompts(context, prompt, mean, tokens > 0)
        predicted = np.where(counts >= MIN_OTHERS, sums / np.maximum(counts, 1), predicted)
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


def _contexts(block: RecordBlock, ids: Array, owner: Array, starts: Array, ends: Array) -> list[Array]:
    """Return the numbers of the turns' wide and narrow contexts, from the first token and the end of each turn."""
    environment = block.sequences.get("environment", np.full(len(block), None, dtype=object))
    wide: dict[object, int] = {}
    narrow: dict[object, int] = {}
    numbers: list[tuple[int, int]] = []
    turn = 0
    for index, (start, sequence) in enumerate(zip(starts.tolist(), owner[starts].tolist(), strict=True)):
        turn = turn + 1 if index and owner[starts[index - 1]] == sequence else 0
        before = int(ends[index - 1]) if turn else start
        key = environment[sequence], turn
        reply = hash(ids[before:start].tobytes())
        numbers.append((wide.setdefault(key, len(wide)), narrow.setdefault((*key, reply), len(narrow))))
    return list(np.array(numbers, int).reshape(-1, 2).T)
