"""Report of a rehearsal, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from nemo_geomask.tools.rehearse.control_run import Comparison
from nemo_geomask.tools.rehearse.json_format import RehearsalJson
from nemo_geomask.tools.rehearse.mismatch_check import Mismatch
from nemo_geomask.tools.rehearse.plan import Plan
from nemo_geomask.tools.rehearse.rehearsal import Rehearsal
from nemo_geomask.tools.rehearse.rehearsed_run import driver_command
from nemo_geomask.tools.rehearse.run_outcome import RunFailure, RunResult, Stage
from nemo_geomask.tools.rehearse.run_report import absent_requirements, row, run_lines, sentence, verdict_lines
from nemo_geomask.tools.shared.json_output import JSON_VERSION
from nemo_geomask.tools.shared.terminal_tables import count_with_noun


def as_text(rehearsal: Rehearsal) -> list[str]:
    """Return the lines of the text report."""
    device = "GPUs" if rehearsal.gpus else "CPUs, with shims for CUDA"
    lines = [f"{rehearsal.recipe} through the NeMo-RL in {rehearsal.nemo_rl}, on {device}", ""]
    severities = [finding.rule.severity for finding in rehearsal.findings]
    counts = ", ".join(
        count_with_noun(severities.count(severity), severity) for severity in ("error", "warning", "note")
    )
    lines.append(row("check", "ran" if rehearsal.plan else "failed", "", counts))
    if rehearsal.plan is not None and rehearsal.outcome is None:
        return [*lines, "", *_plan(rehearsal, rehearsal.plan)]
    has_run = rehearsal.outcome is not None and rehearsal.plan is not None
    shown = ("warning",) if has_run else ("error",)
    for finding in rehearsal.findings:
        if finding.rule.severity in shown:
            place = f"{finding.origin}: " if finding.origin else ""
            lines += [f"    {place}{finding.rule.severity} {finding.rule.id} {finding.key}: {finding.message}"]
    if rehearsal.outcome is None or rehearsal.plan is None:
        return [*lines, "", "The recipe has errors; nothing was run."]
    lines += run_lines(rehearsal.outcome, rehearsal.folder / "log.txt")
    lines += _control(rehearsal)
    lines += _resumed(rehearsal)
    lines += ["", "changed for the rehearsal:"]
    lines += [f"  {line}" for line in _size(rehearsal.plan)]
    lines.append(f"  {_small_changes(rehearsal.plan)}: {rehearsal.folder / 'command.txt'}")
    lines += ["", "not rehearsed:", *(f"  {part}" for part in rehearsal.plan.unrehearsed)]
    lines += ["", *verdict_lines(rehearsal.outcome)]
    verdict = "rehearsed" if rehearsal.ok else "failed"
    return [*lines, "", f"{verdict} in {rehearsal.seconds:.0f} s; command, log and metrics are in {rehearsal.folder}"]


def _size(plan: Plan) -> Iterator[str]:
    """Yield the layout and the model of a rehearsal, beside those of the recipe."""
    full = "" if plan.layout == plan.full_layout else f" (the recipe has {plan.full_layout})"
    yield f"the layout {plan.layout}{full}"
    yield f"a tiny {plan.model.model_type} with random weights; its architecture follows from {plan.model.source}"


def _plan(rehearsal: Rehearsal, plan: Plan) -> Iterator[str]:
    """Yield the plan of a rehearsal that was not run."""
    yield from absent_requirements()
    yield f"would run {plan.script} for {plan.options.steps} steps, with"
    yield from (f"  {line}" for line in _size(plan))
    yield f"  {_small_changes(plan)}"
    yield "not rehearsed:"
    yield from (f"  {part}" for part in plan.unrehearsed)
    yield ""
    yield f"nothing was run or written; the rehearsal would write to {rehearsal.folder} alone"
    yield "--json - prints every change with its reason, and the command"


def _small_changes(plan: Plan) -> str:
    count = sum(not change.why for change in plan.changes)
    return f"{count_with_noun(count, 'other setting')} of sizes, folders and prompts"


def _control(rehearsal: Rehearsal) -> Iterator[str]:
    if rehearsal.ours_only:
        yield ""
        yield f"no control: NeMo-RL's own loss does not have {', '.join(rehearsal.ours_only)}"
    if rehearsal.control is None:
        return
    yield ""
    failure = rehearsal.control.failure
    if failure is not None:
        yield f"the control, with NeMo-RL's own loss, failed in {failure.stage}: {failure.error}"
    for name, count in rehearsal.control.loss.items():
        yield f"control: {name}, called {count} times"
    yield from _compared(rehearsal.comparisons)
    if failure is None and not any(each.sampled_alike for each in rehearsal.comparisons):
        yield "the control compares nothing: the two runs sampled other tokens, or others' log-probs, from step 1 on"


def _compared(comparisons: tuple[Comparison, ...], *, may_differ: bool = False) -> Iterator[str]:
    for each in comparisons:
        difference = "different, as settings are" if may_differ else "DIFFERENT"
        verdict = "equal" if each.equal else difference if each.sampled_alike else "other samples by now"
        values = f"{each.ours:>16.9g}{each.theirs:>16.9g}{each.difference:>10.1e}"
        yield f"  step {each.step} {each.name:<24}{values}  {verdict}"


def _resumed(rehearsal: Rehearsal) -> Iterator[str]:
    if rehearsal.resumed is None:
        return
    failure = rehearsal.resumed.failure
    yield ""
    under = f" under {' '.join(rehearsal.resume_changes)}" if rehearsal.resume_changes else ""
    if failure is not None:
        yield from sentence(f"resuming from the checkpoint{under} failed in {failure.stage}", failure)
        if rehearsal.resumed.stages:
            yield f"  the whole output is in {rehearsal.folder / 'resumed' / 'log.txt'}"
    else:
        yield f"the last step, and the same resumed from the checkpoint before it{under}:"
    yield from _compared(rehearsal.resumptions, may_differ=bool(rehearsal.resume_changes))
    if rehearsal.resume_cause is not None:
        yield f"  likely: {rehearsal.resume_cause.key}: {rehearsal.resume_cause.message}"


def as_json(rehearsal: Rehearsal) -> RehearsalJson:
    """Return the whole report as JSON values, but for numbers that are not finite."""
    findings = [
        {
            "rule": finding.rule.id,
            "severity": finding.rule.severity,
            "key": finding.key,
            "message": finding.message,
            "where": str(finding.origin) if finding.origin else None,
        }
        for finding in rehearsal.findings
    ]
    validation = {"name": "validation", "state": "ran" if rehearsal.plan else "failed", "findings": findings}
    outcome = rehearsal.outcome or RunResult((), None, {})
    result: dict[str, Any] = {
        "version": JSON_VERSION,
        "recipe": str(rehearsal.recipe),
        "nemo_rl": str(rehearsal.nemo_rl),
        "ok": rehearsal.ok,
        "gpus": rehearsal.gpus,
        "seconds": round(rehearsal.seconds, 2),
        "folder": str(rehearsal.folder),
        "stages": [validation, *map(_stage_as_json, outcome.stages)],
        **_run_as_json(outcome),
        "workers": outcome.workers,
        "control": _control_as_json(rehearsal),
        "resumed": _resumed_as_json(rehearsal),
        "unmet": [_failure_as_json(unmet) for unmet in outcome.unmet],
        "weights": [
            {key: value for key, value in event.items() if key not in ("at", "kind")} for event in outcome.weights
        ],
        "diagnosis": _mismatch_as_json(outcome.mismatch),
        "update": _mismatch_as_json(outcome.update),
        "changes": [],
        "not_rehearsed": [],
    }
    if rehearsal.plan is not None:
        result |= _plan_as_json(rehearsal.plan)
    return cast(RehearsalJson, result)


def _plan_as_json(plan: Plan) -> dict[str, Any]:
    return {
        "layout": str(plan.layout),
        "model_type": plan.model.model_type,
        "changes": [
            {"key": change.key, "was": change.was, "value": change.value, "why": change.why or None}
            for change in plan.changes
        ],
        "not_rehearsed": list(plan.unrehearsed),
        "command": driver_command(plan),
    }


def _mismatch_as_json(mismatch: Mismatch | None) -> dict[str, Any] | None:
    if mismatch is None:
        return None
    gap = {} if mismatch.gap is None else mismatch.gap._asdict()
    fields = {key: value for key, value in vars(mismatch).items() if key != "gap"}
    return {**fields, **gap, "limits": vars(mismatch.limits), "sentence": mismatch.sentence}


def _stage_as_json(stage: Stage) -> dict[str, Any]:
    fields = dict(vars(stage))
    fields["what"] = fields.pop("labels")
    return fields


def _control_as_json(rehearsal: Rehearsal) -> dict[str, Any] | None:
    if rehearsal.control is None:
        return {"ran": False, "ours_only": list(rehearsal.ours_only)} if rehearsal.ours_only else None
    return {"ran": True, **_run_as_json(rehearsal.control), "comparisons": _comparisons(rehearsal.comparisons)}


def _resumed_as_json(rehearsal: Rehearsal) -> dict[str, Any] | None:
    if rehearsal.resumed is None:
        return None
    cause = rehearsal.resume_cause
    likely = None if cause is None else {"rule": cause.rule.id, "key": cause.key, "message": cause.message}
    comparisons = _comparisons(rehearsal.resumptions)
    return {**_run_as_json(rehearsal.resumed), "comparisons": comparisons, "likely": likely}


def _run_as_json(run: RunResult) -> dict[str, Any]:
    return {
        "failure": None if run.failure is None else _failure_as_json(run.failure),
        "loss": run.loss,
        "metrics": {str(step): dict(values) for step, values in run.metrics.items()},
    }


def _failure_as_json(failure: RunFailure) -> dict[str, Any]:
    traceback = failure.traceback or failure.error
    return {**{key: value for key, value in vars(failure).items() if key != "traceback"}, "text": traceback}


def _comparisons(comparisons: tuple[Comparison, ...]) -> list[dict[str, Any]]:
    return [{**vars(each), "difference": each.difference, "equal": each.equal} for each in comparisons]
