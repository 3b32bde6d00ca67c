"""Statistics of a whole run: sums of every step, and a table of tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nemo_geomask.tools.diagnose.measure.step_sums import StepSums
from nemo_geomask.tools.diagnose.measure.token_table import MAX_TOKENS, TokenTable, join_tables

WORST_COUNT = 8
"""Number of worst tokens, and of worst sequences, that are kept of a run."""
ENGINES = ("sampler", "trainer")
"""Facts of a record that describe an engine and its precision."""


class WorstToken(NamedTuple):
    """One of the tokens with the largest |Δ|; ``context`` holds the ids of the tokens up to and including it."""

    abs_delta: float
    step: int
    row: int
    position: int
    gen: float
    prev: float
    context: tuple[int, ...]


class WorstSequence(NamedTuple):
    """One of the sequences with the largest mean |Δ|; ``tokens`` counts its trained tokens."""

    mean_abs_delta: float
    step: int
    row: int
    group: int
    tokens: int
    k1: float


@dataclass
class RunStatistics:
    """Statistics from which a diagnosis is made."""

    steps: dict[int, StepSums] = field(default_factory=dict)
    tables: list[TokenTable] = field(default_factory=list)  # tables of the tokens without faults; see tokens
    experts: int | None = None  # number of experts of the model, 0 for none; None if nothing says it
    engines: dict[str, set[str]] = field(default_factory=dict)  # descriptions by the keys of ENGINES
    # worst_tokens, worst_sequences: the WORST_COUNT worst tokens and sequences of the run, worst first
    worst_tokens: list[WorstToken] = field(default_factory=list)
    worst_sequences: list[WorstSequence] = field(default_factory=list)
    files: int = 0  # number of files, those that were left out included
    left_out: dict[Path, str] = field(default_factory=dict)  # damaged files that were left out, with the error of each
    superseded: int = 0  # number of files left out because a later recording has begun their steps again

    def add(self, other: RunStatistics) -> None:
        """Add the statistics of another part of the run; the order of additions changes only the rounding."""
        for step, sums in other.steps.items():
            self.steps.setdefault(step, StepSums()).add(sums)
        self.tables += other.tables
        if sum(len(table) for table in self.tables) > 2 * MAX_TOKENS:
            self.tables = [join_tables(self.tables)]
        self.experts = other.experts if self.experts is None else self.experts
        for role, descriptions in other.engines.items():
            self.engines.setdefault(role, set()).update(descriptions)
        self.worst_tokens = heapq.nlargest(WORST_COUNT, [*self.worst_tokens, *other.worst_tokens])
        self.worst_sequences = heapq.nlargest(WORST_COUNT, [*self.worst_sequences, *other.worst_sequences])
        self.files += other.files
        self.left_out |= other.left_out
        self.superseded += other.superseded

    @property
    def tokens(self) -> TokenTable:
        """The run's tokens without faults, or a weighted sample of them."""
        if len(self.tables) != 1:
            self.tables = [join_tables(self.tables)]
        return self.tables[0]

    @property
    def file_notes(self) -> list[str]:
        """Notes on the files for a reader of the verdict, in sentences without a full stop; mostly empty."""
        notes = []
        if self.left_out:
            first, *_ = self.left_out.values()
            notes.append(f"{len(self.left_out)} of {self.files} files left out as damaged; the first: {first}")
        if self.superseded:
            notes.append(
                f"{self.superseded} files of an earlier recording left out, whose steps a later one took again"
            )
        return notes

    def total(self, steps: Iterable[int] | None = None) -> StepSums:
        """Return the sums over some steps, or over all steps for None."""
        total = StepSums()
        for step in self.steps if steps is None else steps:
            total.add(self.steps[step])
        return total
