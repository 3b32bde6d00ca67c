"""Gap between two log-probs of the same tokens, and what a gap that should not be there looks like.

The two are those of sampler and trainer, or π_old and π_θ at the first update of a step: between these no weight has
changed, so that they differ by numerical noise alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.measure.logprob_checks import BETTER_FIT, MIN_GAP, MIN_PAIRS, capped_gap, find_shifts
from nemo_geomask.tools.diagnose.measure.token_values import MAX_LOG_RATIO, k3
from nemo_geomask.tools.diagnose.read.record_reader import Array, RecordBlock

_COMPARED_TOKENS = 64
"""Number of a sequence's first trained tokens by which its log-probs are compared with other sequences'."""


class LogprobPairs(NamedTuple):
    """Two log-probs of each of M trained tokens, where both are finite."""

    first: Array  # [M] float64, nats
    second: Array  # [M] float64, nats
    sequence: Array  # [M], number of the token's sequence, in ascending order
    column: Array  # [M], index of the token in its sequence


class LogprobGap(NamedTuple):
    """Gap Δ = second − first over some tokens."""

    tokens: int = 0
    noise: float = 0.0  # median of |Δ| / (1 − p), p the first's probability: about the size of the noise on a logit
    far: float = 0.0  # share of tokens where it exceeds a limit; a token that is routed to other experts may
    ratio: float = 1.0  # mean of exp(Δ)
    k3: float = 0.0  # mean of exp(Δ) − 1 − Δ, nats a token
    k3_error: float = 0.0  # its standard error, as of independent tokens
    above: float = 0.0  # share of tokens with Δ > 0 beyond healthy noise
    below: float = 0.0  # share of tokens with Δ < 0 beyond healthy noise
    # correlation of Δ with a log-prob over tokens, the smaller one of both; 0 if they differ in sign, as they do where
    # two distributions have little in common. Another temperature makes both.
    tilt: float = 0.0


def select_pairs(block: RecordBlock, first: str, second: str, is_counted: Array | None = None) -> LogprobPairs:
    """Return the log-probs of two columns at the trained tokens of a block's sequences, where both are finite.

    ``is_counted``, bool [S], marks the sequences to take; None: all. A column that was not recorded has no tokens.
    """
    sequence = np.repeat(np.arange(len(block)), np.diff(block.offsets))
    column = np.arange(len(sequence)) - block.offsets[sequence]
    unknown = np.full(len(sequence), np.nan)
    values = [block.tokens.get(name, unknown).astype(float) for name in (first, second)]
    is_taken = block.tokens["mask"].astype(bool) & np.isfinite(values[0]) & np.isfinite(values[1])
    if is_counted is not None:
        is_taken &= is_counted[sequence]
    return LogprobPairs(*(value[is_taken] for value in (*values, sequence, column)))


def logit_noise(delta: Array, logprob: Array) -> Array:
    """Return [M], |Δ| / (1 − p): the noise on a token's logit that would move its log-prob by Δ."""
    noise: Array = np.abs(delta) / np.maximum(-np.expm1(np.minimum(logprob, 0.0)), 1e-3)
    return noise


def measure_gap(first: Array, second: Array, *, noise: float, far_noise: float) -> LogprobGap:
    """Measure the gap between two log-probs [M] of the same tokens.

    Args:
        noise: largest healthy noise, beyond which a token counts in ``above`` or ``below``.
        far_noise: noise beyond which a token counts in ``far``.
    """
    delta = second - first
    if not len(delta):
        return LogprobGap()
    sizes = logit_noise(delta, first)
    is_large = sizes > noise
    tilts = [_correlation(delta, side) for side in (first, second)]
    values = k3(delta)
    return LogprobGap(
        tokens=len(delta),
        noise=float(np.median(sizes)),
        far=float((sizes > far_noise).mean()),
        ratio=float(np.exp(np.clip(delta, -MAX_LOG_RATIO, MAX_LOG_RATIO)).mean()),
        k3=float(values.mean()),
        k3_error=float(values.std()) / len(values) ** 0.5,
        above=float((is_large & (delta > 0)).mean()),
        below=float((is_large & (delta < 0)).mean()),
        tilt=min(tilts, key=abs) if tilts[0] * tilts[1] > 0 else 0.0,
    )


def _correlation(x: Array, y: Array) -> float:
    spread = float(np.std(x) * np.std(y))
    return float(np.mean((x - x.mean()) * (y - y.mean()))) / spread if spread else 0.0


def shifted_share(pairs: LogprobPairs) -> float:
    """Return the share of sequences in which one log-prob fits the other one of the next or the previous token."""
    if not len(pairs.first):
        return 0.0
    everywhere = np.ones(len(pairs.first), dtype=bool)
    count = int(pairs.sequence[-1]) + 1
    is_checked, later, earlier = find_shifts(everywhere, pairs.first, pairs.second, pairs.sequence, count)
    return float(((later | earlier) & is_checked).sum() / max(is_checked.sum(), 1))


def exchanged_share(pairs: LogprobPairs) -> float:
    """Return the share of sequences whose second log-probs are another sequence's first ones, column by column.

    Only sequences of :data:`~nemo_geomask.tools.diagnose.measure.logprob_checks.MIN_PAIRS` tokens are compared.
    """
    numbers, starts = np.unique(pairs.sequence, return_index=True)
    ends = np.append(starts[1:], len(pairs.sequence))[: len(starts)]
    by_column = np.full((len(numbers), int(pairs.column.max(initial=0)) + 1), np.nan)
    by_column[np.searchsorted(numbers, pairs.sequence), pairs.column] = pairs.first
    compared = exchanged = 0
    for index, (begin, end) in enumerate(zip(starts, ends, strict=True)):
        if end - begin < MIN_PAIRS:
            continue
        compared += 1
        part = slice(begin, min(end, begin + _COMPARED_TOKENS))
        own = float(capped_gap(pairs.first[part], pairs.second[part]).mean())
        if own <= MIN_GAP:
            continue
        # A column that the other sequence lacks counts as a gap of 1 nat.
        others = capped_gap(np.delete(by_column, index, axis=0)[:, pairs.column[part]], pairs.second[part])
        exchanged += bool((others.mean(axis=1) < own / BETTER_FIT).any())
    return exchanged / max(compared, 1)
