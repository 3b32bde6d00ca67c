"""Corrections and masks that a sweep compares, with the bounds that other systems use and with a grid of bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_geomask.config.presets import PUBLISHED_SETTINGS
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.losses import build_loss
from nemo_geomask.objectives.registry import LOSSES


@dataclass(frozen=True)
class Candidate:
    """One correction, mask or veto: fields of ``loss_fn`` that are added to the base's, and who uses these bounds."""

    name: str
    settings: Mapping[str, Any]
    source: str


def _weight(
    level: str, source: str, truncation: str | None = None, low: float | None = None, high: float = 0.0
) -> Candidate:
    """Return an importance-sampling correction, with a truncation type of NeMo-RL's or without."""
    settings: dict[str, Any] = {"use_importance_sampling_correction": True, "is_correction_level": level}
    if truncation is None:
        return Candidate(f"weight {level}", settings, source)
    settings |= {"truncated_importance_sampling_type": truncation, "truncated_importance_sampling_ratio": high}
    if low is not None:
        settings["truncated_importance_sampling_ratio_min"] = low
    return Candidate(f"weight {level} {truncation} [{low or 0:g}, {high:g}]", settings, source)


def _mask(preset: str, source: str, **settings: Any) -> Candidate:
    values = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in settings.values())
    return Candidate(f"mask {preset} {values}", {"masks": [{"preset": preset, **settings}]}, source)


def _veto(limit: float, source: str) -> Candidate:
    # Training stops after `max_in_a_row` vetoed batches, but a replay must go on.
    veto = {"estimator": "k3", "max": limit, "max_in_a_row": 10**9}
    return Candidate(f"batch_veto k3 {limit:g}", {"batch_veto": veto}, source)


NO_CORRECTION = Candidate("nothing", {}, "NeMo-RL's default")
CANDIDATES: tuple[Candidate, ...] = (
    NO_CORRECTION,
    _weight("token", "NeMo-RL use_importance_sampling_correction"),
    _weight("token", "verl, slime, TRL: cap 2", "tis", None, 2.0),
    _weight("token", "IcePop, arXiv:2510.18855", "icepop", 0.5, 5.0),
    _weight("sequence", "verl decoupled_seq_is", "tis", None, 2.0),
    _weight("sequence_mean", "NeMo-RL PR 2269"),
    _weight("token", "NeMo-RL", "seq-mask-tis", 0.999, 1.002),
    _mask("geometric", "verl decoupled_geo_rs", min=0.999, max=1.001),
    *(_mask(preset, published.source, **published.settings) for preset, published in PUBLISHED_SETTINGS.items()),
    _veto(0.1, "When Speed Kills Stability (2025)"),
)
"""Candidates with bounds that other systems and papers use."""

RECIPE_SOURCE, RUN_SOURCE = "the recipe", "the run"
""":attr:`Candidate.source` of the recipe's own corrections, and of those that the records are of."""

_GRID = "grid"
GRID: tuple[Candidate, ...] = (
    *(_weight("token", _GRID, "tis", None, high) for high in (1.5, 5.0, 10.0)),
    *(_weight("token", _GRID, "icepop", 1 / high, high) for high in (1.5, 2.0, 10.0)),
    *(_weight("sequence", _GRID, "tis", None, high) for high in (5.0, 10.0)),
    *(_mask("geometric", _GRID, min=1 - width, max=1 + width) for width in (3e-4, 3e-3, 0.03, 0.1)),
    *(_mask("product", _GRID, min=1 / high, max=high) for high in (1.5, 5.0, 10.0)),
    *(_mask("icepop", _GRID, min=1 / high, max=high) for high in (1.5, 2.0, 5.0, 10.0)),
    *(_mask("veto", _GRID, min=1 / high, max=high) for high in (5.0, 20.0, 1000.0)),
    *(
        _mask("trust_region", _GRID, statistic="k3", level="sequence_mean", max=limit)
        for limit in (3e-4, 1e-3, 3e-3, 0.03, 0.1)
    ),
    *(_mask("opsm", _GRID, delta=delta) for delta in (1e-3, 0.01, 0.05)),
    *(_mask("dppo_tv", _GRID, delta=delta) for delta in (0.05, 0.1, 0.2, 0.3)),
    *(_mask("dppo_kl", _GRID, delta=delta) for delta in (0.01, 0.1)),
    *(_mask("kpop", _GRID, max=limit) for limit in (0.02, 0.5, 2.0)),
    *(_mask("m2po", _GRID, tau=tau) for tau in (0.01, 0.1)),
    *(_veto(limit, _GRID) for limit in (0.01, 0.03)),
)
"""Candidates with narrower and wider bounds."""

CORRECTION_FIELDS = (
    "use_importance_sampling_correction",
    "is_correction_level",
    "is_correction_batch_normalize",
    "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
    "masks",
    "denominator",
    "batch_veto",
)
"""Fields of ``loss_fn`` that correct the mismatch; the other fields are the base, which all candidates share."""


_NOT_REPLAYED = ("record", "compile", "metrics", "compare_ranks", "logprob_backend")
"""Fields of ``loss_fn`` that change no gradient."""


def recorded_loss(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``loss_fn`` that a record was trained with, without defaults; empty if its facts name none.

    Raises: ConfigError: it is not a loss of this package, and a record starts no code of others; or it is not valid.
    """
    recorded = facts.get("settings")
    if not isinstance(recorded, dict):
        return {}
    name, options = recorded.get("name"), recorded.get("options")
    if not isinstance(name, str) or not LOSSES.is_built_in(name):
        raise ConfigError(
            Problem(("loss_fn.name",), f"the records are of {name!r}, which is no loss of this package; give --recipe")
        )
    # The settings in force, with the objective's own.
    implied = build_loss({"name": name, "options": options or {}}).config.model_dump(mode="json")
    settings = {
        key: value
        for key, value in recorded.items()
        if key in ("name", "options") or (key not in _NOT_REPLAYED and implied.get(key, ...) != value)
    }
    if "masks" in settings:
        settings["masks"] = settings["masks"][len(implied["masks"]) :]
    if not settings["options"]:
        del settings["options"]
    return settings


def split_loss(settings: Mapping[str, Any], source: str) -> tuple[dict[str, Any], Candidate | None]:
    """Split a ``loss_fn`` into the base and a candidate with its corrections; None if it has none."""
    base = {key: value for key, value in settings.items() if key not in CORRECTION_FIELDS}
    corrections = {key: value for key, value in settings.items() if key in CORRECTION_FIELDS}
    return base, Candidate(f"{source}'s own", corrections, source) if corrections else None
