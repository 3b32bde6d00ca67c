"""Counts of faulty log-probs: missing, exactly 0, non-finite, positive, or shifted to another token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.measure.step_sums import StepSums
from nemo_geomask.tools.diagnose.read.record_reader import Array

UNSURE_LOGPROB = -0.05
"""Below this log-prob an engine is unsure of a token: there the other engine's log-prob can't round to exactly 0."""
MAX_POSITIVE_LOGPROB = 1e-3
"""Largest log-prob above 0 that counts as a rounding error."""
MIN_PAIRS = 6
"""Minimum number of pairs of successive trained tokens for the shift check, and of the pairs that fit a neighbour."""
MAX_GAP = 1.0
"""Value, in nats, at which differences of log-probs are capped."""
MIN_GAP = 0.05
"""The engines' log-probs of a token must differ by more nats than this for the token to show a shift."""
BETTER_FIT = 3.0
"""A neighbouring token's log-prob fits better if its gap is smaller by more than this factor."""
MIN_FITTING_SHARE = 0.8
"""Share of a sequence's differing tokens that a neighbour must fit better, for the sequence to be shifted."""


class LogprobFaults(NamedTuple):
    """Trained tokens [N] and sequences [S] of a block with faulty log-probs, as bools."""

    comparable: Array  # [N], trained tokens of the sequences for which both engines computed log-probs
    zero: Array  # [N], comparable tokens with a log-prob of exactly 0 from one engine where the other is unsure
    positive: Array  # [N], comparable tokens with a log-prob above 0
    shifted: Array  # [S], sequences whose log-probs belong to a neighbouring token
    missing: Array  # [S], sequences for which the generation engine returned only zeros


def find_faults(sums: StepSums, mask: Array, gen: Array, prev: Array, sequence: Array, count: int) -> LogprobFaults:
    """Return the faulty tokens and sequences, and write their counts, named in ``CHECK_SUMS``, into ``sums``.

    The arrays are [N]: the trained tokens, the log-probs of the two engines, and the sequence of each token.
    """
    trained_tokens = _count_per_sequence(mask, sequence, count)
    has_trained = trained_tokens > 0
    all_nan_gen = has_trained & (_count_per_sequence(mask & np.isnan(gen), sequence, count) == trained_tokens)
    lacks_gen = _lacks_logprobs(gen, prev, mask, sequence, count)
    lacks_prev = _lacks_logprobs(prev, gen, mask, sequence, count)
    comparable: Array = mask & ~(lacks_gen | lacks_prev)[sequence]
    is_checked, fits_later, fits_earlier = find_shifts(comparable, gen, prev, sequence, count)
    is_nonfinite = comparable & ~(np.isfinite(gen) & np.isfinite(prev))
    counts = {
        "all_sequences": has_trained,
        # The training engine skips the log-probs of some sequences by design, and leaves NaN or 0. The generation
        # engine never skips any: a sequence in which all its log-probs are NaN counts as non-finite.
        "sequences_without_gen": lacks_gen & ~all_nan_gen,
        "sequences_without_prev": lacks_prev,
        "nonfinite": is_nonfinite | (mask & all_nan_gen[sequence]),
        "unsure_tokens": mask & ((gen < UNSURE_LOGPROB) | (prev < UNSURE_LOGPROB)),
        "positive_logprobs": mask & ((gen > MAX_POSITIVE_LOGPROB) | (prev > MAX_POSITIVE_LOGPROB)),
        "all_tokens": mask,
        "sequences_checked_for_shift": is_checked,
        "shifted_later": fits_later,
        "shifted_earlier": fits_earlier,
    }
    for name, flags in counts.items():
        sums[name] = float(flags.sum())
    # A shifted sequence has a 0 at one end of each turn. These zeros are part of the shift and are not counted.
    unshifted = ~(fits_later | fits_earlier)
    zeros = {
        "zero_gen": mask & (gen == 0) & (prev < UNSURE_LOGPROB),
        "zero_prev": comparable & (prev == 0) & (gen < UNSURE_LOGPROB),
    }
    for name, flags in zeros.items():
        sums[name] = float(_count_per_sequence(flags, sequence, count)[unshifted].sum())
    return LogprobFaults(
        comparable=comparable,
        zero=(zeros["zero_gen"] | zeros["zero_prev"]) & comparable,
        positive=counts["positive_logprobs"] & comparable,
        shifted=~unshifted,
        missing=counts["sequences_without_gen"],
    )


def _count_per_sequence(tokens: Array, sequence: Array, count: int) -> Array:
    """Return [S] floats, the number of marked tokens of each sequence."""
    return np.bincount(sequence[tokens], minlength=count).astype(float)


def _lacks_logprobs(logprobs: Array, reference: Array, mask: Array, sequence: Array, count: int) -> Array:
    """Return bool [S]: sequences whose trained log-probs are all NaN, or all 0 where the reference is unsure."""
    trained_tokens = _count_per_sequence(mask, sequence, count)
    is_unsure = _count_per_sequence(mask & (reference < UNSURE_LOGPROB), sequence, count) > 0
    all_nan = _count_per_sequence(mask & np.isnan(logprobs), sequence, count) == trained_tokens
    all_zero = _count_per_sequence(mask & (logprobs == 0), sequence, count) == trained_tokens
    missing: Array = (trained_tokens > 0) & (all_nan | (is_unsure & all_zero))
    return missing


def find_shifts(comparable: Array, gen: Array, prev: Array, sequence: Array, count: int) -> tuple[Array, Array, Array]:
    """Compare each log-prob of one engine with the other engine's log-probs of the same and the neighbouring tokens.

    Returns bools [S]: sequences with enough pairs of successive tokens to be checked; those in which prev of token t
    fits gen of token t + 1; and those in which prev of token t + 1 fits gen of token t.
    """
    is_pair = comparable[1:] & comparable[:-1] & (sequence[1:] == sequence[:-1])
    owner = sequence[:-1][is_pair]
    gen_first, gen_second = gen[:-1][is_pair], gen[1:][is_pair]
    prev_first, prev_second = prev[:-1][is_pair], prev[1:][is_pair]
    gap = capped_gap(prev_first, gen_first)
    differs = gap > MIN_GAP

    def fits(shifted_gap: Array) -> Array:
        """Return bool [S]: sequences in which the neighbour fits better at enough tokens, and over all of them."""
        gap_sum = np.bincount(owner, weights=gap, minlength=count)
        shifted_gap_sum = np.bincount(owner, weights=shifted_gap, minlength=count)
        fitting = np.bincount(owner[differs & (shifted_gap < gap / BETTER_FIT)], minlength=count)
        needed = np.maximum(MIN_PAIRS, MIN_FITTING_SHARE * np.bincount(owner[differs], minlength=count))
        is_shifted: Array = (fitting >= needed) & (shifted_gap_sum < gap_sum / BETTER_FIT)
        return is_shifted

    is_checked: Array = np.bincount(owner, minlength=count) >= MIN_PAIRS
    return is_checked, fits(capped_gap(prev_first, gen_second)), fits(capped_gap(prev_second, gen_first))


def capped_gap(first: Array, second: Array) -> Array:
    """Return the capped absolute difference of log-probs; ``MAX_GAP`` where it is not a number."""
    with np.errstate(invalid="ignore"):  # inf - inf
        gap: Array = np.minimum(np.nan_to_num(np.abs(first - second), nan=MAX_GAP), MAX_GAP)
    return gap
