"""From a step's records to its sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_geomask.diagnosis.read import Array, RecordBlock
from nemo_geomask.diagnosis.statistics import (
    BOOT,
    BY_NAME,
    CELLS,
    CONTEXT,
    DIMENSIONS,
    REPLICATES,
    TAIL_BINS,
    TOKEN_SUMS,
    WORST,
    Dimension,
    Statistics,
    StepSums,
    Window,
)

__all__ = ["survey", "trainer_column"]

LIMIT = 40.0
SEQUENCE_LIMIT = 300.0
"""Of the log of a sequence's weight: the sums of its square stay finite in float64."""
SIZE_CAP = 1.0
SCORE_CAP = 0.1
SURPRISE_CAP = 20.0
SURE = -0.05
"""A log-prob above it may round to 0."""
LEAST_PAIRS = 6
"""Of successive tokens that a neighbour has to fit."""


@dataclass(frozen=True)
class KnownTokens:
    """The trained tokens of one step whose log-probs both engines computed.

    Attributes:
        block: where they are from.
        place: [M], their places in it.
        owner: [M], the sequence of each.
        values: [M] each, see :mod:`nemo_geomask.diagnosis.statistics`.
        gen, prev: [M].
        advantages: [M], where there are some.
    """

    block: RecordBlock
    place: Array
    owner: Array
    values: dict[str, Array]
    gen: Array
    prev: Array
    advantages: Array | None

    def of_sequences(self, name: str) -> Array:
        """[S], the sum of a value."""
        return np.bincount(self.owner, weights=self.values[name], minlength=len(self.block))

    def of_sequence(self, name: str) -> Array:
        """[S], a column, NaN where it is not there."""
        found = self.block.sequences.get(name)
        return np.full(len(self.block), np.nan) if found is None else found.astype(float)


def survey(block: RecordBlock, crosses: Sequence[tuple[str, str]] = ()) -> Statistics:
    """The sums of one block, all of one step.

    Args:
        block: the records.
        crosses: pairs of dimensions to split tokens by at once, beside every single one.
    """
    found = Statistics()
    if not len(block):
        return found
    step = int(block.sequences["step"][0])
    sequence = np.repeat(np.arange(len(block)), np.diff(block.offsets))
    mask = block.tokens["mask"].astype(bool)
    gen, prev = _logprobs(block, mask)
    sums = found.steps[step] = StepSums()
    shown = _bugs(sums, mask, gen, prev, sequence, len(block))
    if "gen" not in block.tokens:  # nobody recorded them
        sums.put("nonfinite", 0.0)
    shown &= np.isfinite(gen) & np.isfinite(prev)
    in_loss = (block.sequences["sample_mask"] != 0)[sequence]
    judged = _judge(block, np.flatnonzero(shown & in_loss), sequence, gen, prev)
    left_out = np.flatnonzero(shown & ~in_loss)
    sums.put("masked_out", float((block.sequences["sample_mask"] == 0).sum()))
    sums.put("masked_out_size", float(np.minimum(np.abs(prev[left_out] - gen[left_out]), SIZE_CAP).sum()))
    sums.put("masked_out_tokens", float(len(left_out)))
    _sum_up(sums, judged)
    _of_masks_and_groups(sums, judged)
    found.windows[step] = _split(judged, mask, sequence, crosses)
    _worst(found, judged, step)
    return found


def trainer_column(block: RecordBlock) -> str:
    """``prev``, or ``curr`` where π_old was not computed and the current policy's log-probs are there."""
    if "curr" not in block.tokens:
        return "prev"
    return block.trainer or ("prev" if block.has_prev else "curr")


def _logprobs(block: RecordBlock, mask: Array) -> tuple[Array, Array]:
    """Both engines', float64."""
    nobody = np.full(len(mask), np.nan)
    gen, prev = (block.tokens.get(name, nobody).astype(float) for name in ("gen", trainer_column(block)))
    return gen, prev


