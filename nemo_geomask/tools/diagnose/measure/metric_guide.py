"""Guide to the reported metrics: definitions, ranges, alerts and actions, of which the site makes its page of metrics.

``python -m nemo_geomask.tools.diagnose.measure.metric_guide --alerts`` prints the alert limits as JSON.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from nemo_geomask.tools.diagnose.measure.thresholds import HEALTH_LIMITS

LABEL = "<label>"
"""Placeholder for a mask's label in the names of metrics."""


@dataclass(frozen=True)
class MetricEntry:
    """Entry of the guide for one metric, or for several that belong together; see ``metrics.toml``.

    Attributes:
        names: names under which the metrics are reported; ``<label>`` stands for a mask's label.
        averaging: the elements that a metric is averaged over; or "count", "largest", "smallest, largest", "step" or
            "batch".
        formula, unit: the definition.
        peers: names of the same quantity in other libraries.
        healthy: range of healthy values.
        action: what to do outside of that range.
        alerts: the names that have a limit.
        above, below: limits beyond which an alert is due.
        broken: second limit, beyond which a run is broken; None if there is none.
        limit_source: source of the limits, or the reason for them.
    """

    names: tuple[str, ...]
    averaging: str
    formula: str
    unit: str
    peers: str
    healthy: str
    action: str
    alerts: tuple[str, ...] = ()
    above: float | None = None
    below: float | None = None
    broken: float | None = None
    limit_source: str = ""


class Family(NamedTuple):
    """Section of the guide: metrics of one subject, with an introduction (``about``)."""

    name: str
    about: str
    entries: tuple[MetricEntry, ...]


class Alert(NamedTuple):
    """Limits of one metric's mean over five steps, None where there is none, and their source."""

    metric: str
    above: float | None
    below: float | None
    source: str


@cache
def metric_families() -> tuple[Family, ...]:
    """Return all sections of the guide."""
    text = files("nemo_geomask.tools.diagnose.measure").joinpath("metrics.toml").read_text(encoding="utf-8")
    return tuple(
        Family(family["name"], family["about"], tuple(_read_entry(entry) for entry in family["metric"]))
        for family in tomllib.loads(text)["family"]
    )


def _read_entry(table: Mapping[str, Any]) -> MetricEntry:
    """Build an entry from its TOML table; ``limit`` names one of ``HEALTH_LIMITS``, to which ``plus`` is added."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    limit_name = fields.pop("limit", None)
    if limit_name is not None:
        limit = next(limit for limit in HEALTH_LIMITS if limit.name == limit_name)
        offset = fields.pop("plus", 0)
        fields["below" if limit.is_minimum else "above"] = limit.drifting + offset
        fields["broken"] = limit.broken + offset
        fields["limit_source"] = limit.source
    if {"above", "below"} & fields.keys():
        fields.setdefault("alerts", fields["names"][:1])
    return MetricEntry(**fields)


def alerts(labels: Iterable[str] = (), prefix: str = "train/") -> list[Alert]:
    """Return the limits of all metrics.

    Args:
        labels: labels of the recipe's masks; a metric of masks has an alert for each label.
        prefix: prefix of metric names in the log, ``train/`` in NeMo-RL's.
    """
    labels = list(labels)
    limits = []
    for entry in (entry for family in metric_families() for entry in family.entries):
        for pattern in entry.alerts:
            names = [pattern.replace(LABEL, label) for label in labels] if LABEL in pattern else [pattern]
            limits += [Alert(f"{prefix}{name}", entry.above, entry.below, entry.limit_source) for name in names]
    return limits


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alerts", nargs="*", metavar="LABEL", help="print the limits; labels of the recipe's masks")
    arguments = parser.parse_args()
    if arguments.alerts is not None:
        print(json.dumps([alert._asdict() for alert in alerts(arguments.alerts)], ensure_ascii=False, indent=1))


if __name__ == "__main__":
    _main()
