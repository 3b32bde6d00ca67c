"""Types of what ``diagnose --json`` and ``sweep --json`` print, which are also their JSON Schemas."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from nemo_geomask.tools.shared.json_output import Interval, Number

Health = Annotated[str, Field(description="healthy, drifting, broken or unknown.")]


class NamedCauseJson(TypedDict):
    """The cause with the largest share, or the place whose cause is not known."""

    id: str
    name: str
    action: str
    is_known: Annotated[bool, Field(description="False if it is a place: a part of the data, not a cause.")]
    place: Annotated[str, Field(description="The tokens that have it; empty if all tokens do.")]
    likely: Annotated[list[str], Field(description="The likeliest causes of a place.")]


class CauseJson(TypedDict):
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


class LevelJson(TypedDict):
    """A measure of health, against its limits."""

    value: Number
    interval: Interval
    health: str
    drifting: Number
    broken: Number
    definition: str
    source: str


class DiagnosisJson(TypedDict):
    """One run of ``diagnose --json``."""

    version: Literal[1]
    run: str
    health: Health
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


class LogVerdictJson(TypedDict):
    """One run of ``diagnose --json`` that has metrics but no records."""

    version: Literal[1]
    run: str
    health: Health
    verdict: str


DiagnoseOutput = list[DiagnosisJson | LogVerdictJson]


class MeasureJson(TypedDict):
    """A measure with its confidence interval."""

    value: Number
    interval: Interval


class CandidateJson(TypedDict):
    """The effect of one correction."""

    name: str
    settings: dict[str, Any]
    source: str
    removed: MeasureJson
    pull: MeasureJson
    bias: MeasureJson
    variance: MeasureJson
    ess: MeasureJson
    advantage: MeasureJson
    skipped: list[int]
    metrics: Any
    on_front: bool


class SweepJson(TypedDict):
    """``sweep --json``."""

    version: Literal[1]
    run: str
    objective: Annotated[str, Field(description="The objective that is judged, and where its settings are from.")]
    steps: list[int]
    left_out: dict[str, int]
    damaged_files: dict[str, str]
    at: Literal["prev", "curr"]
    does_not_fit: Any
    recommended: str | None
    loss_fn: str | None
    no_recommendation: str
    decided_by: Literal["pull", "bias"]
    wrong_tokens: Annotated[Number, Field(description="Tokens of a response that the trainer would not have sampled.")]
    advantage_explained: Annotated[Number, Field(description="Share of A by its context; null: not testable.")]
    definitions: dict[str, str]
    tokens: Annotated[dict[str, int], Field(description="Number of trained tokens, and of those with_gradient.")]
    candidates: list[CandidateJson]
