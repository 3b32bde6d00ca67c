"""Type of what ``rehearse --json`` prints, which is also its JSON Schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict


class RehearsalJson(TypedDict, total=False):
    """``rehearse --json``; the plan's keys are missing where the recipe was refused."""

    version: Literal[1]
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
    update: Annotated[dict[str, Any] | None, Field(description="Verdict on curr at first updates, against prev.")]
    layout: str
    model_type: str
    command: list[str]
