"""Formats of the commands' JSON, from which ``nemo-geomask schema --of COMMAND`` writes JSON Schemas.

A format has every key that the command may write. Numbers that are not finite are null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from nemo_geomask.tools.shared.json_output import JSON_VERSION

__all__ = ["FORMATS", "json_schema"]

Version = Annotated[Literal[1], Field(description="Version of the format; it grows when a key goes or changes.")]
Number = float | None
Interval = tuple[Number, Number]


class _Strict(TypedDict):
    """Object with exactly the keys that its class declares."""

    # pydantic reads it from subclasses, too; mypy allows nothing but keys in a TypedDict.
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]


class PartJson(_Strict):
    """A line of the objective."""

    formula: str
    words: Annotated[str, Field(description="Explanation in a sentence.")]


class KeptJson(_Strict):
    """Fraction that a mask keeps at a mismatch."""

    mismatch_kl: Annotated[float, Field(description="Nats per token.")]
    share: float


class ForecastJson(_Strict):
    """Expectation of what a mask keeps."""

    key: str
    mask: str
    of: Literal["tokens", "sequences"]
    when: str
    tokens: Annotated[int, Field(description="Tokens of a response.")]
    kept: list[KeptJson]


class MeasuredJson(_Strict):
    """Measurements of the similar run of ``--from``."""

    directory: str
    steps: tuple[int, int]
    mismatch_kl: Number
    interval: Interval
    response_tokens: int
    staleness: Number
    kept: dict[str, Number]


class FindingJson(_Strict):
    """A finding of a rule, or a problem that has no rule."""

    rule: str | None
    severity: Literal["error", "warning", "note"]
    key: str | None
    message: str
    file: str | None
    line: int | None
    override: str | None
    source: str | None


class MismatchSettingJson(_Strict):
    """Setting of the recipe that ``probe`` would try at its conservative value."""

    key: str
    value: Any
    conservative: Any


class UnjudgedJson(_Strict):
    """A rule that could not be checked."""

    rule: str
    needs: Annotated[str, Field(description="Option or variable without which it can't be checked.")]


class NotImportedJson(_Strict):
    """A setting that names a plugin, under ``--no-import``."""

    key: str | None


class SummaryJson(_Strict):
    """Numbers of findings."""

    error: int
    warning: int
    note: int


class CheckJson(_Strict):
    """``check RECIPE --format json``."""

    version: Version
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


class BulkCheckJson(_Strict):
    """``check FOLDER --format json``."""

    version: Version
    recipes: list[CheckJson]
    skipped: Any
    summary: SummaryJson


class NamedCauseJson(_Strict):
    """The cause with the largest share."""

    id: str
    name: str
    action: str


class CauseJson(_Strict):
    """The test of one cause."""

    id: str
    measured: Number
    threshold: Number
    why: str
    shown: bool
    state: str
    needs: str
    detectable_share: Number
    share: Annotated[dict[str, Any] | None, Field(description="Shares of k3 and of |Δ|, with intervals.")]
    since: int | None
    says: str
    steps: list[int]


class LevelJson(_Strict):
    """A measure of health, against its limits."""

    value: Number
    interval: Interval
    health: str
    drifting: Number
    broken: Number
    definition: str
    source: str


class DiagnosisJson(_Strict):
    """One run of ``diagnose --json``."""

    version: Version
    run: str
    health: Literal["healthy", "drifting", "broken", "unknown"]
    verdict: str
    since: int | None
    against: dict[str, Any] | None
    cause: NamedCauseJson | None
    steps: list[int]
    named: list[str]
    causes: list[CauseJson]
    levels: dict[str, LevelJson]
    tables: dict[str, list[dict[str, Any]]]
    files: Annotated[list[Any], Field(description="Files that were left out, and why.")]


class TokensJson(_Strict):
    """Numbers of tokens that the measures are over."""

    with_gradient: int
    trained: int


class MeasureJson(_Strict):
    """A measure with its confidence interval."""

    value: Number
    interval: Interval


class CandidateJson(_Strict):
    """The effect of one correction."""

    name: str
    settings: dict[str, Any]
    source: str
    removed: MeasureJson
    bias: MeasureJson
    variance: MeasureJson
    ess: MeasureJson
    advantage: MeasureJson
    of_all_trained_tokens: dict[str, Number]
    removed_of: dict[str, Number]
    skipped: list[int]
    metrics: Any
    on_front: bool


class SweepJson(_Strict):
    """``sweep --json``."""

    version: Version
    run: str
    steps: list[int]
    left_out: dict[str, int]
    damaged_files: dict[str, str]
    at: Literal["prev", "curr"]
    does_not_fit: Any
    recommended: str | None
    loss_fn: str | None
    no_recommendation: str
    definitions: dict[str, str]
    tokens: TokensJson
    candidates: list[CandidateJson]


class RehearsalJson(_Strict, total=False):
    """``rehearse --json``; the plan's keys are missing where the recipe was refused."""

    version: Version
    recipe: str
    nemo_rl: str
    ok: bool
    gpus: Any
    seconds: float
    folder: str
    stages: list[dict[str, Any]]
    failure: dict[str, Any] | None
    loss: dict[str, Any]
    workers: list[Any]
    metrics: Annotated[dict[str, dict[str, Any]], Field(description="Metrics of each step.")]
    control: dict[str, Any] | None
    resumed: dict[str, Any] | None
    changes: list[dict[str, Any]]
    not_rehearsed: list[str]
    unmet: list[dict[str, Any]]
    weights: list[dict[str, Any]]
    diagnosis: dict[str, Any] | None
    layout: str
    model_type: str
    command: list[str]


FORMATS: dict[str, Any] = {
    "check": CheckJson | BulkCheckJson,
    "diagnose": list[DiagnosisJson],
    "rehearse": RehearsalJson,
    "sweep": SweepJson,
}
"""Type of the JSON of each command."""


def json_schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema of a command's JSON."""
    schema = TypeAdapter(FORMATS[command]).json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"nemo-geomask {command}, version {JSON_VERSION}",
        **{key: value for key, value in schema.items() if key != "title"},
    }
