"""What a rehearsal found: its stages, the error of the one that failed, the proof, the metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_geomask.rehearsal.causes import likely_cause
from nemo_geomask.rehearsal.events import STAGES

__all__ = ["Breakdown", "RunResult", "Stage", "State", "outcome_of"]

_OWN = "nemo-geomask: error: "
_COLOUR = re.compile("\x1b\\[[0-9;]*m")

State = Literal["ran", "failed", "running", "not reached", "not in the recipe"]


@dataclass(frozen=True)
class Stage:
    """One stage of a rehearsal.

    Attributes:
        name: of :data:`~nemo_geomask.rehearsal.events.STAGES`.
        state: ``running``: when the time was over.
        seconds: in all.
        first: of the first time, which has to load and to compile; None where it never ended.
        times: how often it was begun.
        what: what ran, by NeMo-RL's names.
    """

    name: str
    state: State
    seconds: float = 0.0
    first: float | None = None
    times: int = 0
    what: tuple[str, ...] = ()


@dataclass(frozen=True)
class Breakdown:
    """Why a rehearsal ended early.

    Attributes:
        stage: in which.
        error: the innermost error, in a line.
        text: in full, with the traceback of the worker.
        setting: what is likely behind it; None where that is not known.
        fix: the way out.
    """

    stage: str
    error: str
    text: str
    setting: str | None = None
    fix: str | None = None


@dataclass(frozen=True)
class RunResult:
    """What was seen of one run.

    Attributes:
        stages: all, in order.
        failure: None where the run came to its end.
        metrics: of each training step, by step.
        loss: that trained, by the workers' own description, with the number of calls in all of them.
        workers: what each worker said of itself.
        seconds: from the start of the driver to its end.
    """

    stages: tuple[Stage, ...]
    failure: Breakdown | None
    metrics: Mapping[int, Mapping[str, float]]
    loss: Mapping[str, int] = field(default_factory=dict)
    workers: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0


def outcome_of(
    events: Iterable[Mapping[str, Any]],
    *,
    status: int | None,
    steps: int,
    started: float,
    ended: float,
    asked: frozenset[str] = frozenset(STAGES),
    log: str = "",
    settings: Mapping[str, object] | None = None,
) -> RunResult:
    """Read the events of a run.

    Args:
        events: in order.
        status: of the driver; None where the time was over.
        steps: that were to be trained.
        started: when the driver was started, seconds since the epoch, as the events have it.
        ended: when it had ended.
        asked: stages that the recipe has.
        log: the end of the driver's output, for a driver that could not say anything.
        settings: of the recipe, by dotted key: an error may name one.
    """
    events = list(events)
    stages = list(_stages(events, started, ended, asked, over=status is None))
    metrics: dict[int, dict[str, float]] = {}
    for event in events:
        if event["kind"] == "metrics" and event["prefix"] == "train":
            metrics.setdefault(event["step"], {}).update(event["values"])
    # NeMo-RL logs what was sampled before it trains.
    metrics = {step: values for step, values in metrics.items() if "loss" in values}
    workers: list[dict[str, Any]] = next(
        (event["workers"] for event in reversed(events) if event["kind"] == "proof"), []
    )
    calls: dict[str, int] = {}
    for worker in workers:
        for name, count in worker["calls"].items():
            calls[name] = calls.get(name, 0) + count
    failure = _breakdown(events, stages, status, steps, metrics, log, ended - started, settings or {})
    if failure is not None and failure.stage != "validation":
        stages = [_failed(stage) if stage.name == failure.stage and status is not None else stage for stage in stages]
    return RunResult(tuple(stages), failure, metrics, calls, tuple(workers), ended - started)


def _failed(stage: Stage) -> Stage:
    return Stage(stage.name, "failed", stage.seconds, stage.first, stage.times, stage.what)


def _stages(
    events: list[Mapping[str, Any]], started: float, ended: float, asked: frozenset[str], *, over: bool
) -> Iterator[Stage]:
    for name in STAGES:
        if name == "validation":
            continue
        of_it = [event for event in events if event.get("stage") == name]
        if name == "start":
            # It begins before the driver can say so.
            of_it = [{"at": started, "kind": "begin", "stage": name, "label": ""}, *of_it]
        seconds, first, opened, depth = 0.0, None, started, 0
        for event in of_it:
            # Stages may lie in each other, such as a worker group that starts others.
            if event["kind"] == "begin":
                opened = event["at"] if depth == 0 else opened
                depth += 1
            else:
                depth = max(0, depth - 1)
                if depth == 0:
                    seconds += event["at"] - opened
                    first = event["at"] - opened if first is None else first
        labels = tuple(dict.fromkeys(str(event["label"]) for event in of_it if event.get("label")))
        times = sum(event["kind"] == "begin" for event in of_it)
        state: State = "ran"
        if depth:
            seconds += ended - opened
            state = "running" if over else "failed"
        elif not times:
            state = "not reached" if name in asked else "not in the recipe"
        if any(event.get("failed") for event in of_it):
            state = "failed"
        yield Stage(name, state, seconds, first, times, labels)


def _breakdown(
    events: list[Mapping[str, Any]],
    stages: list[Stage],
    status: int | None,
    steps: int,
    metrics: Mapping[int, Mapping[str, Any]],
    log: str,
    seconds: float,
    settings: Mapping[str, object],
) -> Breakdown | None:
    where = next((event["stage"] for event in events if event.get("failed")), None)
    where = (
        where or next((stage.name for stage in stages if stage.state in ("running", "failed")), None) or _last(events)
    )
    if status is None:
        message = f"not done within {seconds:.0f} s (--timeout); it was in {where}"
        return Breakdown(
            where, message, message, "--timeout", "give it more time, fewer --steps, or see the log for a hang"
        )
    error = next((event for event in events if event["kind"] == "error"), None)
    if error is not None or status != 0:
        last = f"the driver ended with status {status}"
        text = _COLOUR.sub("", str(error["traceback"]) if error else log or f"{last} and said nothing")
        raised = _innermost(text, f"{error['type']}: {error['message']}" if error else last)
        return Breakdown(where, raised, text, *(likely_cause(text, raised, settings) or (None, None)))
    if len(metrics) < steps:
        message = f"{len(metrics)} of {steps} steps were logged: the prompts or epochs were at their end before"
        return Breakdown("step", message, message, None, None)
    for step, values in sorted(metrics.items()):
        # inf is no failure: the squares of finite gradients can overflow.
        for name in ("loss", "grad_norm"):
            if isinstance(value := values.get(name), float) and math.isnan(value):
                message = f"{name} of step {step} is nan"
                return Breakdown("step", message, message, None, None)
    return None


def _last(events: list[Mapping[str, Any]]) -> str:
    """The stage that was begun last."""
    return next((str(event["stage"]) for event in reversed(events) if "stage" in event), "start")


def _innermost(text: str, otherwise: str) -> str:
    """The line of the error that a worker raised: the last that is not one of Ray's own, inside which it travelled."""
    for line in reversed(text.splitlines()):
        if line.startswith(_OWN):  # `nemo-geomask run`, before the driver had begun
            return line.removeprefix(_OWN)
        name, colon, _ = line.partition(":")
        is_error = name.rpartition(".")[2].endswith(("Error", "Exception", "Exit"))
        if colon and is_error and not line.startswith((" ", "ray.")):
            return line.strip()
    return otherwise.splitlines()[0]
