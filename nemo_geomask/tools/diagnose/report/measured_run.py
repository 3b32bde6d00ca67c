"""Measured mismatch, response length and staleness of a run, with which ``check`` replaces its assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_geomask.errors import DataError
from nemo_geomask.tools.diagnose.measure.run_survey import read_step, survey_run
from nemo_geomask.tools.diagnose.read.record_sources import RunFiles, find_run

REPLAYED_STEPS = 2
"""Number of steps that are replayed to measure what a recipe's masks keep."""
MIN_STEPS = 3
"""Minimum number of steps that are measured."""
_IGNORED_SETTINGS = ("record", "audit_fraction", "batch_veto", "metrics")
"""Settings of ``loss_fn`` that are left out of the replay: they do not change what the masks keep."""


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements over the last third of a recorded run.

    ``kept`` has the share of tokens or sequences that each mask of the recipe keeps in the last steps, by the mask's
    label. It is measured by replaying the loss, with π_old in place of the current policy.
    """

    directory: Path
    steps: tuple[int, int]  # the first and the last
    mismatch_kl: float  # mean of exp(Δ) − 1 − Δ, nats a token
    interval: tuple[float, float]  # its confidence interval over sequences
    response_tokens: int  # mean number of trained tokens of a response, at least 1
    staleness: float  # mean, in steps; NaN if it was not recorded
    kept: Mapping[str, float] = field(default_factory=dict)


def measure_run(directory: Path, settings: Mapping[str, Any] | None = None, cache: Path | None = None) -> MeasuredRun:
    """Measure the run in a folder, and what the masks of a valid ``loss_fn`` keep of it.

    Raises: ConfigError: the folder holds several runs. DataError: it holds none, or lacks log-probs of an engine.
    """
    run = find_run(directory)
    steps = run.steps[-max(MIN_STEPS, len(run.steps) // 3) :]
    total = survey_run(run, steps, cache).total()
    if not total["tokens"]:
        raise DataError(f"{directory}: no sequence has a trained token with log-probs of both engines")
    return MeasuredRun(
        directory=directory,
        steps=(steps[0], steps[-1]),
        mismatch_kl=total.mean("k3"),
        interval=total.interval("k3"),
        response_tokens=max(1, round(total.mean("tokens", "sequences"))),
        staleness=total.mean("staleness", "sequences_with_staleness"),
        kept={} if settings is None else _kept_shares(settings, run, steps[-REPLAYED_STEPS:], cache),
    )


def _kept_shares(settings: Mapping[str, Any], run: RunFiles, steps: list[int], cache: Path | None) -> dict[str, float]:
    """Replay steps through the loss, and return the share that each mask keeps, by its label."""
    from nemo_geomask.tools.diagnose.report.correction_sweep import padded_batch, replay  # needs torch
    from nemo_geomask.tools.diagnose.report.sweep_candidates import Candidate

    recipe = Candidate(
        "recipe", {key: value for key, value in settings.items() if key not in _IGNORED_SETTINGS}, source=""
    )
    batches = [(step, padded_batch(read_step(run, step, cache))[0]) for step in steps]
    (outcome,) = replay(batches, [recipe])
    removed: dict[str, list[float]] = {}
    for metrics in outcome.metrics.values():
        for name, value in metrics.items():
            if name.startswith("geomask/mask/") and name.endswith("/removed"):
                removed.setdefault(name.split("/")[2], []).append(value)
    return {label: 1 - sum(shares) / len(shares) for label, shares in removed.items()}
