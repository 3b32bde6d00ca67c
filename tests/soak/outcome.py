"""What a scenario came to, and the memory that it kept."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, field
from pathlib import Path

MIB = 2**20


def resident_mib() -> float:
    """Memory of this process that is in use after a collection, in MiB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


@dataclass
class Outcome:
    """Result of a scenario.

    Attributes:
        name: what was done.
        done: how often.
        checked: how many of these were compared with an independent answer.
        growth_mib: memory gained over the second half; None if the work was done by other processes.
        limit_mib: the largest growth allowed.
        facts: further numbers, for the report.
        problems: what went wrong; empty if nothing did.
    """

    name: str
    done: int = 0
    checked: int = 0
    growth_mib: float | None = None
    limit_mib: float = 64.0
    facts: dict[str, object] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def failures(self) -> list[str]:
        """The problems, among them memory that grew beyond the limit."""
        if self.growth_mib is not None and self.growth_mib > self.limit_mib:
            return [*self.problems, f"memory grew by {self.growth_mib:.0f} MiB, more than {self.limit_mib:.0f}"]
        return self.problems

    def line(self) -> str:
        """One line for the report."""
        growth = "" if self.growth_mib is None else f"; memory {self.growth_mib:+.1f} MiB over the second half"
        facts = "".join(f"; {name} {value}" for name, value in self.facts.items())
        verdict = "ok" if not self.failures() else f"{len(self.failures())} PROBLEMS"
        return f"{self.name}: {self.done} done, {self.checked} checked{growth}{facts}: {verdict}"
