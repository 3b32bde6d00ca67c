"""Starts of NeMo-RL's workers and their scores on disk; a start that is stored is never run again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nemo_geomask.errors import DataError
from nemo_geomask.tools.probe.stored_files import Content, Frozen, read_json_file, validate
from nemo_geomask.tools.shared.json_output import write_json_file

__all__ = ["Launcher", "LauncherOutcome", "Start", "StartAnswer", "StartStore"]

_ERRORS_KEPT = 2000  # characters
_NAME_KEPT = 80  # characters: names of many switches exceed what a file system takes
_STATES = 3  # sequences whose hidden states are compared


class LauncherOutcome(Protocol):
    """Outcome of a start."""

    @property
    def error(self) -> str:
        """Last error; empty if the job ended well."""

    @property
    def is_timeout(self) -> bool:
        """True if the time limit was reached; such a start is run again by the next probe."""

    @property
    def events(self) -> tuple[Mapping[str, Any], ...]:
        """Events of the driver, with ``weights`` events after each refit."""


Launcher = Callable[..., LauncherOutcome]
"""Runs a job with NeMo-RL's workers: called with the job, ``name``, ``settings`` and ``is_fresh``, as
:class:`~nemo_geomask.tools.rehearse.job_session.JobSession` is."""


@dataclass(frozen=True)
class Start:
    """One start of the workers, or of an engine in place of theirs.

    Attributes:
        name: name for the reader.
        settings: settings of the workers, by dotted key.
        engine: settings with which an engine is started in place of the workers' own, by dotted key below
            ``policy.generation``; None leaves them their engine, and starts new workers.
        decode: options of each request to the engine's decode, by name.
        trainer: options of each request to the trainer, by name.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] | None = None
    decode: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"base": {}})
    trainer: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"base": {}})

    @property
    def file_name(self) -> str:
        """Name of its files, which differs from that of every other start and has at most 89 characters."""
        digest = _digest([self.settings, self.engine, self.decode, self.trainer])
        return f"{self.name[:_NAME_KEPT]}-{digest[:8]}"


@dataclass(frozen=True)
class StartAnswer:
    """Scores of a start.

    Attributes:
        error: why there are none; empty if there are.
        scores: the answer of :func:`~nemo_geomask.tools.probe.scoring_job.score`.
        weights: groups of weights that differ between trainer and engine after the refit; None if not compared.
        sent: checksum of the weights that the trainer sent; empty if it is not known.
        seconds: time of the start and its scores.
    """

    error: str
    scores: Mapping[str, Any]
    weights: tuple[str, ...] | None
    sent: str
    seconds: float


