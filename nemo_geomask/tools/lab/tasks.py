"""Interface of a lab task, and the built-in tasks: arithmetic progressions modulo a number, and two that call a tool.

In the default task, a prompt is ``start + step :`` and the response should be the next terms. Each term is compared
with the term before it, so there is partial credit: a mistake costs one term (two, if it is not a number), but not the
rest of the response. Every prompt requests a number of terms, after which the environment ends the response. The policy
may end it earlier with EOS, and then loses the missing terms. Responses therefore differ in length.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.lab_recipe import TASKS, EnvConfig

_PROMPTS_PER_HELD_OUT = 8  # one prompt in this many belongs to the validation split
_MAX_DRAWS = 200  # maximum number of batches that are drawn to fill a split


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts of equal width."""

    token_ids: Tensor  # [B, P] long
    terms: Tensor  # [B] long, the largest number of tokens in each response


class Task(Protocol):
    """Interface of a task that the policy learns; token ids are 0 to ``vocab_size - 1``."""

    @property
    def prompt_width(self) -> int:
        """Number of tokens of every prompt."""

    @property
    def max_terms(self) -> int:
        """Number of tokens of the longest response."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including EOS and PAD."""

    @property
    def eos_id(self) -> int:
        """End of response."""

    @property
    def pad_id(self) -> int:
        """Padding."""

    @property
    def chance(self) -> float:
        """Expected reward of random answers."""

    def sample(self, count: int, generator: torch.Generator) -> Prompts:
        """Draw ``count`` prompts, each with the largest number of tokens of its response."""

    def reward(self, prompt: Sequence[int], response: Sequence[int], terms: int) -> float:
        """Return the reward of a response: the tokens after the prompt, with or without EOS."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the tokens as readable text."""


class CallingTask(Task, Protocol):
    """A task whose environment replies within a response, as a tool does."""

    @property
    def call_id(self) -> int:
        """Token id with which the policy calls the environment."""

    def reply(self, prompt: Sequence[int], response: Sequence[int], luck: float) -> Sequence[int]:
        """Return the environment's tokens in reply to a call, which is the last token of ``response``.

        They are not trained on. ``luck`` is a random number, uniform in [0, 1), for what the policy can't influence.
        """


class MeasuredTask(Task, Protocol):
    """A task with further measures of a response, which validations report beside the reward."""

    def measures(self, prompt: Sequence[int], response: Sequence[int]) -> Mapping[str, float]:
        """Return the measures that apply to a response, by name; a validation averages each over those that have it."""


def load_task(env: EnvConfig) -> Task:
    """Create the task that a recipe names."""
    task: Task = TASKS.load(env.name).of(env)
    return task


def draw_prompts(task: Task, count: int, generator: torch.Generator, *, held_out: bool | None) -> Prompts:
    """Draw prompts of a task's training split (``held_out`` False), its validation split (True), or both (None).

    A checksum of a prompt's tokens assigns one prompt in eight to the validation split. The assignment is the same in
    all runs, so no run trains on prompts that another run is validated on.

    Raises: ConfigError: the task has too few prompts in that split.
    """
    parts: list[Prompts] = []
    count_drawn = 0
    for _ in range(_MAX_DRAWS):
        drawn = task.sample(count, generator)
        if held_out is not None:
            chosen = torch.tensor([_is_held_out(ids) == held_out for ids in drawn.token_ids.tolist()])
            drawn = Prompts(drawn.token_ids[chosen], drawn.terms[chosen])
        parts.append(drawn)
        count_drawn += len(drawn.terms)
        if count_drawn >= count:
            token_ids, terms = (
                torch.cat([getattr(part, key) for part in parts])[:count] for key in ("token_ids", "terms")
            )
            return Prompts(token_ids, terms)
    raise ConfigError(
        f"grpo.val_period: of {count * _MAX_DRAWS} prompts that the task drew, {count_drawn} belong to the "
        f"{'validation' if held_out else 'training'} split: too few; give env more prompts, or set val_period: 0"
    )


