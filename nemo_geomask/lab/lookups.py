"""A task with tool calls: ask the environment for numbers and repeat them.

A prompt reads ``key :``. The policy may write ``?``, which the environment answers with three numbers; the next three
that the policy writes should be the same. Numbers come from a checksum of what was asked so far, so that the policy
can't know them and a run repeats. They make up near to half of the context, are not the policy's, and are unlikely
under it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.lab.recipe import EnvConfig
from nemo_geomask.lab.task import Prompts

__all__ = ["Lookups"]

_WIDTH = 3
_ROUND = 1 + 2 * _WIDTH


@dataclass(frozen=True)
class Lookups:
    """Call, read three numbers, repeat them, and call again; see :class:`nemo_geomask.lab.task.CallingTask`.

    Tokens 0 to modulus-1 are the numbers themselves; ``?``, ``:``, EOS and PAD follow.

    Attributes:
        modulus: how many numbers there are.
        min_terms: fewest tokens of a response, the environment's among them.
        max_terms: most.
    """

    modulus: int
    min_terms: int
    max_terms: int

    prompt_width = 2

    @classmethod
    def of(cls, env: EnvConfig) -> Lookups:
        """The task that a recipe describes."""
        if env.min_terms < _ROUND:
            raise ConfigError(
                f"env.min_terms: {env.min_terms}; a call, its reply and their repetition are {_ROUND} tokens, so ask "
                f"for {_ROUND} at least"
            )
        return cls(env.modulus, env.min_terms, env.max_terms)

    @property
    def call_id(self) -> int:
        """Token ``?``."""
        return self.modulus

    @property
    def colon_id(self) -> int:
        """Token ``:``."""
        return self.modulus + 1

    @property
    def eos_id(self) -> int:
        """End of response."""
        return self.modulus + 2

    @property
    def pad_id(self) -> int:
        """Padding."""
        return self.modulus + 3

    @property
    def vocab_size(self) -> int:
        """Numbers and the four signs."""
        return self.modulus + 4

    @property
    def chance(self) -> float:
        """Expected reward of calling wherever it is of use and repeating random numbers."""
        return 1.0 / self.modulus

    def sample(self, count: int, generator: torch.Generator) -> Prompts:
        """Draw ``count`` prompts: key and number of terms, each uniform."""
        key = torch.randint(0, self.modulus, (count,), generator=generator)
        terms = torch.randint(self.min_terms, self.max_terms + 1, (count,), generator=generator)
        return Prompts(torch.stack([key, torch.full_like(key, self.colon_id)], dim=1), terms)

    def reply(self, prompt: Sequence[int], response: Sequence[int]) -> list[int]:
        """Three numbers."""
        digest = zlib.crc32(",".join(map(str, (*prompt, *response))).encode())
        return [digest // self.modulus**place % self.modulus for place in range(_WIDTH)]

    def reward(self, prompt: Sequence[int], response: Sequence[int], terms: int) -> float:
        """Numbers repeated in their places, over those that as many whole rounds as fit have, in [0, 1]."""
        correct, place = 0, 0
        while place < min(len(response), terms) and response[place] != self.eos_id:
            if response[place] != self.call_id:
                place += 1
                continue
            said = response[place + 1 : place + 1 + _WIDTH]
            # What is repeated ends at the next call, whose reply is not the policy's.
            for offset, number in enumerate(said, start=place + 1 + _WIDTH):
                if offset >= min(len(response), terms) or response[offset] in (self.call_id, self.eos_id):
                    break
                correct += response[offset] == number
            place += 1 + _WIDTH
        # What fits of a round that is cut off makes up for slips.
        return min(1.0, correct / (terms // _ROUND * _WIDTH))

    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens as a user reads them: ``3 : ? 5 0 2 5 0 2 <eos>``."""
        signs = {self.call_id: "?", self.colon_id: ":", self.eos_id: "<eos>", self.pad_id: "<pad>"}
        return " ".join(signs.get(token, str(token)) for token in token_ids)
