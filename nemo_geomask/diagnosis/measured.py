"""What ``check`` assumes of a run, measured in one that was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_geomask.diagnosis.run import blocks_of, survey_run
from nemo_geomask.diagnosis.sources import find_runs
from nemo_geomask.errors import ConfigError, DataError

__all__ = ["Measured", "measure_run"]

REPLAYED = 2
"""Steps that a recipe's masks are tried on."""


@dataclass(frozen=True)
class Measured:
    """A run's last third.

    Attributes:
        directory: where it was recorded.
        steps: the first and the last of those measured.
        mismatch_kl: mean of exp(Δ) − 1 − Δ, nats a token.
        interval: its 95 % interval over sequences.
        response_tokens: mean number of trained tokens of a response, at least 1.
        staleness: mean, in steps; NaN where it was not recorded.
        kept: by a mask's label, the share of tokens or sequences that it keeps of the last steps, by the loss itself,
            the current policy taken to be π_old.
    """

    directory: Path
    steps: tuple[int, int]
    mismatch_kl: float
    interval: tuple[float, float]
    response_tokens: int
    staleness: float
    kept: Mapping[str, float] = field(default_factory=dict)


def measure_run(directory: Path, settings: Mapping[str, Any] | None = None, cache: Path | None = None) -> Measured:
    """Measure the run in a folder.

    Args:
        directory: of its records or logs.
        settings: a valid ``loss_fn`` whose masks are tried; None: none are.
        cache: as for :func:`~nemo_geomask.diagnosis.run.survey_run`.

    Raises: ConfigError: several runs. DataError: none, or one without log-probs of both engines.
    """
    runs = find_runs([directory])
    if len(runs) > 1:
        raise ConfigError(f"{directory} holds several runs: {', '.join(str(run.directory) for run in runs)}; name one")
    (run,) = runs
    steps = run.steps[-max(3, len(run.steps) // 3) :]
    total = survey_run(run, steps, cache).total()
    if not total["tokens"]:
        raise DataError(f"{directory}: no sequence has a trained token with log-probs of both engines")
    return Measured(
        directory,
        (steps[0], steps[-1]),
        total.mean("k3"),
        total.interval("k3"),
        max(1, round(total.mean("tokens", "sequences"))),
        total.mean("staleness", "stale_known"),
        {}
        if settings is None
        else _kept(settings, [(step, blocks_of(run, step, cache)) for step in steps[-REPLAYED:]]),
    )


def _kept(settings: Mapping[str, Any], steps: list[Any]) -> dict[str, float]:
    from nemo_geomask.diagnosis.candidates import Candidate
    from nemo_geomask.diagnosis.sweep import as_batch, replay  # which needs torch

    # metrics: what is read here are the loss's own, whatever the run reports.
    apart = ("record", "audit_fraction", "batch_veto", "metrics")
    own = {key: value for key, value in settings.items() if key not in apart}
    batches = [(step, as_batch(blocks)[0]) for step, blocks in steps]
    (found,) = replay(batches, [Candidate("own", own, "")])
    removed: dict[str, list[float]] = {}
    for metrics in found.metrics.values():
        for name, value in metrics.items():
            if name.startswith("geomask/mask/") and name.endswith("/removed"):
                removed.setdefault(name.split("/")[2], []).append(value)
    return {label: 1 - sum(shares) / len(shares) for label, shares in removed.items()}
