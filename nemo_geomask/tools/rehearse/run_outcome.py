"""Outcome of one run, read from its events: stages, failure, calls of losses, and metrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nemo_geomask.tools.rehearse.control_run import Samples
from nemo_geomask.tools.rehearse.error_causes import MEMORY, likely_cause, plugin_module
from nemo_geomask.tools.rehearse.event_log import STAGES
from nemo_geomask.tools.rehearse.mismatch_check import Mismatch

_ERROR_PREFIX = "nemo-geomask: error: "
# Ray's description of an actor that died.
_DEAD_ACTOR = re.compile(r"class_name: (?P<name>\w+).{0,300}?\bpid: (?P<pid>\d+)", re.DOTALL)
# What other processes report when vLLM's engine has ended.
_LOST_ENGINE = re.compile(r"Connection (closed|reset) by peer|EngineDeadError|Engine core initialization failed")
# A line of the engine's process, and what vLLM logs when that process ends (vllm/v1/engine/core.py).
_ENGINE_LINE = re.compile(r"\(EngineCore[^)]*\) (?:ERROR [^]]*\] )?(?P<line>.*)")
_ENGINE_END = re.compile(r"EngineCore (encountered a fatal error|failed to start)")
_ERROR_LINE = re.compile(r"(\w+\.)*\w+(Error|Exception)(: .*)?")
_LOG_TAIL = 20_000  # characters of a log without a logged error
_COLOUR = re.compile("\x1b\\[[0-9;]*m")

State = Literal["ran", "failed", "running", "not reached", "not in the recipe"]


@dataclass(frozen=True)
class Stage:
    """One stage of a rehearsal."""

    name: str  # one of :data:`~nemo_geomask.tools.rehearse.event_log.STAGES`
    state: State  # ``running`` if the time limit was reached in this stage
    seconds: float = 0.0  # total time
    first: float | None = None  # time of the first pass, which loads and compiles; None if it never ended
    times: int = 0  # number of passes
    labels: tuple[str, ...] = ()  # NeMo-RL's names of what ran


@dataclass(frozen=True)
class RunFailure:
    """Reason why a run failed, or a condition of :mod:`~nemo_geomask.tools.rehearse.gate` that it does not meet."""

    stage: str  # stage that failed
    error: str  # the innermost error, in one line
    setting: str | None = None  # setting that is the likely cause; None if unknown
    fix: str | None = None  # what to change
    traceback: str = ""  # the error with the worker's traceback; empty if there is none


@dataclass(frozen=True)
class RunResult:
    """One run: what its events say, what was asked of it, and the verdicts of the gate."""

    stages: tuple[Stage, ...]  # all stages, in order
    failure: RunFailure | None  # None if the run was completed and counts as rehearsed
    metrics: Mapping[int, Mapping[str, float]]  # metrics by training step
    events: Sequence[Mapping[str, Any]] = ()  # its events, in order
    log: str = ""  # the driver's output

    # What was asked of it.
    steps: Sequence[int] = ()  # numbers of the steps that were to be trained
    loss_name: str | None = None  # ``loss_fn.name``; None if NeMo-RL's own loss was asked for
    records: Path | None = None  # folder of its records; None if it was not to be recorded
    updates: int = 1  # number of optimiser steps that a rollout batch has
    precisions: tuple[str, str] = ("bfloat16", "bfloat16")  # of trainer and engine, as the recipe asks for
    forecasts: Sequence[str] = ()  # what `check` expects of masks that keep hardly anything
    is_validated: bool = False  # True if NeMo-RL was to validate

    # Verdicts; those on records are None or empty without records.
    unmet: tuple[RunFailure, ...] = ()  # conditions of the gate that it does not meet
    mismatch: Mismatch | None = None  # diagnosis of the records
    update: Mismatch | None = None  # verdict on π_θ at the first updates, against π_old
    # by step, the loss of the recorded batch and the sum of its terms' absolute values
    replayed: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)  # what it sampled, by step

    @property
    def worker_counts(self) -> list[Mapping[str, Any]]:
        """The workers' counts, before the first step and after each."""
        return [event for event in self.events if event["kind"] == "worker_counts"]

    @property
    def workers(self) -> list[Mapping[str, Any]]:
        """Last report of each worker, see :func:`nemo_geomask.tools.rehearse.worker_counts.read_counts`."""
        counts = self.worker_counts
        return list(counts[-1]["workers"]) if counts else []

    @property
    def loss(self) -> dict[str, int]:
        """Number of calls in all workers, by the repr of the loss."""
        calls: Counter[str] = Counter()
        for worker in self.workers:
            calls.update(worker["calls"])
        return dict(calls)

    @property
    def weights(self) -> list[Mapping[str, Any]]:
        """Comparisons of the weights of trainer and engine after refits."""
        return [event for event in self.events if event["kind"] == "weights"]

    @property
    def weight_precision(self) -> Mapping[str, Any]:
        """What trainer and engine had quantised at the last refit, see :mod:`~.weight_sums`; empty if unknown."""
        return next((event["precision"] for event in reversed(self.weights) if "precision" in event), {})

    @property
    def is_plugin(self) -> bool:
        """True if the loss is not one of this package's own."""
        return self.loss_name is not None and plugin_module(self.loss_name) != ""

    def failed(self, failure: RunFailure) -> RunResult:
        """Return the run with a failure, which its stage shows."""
        stages = [replace(each, state="failed") if each.name == failure.stage else each for each in self.stages]
        return replace(self, failure=failure, stages=tuple(stages))


