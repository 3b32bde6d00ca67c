"""JSON output of ``nemo-geomask check``, whose types are also its JSON Schema."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field
from typing_extensions import TypedDict

from nemo_geomask.errors import Problem
from nemo_geomask.tools.check.bulk_check import BulkCheck
from nemo_geomask.tools.check.check_output import OPTION_FOR, settings_of_probe
from nemo_geomask.tools.check.recipe_check import SEVERITIES, CheckedRecipe, MaskForecast
from nemo_geomask.tools.check.rule import Finding
from nemo_geomask.tools.shared.json_output import JSON_VERSION, Interval, Number, replace_nonfinite

if TYPE_CHECKING:
    from nemo_geomask.tools.diagnose import MeasuredRun


class PartJson(TypedDict):
    """A line of the objective."""

    formula: str
    words: Annotated[str, Field(description="Explanation in a sentence.")]


class KeptJson(TypedDict):
    """Fraction that a mask keeps at a mismatch."""

    mismatch_kl: Annotated[float, Field(description="Nats per token.")]
    share: float


class ForecastJson(TypedDict):
    """Expectation of what a mask keeps."""

    key: str
    mask: str
    of: Literal["tokens", "sequences"]
    when: str
    tokens: Annotated[int, Field(description="Tokens of a response.")]
    kept: list[KeptJson]


class MeasuredJson(TypedDict):
    """Measurements of the similar run of ``--from``."""

    directory: str
    steps: tuple[int, int]
    mismatch_kl: Number
    interval: Interval
    response_tokens: int
    staleness: Number
    kept: dict[str, Number]


class FindingJson(TypedDict):
    """A finding of a rule, or a problem that has no rule."""

    rule: str | None
    severity: Literal["error", "warning", "note"]
    key: str | None
    message: str
    file: str | None
    line: int | None
    override: str | None
    source: str | None
    fix: Annotated[dict[str, Any], Field(description="Settings that are a way out, by dotted key.")]


class MismatchSettingJson(TypedDict):
    """Setting of the recipe that ``probe`` would try at its conservative value."""

    key: str
    value: Any
    conservative: Any


class UnjudgedJson(TypedDict):
    """A rule that could not be checked."""

    rule: str
    needs: Annotated[str, Field(description="Option or variable without which it can't be checked.")]


class NotImportedJson(TypedDict):
    """A setting that names a plugin, under ``--no-import``."""

    key: str | None


class SummaryJson(TypedDict):
    """Numbers of findings."""

    error: int
    warning: int
    note: int


class CheckJson(TypedDict):
    """``check RECIPE --format json``."""

    version: Literal[1]
    recipe: str | None
    nemo_rl: Annotated[str | None, Field(description="Checkout that the recipe was checked against.")]
    loss_of: Annotated[Literal["nemo_rl", "nemo_geomask"] | None, Field(description="Whose loss trains.")]
    objective: list[PartJson]
    expected: list[ForecastJson]
    measured: MeasuredJson | None
    settings: Annotated[dict[str, Any] | None, Field(description="Settings of loss_fn in force.")]
    findings: list[FindingJson]
    ignored: list[FindingJson]
    mismatch_settings: list[MismatchSettingJson]
    unjudged: list[UnjudgedJson]
    not_imported: list[NotImportedJson]
    summary: SummaryJson


class BulkCheckJson(TypedDict):
    """``check FOLDER --format json``."""

    version: Literal[1]
    recipes: list[CheckJson]
    skipped: int
    summary: SummaryJson


CheckOutput = CheckJson | BulkCheckJson
_NO_RULE = cast(FindingJson, {**dict.fromkeys(FindingJson.__annotations__), "severity": "error", "fix": {}})
_NOTHING = cast(
    CheckJson,
    {
        **{name: [] if "list" in str(annotation) else None for name, annotation in CheckJson.__annotations__.items()},
        "version": JSON_VERSION,
    },
)


def as_json(checked: CheckedRecipe) -> CheckJson:
    """Return the JSON of a checked recipe."""
    facts, report = checked.facts, checked.report
    trained_loss: Literal["nemo_rl", "nemo_geomask"] = "nemo_rl" if facts.trains_nemo_rl_loss else "nemo_geomask"
    return {
        "version": JSON_VERSION,
        "recipe": os.fspath(facts.recipe.path),
        "nemo_rl": str(facts.nemo_rl) if facts.nemo_rl else None,
        "loss_of": None if facts.loss is None else trained_loss,
        "objective": [{"formula": part.formula, "words": part.explanation} for part in checked.objective],
        "expected": [_forecast_as_json(forecast) for forecast in checked.forecasts],
        "measured": None if checked.measured is None else _measured_as_json(checked.measured),
        "settings": facts.config.model_dump(mode="json") if facts.loss else None,
        "findings": [_finding_as_json(finding) for finding in report.findings],
        "ignored": [_finding_as_json(finding) for finding in report.ignored],
        "mismatch_settings": [
            {"key": switch.key, "value": value, "conservative": switch.value}
            for switch, value in settings_of_probe(facts)
        ],
        "unjudged": [{"rule": rule.id, "needs": OPTION_FOR[attribute]} for rule, attribute in report.unchecked],
        "not_imported": [{"key": next(iter(problem.keys), None)} for problem in facts.not_imported],
        "summary": _summary(report.count),
    }


def bulk_as_json(bulk: BulkCheck) -> BulkCheckJson:
    """Return the JSON of several recipes: that of each recipe, unreadable ones first, and the numbers of findings."""
    unreadable = [unreadable_as_json(path, error.problems) for path, error in bulk.unreadable]
    return {
        "version": JSON_VERSION,
        "recipes": [*unreadable, *map(as_json, bulk.checked)],
        "skipped": bulk.skipped,
        "summary": _summary(bulk.count),
    }


def unreadable_as_json(recipe: str | None, problems: Sequence[Problem]) -> CheckJson:
    """Return the JSON of a recipe that can't be checked: its problems as findings without a rule."""
    keys = [next(iter(problem.keys), None) for problem in problems]
    findings: list[FindingJson] = [
        {**_NO_RULE, "key": key, "message": problem.message} for key, problem in zip(keys, problems, strict=True)
    ]
    summary: SummaryJson = {"error": len(problems), "warning": 0, "note": 0}
    return {**_NOTHING, "recipe": recipe, "findings": findings, "summary": summary}


def _summary(count: Callable[[str], int]) -> SummaryJson:
    return cast(SummaryJson, {severity: count(severity) for severity in SEVERITIES})


def _forecast_as_json(forecast: MaskForecast) -> ForecastJson:
    rule, unit = forecast.mask
    return {
        "key": rule.key,
        "mask": rule.label,
        "of": unit,
        "when": rule.when,
        "tokens": forecast.tokens,
        "kept": [{"mismatch_kl": kl, "share": fraction} for kl, fraction in forecast.kept],
    }


def _measured_as_json(measured: MeasuredRun) -> MeasuredJson:
    return cast(MeasuredJson, replace_nonfinite({**asdict(measured), "directory": str(measured.directory)}))


def _finding_as_json(finding: Finding) -> FindingJson:
    origin = finding.origin
    return {
        "rule": finding.rule.id,
        "severity": finding.rule.severity,
        "key": finding.key,
        "message": finding.message,
        "file": origin.file if origin else None,
        "line": origin.line if origin else None,
        "override": origin.where if origin and origin.line is None else None,
        "source": finding.rule.source,
        "fix": dict(finding.fix),
    }
