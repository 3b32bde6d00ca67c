"""Verdicts on the runs in some folders: by their records, or else by their logged metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Literal, NamedTuple

from nemo_geomask.errors import DataError, GeomaskError, MissingDependencyError
from nemo_geomask.tools.diagnose.explain.logged_verdict import expected_names, judge_logged
from nemo_geomask.tools.diagnose.explain.run_diagnosis import RunDiagnosis
from nemo_geomask.tools.diagnose.measure.thresholds import Health
from nemo_geomask.tools.diagnose.read.logged_metrics import read_logged
from nemo_geomask.tools.diagnose.read.record_sources import RunFiles, find_runs

OverallHealth = Literal[Health, "unknown"]
_HEALTH_ORDER: tuple[OverallHealth, ...] = ("healthy", "drifting", "unknown", "broken")
"""Values of :data:`OverallHealth`, from best to worst."""


class JudgedRun(NamedTuple):
    """A run whose records were read, and its diagnosis."""

    files: RunFiles
    diagnosis: RunDiagnosis

    @property
    def health(self) -> OverallHealth:
        """Health by the diagnosis; ``unknown`` if the records do not tell the mismatch."""
        return "unknown" if self.diagnosis.unjudged_reason else self.diagnosis.health


class FallbackVerdict(NamedTuple):
    """Verdict on a folder without readable records, by its logged metrics; why there is none for ``unknown``."""

    health: OverallHealth
    explanation: str

    def sentence(self, folder: Path) -> str:
        """Return the verdict in one line, without the folder's path in front of the error."""
        line = " ".join(self.explanation.removeprefix(f"{folder}: ").splitlines())
        return f"not judged: {line}" if self.health == "unknown" else line


@dataclass
class RunVerdicts:
    """Verdicts on the runs with records, in the order of the folders, and on the other folders."""

    judged: list[JudgedRun] = field(default_factory=list)
    fallbacks: dict[Path, FallbackVerdict] = field(default_factory=dict)

    @property
    def worst_health(self) -> OverallHealth:
        """The worst health of the runs and folders; one that could not be judged is worse than a drifting one."""
        healths = *(run.health for run in self.judged), *(verdict.health for verdict in self.fallbacks.values())
        return max(healths, key=_HEALTH_ORDER.index)


def find_recorded_runs(
    directories: Iterable[Path], *, skip_damaged: bool = False
) -> tuple[list[RunFiles], dict[Path, FallbackVerdict]]:
    """Return the recorded runs in some folders, and a fallback verdict on each folder without any."""
    runs, fallbacks = [], {}
    for directory in directories:
        try:
            runs += find_runs([directory], skip_damaged=skip_damaged)
        except DataError as error:
            fallbacks[directory] = _judge_by_metrics(directory, str(error))
    return runs, fallbacks


def _judge_by_metrics(directory: Path, records_error: str) -> FallbackVerdict:
    try:
        series = read_logged(directory)
    except GeomaskError as metrics_error:
        return FallbackVerdict("unknown", f"{records_error}; {metrics_error}")
    if not series and not (directory / "metrics.jsonl").is_file():
        return FallbackVerdict("unknown", records_error)
    try:
        verdict = judge_logged(series)
    except DataError as metrics_error:
        return FallbackVerdict("unknown", f"{directory}: {metrics_error}")
    if verdict is None:
        return FallbackVerdict(
            "unknown",
            f"{records_error}; its logged metrics ({shorten(', '.join(series) or 'no number', 100)}) hold none that "
            f"tells the mismatch; expected one of {expected_names()}",
        )
    return FallbackVerdict(verdict.health, verdict.sentence)


def judge_runs(
    runs: Sequence[RunFiles], fallbacks: dict[Path, FallbackVerdict], judge: Callable[[RunFiles], RunDiagnosis]
) -> RunVerdicts:
    """Judge each run; a run whose records cannot be read gets a fallback verdict and does not stop the others.

    Raises:
        MissingDependencyError: a package is missing, without which no run can be read.
        DataError: no run and no folder could be judged.
    """
    verdicts = RunVerdicts(fallbacks=dict(fallbacks))
    for run in runs:
        try:
            verdicts.judged.append(JudgedRun(run, judge(run)))
        except MissingDependencyError:
            raise
        except GeomaskError as error:
            verdicts.fallbacks[run.directory] = FallbackVerdict("unknown", str(error))
    if not verdicts.judged and all(verdict.health == "unknown" for verdict in verdicts.fallbacks.values()):
        raise DataError(*(verdict.explanation for verdict in verdicts.fallbacks.values()))
    return verdicts
