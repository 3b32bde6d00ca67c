"""The corrections and masks that a sweep compares, at their peers' defaults and at other bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CANDIDATES", "GRID", "NOTHING", "OF_RECIPE", "Candidate", "of_recipe"]


@dataclass(frozen=True)
class Candidate:
    """One way to correct.

    Attributes:
        name: short.
        settings: of ``loss_fn``, on top of the base's.
        source: of its numbers.
    """

    name: str
    settings: Mapping[str, Any]
    source: str


def _weight(level: str, kind: str | None, low: float | None, high: float | None, source: str) -> Candidate:
    bounds = {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }
    settings = {"use_importance_sampling_correction": True, "is_correction_level": level, **bounds}
    settings = {key: value for key, value in settings.items() if value is not None}
    between = "" if kind is None else f" {kind} [{low or 0:g}, {high:g}]"
    return Candidate(f"weight {level}{between}", settings, source)


def _mask(preset: str, source: str, **bounds: Any) -> Candidate:
    said = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in bounds.values())
    return Candidate(f"mask {preset} {said}", {"masks": [{"preset": preset, **bounds}]}, source)


def _veto(limit: float, source: str) -> Candidate:
    # As many in a row as there are: here a veto ends nothing.
    veto = {"estimator": "k3", "max": limit, "max_in_a_row": 10**9}
    return Candidate(f"batch_veto k3 {limit:g}", {"batch_veto": veto}, source)


NOTHING = Candidate("nothing", {}, "NeMo-RL's default")
CANDIDATES: tuple[Candidate, ...] = (
    NOTHING,
    _weight("token", None, None, None, "NeMo-RL use_importance_sampling_correction"),
    _weight("token", "tis", None, 2.0, "verl, slime, TRL: cap 2"),
    _weight("token", "icepop", 0.5, 5.0, "IcePop, arXiv:2510.18855"),
    _weight("sequence", "tis", None, 2.0, "verl decoupled_seq_is"),
    _weight("sequence_mean", None, None, None, "NeMo-RL PR 2269"),
    _weight("token", "seq-mask-tis", 0.999, 1.002, "NeMo-RL"),
    _mask("geometric", "verl decoupled_geo_rs", min=0.999, max=1.001),
    _mask("geometric", "SkyRL", min=0.99, max=1.01),
    _mask("product", "verl decoupled_seq_is_rs", min=0.5, max=2.0),
    _mask("icepop", "IcePop, arXiv:2510.18855", min=0.5, max=5.0),
    _mask("veto", "SkyRL outlier tokens", min=1e-4, max=100.0),
    _mask("trust_region", "verl decoupled_k3_rs", statistic="k3", level="sequence_mean", max=0.01),
    _mask("opsm", "TRL off_policy_mask_threshold", delta=0.5),
    _mask("dppo_tv", "verl's example for DPPO, arXiv:2602.04879", delta=0.15),
    _mask("dppo_kl", "verl's example for DPPO, arXiv:2602.04879", delta=0.05),
    _mask("cppo", "CPPO, arXiv:2606.10968", delta=0.15),
    _mask("kpop", "prime-rl PR 3283", max=0.1),
    _mask("m2po", "M2PO, arXiv:2510.01161", tau=0.04),
    _veto(0.1, "When Speed Kills Stability (2025)"),
)
"""At their peers' defaults."""
_OF_GRID = "grid"
OF_RECIPE = "the recipe"
"""The source of its own."""
GRID: tuple[Candidate, ...] = (
    *(_weight("token", "tis", None, high, _OF_GRID) for high in (1.5, 5.0, 10.0)),
    *(_weight("token", "icepop", 1 / high, high, _OF_GRID) for high in (1.5, 2.0, 10.0)),
    *(_weight("sequence", "tis", None, high, _OF_GRID) for high in (5.0, 10.0)),
    *(_mask("geometric", _OF_GRID, min=1 - by, max=1 + by) for by in (3e-4, 3e-3, 0.03, 0.1)),
    *(_mask("product", _OF_GRID, min=1 / by, max=by) for by in (1.5, 5.0, 10.0)),
    *(_mask("icepop", _OF_GRID, min=1 / by, max=by) for by in (1.5, 2.0, 5.0, 10.0)),
    *(_mask("veto", _OF_GRID, min=1 / by, max=by) for by in (5.0, 20.0, 1000.0)),
    *(
        _mask("trust_region", _OF_GRID, statistic="k3", level="sequence_mean", max=high)
        for high in (3e-4, 1e-3, 3e-3, 0.03, 0.1)
    ),
    *(_mask("opsm", _OF_GRID, delta=delta) for delta in (1e-3, 0.01, 0.05)),
    *(_mask("dppo_tv", _OF_GRID, delta=delta) for delta in (0.05, 0.1, 0.2, 0.3)),
    *(_mask("dppo_kl", _OF_GRID, delta=delta) for delta in (0.01, 0.1)),
    *(_mask("kpop", _OF_GRID, max=high) for high in (0.02, 0.5, 2.0)),
    *(_mask("m2po", _OF_GRID, tau=tau) for tau in (0.01, 0.1)),
    *(_veto(limit, _OF_GRID) for limit in (0.01, 0.03)),
)
CORRECTIONS = (
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
"""Fields of ``loss_fn`` that say how to correct."""


def of_recipe(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Candidate | None]:
    """A recipe's ``loss_fn`` as a base without corrections, and as a candidate, where it corrects."""
    base = {key: value for key, value in settings.items() if key not in CORRECTIONS}
    own = {key: value for key, value in settings.items() if key in CORRECTIONS}
    return base, Candidate("the recipe's own", own, OF_RECIPE) if own else None
