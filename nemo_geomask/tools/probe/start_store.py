"""Starts of NeMo-RL's workers and their scores on disk; a start that is stored is never run again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_geomask.errors import DataError
from nemo_geomask.recipe.input_limits import open_regular_file
from nemo_geomask.tools.shared.json_output import write_json_file

_ERRORS_KEPT = 2000  # characters
_NAME_KEPT = 80  # characters: names of many switches exceed what a file system takes
_STATES = 3  # sequences whose hidden states are compared


Launcher = Callable[..., Any]
"""Runs a job with NeMo-RL's workers: called with the job, ``name``, ``settings`` and ``is_fresh``, as
:class:`~nemo_geomask.tools.rehearse.hosted_job.JobSession` is. It returns the last ``error``, empty if the job ended
well; ``is_timeout``; and the driver's ``events``, with ``weights`` after each refit."""

_MAX_BYTES = 2**30
"""Of one file. The scores of 64 prompts with 8,000 tokens each take 400 MB under thirty requests."""


@dataclass(frozen=True)
class Start:
    """One start of the workers, or of an engine in place of theirs."""

    name: str  # name for the reader
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of the workers, by dotted key
    # settings with which an engine is started in place of the workers' own, by dotted key below
    # ``policy.generation``; None leaves them their engine, and starts new workers
    engine: Mapping[str, Any] | None = None
    # options of each request to the engine's decode, by name
    decode: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"base": {}})
    # options of each request to the trainer, by name
    trainer: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"base": {}})

    @property
    def file_name(self) -> str:
        """Name of its files, which differs from that of every other start and has at most 89 characters."""
        digest = _digest([self.settings, self.engine, self.decode, self.trainer])
        return f"{self.name[:_NAME_KEPT]}-{digest[:8]}"


@dataclass(frozen=True)
class StartAnswer:
    """Scores of a start."""

    error: str  # why there are none; empty if there are
    scores: Mapping[str, Any]  # the answer of :func:`~nemo_geomask.tools.probe.scoring_job.score`
    # groups of weights that differ between trainer and engine after the refit; None if not compared
    weights: Sequence[str] | None
    sent: str  # checksum of the weights that the trainer sent; empty if it is not known


class StartStore:
    """Folder with the frozen sequences and one file of scores for each start."""

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
        content = read_json_file(self.frozen_file)
        with _stored(self.frozen_file):
            names = ("sequences", "prompt_lengths", "prompts", "sampled", "by_trainer")
            fits = len({len(content[name]) for name in names}) == 1
            count = self._sizes["prompts"]
            if not fits or set(content["prompts"]) != set(range(count)):
                raise DataError(
                    f"{self.frozen_file}: does not have the {count} prompts of this probe; give another folder to --out"
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
        with _stored(file):
            if not content["error"]:
                self._check_scores(start, content, file)
            return StartAnswer(**{name: content[name] for name in ("error", "scores", "weights", "sent")})

    def _check_scores(self, start: Start, content: Mapping[str, Any], file: Path) -> None:
        if content["frozen"] != _digest(self.frozen()):
            raise DataError(f"{file} was scored on other sequences than {self.frozen_file}; delete it to run it again")
        scores = content["scores"]
        missing = [*(start.decode.keys() - scores["decode"].keys()), *(start.trainer.keys() - scores["trainer"].keys())]
        if missing:
            raise DataError(f"{file} has no scores of {', '.join(sorted(missing))}; delete it to run it again")

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
            "states": _STATES,
            "engine": start.engine,
            "decode": start.decode,
            "trainer": start.trainer,
            **self._sizes,
        }
        began = time.monotonic()
        outcome = self._launcher(job, name=start.file_name, settings=start.settings, is_fresh=start.engine is None)
        self.runs += 1
        self.seconds_of_runs[start.engine is None].append(time.monotonic() - began)
        error = outcome.error[-_ERRORS_KEPT:]
        if not error and not out.is_file():
            error = "NeMo-RL's script ended without its training function, so nothing was scored"
        is_first = not any(file.parent.iterdir())
        # The first one fails for a reason outside the probe, which the user may have removed when it is resumed.
        if outcome.is_timeout or (error and is_first):
            return StartAnswer(error, {}, None, "")
        content = {
            "name": start.name,
            "settings": dict(start.settings),
            "engine": start.engine,
            "error": error,
            "scores": {} if error else json.loads(out.read_text(encoding="utf-8")),
            "frozen": "" if error else _digest(self.frozen()),
            "weights": _differing_weights(outcome.events),
            "sent": next((str(each["sent"]) for each in reversed(outcome.events) if "sent" in each), ""),
        }
        write_json_file(file, {"sha256": _digest(content), "content": content})
        out.unlink(missing_ok=True)
        return None


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of the probe.

    Raises:
        InputLimitError: it is no regular file.
        DataError: it can't be read, is larger than 1 GiB, or is not JSON.
    """
    try:
        with open_regular_file(path) as file:
            if os.fstat(file.fileno()).st_size > _MAX_BYTES:
                raise DataError(f"{path}: has more than {_MAX_BYTES:,} bytes, so no probe wrote it; remove it")
            # Every file of a probe is an object. A hole in a file begins with null characters, and is not read.
            text = b"{" + file.read() if file.read(1) == b"{" else b""
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from None
    try:
        content: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error)[:200] if isinstance(error, ValueError) else type(error).__name__
        raise DataError(f"{path}: not JSON: {reason}; remove it, or give another folder to --out") from None
    return content


@contextlib.contextmanager
def _stored(path: Path) -> Iterator[None]:
    """Raise DataError for a file that lacks what a probe writes. Its hash tells what was changed by accident alone."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise DataError(f"{path}: is no file that a probe wrote: {reason}; remove it, or give another --out") from None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _differing_weights(events: tuple[Mapping[str, Any], ...]) -> list[str] | None:
    compared = [event for event in events if event.get("kind") == "weights" and "differences" in event]
    if not compared:
        return None
    return [str(difference["group"]) for difference in compared[-1]["differences"]]
