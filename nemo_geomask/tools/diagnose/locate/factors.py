"""Factors that the mismatch is decomposed over: each divides the trained tokens into levels that can be described."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_geomask.tools.diagnose.measure.dimensions import SURPRISE_EDGES
from nemo_geomask.tools.diagnose.measure.token_table import TokenTable
from nemo_geomask.tools.diagnose.read.record_reader import Array

COUNT_EDGES = np.unique(np.round(2 ** (np.arange(1, 161) / 8)).astype(np.int64))
"""Edges between the bins of positions and lengths: 1, 2, 3, …, 8, 10, …, each bin a tenth as wide as its numbers."""
TURN_EDGES = np.arange(1, 6)
MAX_LEVELS = {"token_id": 64, "sequence": 4096}
"""Largest number of levels of a factor; they are the ones with the largest mismatch, and one more holds all others."""


@dataclass(frozen=True)
class Levels:
    """Levels of a factor in a table.

    Attributes:
        values: value of each level in ascending order; of a bin, its lowest number and the first above it or None.
    """

    of_token: Array  # [M], the level of each token; −1 where the factor is not recorded
    values: Sequence[Any]


@dataclass(frozen=True)
class Factor:
    """A property of a token or of its sequence.

    Attributes:
        read: returns the property: [S], or [M] if ``is_of_token``; NaN or None where it is not recorded.
        describe: phrase for the tokens of some levels, from their values and the number of all levels.
    """

    id: str  # identifier for programs
    read: Callable[[TokenTable], Array]
    describe: Callable[[Sequence[Any], int], str]
    edges: Array | None = None  # edges of bins for numbers, of which a range is sought; None: any levels are chosen
    needs: str = ""  # data that must be recorded for it; empty if every record has it
    is_of_token: bool = False  # True if it distinguishes the tokens of one sequence
    is_coarse: bool = True  # True if it may be crossed with another one

    def divide(self, table: TokenTable) -> Levels | None:
        """Divide a table; None if it holds fewer than two levels."""
        values = self.read(table)
        present = None if self.is_of_token else np.bincount(table.sequence, minlength=len(table.step)) > 0
        if values.dtype == object:
            is_known = np.array([value is not None for value in values], bool)
        else:
            is_known = np.isfinite(values.astype(float))
        if present is not None:
            is_known &= present
        if self.edges is not None:
            values = np.digitize(values, self.edges)
        recorded = values[is_known]
        recorded = recorded.astype(str) if recorded.dtype == object else recorded
        unique, inverse = np.unique(recorded, return_inverse=True)
        if len(unique) < 2:
            return None
        level = np.full(len(values), -1)
        level[is_known] = inverse
        of_token = level if self.is_of_token else level[table.sequence]
        if self.edges is not None:
            # The outermost bins are open: nothing lies beyond them.
            bounds = [0, *self.edges.tolist()]
            highs = [bounds[bin_ + 1] for bin_ in unique[:-1].tolist()]
            return Levels(of_token, list(zip([0, *(bounds[bin_] for bin_ in unique[1:])], [*highs, None], strict=True)))
        most = MAX_LEVELS.get(self.id)
        if most is None or len(unique) <= most:
            return Levels(of_token, unique.tolist())
        mismatch = np.bincount(of_token[of_token >= 0], (table.weight * table.capped_abs)[of_token >= 0])
        chosen = np.sort(np.argsort(-mismatch, kind="stable")[:most])
        number = np.full(len(unique) + 1, most)
        number[chosen] = np.arange(most)
        number[-1] = -1
        return Levels(number[of_token], [*unique[chosen].tolist(), None])

    def contains(self, table: TokenTable, values: Sequence[Any]) -> Array:
        """Return bool [M], the tokens of any table in the levels with these values."""
        read = self.read(table)
        if self.edges is not None:
            low, high = values[0][0], values[-1][1]
            flags = (read >= low) & (read < (math.inf if high is None else high))
        elif read.dtype == object:
            flags = np.array([value in values for value in read], bool)
        else:
            flags = np.isin(read, [value for value in values if value is not None])
        members: Array = flags if self.is_of_token else flags[table.sequence]
        return members


def list_names(names: Sequence[Any], most: int = 4) -> str:
    """Return names as a list, with the number of further ones if there are many."""
    texts = [f"{name:g}" if isinstance(name, float) else str(name) for name in names]
    if len(texts) > most:
        return f"{', '.join(texts[:most])} and {len(texts) - most} more"
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _span(values: Sequence[Any]) -> tuple[Any, Any]:
    return values[0][0], values[-1][1]


def _numbers(low: int, high: int | None) -> str:
    if high is None:
        return f"{low} and more"
    return f"{low}" if high - 1 == low else f"{low} to {high - 1}"


def _describe_position(values: Sequence[Any], _: int) -> str:
    low, high = _span(values)
    if low == 0:
        return "the first token of the response" if high == 1 else f"the first {high} tokens of the response"
    if high is None:
        return f"tokens late in the response (from position {low} on)"
    return f"tokens at positions {_numbers(low, high)} of the response"


def _describe_end(values: Sequence[Any], _: int) -> str:
    low, high = _span(values)
    if low == 0:
        return "the last token of the response" if high == 1 else f"the last {high} tokens of the response"
    return f"tokens {_numbers(low, high)} before the end of the response"


def _describe_probability(values: Sequence[Any], _: int) -> str:
    low, high = _span(values)
    if high is None:
        return f"low-probability tokens (below {math.exp(-low):.2g})"
    if low == 0:
        return f"tokens with a probability above {math.exp(-high):.3g}"
    return f"tokens with a probability from {math.exp(-high):.2g} to {math.exp(-low):.2g}"


def describe_steps(values: Sequence[Any], count: int) -> str:
    """Return a phrase for some of a run's steps, which may be a range or recur at a fixed distance."""
    steps = sorted(int(value) for value in values)
    gaps = set(np.diff(steps).tolist())
    if len(steps) == 1:
        return f"step {steps[0]}"
    if gaps == {1}:
        return f"steps {steps[0]} to {steps[-1]}"
    if len(gaps) == 1 and len(steps) >= 3:
        gap = gaps.pop()
        ordinal = {2: "second", 3: "third"}.get(gap, f"{gap}th")
        return f"every {ordinal} step ({list_names(steps)})"
    return f"steps {list_names(steps, 8)} ({len(steps)} of {count})"


