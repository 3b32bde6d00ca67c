"""Table of a run's trained tokens, with all that is recorded of each: what the search for places and causes reads.

A run has more tokens than fit in memory, and few of them make up the mismatch. The table is a Poisson sample: a token
is kept with a probability in proportion to its mismatch, plus a part of its expected mismatch, and weighted by the
inverse of that probability (Horvitz and Thompson 1952), so that weighted sums are unbiased. Up to ``MAX_TOKENS``
tokens, all are kept and every weight is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from nemo_geomask.tools.diagnose.measure.bootstrap_draws import GOLDEN_GAMMA, mix_bits, poisson_draws, uniform_bits
from nemo_geomask.tools.diagnose.measure.token_values import MAX_CAPPED_ABS, TrainedTokens, k3
from nemo_geomask.tools.diagnose.read.record_reader import Array

MAX_TOKENS = 2**16
"""Largest number of tokens in a table."""
EXPECTED_SHARE = 0.02
"""Weight of the expected mismatch, 1 − p, in the probability that a token is kept."""
ALL_KEPT = 2.0**20
"""Sampling rate at which every token is kept."""
REPLICATES = 50
"""Number of bootstrap replicates over sequences; they are the first ones of :class:`StepSums`."""

SEQUENCE_NUMBERS = ("group", "staleness", "reward", "length", "after_prompt", "response", "advantage")
"""Numbers recorded of a sequence; NaN where they are not.

``length`` counts all its tokens, ``after_prompt`` those after the prompt, ``response`` those that train;
``advantage`` is the mean over the latter.
"""
SEQUENCE_NAMES = ("environment", "replica")
"""Names recorded of a sequence; None where they are not."""


@dataclass(frozen=True, eq=False)
class SequenceColumns:
    """Recorded properties of S sequences."""

    step: Array  # int64 [S]
    row: Array  # int64 [S]
    numbers: Mapping[str, Array]  # by name of SEQUENCE_NUMBERS, float64 [S]
    names: Mapping[str, Array]  # by name of SEQUENCE_NAMES, object [S]

    @cached_property
    def draws(self) -> Array:
        """uint8 [REPLICATES, S], how often each bootstrap replicate contains each sequence."""
        draws = np.zeros((REPLICATES, len(self.step)), np.uint8)
        for step in np.unique(self.step).tolist():
            rows = np.flatnonzero(self.step == step)
            draws[:, rows] = poisson_draws(step, self.row[rows], REPLICATES)
        return draws


@dataclass(frozen=True, eq=False)
class TokenTable:
    """M trained tokens, with finite and sound log-probs of both engines, their sequences, and maybe others."""

    sequences: SequenceColumns
    sequence: Array  # int32 [M], index of the token's sequence
    position: Array  # int32 [M], number of response tokens before it, trained or not
    from_end: Array  # int32 [M], number of trained tokens of the sequence after it
    turn: Array  # int32 [M], number of the sequence's trained turns before it
    begins_turn: Array  # bool [M], True for the first token of a turn
    is_repeated: Array  # bool [M], True if the sequence has the same id before it, prompt included
    token: Array  # int32 [M], its id
    gen: Array  # float32 [M], log-prob by the generation engine, nats
    delta: Array  # float32 [M], log-prob by the training engine minus gen, nats
    advantage: Array  # float32 [M], NaN where it was not recorded
    entropy: Array  # float32 [M], entropy of the training engine's distribution, nats; NaN where it was not recorded
    weight: Array  # float32 [M], inverse of the probability with which the token was kept
    rate: float = ALL_KEPT  # sampling rate of the table

    @property
    def step(self) -> Array:
        """[S], the step of each sequence."""
        return self.sequences.step

    @property
    def numbers(self) -> Mapping[str, Array]:
        """Numbers recorded of the sequences."""
        return self.sequences.numbers

    @property
    def names(self) -> Mapping[str, Array]:
        """Names recorded of the sequences."""
        return self.sequences.names

    def __len__(self) -> int:
        return len(self.delta)

    @property
    def capped_abs(self) -> Array:
        """min(|Δ|, 1) of each token: its mismatch."""
        return np.minimum(np.abs(self.delta), np.float32(MAX_CAPPED_ABS)).astype(float)

    @property
    def k3(self) -> Array:
        """exp(Δ) − 1 − Δ of each token, nats."""
        return k3(self.delta.astype(float))

    @property
    def one_minus_p(self) -> Array:
        """1 − p of each token: noise on the logits moves its log-prob in proportion to it."""
        values: Array = -np.expm1(np.minimum(self.gen, 0).astype(float)) + 1e-3
        return values

    @property
    def surprise(self) -> Array:
        """−gen of each token, nats, at least 0."""
        values: Array = np.maximum(-self.gen.astype(float), 0.0)
        return values

    def select(self, is_kept: Array) -> TokenTable:
        """Return the tokens that a bool array [M] marks; the sequences keep their indices."""
        return replace(self, **{name: getattr(self, name)[is_kept] for name in _TOKEN_COLUMNS})

    def select_sequences(self, is_kept: Array) -> TokenTable:
        """Return the tokens of the sequences that a bool array [S] marks."""
        return self.select(is_kept[self.sequence])

    def thin(self, rate: float) -> TokenTable:
        """Return a sample of the tokens at a lower sampling rate, the same whatever the order of earlier ones."""
        if rate >= self.rate:
            return self
        size = self.capped_abs + EXPECTED_SHARE * self.one_minus_p
        probability = np.minimum(rate * size, 1.0)
        is_kept = self._uniform() < probability
        return replace(self.select(is_kept), weight=(1 / probability[is_kept]).astype(np.float32), rate=rate)

    def _uniform(self) -> Array:
        """Return [M] numbers in [0, 1) that depend only on a token's step, row and position."""
        with np.errstate(over="ignore"):  # integer overflow is part of the hash
            columns = self.sequences
            owner = columns.row.astype(np.uint64) + columns.step.astype(np.uint64) * GOLDEN_GAMMA
            return uniform_bits(mix_bits(owner)[self.sequence] + self.position.astype(np.uint64) * GOLDEN_GAMMA)


