"""A sparse reward, 0 or 1, for the last token of a long response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_geomask.lab.task import Progressions

__all__ = ["Answers"]


@dataclass(frozen=True)
class Answers(Progressions):
    """Reward 1 or 0, for the last number alone: ``start + step :``, some tokens, and then ``start + step``.

    The environment ends the response after as many tokens as the prompt asks for, which the policy can't see; an answer
    of fewer than ``min_terms`` tokens earns nothing. All tokens share the credit of the last.
    """

    def reward(self, prompt: Sequence[int], response: Sequence[int], terms: int) -> float:
        """1 if the last token before EOS or the end is the sum."""
        written = list(response[:terms])
        if self.eos_id in written:
            written = written[: written.index(self.eos_id)]
        return float(len(written) >= self.min_terms and written[-1] == (prompt[0] + prompt[2]) % self.modulus)
