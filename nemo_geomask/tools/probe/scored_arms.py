"""Log-probs of all arms over the same tokens, from the answers of the starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_geomask.errors import DataError
from nemo_geomask.optional import require
from nemo_geomask.tools.shared.flat_settings import differing_keys

numpy: Any = require("numpy", "the probe's statistics need", "diagnose")

BASE = "base"
"""Name of the request that every start has: all sequences at once, with the recipe's options."""

EXCLUDED = -1000.0
"""Log-prob in place of -inf, of a token that top-p or top-k excludes."""


@dataclass(frozen=True)
class FrozenTokens:
    """The response tokens of the frozen sequences, one after the other."""

    prompts: Any  # number of each token's prompt, [N]
    positions: Any  # position of each token in its response, [N]
    lengths: tuple[int, ...]  # length of each response, [S]
    sampled: Any  # log-probs that the sampling side reported as it sampled, [N]
    by_trainer: Any  # True for tokens that the trainer sampled; the engine sampled the others, [N]
    is_fresh: Any  # True for tokens that serve to confirm alone: those of every second prompt, [N]

    @classmethod
    def from_frozen(cls, frozen: Mapping[str, Any]) -> FrozenTokens:
        """Return the tokens of frozen sequences, as the scoring job writes them."""
        pairs = list(zip(frozen["sequences"], frozen["prompt_lengths"], strict=True))
        lengths = tuple(len(sequence) - prompt for sequence, prompt in pairs)
        prompts = numpy.repeat(numpy.asarray(frozen["prompts"]), lengths)
        return cls(
            prompts=prompts,
            positions=numpy.concatenate([numpy.arange(length) for length in lengths]),
            lengths=lengths,
            sampled=numpy.concatenate(frozen["sampled"]).astype(numpy.float64),
            by_trainer=numpy.repeat(numpy.asarray(frozen["by_trainer"], dtype=bool), lengths),
            is_fresh=prompts % 2 == 1,
        )

    def signed(self, logprobs: Any) -> Any:
        """Return log-probs with the opposite sign for tokens that the trainer sampled, [N].

        A difference Δ of the trainer minus the engine becomes that of the other side minus the side that sampled.
        The mean of exp(Δ) − 1 − Δ then estimates KL(engine ‖ trainer) over the engine's tokens, and
        KL(trainer ‖ engine) over the trainer's.
        """
        return numpy.where(self.by_trainer, -logprobs, logprobs)

    def flat(self, logprobs: Sequence[Sequence[float]], source: str) -> Any:
        """Return the log-probs of a request as one vector, [N] float64; -inf becomes :data:`EXCLUDED`.

        Raises:
            DataError: another number of tokens than were frozen, or a value that is NaN or +inf.
        """
        if tuple(map(len, logprobs)) != self.lengths:
            raise DataError(
                f"{source} scored {list(map(len, logprobs))} tokens; the frozen responses have {self.lengths}"
            )
        values = numpy.concatenate([numpy.asarray(each, dtype=numpy.float64) for each in logprobs])
        # Top-p and top-k exclude tokens, and rounding moves their border.
        values = numpy.where(numpy.isneginf(values), EXCLUDED, values)
        if not numpy.isfinite(values).all():
            place = int(numpy.argmin(numpy.isfinite(values)))
            raise DataError(f"{source} has the log-prob {values[place]} for token {place}; no gap can be computed")
        return values


def differing_settings(
    before: Mapping[str, str], after: Mapping[str, str], ignored: frozenset[str] = frozenset()
) -> dict[str, tuple[str, str]]:
    """Return what the resolved settings of two starts differ in, as (before, after) by name.

    Args:
        ignored: names that differ between two starts with the same settings.
    """
    names = (name for name in differing_keys(before, after) if name not in ignored)
    return {name: (before.get(name, ""), after.get(name, "")) for name in names}
