"""A task with tool calls: ask the environment for numbers and repeat them.

A prompt is ``key :``. The policy may generate ``?``, to which the environment replies with three numbers. The policy
should then generate the same three numbers. They are a checksum of the tokens so far, so that the policy cannot predict
them and a run is repeatable. So nearly half of the context comes from the environment and is unlikely under the policy,
like tool output.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.lab_recipe import EnvConfig
from nemo_geomask.tools.lab.progression_task import NumberTask, Prompts

__all__ = ["Lookups"]

_REPLY_LENGTH = 3  # numbers in a reply
_ROUND_LENGTH = 1 + 2 * _REPLY_LENGTH  # tokens of a call, its reply and the repetition


@dataclass(frozen=True)
class Lookups(NumberTask):
    """Task of calling a tool, repeating the three numbers that it returns, and calling it again.

    Implements :class:`nemo_geomask.tools.lab.progression_task.CallingTask`. The environment's tokens count towards the
    ``min_terms`` to ``max_terms`` of a response.
    """

    prompt_width = 2
    sign = "?"

    @classmethod
    def of(cls, env: EnvConfig) -> Self:
        """Create the task that ``env:`` describes; raise ConfigError if one call does not fit into a response."""
        if env.min_terms < _ROUND_LENGTH:
            raise ConfigError(
                f"env.min_terms: {env.min_terms} is too small: a call, its reply and the repetition are "
                f"{_ROUND_LENGTH} tokens; set it to at least {_ROUND_LENGTH}"
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
        """Return three numbers, determined by the tokens so far."""
        digest = zlib.crc32(",".join(map(str, (*prompt, *response))).encode())
        return [digest // self.modulus**digit % self.modulus for digit in range(_REPLY_LENGTH)]

    def reward(self, prompt: Sequence[int], response: Sequence[int], terms: int) -> float:
        """Return the share of correctly repeated numbers, in [0, 1].

        The denominator is the number of repetitions in as many complete rounds as fit into the response.
        """
        correct, position = 0, 0
        while position < min(len(response), terms) and response[position] != self.eos_id:
            if response[position] != self.call_id:
                position += 1
                continue
            numbers = response[position + 1 : position + 1 + _REPLY_LENGTH]
            # The next call ends the repetition, since the policy does not generate its reply.
            for offset, number in enumerate(numbers, start=position + 1 + _REPLY_LENGTH):
                if offset >= min(len(response), terms) or response[offset] in (self.call_id, self.eos_id):
                    break
                correct += response[offset] == number
            position += 1 + _REPLY_LENGTH
        # Numbers of a last, incomplete round also count and can make up for mistakes.
        return min(1.0, correct / (terms // _ROUND_LENGTH * _REPLY_LENGTH))
