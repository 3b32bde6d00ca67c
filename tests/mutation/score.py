"""What became of a room's mutants: the score, and the survivors that are not known to be equivalent."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
EQUIVALENTS = FOLDER / "equivalents.toml"
SLOW_TESTS = "MUTATION_SLOW_TESTS"
"""Environment variable with beginnings of the names of slow tests that take part, separated by commas."""
DETECTED = ("killed", "timeout", "segfault", "suspicious")
"""Statuses of a mutant whose tests did not pass."""


def read_rooms() -> dict[str, dict[str, list[str]]]:
    """Return the sources and tests of each room."""
    return tomllib.loads((FOLDER / "rooms.toml").read_text(encoding="utf-8"))


class Equivalent(NamedTuple):
    """A change of one line that alters no result, or none that the package promises."""

    file: str
    was: str
    becomes: str
    reason: str


class Elsewhere(NamedTuple):
    """A function whose code runs only where mutation testing does not, as on a GPU; ``*`` for all of a file."""

    file: str
    function: str
    reason: str


class Argument(NamedTuple):
    """A keyword argument that changes no result on a CPU, or only turns a mistake of our own into an error."""

    name: str
    reason: str


class Exempt(NamedTuple):
    """The changes that need not be noticed."""

    changes: list[Equivalent]
    functions: list[Elsewhere]
    arguments: list[Argument]


def read_equivalents() -> Exempt:
    """Return the changes that are known to be equivalent, or that nothing here can notice."""
    entries = tomllib.loads(EQUIVALENTS.read_text(encoding="utf-8"))
    return Exempt(
        [Equivalent(**entry) for entry in entries.get("equivalent", [])],
        [Elsewhere(**entry) for entry in entries.get("elsewhere", [])],
        [Argument(**entry) for entry in entries.get("argument", [])],
    )


@dataclass(frozen=True)
class Mutant:
    """One change, and what became of it: ``killed``, ``survived``, ``no tests``, ``timeout``, …"""

    name: str
    file: str
    status: str
    diff: str = ""

    @property
    def change(self) -> tuple[str, str]:
        """The lines that were removed and those that were added, without indentation."""
        lines = [line for line in self.diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
        return tuple(" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")

    def is_equivalent(self, exempt: Exempt) -> bool:
        """Return True if the change is a listed one of the same file, in a listed function, or of a listed argument."""
        if (self.file, *self.change) in {entry[:3] for entry in exempt.changes}:
            return True
        mangled = self.name.rpartition("__mutmut_")[0].rpartition(".")[2]  # x_function, or xǁClassǁmethod
        function = mangled.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
        if {(self.file, function), (self.file, "*")} & {entry[:2] for entry in exempt.functions}:
            return True
        was, becomes = (_without_arguments(text, [entry.name for entry in exempt.arguments]) for text in self.change)
        return was == becomes


def _without_arguments(text: str, names: list[str]) -> str:
    """Return a line of code without some keyword arguments, and without the commas before them."""
    value = r"[^(),=]+(?:\([^()]*\))?"
    text = re.sub(rf",?\s*\b(?:{'|'.join(names)})={value}(?=[,)]|$)", "", text)
    return re.sub(r",?\s*(?=\)|$)", "", text)


@dataclass(frozen=True)
class Score:
    """Outcomes of a sample of a room's mutants."""

    room: str
    population: int
    outcomes: list[Mutant]

    def survivors(self, equivalents: Exempt) -> list[Mutant]:
        """Return the mutants that no test noticed, without the equivalent ones."""
        return [
            mutant
            for mutant in self.outcomes
            if mutant.status not in DETECTED and not mutant.is_equivalent(equivalents)
        ]

    def summary(self, equivalents: Exempt) -> str:
        """Return one line: how many of the mutants that are not equivalent were noticed."""
        detected = sum(mutant.status in DETECTED for mutant in self.outcomes)
        judged = detected + len(self.survivors(equivalents))
        share = f"{detected / judged:.1%}" if judged else "none"
        return (
            f"{self.room}: {detected} of {judged} noticed ({share}); {len(self.outcomes) - judged} equivalent; "
            f"{len(self.outcomes)} of {self.population} mutants tested"
        )
