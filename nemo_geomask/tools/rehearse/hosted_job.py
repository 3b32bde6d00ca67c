"""A job of another tool, run in place of training, with the workers that NeMo-RL's ``setup`` has made for a recipe.

NeMo-RL's own script starts the workers, sends no sample and takes no step: its training function is replaced by the
job, which gets the function's arguments. Everything before it is as in a rehearsal, the tiny model included.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe import read_recipe
from nemo_geomask.tools.check import RecipeFacts
from nemo_geomask.tools.rehearse.event_log import EVENTS, read_events
from nemo_geomask.tools.rehearse.plan import Plan, plan
from nemo_geomask.tools.rehearse.rehearsal import machine_options, nemo_rl_checkout
from nemo_geomask.tools.rehearse.rehearsed_run import LOG, driver
from nemo_geomask.tools.rehearse.run_outcome import innermost_error, without_colours
from nemo_geomask.tools.rehearse.setting_changes import Change
from nemo_geomask.tools.shared.json_output import write_json_file

_TICK = 0.1  # seconds between looks for the answer


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of a hosted job."""

    error: str  # last error; empty if the job ended well
    is_timeout: bool  # True if the time limit was reached
    # the driver's events, as :mod:`~nemo_geomask.tools.rehearse.event_log` writes them
    events: tuple[Mapping[str, Any], ...]


def make_empty(folder: Path) -> None:
    """Make a folder, and delete what it holds."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def hosted_job(
    recipe: str | Path,
    overrides: Sequence[str],
    function: str,
    file: Path,
    *,
    folder: Path,
    settings: Mapping[str, Any],
    ranks: int = 1,
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """Return the process of NeMo-RL's driver for a small version of a recipe, with a job in place of training.

    It is started and ended with the context.

    Args:
        function: ``module:function`` that is called in place of training, with the arguments of NeMo-RL's training
            function, by name, and ``file``.
        folder: folder for model, log and events; what it holds is deleted.
        settings: values by dotted key that come after the rehearsal's changes, and so are in force. A mapping replaces
            the one that is there.

    Raises:
        ConfigError: the recipe can't be read or rehearsed, or there is no NeMo-RL.
        EngineError: a process could not be ended.
    """
    planned = _planned(recipe, overrides, folder, ranks)
    if planned.script != "examples/run_grpo.py":
        raise ConfigError(f"{planned.script} does not train by GRPO, whose workers the job needs; give a GRPO recipe")
    make_empty(folder)
    changes = [Change(key, value, was=planned.value(key)) for key, value in settings.items()]
    more = [override for change in changes for override in change.overrides]
    return driver(planned, more, job=(function, str(file)))


def values_in_force(
    recipe: str | Path, overrides: Sequence[str], keys: Iterable[str], *, ranks: int = 1
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Return the values that settings have in a hosted job, and the recipe's own values of those that differ.

    Both are by dotted key; keys that nobody sets are absent. The third item are the parts of the recipe that the job's
    workers do not have.

    Raises:
        ConfigError: the recipe can't be read or rehearsed, or there is no NeMo-RL.
    """
    planned = _planned(recipe, overrides, Path("job"), ranks)
    of_recipe = {key: planned.facts.get(key) for key in keys}
    values = {key: planned.value(key) for key in of_recipe}
    replaced = {key: value for key, value in of_recipe.items() if value is not None and value != values[key]}
    return {key: value for key, value in values.items() if value is not None}, replaced, planned.unrehearsed


def reads_key(key: str) -> bool:
    """Return True if NeMo-RL's code for policies or engines has the part of a key that it reads, as a string.

    vLLM reads what is below ``vllm_kwargs`` and ``env_vars``; of these keys, that name is looked for.
    """
    parts = key.split(".")
    name = next((part for part in parts if part in ("vllm_kwargs", "env_vars")), parts[-1])
    files = (nemo_rl_checkout() / "nemo_rl" / "models").rglob("*.py")
    # As a string or as a declared field: v0.7.0 passes a keyword `logprobs_mode`, and reads no such setting.
    pattern = re.compile(rf"""["']{name}["']|^    {name}: """, re.MULTILINE)
    return any(pattern.search(file.read_text(encoding="utf-8")) for file in files)