def _bugs(sums: StepSums, mask: Array, gen: Array, prev: Array, sequence: Array, count: int) -> Array:
    """Put what no mismatch explains; returns the tokens of sequences for which both engines computed log-probs."""

    def of_sequences(where: Array) -> Array:
        return np.bincount(sequence[where], minlength=count).astype(float)

    def absent(mine: Array, other: Array) -> Array:
        """All NaN, or all 0 where the other engine is unsure."""
        unsure = of_sequences(mask & (other < SURE)) > 0
        none = of_sequences(mask & np.isnan(mine)) == tokens
        missing: Array = (tokens > 0) & (none | (unsure & (of_sequences(mask & (mine == 0)) == tokens)))
        return missing

    tokens = of_sequences(mask)
    no_gen, no_prev = absent(gen, prev), absent(prev, gen)
    # All NaN: of the trainer's, those that it did not compute; the other engine has no reason for it.
    nan_gen = (tokens > 0) & (of_sequences(mask & np.isnan(gen)) == tokens)
    both = ~(no_gen | no_prev)
    shown: Array = mask & both[sequence]
    # Beside itself: with the token after and before it, where both train.
    pair = shown[1:] & shown[:-1] & (sequence[1:] == sequence[:-1])
    owner = sequence[:-1][pair]
    here, later, earlier = (
        _gap(one[pair], other[pair])
        for one, other in ((prev[:-1], gen[:-1]), (prev[:-1], gen[1:]), (prev[1:], gen[:-1]))
    )
    apart = here > 0.05
    enough = np.bincount(owner, minlength=count) >= LEAST_PAIRS
    shifted = {}
    for name, beside in (("shifted_later", later), ("shifted_earlier", earlier)):
        total, better = (np.bincount(owner, weights=gap, minlength=count) for gap in (here, beside))
        fits = np.bincount(owner[apart & (beside < here / 3)], minlength=count)
        least = np.maximum(LEAST_PAIRS, 0.8 * np.bincount(owner[apart], minlength=count))
        shifted[name] = (fits >= least) & (better < total / 3)
    counts = {
        "all_sequences": tokens > 0,
        "no_gen": no_gen & ~nan_gen,
        "no_prev": no_prev,
        "nonfinite": (shown & ~(np.isfinite(gen) & np.isfinite(prev))) | (mask & nan_gen[sequence]),
        "unsure": mask & ((gen < SURE) | (prev < SURE)),
        "positive_logprobs": mask & ((gen > 1e-3) | (prev > 1e-3)),
        "all_tokens": mask,
        "lagged": enough,
        **shifted,
    }
    for name, where in counts.items():
        sums.put(name, float(where.sum()))
    # A shift leaves a hole at one end of each turn; those are none of its own.
    whole = ~(shifted["shifted_later"] | shifted["shifted_earlier"])
    zeros = {"zero_gen": mask & (gen == 0) & (prev < SURE), "zero_prev": shown & (prev == 0) & (gen < SURE)}
    for name, where in zeros.items():
        sums.put(name, float(of_sequences(where)[whole].sum()))
    return shown


def _gap(one: Array, other: Array) -> Array:
    with np.errstate(invalid="ignore"):  # inf - inf
        gap: Array = np.minimum(np.nan_to_num(np.abs(one - other), nan=SIZE_CAP), SIZE_CAP)
    return gap


def _judge(block: RecordBlock, place: Array, sequence: Array, gen: Array, prev: Array) -> KnownTokens:
    gen, prev = gen[place], prev[place]
    delta = prev - gen
    near = np.clip(delta, -LIMIT, LIMIT)
    up, down = np.exp(near), np.exp(-near)
    size = np.minimum(np.abs(delta), SIZE_CAP)
    model = -np.expm1(np.minimum(gen, 0)) + 1e-3
    score = np.clip(delta / model, -SCORE_CAP, SCORE_CAP)
    values = {
        "tokens": np.ones_like(delta),
        "abs": np.abs(delta),
        "size": size,
        "delta": delta,
        "square": np.square(delta),
        "k3": np.expm1(near) - near,
        "k3_reverse": np.expm1(-near) + near,
        "prob_error": np.maximum(up, down),
        "weight": up,
        "weight_square": up * up,
        "positive": (delta > 0).astype(float),
        "negative": (delta < 0).astype(float),
        "above_0.1": (size > 0.1).astype(float),
        "above_1": (np.abs(delta) > 1).astype(float),
        "model": model,
        "size_square": np.square(size),
        "surprise": np.clip(-gen, 0, SURPRISE_CAP),
        "score": score,
        "score_square": np.square(score),
    }
    advantages = block.tokens.get("advantages")
    advantages = None if advantages is None else advantages[place].astype(float)
    return KnownTokens(block, place, sequence[place], values, gen, prev, advantages)


