"""What a run's mismatch may be due to: causes, each with a signature of its own, and places.

A place is a part of the data that holds the excess mismatch. It is no cause: several may lead to it, and the likely
ones are listed with what tells them apart. The texts and thresholds are in ``causes.toml``.
:mod:`~nemo_geomask.tools.diagnose.explain.cause_selection` ranks what a run shows by the share of the mismatch that
each accounts for.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from nemo_geomask.tools.diagnose.explain import faults, noise, places, signatures, stale_engine
from nemo_geomask.tools.diagnose.explain.evidence import Detector


@dataclass(frozen=True)
class Cause:
    """One possible cause of a mismatch, or a place; ``causes.toml`` describes the fields."""

    id: str
    name: str
    action: str
    threshold: float
    rationale: str
    detect: Detector  # function that looks for the cause
    is_bug: bool = False
    likely: tuple[str, ...] = ()  # empty for a cause
    unless: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_place(self) -> bool:
        """True if this is a part of the data, whose cause is not known."""
        return bool(self.likely)

    def keep_unrefuted(self, texts: Iterable[str], facts: Collection[str]) -> list[str]:
        """Return those of its likely causes, or of the parts of its action, that the facts of the records leave."""
        refuted = tuple(start for fact in facts for start in self.unless.get(fact, ()))
        return [text for text in texts if not text.startswith(refuted)]


_PLACE_DEFAULTS: dict[str, Any] = {
    "threshold": 0.1,
    "rationale": "share of the mismatch that the part has beyond the rate of the other tokens, measured on the half of "
    "the sequences that did not choose it; our threshold, measured on planted causes",
}
_DETECTORS: dict[str, Detector] = {
    "current_policy": faults.detect_current_policy,
    "filtered": signatures.detect_filter,
    "zero_logprobs": faults.detect_zeros,
    "nonfinite": faults.detect_nonfinite,
    "positive_logprobs": faults.detect_positive,
    "shifted": faults.detect_shift,
    "temperature": signatures.detect_temperature,
    "penalty": signatures.detect_penalty,
    "smoothed": signatures.detect_smoothed,
    "scaled": signatures.detect_scaled,
    "biased_weight": signatures.detect_biased_weight,
    "stale_engine": stale_engine.detect_stale_engine,
    "staleness": places.detect_staleness,
    "few_tokens": noise.detect_few_tokens,
    "routing": noise.detect_routing,
    "precision": noise.detect_precision,
}
"""Detectors of causes by their ids; places, which have factors instead, are all detected in the same way."""


def _read_cause(table: Mapping[str, Any]) -> Cause:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    factors = fields.pop("factors", ())
    if not factors:
        return Cause(detect=_DETECTORS[fields["id"]], **fields)
    detect = places.detect_place(*factors, is_early=fields["id"] == "early_tokens")
    return Cause(**(_PLACE_DEFAULTS | fields), detect=detect)


_TEXT = files("nemo_geomask.tools.diagnose.explain").joinpath("causes.toml").read_text(encoding="utf-8")
CAUSES = tuple(_read_cause(table) for table in tomllib.loads(_TEXT)["cause"])
"""All causes; of two that account for equal shares of the mismatch, the first is named."""
DISTRIBUTION_CAUSES = ("filtered", "temperature", "penalty", "smoothed", "scaled", "biased_weight", "stale_engine")
"""Causes that change the log-probs of all tokens, of some more than of others."""
NOISE_CAUSES = ("few_tokens", "routing", "precision")
"""Causes without a place or a shape of their own: they account for what no other cause does."""
PLACES = (*(cause.id for cause in CAUSES if cause.is_place and cause.id not in NOISE_CAUSES), "staleness")
"""Parts of the data, and samples of old weights, which are one as well."""