def _planned(recipe: str | Path, overrides: Sequence[str], folder: Path, ranks: int) -> Plan:
    facts = RecipeFacts.from_recipe(read_recipe(recipe, overrides, leave=("data", "env")))
    options = replace(machine_options(nemo_rl_checkout()), steps=1, ranks=ranks)
    return plan(facts, overrides, folder=folder, options=options)


def last_error(events: Sequence[Mapping[str, Any]], status: int) -> str:
    """Return the last error of a driver that has ended without an answer, in a line."""
    errors = [event for event in events if event["kind"] == "error"]
    if not errors:
        return f"the driver ended with status {status}, and left no error"
    last = errors[-1]
    return innermost_error(without_colours(last["traceback"]), f"{last['type']}: {last['message']}")


class JobSession:
    """Starts NeMo-RL's workers when a job needs them, and keeps them for further jobs.

    The driver runs a function that answers jobs: a job's file is JSON; ``out`` names the file of its answer, and
    ``more`` the file of the next job, for which the function waits.

    Args:
        function: ``module:function`` that answers jobs in the driver.
        folder: folder for models, logs and jobs.
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
        self._workers = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self.workers_started = 0
        """Number of times that the workers were started."""

    def __call__(
        self, job: Mapping[str, Any], *, name: str, settings: Mapping[str, Any], is_fresh: bool = True
    ) -> JobOutcome:
        """Run a job and wait for its answer.

        Args:
            name: name of the workers' folder, if they are started.
            settings: settings of the workers by dotted key, as for :func:`hosted_job`.
            is_fresh: start new workers for it; else those that run with the same settings are used, if there are any.

        Returns:
            The outcome; its events are those since the workers' start. After an error or a timeout no worker runs.

        Raises:
            ConfigError: the recipe can't be read or rehearsed, or there is no NeMo-RL.
            EngineError: a process could not be ended.
        """
        deadline = time.monotonic() + self._timeout
        try:
            process = self._process
            if is_fresh or process is None or process.poll() is not None or settings != self._settings:
                self.close()
                process = self._begin(name, settings)
            self._send(job)
            return self._wait(process, Path(job["out"]), deadline)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers, if any run. Answers are complete by then, so that nothing has to be waited for."""
        self._process = None
        self._workers.close()

    def _begin(self, name: str, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        self._work, self._jobs = self._folder / name, self._folder / f"{name}.jobs"
        make_empty(self._jobs)
        self._settings, self._jobs_sent = dict(settings), 0
        self.workers_started += 1
        start = hosted_job(
            *(self._recipe, self._overrides, self._function, self._job_file(0)),
            folder=self._work,
            settings=self._settings,
            ranks=self._ranks,
        )
        self._process = self._workers.enter_context(start)
        return self._process

    def _job_file(self, number: int) -> Path:
        return self._jobs / f"{number}.json"

    def _send(self, job: Mapping[str, Any]) -> None:
        file = self._job_file(self._jobs_sent)
        self._jobs_sent += 1
        write_json_file(file, {**job, "more": str(self._job_file(self._jobs_sent))})

    def _wait(self, process: subprocess.Popen[bytes], out: Path, deadline: float) -> JobOutcome:
        while not out.is_file():
            status = process.poll()
            is_timeout = status is None and time.monotonic() > deadline
            if is_timeout or (status is not None and not out.is_file()):
                self.close()
                timeout = f"not done after {self._timeout:.0f} s"
                error = timeout if status is None else last_error(self._events(), status)
                return JobOutcome(f"{error}; the log is {self._work / LOG}", is_timeout, self._events())
            time.sleep(_TICK)
        return JobOutcome("", False, self._events())

    def _events(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(read_events(self._work / EVENTS))