def _sum_up(sums: StepSums, judged: KnownTokens) -> None:
    block, tokens = judged.block, judged.of_sequences("tokens")
    some = tokens > 0
    for name in TOKEN_SUMS:
        sums.put(name, float(judged.values[name].sum()))
    delta = judged.of_sequences("delta")[some]
    for name, exponent in (("sequence_weight", delta), ("mean_weight", delta / tokens[some])):
        weight = np.exp(np.minimum(exponent, SEQUENCE_LIMIT))
        sums.put(name, float(weight.sum()))
        sums.put(f"{name}_square", float(np.square(weight).sum()))
    sums.put("sequences", float(some.sum()))
    length, prompt = (judged.of_sequence(name)[some] for name in ("length", "prompt_length"))
    sums.put("length", float(length.sum()))
    sums.put("response", float((length - prompt).sum()))
    for name, known in (("reward", "rewarded"), ("staleness", "stale_known")):
        value = judged.of_sequence(name)
        sums.put(name, float(np.nansum(value)))
        sums.put(known, float(np.isfinite(value).sum()))
    if "entropy" in block.tokens:
        entropy = block.tokens["entropy"][judged.place]
        sums.put("entropy", float(np.nansum(entropy, dtype=float)))
        sums.put("entropy_known", float(np.isfinite(entropy).sum()))
    if judged.advantages is not None:
        mean = np.bincount(judged.owner, weights=judged.advantages, minlength=len(block)) / np.maximum(tokens, 1)
        a, n = np.clip(np.nan_to_num(mean), -3, 3), np.sqrt(np.maximum(tokens, 1))
        d = judged.of_sequences("score") / n
        learned = {"ad": a * d, "an": a * n, "a2d2": (a * d) ** 2, "a2dn": a * a * d * n, "a2n2": (a * n) ** 2}
        for name, value in learned.items():
            sums.put(name, float(value.sum()))
    draws = _poisson(int(block.sequences["step"][0]), block.sequences["row"])
    sums.boot = draws @ np.stack([judged.of_sequences(name) for name in BOOT], axis=1)


def _of_masks_and_groups(sums: StepSums, judged: KnownTokens) -> None:
    block = judged.block
    versions = judged.of_sequence("weight_version")
    if np.isfinite(versions).any():
        sums.versions = float(np.nanmin(versions)), float(np.nanmax(versions))
    size = judged.values["size"]
    if block.removed:
        sums.removed[""] = float(len(size)), float(size.sum())
    for label, removed in block.removed.items():
        gone = removed[judged.place]
        sums.removed[label] = float(gone.sum()), float(size[gone].sum())
    groups, member = np.unique(block.sequences["group"], return_inverse=True)
    columns = [
        np.bincount(member, weights=judged.of_sequences(name), minlength=len(groups))
        for name in ("size", "model", "size_square")
    ]
    for group, size, model, square in zip(groups.tolist(), *(column.tolist() for column in columns), strict=True):
        sums.groups[group] = size, model, square


