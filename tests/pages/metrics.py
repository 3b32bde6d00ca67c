"""Tables and entries of all metrics, for ``docs/reference/metrics.md``.

``python -m tests.pages.metrics DIR`` takes the ranges *in the lab* from a run of the lab.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nemo_geomask.tools.diagnose.read.logged_metrics import read_logged
from tests.helpers.markdown import markdown_table
from tests.pages.metric_guide import LABEL, Family, MetricEntry, metric_families

RANGES_FILE = Path(__file__).parents[2] / "docs" / "diagnose" / "lab-metrics.json"
ENTRIES = [entry for family in metric_families() for entry in family.entries]


def limit_table() -> str:
    """Return the table of all alerts."""
    rows = (row for entry in ENTRIES for row in _limit_rows(entry))
    return markdown_table(("metric", "alert", "broken", "source"), rows)


def metric_sections() -> str:
    """Return a Markdown section for each family of metrics."""
    ranges = json.loads(RANGES_FILE.read_text(encoding="utf-8"))
    return "\n".join(line for family in metric_families() for line in _family_lines(family, ranges))


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


def measure_ranges(folder: Path) -> dict[str, list[float]]:
    """Return the smallest, the median and the largest value of each metric in a run of the lab."""
    series = read_logged(folder)
    ranges = {}
    for name in sorted({name for entry in ENTRIES for name in entry.names}):
        if values := sorted(value for value in series.get(name, {}).values() if math.isfinite(value)):
            ranges[name] = [float(f"{value:.3g}") for value in (values[0], values[len(values) // 2], values[-1])]
    return ranges


if __name__ == "__main__":
    RANGES_FILE.write_text(json.dumps(measure_ranges(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