def outcome_of(
    events: Iterable[Mapping[str, Any]],
    *,
    status: int | None,
    steps: int,
    started: float,
    ended: float,
    expected_stages: frozenset[str] = frozenset(STAGES),
    log: str = "",
    settings: Mapping[str, object] | None = None,
    killed_by_kernel: int = 0,
) -> RunResult:
    """Return the outcome of a run, read from its events.

    Args:
        status: exit status of the driver; None if the time limit was reached.
        started: start of the driver, in seconds since the epoch as in the events.
        expected_stages: stages that the recipe has.
        killed_by_kernel: number of processes that the kernel killed meanwhile for want of memory.
    """
    events = list(events)
    stages = list(_stages(events, started, ended, expected_stages, is_timed_out=status is None))
    metrics: dict[int, dict[str, float]] = {}
    for event in events:
        if event["kind"] == "metrics" and event["prefix"] == "train":
            metrics.setdefault(event["step"], {}).update(event["values"])
    # NeMo-RL logs metrics of the samples before it trains.
    metrics = {step: values for step, values in metrics.items() if "loss" in values}
    seconds = ended - started
    failure = _failure_of(events, stages, status, steps, metrics, log, seconds, settings or {}, killed_by_kernel)
    if failure is not None and killed_by_kernel and failure.setting == MEMORY:
        fix = f"the kernel killed {killed_by_kernel} processes for want of memory: fewer --ranks, or a larger machine"
        failure = replace(failure, fix=fix)
    run = RunResult(tuple(stages), failure, metrics, events, log)
    return run if failure is None or status is None else run.failed(failure)


def _stages(
    events: list[Mapping[str, Any]],
    started: float,
    ended: float,
    expected_stages: frozenset[str],
    *,
    is_timed_out: bool,
) -> Iterator[Stage]:
    for name in STAGES:
        stage_events = [event for event in events if event.get("stage") == name]
        if name == "start":
            # This stage begins before the driver can log an event.
            stage_events = [{"at": started, "kind": "begin", "stage": name, "label": ""}, *stage_events]
        seconds, first, opened, depth = 0.0, None, started, 0
        for event in stage_events:
            # Stages may be nested, such as a worker group that starts others.
            if event["kind"] == "begin":
                opened = event["at"] if depth == 0 else opened
                depth += 1
            else:
                depth = max(0, depth - 1)
                if depth == 0:
                    seconds += event["at"] - opened
                    first = event["at"] - opened if first is None else first
        labels = tuple(dict.fromkeys(str(event["label"]) for event in stage_events if event.get("label")))
        times = sum(event["kind"] == "begin" for event in stage_events)
        state: State = "ran"
        if depth:
            seconds += ended - opened
            state = "running" if is_timed_out else "failed"
        elif not times:
            state = "not reached" if name in expected_stages else "not in the recipe"
        if any(event.get("failed") for event in stage_events):
            state = "failed"
        yield Stage(name, state, seconds, first, times, labels)


