"""Statistics of a whole run: sums of every step, and of windows of steps split by dimension."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.measure.dimensions import DIMENSIONS
from nemo_geomask.tools.diagnose.measure.step_sums import StepSums, add_by_key
from nemo_geomask.tools.diagnose.measure.thresholds import BIN_SUMS
from nemo_geomask.tools.diagnose.measure.token_table import MAX_TOKENS, TokenTable, join_tables
from nemo_geomask.tools.diagnose.read.record_reader import Array

MAX_WINDOWS = 128
"""Largest number of windows of a run."""
MAX_ENVIRONMENTS = 50
"""Largest number of environments whose sums are kept apart; they are the first ones in the order of their names.

An environment that is among the first ones of a run is so in each part of it, too. Its sums are therefore exact, in
whatever order the parts are added.
"""
OTHER_ENVIRONMENTS = ""
"""Key of the sums over all further environments; no environment's name is empty."""
WORST_COUNT = 8
"""Number of worst tokens, and of worst sequences, that are kept of a run."""


def _empty_bins() -> dict[str, Array]:
    return {dimension.name: np.zeros((dimension.bin_count, len(BIN_SUMS))) for dimension in DIMENSIONS}


@dataclass
class Window:
    """Sums over a few successive steps, split into the bins of each dimension, without tokens with faulty log-probs."""

    # by dimension, [bins, len(BIN_SUMS)]; by a pair first,second, [bins of first × bins of second, len(BIN_SUMS)]
    bin_sums: dict[str, Array] = field(default_factory=_empty_bins)
    # by name of the environment, or OTHER_ENVIRONMENTS, [len(BIN_SUMS)]
    environment_sums: dict[str, Array] = field(default_factory=dict)

    def add(self, other: Window) -> None:
        """Add the sums of another window."""
        add_by_key(self.bin_sums, other.bin_sums)
        add_by_key(self.environment_sums, other.environment_sums)
        for name in sorted(self.environments)[MAX_ENVIRONMENTS:]:
            add_by_key(self.environment_sums, {OTHER_ENVIRONMENTS: self.environment_sums.pop(name)})

    @property
    def environments(self) -> set[str]:
        """Names of the environments whose sums are kept apart."""
        return {*self.environment_sums} - {OTHER_ENVIRONMENTS}

    def by_environment(self, names: Sequence[str]) -> Array:
        """Return [len(names) + 1, len(BIN_SUMS)], the sums of each environment, then of all others together."""
        empty = np.zeros(len(BIN_SUMS))
        others = [sums for name, sums in self.environment_sums.items() if name not in names]
        return np.stack([*(self.environment_sums.get(name, empty) for name in names), sum(others, empty)])

    @property
    def is_empty(self) -> bool:
        """True if the window holds no token."""
        return not self.bin_sums["probability"].any()


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
    """Statistics from which a diagnosis is made.

    Attributes:
        windows: windows of ``width`` successive steps, by the number of their first step. The width doubles
            whenever there are more than ``MAX_WINDOWS``, which bounds memory.
    """

    steps: dict[int, StepSums] = field(default_factory=dict)
    windows: dict[int, Window] = field(default_factory=dict)
    width: int = 1
    tables: list[TokenTable] = field(default_factory=list)  # tables of the tokens without faults; see tokens
    experts: int | None = None  # number of experts of the model, 0 for none; None if nothing says it
    # worst_tokens, worst_sequences: the WORST_COUNT worst tokens and sequences of the run, worst first
    worst_tokens: list[WorstToken] = field(default_factory=list)
    worst_sequences: list[WorstSequence] = field(default_factory=list)
    files: int = 0  # number of files, those that were left out included
    left_out: dict[Path, str] = field(default_factory=dict)  # damaged files that were left out, with the error of each
    # files that were left out because a later recording has begun their steps again
    superseded: set[Path] = field(default_factory=set)
    without_checksum: int = 0  # number of files without a checksum, which earlier versions wrote

    def add(self, other: RunStatistics) -> None:
        """Add the statistics of another part of the run; the order of additions changes only the rounding."""
        for step, sums in other.steps.items():
            self.steps.setdefault(step, StepSums()).add(sums)
        self.tables += other.tables
        if sum(len(table) for table in self.tables) > 2 * MAX_TOKENS:
            self.tables = [join_tables(self.tables)]
        self.experts = other.experts if self.experts is None else self.experts
        self._widen(other.width)
        for first_step, window in other.windows.items():
            self.windows.setdefault(self.window_start(first_step), Window()).add(window)
        while len(self.windows) > MAX_WINDOWS:
            self._widen(2 * self.width)
        self.worst_tokens = heapq.nlargest(WORST_COUNT, [*self.worst_tokens, *other.worst_tokens])
        self.worst_sequences = heapq.nlargest(WORST_COUNT, [*self.worst_sequences, *other.worst_sequences])
        self.files += other.files
        self.left_out |= other.left_out
        self.superseded |= other.superseded
        self.without_checksum += other.without_checksum

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
                f"{len(self.superseded)} files of an earlier recording left out, whose steps a later one took again"
            )
        if self.without_checksum:
            notes.append(
                f"{self.without_checksum} of {self.files} files have no checksum, as those of earlier versions, so "
                "that a damaged value in them can't be told"
            )
        return notes

    def window_start(self, step: int) -> int:
        """Return the first step of the window that a step belongs to."""
        return step // self.width * self.width

    def _widen(self, width: int) -> None:
        if width <= self.width:
            return
        narrow_windows, self.width, self.windows = self.windows, width, {}
        for first_step, window in sorted(narrow_windows.items()):
            self.windows.setdefault(self.window_start(first_step), Window()).add(window)

    def total(self, steps: Iterable[int] | None = None) -> StepSums:
        """Return the sums over some steps, or over all steps for None, without the sums of prompt groups."""
        total = StepSums()
        for step in self.steps if steps is None else steps:
            total.add(self.steps[step])
            total.groups = {}
        return total

    def merge_windows(self, first: float = -np.inf, end: float = np.inf) -> Window:
        """Return the sum of the windows whose first step is at least ``first`` and less than ``end``."""
        merged = Window()
        for first_step, window in self.windows.items():
            if first <= first_step < end:
                merged.add(window)
        return merged
