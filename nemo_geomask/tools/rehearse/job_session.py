"""Workers of NeMo-RL that stay for several jobs of another tool, one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.rehearse.event_log import read_events
from nemo_geomask.tools.rehearse.hosted_job import HostedJob, JobOutcome, make_empty, run_job
from nemo_geomask.tools.shared.json_output import write_json_file

__all__ = ["JobSession"]

_TICK = 0.1  # seconds between looks for the answer


class JobSession:
    """Starts NeMo-RL's workers when a job needs them, and keeps them for further jobs.

    The driver runs a function that answers jobs: a job's file is JSON; ``out`` names the file of its answer, and
    ``more`` the file of the next job, for which the function waits.

    Args:
        recipe: path of the recipe.
        overrides: overrides of the recipe.
        function: ``module:function`` that answers jobs in the driver.
        folder: folder for models, logs and jobs.
        ranks: largest number of processes that train.
        timeout: time limit of a job in seconds, the start of its workers included.
    """

    def __init__(
        self,
        recipe: str | Path,
        overrides: Sequence[str],
        function: str,
        *,
        folder: Path,
        ranks: int = 1,
        timeout: float = 600.0,
    ) -> None:
        self._recipe, self._overrides, self._function = recipe, tuple(overrides), function
        self._folder, self._ranks, self._timeout = folder, ranks, timeout
        self._settings: Mapping[str, Any] = {}
        self._work = self._jobs = folder
        self._jobs_sent = 0
        self._thread: threading.Thread | None = None
        self._is_stopped = threading.Event()
        self._outcome: JobOutcome | BaseException | None = None
        self.workers_started = 0
        """Number of times that the workers were started."""

    def __call__(
        self, job: Mapping[str, Any], *, name: str, settings: Mapping[str, Any], is_fresh: bool = True
    ) -> JobOutcome:
        """Run a job and wait for its answer.

        Args:
            job: the job; ``out``: path of its answer, a file that is not there yet.
            name: name of the workers' folder, if they are started.
            settings: settings of the workers by dotted key, as for :func:`run_job`.
            is_fresh: start new workers for it; else those that run with the same settings are used, if there are any.

        Returns:
            The outcome; its events are those since the workers' start. After an error or a timeout no worker runs.

        Raises:
            ConfigError: the recipe can't be read or rehearsed, or there is no NeMo-RL.
            EngineError: a process could not be ended.
        """
        deadline = time.monotonic() + self._timeout
        try:
            if is_fresh or self._thread is None or not self._thread.is_alive() or settings != self._settings:
                self.close()
                self._begin(name, settings)
            self._send(job)
            return self._wait(Path(job["out"]), deadline)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers, if any run. Answers are complete by then, so that nothing has to be waited for."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if isinstance(self._outcome, BaseException) and not isinstance(self._outcome, _Stopped):
            error, self._outcome = self._outcome, None
            raise error

    def _begin(self, name: str, settings: Mapping[str, Any]) -> None:
        self._work, self._jobs = self._folder / name, self._folder / f"{name}.jobs"
        if self._folder.is_symlink():
            raise ConfigError(f"{self._folder} is a link, and what is there would be deleted; remove the link")
        make_empty(self._jobs)
        self._settings, self._jobs_sent, self._outcome = dict(settings), 0, None
        self._is_stopped.clear()
        self.workers_started += 1
        self._thread = threading.Thread(target=self._run, name=f"workers {name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = run_job(
                *(self._recipe, self._overrides, HostedJob(self._function, self._job_file(0))),
                folder=self._work,
                settings=self._settings,
                ranks=self._ranks,
                timeout=float("inf"),
                every_tick=self._end_if_stopped,
            )
        except BaseException as error:  # raised again in the thread that waits
            self._outcome = error

    def _end_if_stopped(self) -> None:
        if self._is_stopped.is_set():
            raise _Stopped

    def _job_file(self, number: int) -> Path:
        return self._jobs / f"{number}.json"

    def _send(self, job: Mapping[str, Any]) -> None:
        file = self._job_file(self._jobs_sent)
        self._jobs_sent += 1
        write_json_file(file, {**job, "more": str(self._job_file(self._jobs_sent))})

    def _wait(self, out: Path, deadline: float) -> JobOutcome:
        assert self._thread is not None
        while not out.is_file():
            if not self._thread.is_alive():
                outcome = self._outcome
                if isinstance(outcome, JobOutcome) and not out.is_file():
                    return outcome
                self.close()
            if time.monotonic() > deadline:
                self.close()
                return JobOutcome(f"not done after {self._timeout:.0f} s", True, self._events())
            time.sleep(_TICK)
        return JobOutcome("", False, self._events())

    def _events(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(read_events(self._work / "events.jsonl"))


class _Stopped(Exception):
    """The workers are to end; raised in the thread that supervises them."""
