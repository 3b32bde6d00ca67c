"""The lab's task: continue an arithmetic progression modulo a small number.

A prompt reads ``start + step :``; the response should be the next terms. Each term is checked against the one before
it, so the reward is partial credit: one slip costs one term (two, if the slip is no number), not the rest of the
response. Every prompt asks for its own number of terms, and the environment ends a response there; the policy may
also end it early with EOS, and forfeits the terms it left out. Responses are therefore of uneven length.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from nemo_geomask.errors import ConfigError
from nemo_geomask.lab.recipe import TASKS, EnvConfig

__all__ = ["CallingTask", "NumberTask", "Progressions", "Prompts", "Task", "draw_prompts", "task_of"]

# One prompt in so many is for validation, and how often as many as are needed may be drawn to find them.
_SPLIT = 8
_DRAWS = 200


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts, all of one width.

    Attributes:
        token_ids: [B, P] long.
        terms: [B] long, how many tokens each response may have.
    """

    token_ids: Tensor
    terms: Tensor


class Task(Protocol):
    """What the policy is to learn; token ids count from 0 to ``vocab_size - 1``."""

    @property
    def prompt_width(self) -> int:
        """Tokens of every prompt."""

    @property
    def max_terms(self) -> int:
        """Tokens of the longest response."""

    @property
    def vocab_size(self) -> int:
        """Tokens there are, EOS and PAD among them."""

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
        """Draw prompts; each says how many tokens its response may have."""

    def reward(self, prompt: Sequence[int], response: Sequence[int], terms: int) -> float:
        """Of the tokens sampled after the prompt, with or without EOS."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens as a user reads them."""


class CallingTask(Task, Protocol):
    """A task whose environment replies within a response, as a tool does."""

    @property
    def call_id(self) -> int:
        """The token that calls it."""

    def reply(self, prompt: Sequence[int], response: Sequence[int]) -> Sequence[int]:
        """Tokens that it writes after a call, the last of ``response``; not the policy's, and not trained on."""


def task_of(env: EnvConfig) -> Task:
    """The task that a recipe names."""
    task: Task = TASKS.load(env.name).of(env)
    return task


def draw_prompts(task: Task, count: int, generator: torch.Generator, *, held_out: bool | None) -> Prompts:
    """Draw prompts of a task's training or validation split; None: of all.

    A prompt belongs to the validation split by a checksum of its tokens, one in eight does, whoever asks: what one run
    is validated on is trained on by none.

    Raises:
        ConfigError: the task has next to no prompts in that split.
    """
    parts: list[Prompts] = []
    found = 0
    for _ in range(_DRAWS):
        drawn = task.sample(count, generator)
        if held_out is not None:
            chosen = torch.tensor([_held_out(ids) == held_out for ids in drawn.token_ids.tolist()])
            drawn = Prompts(drawn.token_ids[chosen], drawn.terms[chosen])
        parts.append(drawn)
        found += len(drawn.terms)
        if found >= count:
            token_ids, terms = (
                torch.cat([getattr(part, key) for part in parts])[:count] for key in ("token_ids", "terms")
            )
            return Prompts(token_ids, terms)
    raise ConfigError(
        f"grpo.val_period: of {count * _DRAWS} prompts that the task drew, {found} belong to the "
        f"{'validation' if held_out else 'training'} split: too few; give env more prompts, or set val_period: 0"
    )


def _held_out(token_ids: Sequence[int]) -> bool:
    return zlib.crc32(",".join(map(str, token_ids)).encode()) % _SPLIT == 0


@dataclass(frozen=True)
class NumberTask:
    """What tasks on the numbers 0 to modulus-1 share: these are tokens themselves; a sign, ``:``, EOS and PAD follow.

    Attributes:
        modulus: how many numbers there are.
        min_terms: fewest terms a prompt asks for; tokens of a response.
        max_terms: most.
        sign: what token ``modulus`` is written as.
    """

    modulus: int
    min_terms: int
    max_terms: int

    sign: ClassVar[str]

    @classmethod
    def of(cls, env: EnvConfig) -> Self:
        """The task that a recipe describes."""
        return cls(env.modulus, env.min_terms, env.max_terms)

    @property
    def sign_id(self) -> int:
        """The sign of the task's own."""
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
        """Padding; also a token that the policy can sample, always wrong."""
        return self.modulus + 3

    @property
    def vocab_size(self) -> int:
        """Numbers and the four signs."""
        return self.modulus + 4

    @property
    def chance(self) -> float:
        """Expected reward of numbers drawn uniformly at random, never ending early: each is right with 1/modulus."""
        return 1.0 / self.modulus

    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens as a user reads them, such as ``3 + 4 : 7 1 5 <eos>``."""
        signs = {self.sign_id: self.sign, self.colon_id: ":", self.eos_id: "<eos>", self.pad_id: "<pad>"}
        return " ".join(signs.get(token, str(token)) for token in token_ids)


@dataclass(frozen=True)
class Progressions(NumberTask):
    """Continue ``start, start + step, …`` modulo ``modulus``."""

    prompt_width = 4
    sign = "+"

    @property
    def plus_id(self) -> int:
        """Token ``+``."""
        return self.sign_id

    def sample(self, count: int, generator: torch.Generator) -> Prompts:
        """Draw ``count`` prompts: start, step (never 0) and number of terms, each uniform."""

        def draw(low: int, high: int) -> Tensor:
            return torch.randint(low, high + 1, (count,), generator=generator)

        start, step = draw(0, self.modulus - 1), draw(1, self.modulus - 1)
        terms = draw(self.min_terms, self.max_terms)
        plus, colon = torch.full_like(start, self.plus_id), torch.full_like(start, self.colon_id)
        return Prompts(torch.stack([start, plus, step, colon], dim=1), terms)

    def reward(self, prompt: Sequence[int], response: Sequence[int], terms: int) -> float:
        """Fraction of the asked terms that continue the progression from the token before them, in [0, 1].

        Args:
            prompt: the prompt's tokens, as drawn by :meth:`sample`.
            response: the tokens sampled after it, with or without EOS; anything after EOS is ignored.
            terms: how many terms were asked for; terms beyond are ignored.
        """
        before, step = prompt[0], prompt[2]
        correct = 0
        for token in response[:terms]:
            if token == self.eos_id:
                break
            # A sign in the place of a number has no successor: the term after it counts as wrong too.
            correct += before < self.modulus and token == (before + step) % self.modulus
            before = token
        return correct / terms