class StartStore:
    """Folder with the frozen sequences and one file of scores for each start.

    Args:
        folder: the folder.
        launcher: starts the workers.
        prompts: number of prompts.
        generations: number of responses to each.
    """

    def __init__(self, folder: Path, launcher: Launcher, *, prompts: int, generations: int) -> None:
        self._folder = folder
        self._launcher = launcher
        self._sizes = {"prompts": prompts, "generations": generations}
        # Starts that another day's machine may finish, or that failed before there was any other.
        self._not_stored: dict[Path, StartAnswer] = {}
        self.runs = 0
        """Number of starts that were run and not read from the store."""
        self.seconds_of_runs: dict[bool, list[float]] = {True: [], False: []}
        """Time of each of these starts: True: of all workers; False: of an engine alone."""

    @property
    def frozen_file(self) -> Path:
        """Path of the frozen sequences; the first start writes it."""
        return self._folder / "frozen.json"

    def frozen(self) -> dict[str, Any]:
        """Return the frozen sequences.

        Raises:
            DataError: the file is not one that a probe of this size writes.
            InputLimitError: it is no regular file.
        """
        content: dict[str, Any] = read_json_file(self.frozen_file)
        validate(Frozen, content, self.frozen_file)
        if set(content["prompts"]) != set(range(self._sizes["prompts"])):
            raise DataError(
                f"{self.frozen_file}: does not have the {self._sizes['prompts']} prompts of this probe; give another "
                "folder to --out"
            )
        return content

    def has(self, start: Start) -> bool:
        """Return True if a start is stored, and so costs nothing."""
        file = self._file(start)
        return os.path.lexists(file) or file in self._not_stored

    def answer(self, start: Start) -> StartAnswer:
        """Return the scores of a start, from the store or by running it.

        Raises:
            DataError: a stored file was changed, is none that a probe writes, or belongs to other sequences.
            InputLimitError: a stored file is no regular file.
        """
        file = self._file(start)
        if file in self._not_stored:
            return self._not_stored[file]
        if not os.path.lexists(file) and (answer := self._run(start, file)) is not None:
            self._not_stored[file] = answer
            return answer
        try:
            stored = read_json_file(file)
            content, digest = stored["content"], stored["sha256"]
        except (DataError, KeyError):
            content, digest = None, ""
        if _digest(content) != digest:
            raise DataError(f"{file} does not have its own hash; it was changed or cut. Delete it to run it again")
        validate(Content, content, file)
        if content["error"]:
            return _answer_of(content)
        if content["frozen"] != _digest(self.frozen()):
            raise DataError(f"{file} was scored on other sequences than {self.frozen_file}; delete it to run it again")
        scores = content["scores"]
        missing = [*(start.decode.keys() - scores["decode"].keys()), *(start.trainer.keys() - scores["trainer"].keys())]
        if missing:
            raise DataError(f"{file} has no scores of {', '.join(sorted(missing))}; delete it to run it again")
        return _answer_of(content)

    def _file(self, start: Start) -> Path:
        return self._folder / "starts" / f"{start.file_name}.json"

    def _run(self, start: Start, file: Path) -> StartAnswer | None:
        """Run a start and store it; return its answer if that is not to be stored.

        These are starts that reached the time limit, and the first one if it failed.
        """
        if os.path.lexists(self.frozen_file):
            self.frozen()  # the workers read it unseen
        out = self._folder / f"{start.file_name}.answer.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        job = {
            "frozen": str(self.frozen_file),
            "out": str(out),
            "prefill": True,
            "states": _STATES,
            "engine": start.engine,
            "decode": start.decode,
            "trainer": start.trainer,
            **self._sizes,
        }
        began = time.monotonic()
        outcome = self._launcher(job, name=start.file_name, settings=start.settings, is_fresh=start.engine is None)
        seconds = time.monotonic() - began
        self.runs += 1
        self.seconds_of_runs[start.engine is None].append(seconds)
        error = outcome.error[-_ERRORS_KEPT:]
        if not error and not out.is_file():
            error = "NeMo-RL's script ended without its training function, so nothing was scored"
        is_first = not any(file.parent.iterdir())
        # The first one fails for a reason outside the probe, which the user may have removed when it is resumed.
        if outcome.is_timeout or (error and is_first):
            return StartAnswer(error, {}, None, "", seconds)
        content = {
            "name": start.name,
            "settings": dict(start.settings),
            "engine": start.engine,
            "error": error,
            "scores": {} if error else json.loads(out.read_text(encoding="utf-8")),
            "frozen": "" if error else _digest(self.frozen()),
            "weights": _differing_weights(outcome.events),
            "sent": next((str(each["sent"]) for each in reversed(outcome.events) if "sent" in each), ""),
            "seconds": seconds,
        }
        write_json_file(file, {"sha256": _digest(content), "content": content})
        out.unlink(missing_ok=True)
        return None


def _answer_of(content: Mapping[str, Any]) -> StartAnswer:
    weights = content["weights"]
    return StartAnswer(
        content["error"],
        content["scores"],
        None if weights is None else tuple(weights),
        content["sent"],
        content["seconds"],
    )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _differing_weights(events: tuple[Mapping[str, Any], ...]) -> list[str] | None:
    compared = [event for event in events if event.get("kind") == "weights" and "differences" in event]
    if not compared:
        return None
    return [str(difference["group"]) for difference in compared[-1]["differences"]]
