"""Guide to the reported metrics: definitions, ranges, alerts and actions, of which the site makes its page of metrics.

``python -m tests.pages.metric_guide --alerts`` prints the alert limits as JSON.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.diagnose.measure.thresholds import HEALTH_LIMITS

LABEL = "<label>"
"""Placeholder for a mask's label in the names of metrics."""


@dataclass(frozen=True)
class MetricEntry:
    """Entry of the guide for one metric, or for several that belong together; ``metrics.toml`` describes the fields."""

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
    text = Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8")
    return tuple(
        Family(family["name"], family["about"], tuple(read_entry(entry) for entry in family["metric"]))
        for family in tomllib.loads(text)["family"]
    )


def read_entry(table: Mapping[str, Any]) -> MetricEntry:
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
    try:
        return MetricEntry(**fields)
    except TypeError as error:  # "MetricEntry.__init__() missing 1 required positional argument: 'peers'"
        problem = str(error).removeprefix("MetricEntry.__init__() ").replace("positional argument", "field")
        raise ConfigError(
            f"metrics.toml: the entry of {', '.join(fields.get('names', ('no name',)))}: {problem}"
        ) from None


def alerts(labels: Iterable[str] = (), prefix: str = "train/") -> list[Alert]:
    """Return the limits of all metrics; one of masks has an alert for each label of the recipe's masks."""
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
