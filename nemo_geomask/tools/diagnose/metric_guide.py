"""Guide to the reported metrics, the source of ``docs/reference/metrics.md``: definitions, ranges, alerts and actions.

``python -m nemo_geomask.tools.diagnose.metric_guide docs/reference/metrics.md`` rewrites its tables. ``--alerts``
prints the alert limits as JSON, and ``--measured DIR`` takes the page's measured ranges from a run of the lab.
"""

from __future__ import annotations

import argparse
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from nemo_geomask.errors import ArgumentError
from nemo_geomask.tools.diagnose.logged_metrics import read_logged
from nemo_geomask.tools.diagnose.thresholds import HEALTH_LIMITS
from nemo_geomask.tools.shared.markdown import markdown_table, replace_marked_text

__all__ = ["Alert", "Family", "MetricEntry", "alerts", "metric_families", "rewrite"]

LABEL = "<label>"
"""Placeholder for a mask's label in the names of metrics."""
RANGES_FILE = Path("docs/diagnose/lab-metrics.json")


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
    text = files("nemo_geomask.tools.diagnose").joinpath("metrics.toml").read_text(encoding="utf-8")
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
    for entry in _all_entries():
        for pattern in entry.alerts:
            names = [pattern.replace(LABEL, label) for label in labels] if LABEL in pattern else [pattern]
            limits += [Alert(f"{prefix}{name}", entry.above, entry.below, entry.limit_source) for name in names]
    return limits


def _all_entries() -> Iterator[MetricEntry]:
    return (entry for family in metric_families() for entry in family.entries)


def rewrite(text: str, ranges: Mapping[str, Sequence[float]]) -> str:
    """Return the page's text with tables generated from ``metrics.toml``.

    Args:
        text: text of the page.
        ranges: by metric, the smallest, the median and the largest value in a run of the lab.
    """
    rows = (row for entry in _all_entries() for row in _limit_rows(entry))
    table = markdown_table(("metric", "alert", "broken", "source"), rows)
    text = replace_marked_text(text, "limits", table, page="metrics.md")
    lines = (line for family in metric_families() for line in _family_lines(family, ranges))
    return replace_marked_text(text, "metrics", "\n".join(lines), page="metrics.md")


def _limit_rows(entry: MetricEntry) -> Iterator[tuple[str, str, str, str]]:
    sign = "<" if entry.above is None else ">"
    for name in entry.alerts:
        broken = "" if entry.broken is None else f"{sign} {entry.broken:g}"
        yield f"[`{name}`](#{_anchor(entry)})", _limit_text(entry), broken, entry.limit_source


def _limit_text(entry: MetricEntry) -> str:
    bounds = ((">", entry.above), ("<", entry.below))
    return " or ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


def _anchor(entry: MetricEntry) -> str:
    return entry.names[0].replace("/", "-").replace(LABEL, "label")


def _family_lines(family: Family, ranges: Mapping[str, Sequence[float]]) -> Iterator[str]:
    yield from (f"## {family.name}", "", family.about, "")
    for entry in family.entries:
        first, *more_names = entry.names
        yield from (f'<a id="{_anchor(entry)}"></a>', "", f"### `{first}`", "")
        if more_names:
            yield from (f"and {', '.join(f'`{name}`' for name in more_names)}", "")
        unit = "" if entry.unit == "–" else f"; {entry.unit}"
        yield f"- **Definition:** {entry.formula} · {entry.averaging}{unit}."
        yield f"- **In other libraries:** {entry.peers}."
        yield f"- **Healthy:** {entry.healthy}{_range_text(entry, ranges)}."
        if entry.alerts:
            yield f"- **Alert:** {_limit_text(entry)}: {entry.limit_source}."
        yield f"- **What to do:** {entry.action}"
        yield ""


def _range_text(entry: MetricEntry, ranges: Mapping[str, Sequence[float]]) -> str:
    """Return the ranges of the entry's metrics in the lab, without those that do not vary, as a sentence."""
    texts = []
    for name in entry.names:
        smallest, median, largest = ranges.get(name, (0.0, 0.0, 0.0))
        if smallest != largest:
            title = f"{name.removeprefix('geomask/')} " if len(entry.names) > 1 else ""
            texts.append(f"{title}{median:.3g} ({smallest:.3g} to {largest:.3g})")
    return f". In the lab: {', '.join(texts)}" if texts else ""


def _measure_ranges(folder: Path) -> dict[str, list[float]]:
    """Return the smallest, the median and the largest value of each metric in a run of the lab."""
    series = read_logged(folder)
    if not series:
        raise ArgumentError(f"--measured {folder}: holds no metrics; name the folder of a run of the lab")
    ranges = {}
    for name in sorted({name for entry in _all_entries() for name in entry.names}):
        if values := sorted(value for value in series.get(name, {}).values() if math.isfinite(value)):
            ranges[name] = [float(f"{value:.3g}") for value in (values[0], values[len(values) // 2], values[-1])]
    return ranges


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, help="page whose tables are rewritten")
    parser.add_argument("--alerts", nargs="*", metavar="LABEL", help="print the limits; labels of the recipe's masks")
    parser.add_argument("--measured", type=Path, metavar="DIR", help="folder of a run of the lab to take ranges from")
    arguments = parser.parse_args()
    if arguments.measured:
        ranges = _measure_ranges(arguments.measured)
        RANGES_FILE.write_text(json.dumps(ranges, indent=1) + "\n", encoding="utf-8")
    if arguments.alerts is not None:
        print(json.dumps([alert._asdict() for alert in alerts(arguments.alerts)], ensure_ascii=False, indent=1))
    if arguments.page:
        page: Path = arguments.page
        ranges = json.loads(RANGES_FILE.read_text(encoding="utf-8"))
        page.write_text(rewrite(page.read_text(encoding="utf-8"), ranges), encoding="utf-8")


if __name__ == "__main__":
    _main()
