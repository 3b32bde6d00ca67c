"""Verdicts on the runs in some folders, once or while they train: by their records, or else by their logged metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Literal, NamedTuple

from nemo_geomask.errors import DataError, GeomaskError, MissingDependencyError
from nemo_geomask.tools.diagnose.explain.logged_verdict import expected_names, judge_logged
from nemo_geomask.tools.diagnose.explain.run_diagnosis import RunDiagnosis
from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.run_survey import survey_run
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
    def healths(self) -> list[OverallHealth]:
        """Health of every run and folder."""
        return [run.health for run in self.judged] + [verdict.health for verdict in self.fallbacks.values()]

    @property
    def worst_health(self) -> OverallHealth:
        """The worst of :attr:`healths`; a run that could not be judged is worse than a drifting one."""
        return max(self.healths, key=_HEALTH_ORDER.index)


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
    if not series:
        return FallbackVerdict("unknown", records_error)
    try:
        verdict = judge_logged(series)
    except DataError as metrics_error:
        return FallbackVerdict("unknown", f"{directory}: {metrics_error}")
    if verdict is None:
        return FallbackVerdict(
            "unknown",
            f"{records_error}; its logged metrics ({shorten(', '.join(series), 100)}) hold none that tells the "
            f"mismatch; expected one of {expected_names()}",
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


class Poll(NamedTuple):
    """Verdicts on all runs and folders, those that differ from the previous poll's, and whether a step was added."""

    verdicts: RunVerdicts
    changed: RunVerdicts
    has_new_steps: bool


class RunWatcher:
    """Poller of folders, with the statistics of each run so far and the verdicts that the previous poll reported."""

    def __init__(self, directories: Sequence[Path], cache: Path | None, skip_damaged: bool) -> None:
        self._directories = directories
        self._skip_damaged = skip_damaged
        self._cache = cache
        self._statistics: dict[Path, RunStatistics] = {}
        self._file_states: dict[Path, tuple[int, int]] = {}
        self._reported_runs: dict[Path, tuple[str, int | None, bool]] = {}
        self._reported_fallbacks: dict[Path, str] = {}

    def poll(self) -> Poll:
        """Add the new complete steps of each run to its statistics, and judge all runs."""
        runs, fallbacks = find_recorded_runs(self._directories, skip_damaged=self._skip_damaged)
        verdicts = RunVerdicts(fallbacks=fallbacks)
        has_new_steps = False
        for run in runs:
            statistics = self._statistics.setdefault(run.directory, RunStatistics())
            steps = [step for step in run.steps if step not in statistics.steps and self._is_complete(run, step)]
            count = len(statistics.steps)
            if steps and (errors := _add_steps(statistics, run, steps, self._cache)):
                verdicts.fallbacks[run.directory] = FallbackVerdict("unknown", "\n".join(errors))
            has_new_steps |= len(statistics.steps) > count  # False if the new files hold no sequence
            if statistics.steps:
                verdicts.judged.append(JudgedRun(run, diagnose(statistics)))
        return Poll(verdicts, self._changed(verdicts), has_new_steps)

    def _changed(self, verdicts: RunVerdicts) -> RunVerdicts:
        """Return the verdicts that the previous poll did not report, and remember all of them as reported."""
        run_keys = {
            run.files.directory: (run.diagnosis.health, run.diagnosis.since, bool(run.diagnosis.unjudged_reason))
            for run in verdicts.judged
        }
        # A verdict by metrics counts as changed only if its health does: the numbers in its sentence always change.
        fallback_keys = {
            folder: verdict.explanation if verdict.health == "unknown" else verdict.health
            for folder, verdict in verdicts.fallbacks.items()
        }
        new_runs = {folder for folder, key in run_keys.items() if self._reported_runs.get(folder) != key}
        new_fallbacks = {folder for folder, key in fallback_keys.items() if self._reported_fallbacks.get(folder) != key}
        changed = RunVerdicts(
            [run for run in verdicts.judged if run.files.directory in new_runs],
            {folder: verdict for folder, verdict in verdicts.fallbacks.items() if folder in new_fallbacks},
        )
        self._reported_runs |= run_keys
        self._reported_fallbacks = fallback_keys
        return changed

    def _is_complete(self, run: RunFiles, step: int) -> bool:
        """Return True if the step's files have not changed since the previous poll."""
        paths = run.paths([step])
        before = [self._file_states.get(path) for path in paths]
        states = []
        for path in paths:
            try:
                status = path.stat()
            except OSError:  # deleted meanwhile
                return False
            states.append((status.st_size, status.st_mtime_ns))
            self._file_states[path] = states[-1]
        return before == states


def _add_steps(statistics: RunStatistics, run: RunFiles, steps: Sequence[int], cache: Path | None) -> list[str]:
    """Add steps to a run's statistics; return the errors of those that cannot be read."""
    try:
        statistics.add(survey_run(run, steps, cache))
    except MissingDependencyError:
        raise
    except GeomaskError as error:
        if len(steps) == 1:
            return [str(error)]
        # Find the step with the error, and add the others.
        return [message for step in steps for message in _add_steps(statistics, run, [step], cache)]
    return []
