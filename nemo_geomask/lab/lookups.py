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
from typing import Self

import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.lab.recipe import EnvConfig
from nemo_geomask.lab.task import NumberTask, Prompts

__all__ = ["Lookups"]

_WIDTH = 3
_ROUND = 1 + 2 * _WIDTH


@dataclass(frozen=True)
class Lookups(NumberTask):
    """Call, read three numbers, repeat them, and call again; see :class:`nemo_geomask.lab.task.CallingTask`.

    The environment's tokens are among a response's ``min_terms`` to ``max_terms``.
    """

    prompt_width = 2
    sign = "?"

    @classmethod
    def of(cls, env: EnvConfig) -> Self:
        """The task that a recipe describes."""
        if env.min_terms < _ROUND:
            raise ConfigError(
                f"env.min_terms: {env.min_terms}; a call, its reply and their repetition are {_ROUND} tokens, so ask "
                f"for {_ROUND} at least"
            )
        return super().of(env)

    @property
    def call_id(self) -> int:
        """Token ``?``."""
        return self.sign_id

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