def _is_held_out(token_ids: Sequence[int]) -> bool:
    return zlib.crc32(",".join(map(str, token_ids)).encode()) % _PROMPTS_PER_HELD_OUT == 0


@dataclass(frozen=True)
class NumberTask:
    """Base of tasks whose tokens are the numbers 0 to modulus-1, a sign, ``:``, EOS and PAD, in this order."""

    modulus: int  # number of number tokens
    min_terms: int  # smallest number of terms (tokens of the response) that a prompt requests
    max_terms: int  # largest number of terms that a prompt requests

    sign: ClassVar[str]  # text of token ``modulus``

    @classmethod
    def of(cls, env: EnvConfig) -> Self:
        """Create the task that ``env:`` describes."""
        return cls(env.modulus, env.min_terms, env.max_terms)

    @property
    def sign_id(self) -> int:
        """Token id of the task's sign."""
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
        """Padding; the policy can sample it, too, and it is never correct."""
        return self.modulus + 3

    @property
    def vocab_size(self) -> int:
        """Number of token ids: the numbers and the four signs."""
        return self.modulus + 4

    @property
    def chance(self) -> float:
        """Expected reward of uniformly random numbers without an early end, 1/modulus."""
        return 1.0 / self.modulus

    def text(self, token_ids: Sequence[int]) -> str:
        """Return tokens as readable text, such as ``3 + 4 : 7 1 5 <eos>``."""
        signs = {self.sign_id: self.sign, self.colon_id: ":", self.eos_id: "<eos>", self.pad_id: "<pad>"}
        return " ".join(signs.get(token, str(token)) for token in token_ids)


@dataclass(frozen=True)
class Progressions(NumberTask):
    """Task of continuing ``start, start + step, …`` modulo ``modulus``."""

    prompt_width = 4
    sign = "+"

    def sample(self, count: int, generator: torch.Generator) -> Prompts:
        """Draw ``count`` prompts: start, step (never 0) and number of terms, each uniform."""
        ends = ((0, self.modulus), (1, self.modulus), (self.min_terms, self.max_terms + 1))
        start, step, terms = (torch.randint(low, high, (count,), generator=generator) for low, high in ends)
        plus, colon = torch.full_like(start, self.sign_id), torch.full_like(start, self.colon_id)
        return Prompts(torch.stack([start, plus, step, colon], dim=1), terms)

    def reward(self, prompt: Sequence[int], response: Sequence[int], terms: int) -> float:
        """Return the fraction of the requested terms that continue the progression from the token before; in [0, 1].

        Args:
            prompt: the prompt's tokens, as drawn by :meth:`sample`.
            response: the tokens after the prompt, with or without EOS; tokens after EOS are ignored.
            terms: number of requested terms; further terms are ignored.
        """
        previous, step = prompt[0], prompt[2]
        correct = 0
        for token in response[:terms]:
            if token == self.eos_id:
                break
            # A sign in place of a number has no successor, so the term after it is wrong, too.
            correct += previous < self.modulus and token == (previous + step) % self.modulus
            previous = token
        return correct / terms


_REPLY_LENGTH = 3  # numbers in a reply of Lookups
_ROUND_LENGTH = 1 + 2 * _REPLY_LENGTH  # tokens of a call, its reply and the repetition
_SEARCH_LENGTH = 2  # tokens of a call and its reply in Searches


