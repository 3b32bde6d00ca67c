"""Values computed from each trained token's log-probs: Δ, KL estimates, weights and the expected mismatch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_geomask.tools.diagnose.read.record_reader import Array, RecordBlock

MAX_LOG_RATIO = 40.0
"""Log-ratio at which token ratios saturate, as in the losses."""
MAX_CAPPED_ABS = 1.0
"""Value, in nats, at which |Δ| is capped in ``capped_abs``."""
MAX_SCALED_DELTA = 0.1
"""Value at which the magnitude of ``scaled_delta`` is clipped."""
MAX_SURPRISE = 20.0
"""Value, in nats, at which ``surprise`` is clipped."""


def k3(delta: Array) -> Array:
    """Return exp(Δ) − 1 − Δ of log-ratios Δ, nats; they saturate at ``MAX_LOG_RATIO``."""
    log_ratio = np.clip(delta, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    values: Array = np.expm1(log_ratio) - log_ratio
    return values


@dataclass(frozen=True)
class TrainedTokens:
    """The M tokens of one block that enter the loss and have finite log-probs of both engines."""

    block: RecordBlock
    index: Array  # [M], index of each token among the block's tokens
    sequence: Array  # [M], index of each token's sequence in the block
    values: dict[str, Array]  # [M] each; the names are defined in step_sums
    gen: Array
    prev: Array
    advantages: Array | None  # None if they were not recorded

    def sum_per_sequence(self, name: str) -> Array:
        """Return [S], the sums of a value over each sequence's tokens."""
        return np.bincount(self.sequence, weights=self.values[name], minlength=len(self.block))

    def select(self, flags: Array) -> TrainedTokens:
        """Return the tokens that a bool array [M] marks."""
        if flags.all():
            return self
        return TrainedTokens(
            self.block,
            self.index[flags],
            self.sequence[flags],
            {name: values[flags] for name, values in self.values.items()},
            self.gen[flags],
            self.prev[flags],
            None if self.advantages is None else self.advantages[flags],
        )

    def column(self, name: str) -> Array:
        """Return [S] floats, a column of the sequences; NaN if it was not recorded."""
        column = self.block.sequences.get(name)
        return np.full(len(self.block), np.nan) if column is None else column.astype(float)


def select_trained_tokens(block: RecordBlock, index: Array, sequence: Array, gen: Array, prev: Array) -> TrainedTokens:
    """Compute the values of the tokens at ``index`` [M]; the other arrays are [N], of all tokens of the block."""
    gen, prev = gen[index], prev[index]
    delta = prev - gen
    log_ratio = np.clip(delta, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, inverse_ratio = np.exp(log_ratio), np.exp(-log_ratio)
    capped_abs = np.minimum(np.abs(delta), MAX_CAPPED_ABS)
    one_minus_p = -np.expm1(np.minimum(gen, 0)) + 1e-3  # the offset avoids a division by 0 at sure tokens
    scaled_delta = np.clip(delta / one_minus_p, -MAX_SCALED_DELTA, MAX_SCALED_DELTA)
    values = {
        "tokens": np.ones_like(delta),
        "abs_delta": np.abs(delta),
        "capped_abs": capped_abs,
        "delta": delta,
        "k3": k3(delta),
        "k3_reverse": k3(-delta),
        "prob_error": np.maximum(ratio, inverse_ratio),
        "weight": ratio,
        "weight_squared": ratio * ratio,
        "delta_positive": (delta > 0).astype(float),
        "above_0.1": (capped_abs > 0.1).astype(float),
        "above_1": (np.abs(delta) > 1).astype(float),
        "one_minus_p": one_minus_p,
        "one_minus_p_squared": np.square(one_minus_p),
        "scaled_delta": scaled_delta,
        "surprise": np.clip(-gen, 0, MAX_SURPRISE),
    }
    advantages = block.tokens.get("advantages")
    advantages = None if advantages is None else advantages[index].astype(float)
    return TrainedTokens(block, index, sequence[index], values, gen, prev, advantages)
