"""Poller of ``diagnose --watch``, which adds each step of a running training once its files are complete."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nemo_geomask.errors import GeomaskError, MissingDependencyError
from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.run_survey import survey_run
from nemo_geomask.tools.diagnose.read.record_sources import RunFiles
from nemo_geomask.tools.diagnose.report.run_verdicts import (
    FallbackVerdict,
    JudgedRun,
    RunVerdicts,
    find_recorded_runs,
)


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