@dataclass(frozen=True)
class Lookups(NumberTask):
    """Task of calling a tool, repeating the three numbers that it returns, and calling it again.

    Implements :class:`nemo_geomask.tools.lab.tasks.CallingTask`. The environment's tokens count towards the
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

    def reply(self, prompt: Sequence[int], response: Sequence[int], luck: float) -> list[int]:
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


@dataclass(frozen=True)
class Searches(NumberTask):
    """Task of one tool call, which finds something or not whatever the policy does, and a long answer after it.

    Implements :class:`CallingTask` and :class:`MeasuredTask`. A prompt is ``start query :``, with a query of two
    numbers. The policy calls the tool, ``?``, and is told whether it found something, ``!`` or ``x``. Then it should
    count on from ``start``, whatever the reply. The reward is the share of correct terms if the tool found something,
    and otherwise 0. So the context shows, before most tokens are written, what the reward depends on most.
    """

    luck: float  # probability that the tool finds something

    prompt_width = 4
    sign = "+"

    @classmethod
    def of(cls, env: EnvConfig) -> Self:
        """Create the task that ``env:`` describes; raise ConfigError if a response has no term."""
        if env.min_terms < _SEARCH_LENGTH + 1:
            raise ConfigError(
                f"env.min_terms: {env.min_terms} is too small: a call and its reply are {_SEARCH_LENGTH} tokens, and "
                f"the answer follows; set it to at least {_SEARCH_LENGTH + 1}"
            )
        return cls(env.modulus, env.min_terms, env.max_terms, env.luck)

    @property
    def call_id(self) -> int:
        """Token ``?``."""
        return self.modulus + 4

    @property
    def found_id(self) -> int:
        """Token ``!``, a reply."""
        return self.modulus + 5

    @property
    def nothing_id(self) -> int:
        """Token ``x``, a reply."""
        return self.modulus + 6

    @property
    def vocab_size(self) -> int:
        """Number of token ids: the numbers, four signs, the call and its two replies."""
        return self.modulus + 7

    @property
    def chance(self) -> float:
        """Expected reward of a call and random numbers after it."""
        return self.luck / self.modulus

    def text(self, token_ids: Sequence[int]) -> str:
        """Return tokens as readable text, such as ``3 5 2 : ? ! 4 5 6``."""
        signs = {self.call_id: "?", self.found_id: "!", self.nothing_id: "x"}
        return " ".join(signs.get(token) or super(Searches, self).text([token]) for token in token_ids)

    def sample(self, count: int, generator: torch.Generator) -> Prompts:
        """Draw ``count`` prompts: start, query and number of terms, each uniform."""
        numbers = torch.randint(0, self.modulus, (count, 3), generator=generator)
        terms = torch.randint(self.min_terms, self.max_terms + 1, (count,), generator=generator)
        return Prompts(torch.cat([numbers, torch.full_like(numbers[:, :1], self.colon_id)], dim=1), terms)

    def reply(self, prompt: Sequence[int], response: Sequence[int], luck: float) -> list[int]:
        """Return whether the tool found something; a second call gets no reply, and costs the term."""
        if self.call_id in response[:-1]:
            return []
        return [self.found_id if luck < self.luck else self.nothing_id]

    def measures(self, prompt: Sequence[int], response: Sequence[int]) -> dict[str, float]:
        """Return the share of correct terms, ``correct_after_found`` or ``correct_after_nothing``; none without a call.

        A term is correct if it continues from the token before it, the first from ``start``.
        """
        if len(response) <= _SEARCH_LENGTH or response[0] != self.call_id:
            return {}
        previous = [prompt[0], *response[_SEARCH_LENGTH:-1]]
        answer = response[_SEARCH_LENGTH:]
        correct = sum(
            before < self.modulus and token == (before + 1) % self.modulus
            for before, token in zip(previous, answer, strict=True)
        )
        name = "correct_after_found" if response[1] == self.found_id else "correct_after_nothing"
        return {name: correct / len(answer)}

    def reward(self, prompt: Sequence[int], response: Sequence[int], terms: int) -> float:
        """Return the share of correct terms if the tool found something; otherwise, or without a call first, 0."""
        share = self.measures(prompt, response[:terms]).get("correct_after_found", 0.0)
        return share * (len(response[:terms]) - _SEARCH_LENGTH) / (terms - _SEARCH_LENGTH)