_TOKEN_COLUMNS = (
    *("sequence", "position", "from_end", "turn", "begins_turn", "is_repeated", "token"),
    *("gen", "delta", "advantage", "entropy", "weight"),
)


def tabulate(trained: TrainedTokens, mask: Array, owner: Array) -> TokenTable:
    """Return the table of a block's tokens, all of them.

    ``owner`` is the sequence of each token of the block, and ``mask`` marks those that train, finite or not; turns and
    ends are counted from it.
    """
    block, sequence, index = trained.block, trained.sequence, trained.index
    begins_turn = mask & ~np.concatenate([[False], mask[:-1] & (owner[1:] == owner[:-1])])
    first_token, end = block.offsets[:-1], block.offsets[1:]
    turns_begun, masked_before = (np.concatenate([[0], np.cumsum(flags)]) for flags in (begins_turn, mask))
    prompt_length = trained.column("prompt_length")
    advantages = np.full(len(block), np.nan)
    if trained.advantages is not None and len(index):
        tokens = np.maximum(np.bincount(sequence, minlength=len(block)), 1)
        advantages = np.bincount(sequence, np.nan_to_num(trained.advantages), minlength=len(block)) / tokens
    numbers = {name: trained.column(name) for name in SEQUENCE_NUMBERS}
    trained_tokens = np.bincount(owner[mask], minlength=len(block)).astype(float)
    numbers |= {"advantage": advantages, "response": trained_tokens}
    numbers["after_prompt"] = numbers["length"] - prompt_length
    not_recorded = np.full(len(mask), np.nan, np.float32)
    unknown = np.full(len(block), None, dtype=object)
    ids = block.tokens.get("tokens")
    return TokenTable(
        sequences=SequenceColumns(
            block.sequences["step"].astype(np.int64),
            block.sequences["row"].astype(np.int64),
            numbers,
            {name: block.sequences.get(name, unknown) for name in SEQUENCE_NAMES},
        ),
        sequence=sequence.astype(np.int32),
        position=(index - first_token[sequence] - prompt_length[sequence]).astype(np.int32),
        from_end=(masked_before[end[sequence]] - masked_before[index + 1]).astype(np.int32),
        turn=(turns_begun[index + 1] - turns_begun[first_token[sequence]] - 1).astype(np.int32),
        begins_turn=begins_turn[index],
        is_repeated=np.zeros(len(index), bool) if ids is None else _find_repeated(ids, owner)[index],
        token=np.zeros(len(index), np.int32) if ids is None else ids[index].astype(np.int32),
        gen=trained.gen.astype(np.float32),
        delta=(trained.prev - trained.gen).astype(np.float32),
        advantage=block.tokens.get("advantages", not_recorded)[index].astype(np.float32),
        entropy=block.tokens.get("entropy", not_recorded)[index].astype(np.float32),
        weight=np.ones(len(index), np.float32),
    )


def _find_repeated(ids: Array, owner: Array) -> Array:
    """Return bool [N], the tokens whose id occurs before them in their sequence."""
    order = np.argsort(owner.astype(np.int64) * 2**32 + ids, kind="stable")
    flags = np.zeros(len(ids), bool)
    flags[order[1:]] = (ids[order][1:] == ids[order][:-1]) & (owner[order][1:] == owner[order][:-1])
    return flags


def join_tables(tables: Sequence[TokenTable]) -> TokenTable:
    """Return one table of the tokens of several, at least one, thinned to ``MAX_TOKENS``."""
    rate = min(table.rate for table in tables)
    parts = [table.thin(rate) for table in tables]
    owners = [part.sequences for part in parts]
    starts = np.concatenate([[0], np.cumsum([len(part.step) for part in parts])])
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _TOKEN_COLUMNS}
    columns["sequence"] = np.concatenate(
        [part.sequence + np.int32(start) for part, start in zip(parts, starts[:-1], strict=True)]
    )
    sequences = SequenceColumns(
        np.concatenate([owner.step for owner in owners]),
        np.concatenate([owner.row for owner in owners]),
        {name: np.concatenate([owner.numbers[name] for owner in owners]) for name in SEQUENCE_NUMBERS},
        {name: np.concatenate([owner.names[name] for owner in owners]) for name in SEQUENCE_NAMES},
    )
    return limit_table(TokenTable(sequences, **columns, rate=rate))


def sum_with_replicates(table: TokenTable, values: Array) -> Array:
    """Return [1 + REPLICATES, k], the weighted sums of [M, k] values over the tokens, and their replicates."""
    weighted = values * table.weight[:, None].astype(float)
    count = len(table.step)
    by_sequence = np.stack([np.bincount(table.sequence, column, minlength=count) for column in weighted.T], axis=1)
    sums: Array = np.concatenate([by_sequence.sum(axis=0)[None], table.sequences.draws @ by_sequence])
    return sums


def limit_table(table: TokenTable) -> TokenTable:
    """Return the table, thinned to ``MAX_TOKENS``."""
    rate = table.rate
    while len(table) > MAX_TOKENS:
        rate /= 2
        table = table.thin(rate)
    return table