def _failure_of(
    events: list[Mapping[str, Any]],
    stages: list[Stage],
    status: int | None,
    steps: int,
    metrics: Mapping[int, Mapping[str, Any]],
    log: str,
    seconds: float,
    settings: Mapping[str, object],
    killed_by_kernel: int,
) -> RunFailure | None:
    failed_stage = next((event["stage"] for event in events if event.get("failed")), None)
    failed_stage = (
        failed_stage
        or next((stage.name for stage in stages if stage.state in ("running", "failed")), None)
        or _last_stage(events)
    )
    # A process that was killed takes the engine with it, so that the engine's error is not the first one.
    engine_log = "" if killed_by_kernel else log
    if status is None:
        if failure := _engine_failure(engine_log, failed_stage, "the run then hung until --timeout", settings):
            return failure
        message = f"not done within {seconds:.0f} s (--timeout); it was in {failed_stage}"
        fix = "give it more time or fewer --steps, or look in the log for a hang"
        return RunFailure(failed_stage, message, "--timeout", fix)
    error = next((event for event in events if event["kind"] == "error"), None)
    if error is not None or status != 0:
        last = f"the driver ended with status {status}"
        text = without_colours(str(error["traceback"]) if error else log[-_LOG_TAIL:] or f"{last} without a message")
        raised = innermost_error(text, f"{error['type']}: {error['message']}" if error else last)
        dead = _DEAD_ACTOR.search(text)
        if _LOST_ENGINE.search(raised) and not dead:
            effect = f"the other processes only reported: {raised}"
            if failure := _engine_failure(engine_log, failed_stage, effect, settings):
                return failure
        if dead:
            raised += f" ({dead['name']}, process {dead['pid']})"
        return RunFailure(failed_stage, raised, *likely_cause(text, raised, settings), text)
    if len(metrics) < steps:
        message = f"{len(metrics)} of {steps} steps were logged: the prompts or epochs ran out first"
        return RunFailure("step", message)
    return None


def _engine_failure(log: str, stage: str, effect: str, settings: Mapping[str, object]) -> RunFailure | None:
    """Return the failure of vLLM's engine process; None if the log does not show that it ended.

    Args:
        effect: what the run showed of it.
    """
    lines = [match["line"] for line in without_colours(log).splitlines() if (match := _ENGINE_LINE.search(line))]
    begin = next((index for index, line in enumerate(lines) if _ENGINE_END.search(line)), len(lines))
    # An error that led to another one comes before it.
    errors = [line.strip() for line in lines[begin:] if _ERROR_LINE.fullmatch(line.rstrip())]
    if not errors:
        return None
    error = f"{errors[-1]} (raised in vLLM's engine process; {effect})"
    return RunFailure(stage, error, *likely_cause(errors[-1], errors[-1], settings), "\n".join(lines[begin:]))


def _last_stage(events: list[Mapping[str, Any]]) -> str:
    """Return the stage that began last."""
    return next((str(event["stage"]) for event in reversed(events) if "stage" in event), "start")


def without_colours(text: str) -> str:
    """Return text without the control sequences that set a terminal's colours, as Ray writes into tracebacks."""
    return _COLOUR.sub("", text)


def innermost_error(text: str, otherwise: str) -> str:
    """Return the line of the error that a worker raised: the last one that is not Ray's own.

    Args:
        text: output with tracebacks, without colours.
        otherwise: text whose first line is returned if there is none.
    """
    for line in reversed(text.splitlines()):
        if line.startswith(_ERROR_PREFIX):  # `nemo-geomask run`, before the driver had begun
            return line.removeprefix(_ERROR_PREFIX)
        name, colon, _ = line.partition(":")
        is_error = name.rpartition(".")[2].endswith(("Error", "Exception", "Exit"))
        if colon and is_error and not line.startswith((" ", "ray.")):
            return line.strip()
    return otherwise.splitlines()[0]