def _split(judged: KnownTokens, mask: Array, sequence: Array, crosses: Sequence[tuple[str, str]]) -> Window:
    window, block, owner = Window(), judged.block, judged.owner
    begins = mask & ~np.concatenate([[False], mask[:-1] & (sequence[1:] == sequence[:-1])])
    runs = np.concatenate([[0], np.cumsum(begins)])
    first = block.offsets[owner]
    length, prompt = judged.of_sequence("length"), judged.of_sequence("prompt_length")
    entropy = block.tokens.get("entropy")
    found: dict[str, Array | None] = {
        "probability": -judged.gen,
        "position": judged.place - first - prompt[owner],
        "turn": runs[judged.place + 1] - runs[first] - 1,
        "length": (length - prompt)[owner],
        "staleness": judged.of_sequence("staleness")[owner],
        "reward": judged.of_sequence("reward")[owner],
        "advantage": judged.advantages,
        "entropy": None if entropy is None else entropy[judged.place],
    }

    def place(one: Dimension) -> Array | None:
        """[M], the bin of each token, −1 where its value is unknown."""
        values = found[one.name]
        return None if values is None else np.where(np.isfinite(values), np.digitize(values, one.edges), -1)

    def put(name: str, bins: Array, count: int) -> None:
        there = bins >= 0
        if not there.any():
            return
        chosen = slice(None) if there.all() else there
        bins, rows = bins[chosen], owner[chosen]
        window.cells[name] = np.stack(
            [np.bincount(bins, judged.values[cell][chosen], minlength=count) for cell in CELLS], axis=1
        )
        shape = len(block), count
        size, model = (
            np.bincount(rows * count + bins, judged.values[cell][chosen], minlength=shape[0] * count).reshape(shape)
            for cell in ("size", "model")
        )
        products = [(x * y).sum(axis=0) for x, y in ((size, size), (size, model), (model, model))]
        window.clustered[name] = np.stack(products, axis=1)

    for one in DIMENSIONS:
        if (bins := place(one)) is not None:
            put(one.name, bins, one.bins)
    for pair in crosses:
        one, other = (BY_NAME[name] for name in pair)
        bins, beside = place(one), place(other)
        if bins is not None and beside is not None:
            both = np.where((bins >= 0) & (beside >= 0), bins * other.bins + beside, -1)
            put(",".join(pair), both, one.bins * other.bins)
    z2 = judged.values["square"] / np.square(judged.values["model"])
    tail = np.clip(np.log2(np.maximum(z2, 1e-30)) + 32, 0, TAIL_BINS - 1).astype(np.int64)
    window.tail = np.bincount(tail, minlength=TAIL_BINS).astype(float)
    return window


def _worst(found: Statistics, judged: KnownTokens, step: int) -> None:
    block, tokens = judged.block, judged.of_sequences("tokens")
    mean = judged.of_sequences("abs") / np.maximum(tokens, 1)
    delta = judged.of_sequences("delta")
    for index in np.argsort(-mean)[:WORST].tolist():
        if tokens[index]:
            facts = (step, *(int(block.sequences[name][index]) for name in ("row", "group")), int(tokens[index]))
            found.worst_sequences.append((float(mean[index]), (*facts, -float(delta[index] / tokens[index]))))
    far = judged.values["abs"]
    chosen = np.argpartition(-far, WORST)[:WORST] if len(far) > WORST else np.arange(len(far))
    for index in chosen.tolist():
        place, owner = int(judged.place[index]), int(judged.owner[index])
        begin = int(block.offsets[owner])
        ids = tuple(block.tokens["tokens"][max(begin, place - CONTEXT) : place + 1].tolist())
        where = step, int(block.sequences["row"][owner]), place - begin
        found.worst_tokens.append(
            (float(far[index]), (*where, float(judged.gen[index]), float(judged.prev[index]), ids))
        )
    found.worst_tokens.sort(reverse=True)
    found.worst_sequences.sort(reverse=True)


def _poisson(step: int, rows: Array) -> Array:
    """[replicates, S] draws of mean 1 that depend on the step and the row alone, so that sums in any order agree."""
    with np.errstate(over="ignore"):
        seeds = rows.astype(np.uint64) + np.uint64(step) * np.uint64(0x9E3779B97F4A7C15)
        mixed = seeds[None, :] * np.uint64(REPLICATES) + np.arange(REPLICATES, dtype=np.uint64)[:, None]
        mixed += np.uint64(0x9E3779B97F4A7C15)  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    uniform = (mixed >> np.uint64(11)).astype(float) * 2.0**-53
    return np.searchsorted(_CUMULATIVE, uniform, side="right").astype(float)


_CUMULATIVE = np.cumsum(np.exp(-1.0) / np.concatenate([[1.0], np.cumprod(np.arange(1.0, 12.0))]))