def _describe_groups(values: Sequence[Any], _: int) -> str:
    if len(values) == 1:
        return f"prompt group {values[0]:g}"
    return f"{len(values)} prompt groups ({list_names(values)})"


def _describe_turns(values: Sequence[Any], _: int) -> str:
    low, high = _span(values)
    if low == 0:
        return "the first turn" if high == 1 else f"the first {high} turns"
    if low == 1 and high is None:
        return "tokens after tool calls"
    return f"tokens after tool calls (turn {_numbers(low + 1, None if high is None else high + 1)})"


def _describe_staleness(values: Sequence[Any], _: int) -> str:
    low, high = _span(values)
    return "fresh samples" if (low, high) == (0, 1) else f"samples of age {_numbers(low, high)} in rollout batches"


def _lengths(low: int, high: int | None) -> str:
    return f"of fewer than {high} tokens" if low == 0 else f"of {_numbers(low, high)} tokens"


def _describe_response(values: Sequence[Any], _: int) -> str:
    return f"responses {_lengths(*_span(values))}"


def _describe_length(values: Sequence[Any], _: int) -> str:
    return f"sequences {_lengths(*_span(values))}, prompts included"


def _describe_beginnings(values: Sequence[Any], _: int) -> str:
    return "the first token of each turn" if values[0] else "all tokens but the first of each turn"


def _describe_ids(values: Sequence[Any], _: int) -> str:
    ids = [value for value in values if value is not None]
    return f"token id {ids[0]}" if len(ids) == 1 else f"token ids {list_names(ids)}"


def _describe_advantages(values: Sequence[Any], _: int) -> str:
    words = {-1.0: "negative", 0.0: "zero", 1.0: "positive"}
    return f"responses with a {' or '.join(words[value] for value in values)} advantage"


def _some_of(name: str) -> Callable[[Sequence[Any], int], str]:
    return lambda values, count: f"{len(values)} of {count} {name}"


def _number(name: str) -> Callable[[TokenTable], Array]:
    return lambda table: table.numbers[name]


def _name(name: str) -> Callable[[TokenTable], Array]:
    return lambda table: table.names[name]


def _beginnings(table: TokenTable) -> Array:
    """Return whether each token is the first of its turn; not known if there is one turn, whose first is a position."""
    flags: Array = table.begins_turn.astype(float)
    return flags if table.turn.any() else np.full(len(table), np.nan)


def _prompts(table: TokenTable) -> Array:
    """Return a number of each prompt in each step."""
    prompts: Array = table.step * 2.0**24 + table.numbers["group"]
    return prompts


FACTORS: tuple[Factor, ...] = (
    Factor(
        "environment",
        _name("environment"),
        lambda values, _: f"environment {list_names(values)}",
        needs="the environment of each prompt (NeMo-Gym's agent)",
    ),
    Factor(
        "replica",
        _name("replica"),
        lambda values, _: f"replica {list_names(values)} of the generation engine",
        needs="the replica that generated each sequence",
    ),
    Factor(
        "staleness",
        _number("staleness"),
        _describe_staleness,
        np.arange(1, 33),
        "samples of several ages, with the staleness of each (loss_fn.record in asynchronous GRPO)",
    ),
    Factor("step", lambda table: table.step, describe_steps, needs="several steps", is_coarse=False),
    Factor("first_of_turn", _beginnings, _describe_beginnings, needs="several turns", is_of_token=True),
    Factor("position", lambda table: table.position, _describe_position, COUNT_EDGES, is_of_token=True),
    Factor("from_end", lambda table: table.from_end, _describe_end, COUNT_EDGES, is_of_token=True),
    Factor("turn", lambda table: table.turn, _describe_turns, TURN_EDGES, "several turns", is_of_token=True),
    Factor("probability", lambda table: table.surprise, _describe_probability, SURPRISE_EDGES, is_of_token=True),
    Factor("token_id", lambda table: table.token, _describe_ids, is_of_token=True, is_coarse=False),
    Factor("response", _number("response"), _describe_response, COUNT_EDGES, "responses of several lengths"),
    Factor("length", _number("length"), _describe_length, COUNT_EDGES, "sequences of several lengths"),
    Factor("group", _number("group"), _describe_groups, needs="several prompts", is_coarse=False),
    Factor("prompt", _prompts, _some_of("prompts"), needs="several prompts", is_coarse=False),
    Factor("advantage", lambda table: np.sign(table.numbers["advantage"]), _describe_advantages, needs="advantages"),
    Factor(
        "sequence",
        lambda table: np.arange(len(table.step)),
        _some_of("sequences"),
        needs="several sequences",
        is_coarse=False,
    ),
)
"""All factors; of two that explain each other, the first is named unless the second holds more information."""
FACTORS_BY_ID = {factor.id: factor for factor in FACTORS}
