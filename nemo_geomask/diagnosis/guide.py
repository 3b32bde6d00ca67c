"""What each metric is, where it is healthy, when to be called and what to do: the data behind ``docs/metrics.md``.

``python -m nemo_geomask.diagnosis.guide docs/metrics.md`` rewrites the page's tables; ``--alerts`` prints the limits as
JSON; ``--measured DIR`` takes the page's measured ranges from a run of the lab.
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

from nemo_geomask.checks.pages import between_marks, markdown
from nemo_geomask.diagnosis.levels import LEVELS
from nemo_geomask.diagnosis.logged import read_logged
from nemo_geomask.errors import ArgumentError

__all__ = ["Alert", "Family", "MetricEntry", "alerts", "families", "rewrite"]

LABEL = "<label>"
MEASURED = Path("docs/diagnose/lab-metrics.json")


@dataclass(frozen=True)
class MetricEntry:
    """What there is to say of a metric, or of several that belong together.

    Attributes:
        names: under which it is reported; ``<label>`` stands for a mask's.
        over: what it is a mean over, or else.
        formula, unit: its definition.
        peers: what others call it.
        healthy: where it should be.
        do: what to do where it isn't.
        alerts: of ``names``, those that have a limit.
        above, below: the limits.
        broken: the second limit, from which on a run is broken; None: there is one only.
        why: where the limits are from.
    """

    names: tuple[str, ...]
    over: str
    formula: str
    unit: str
    peers: str
    healthy: str
    do: str
    alerts: tuple[str, ...] = ()
    above: float | None = None
    below: float | None = None
    broken: float | None = None
    why: str = ""


class Family(NamedTuple):
    """Metrics of one thing."""

    name: str
    about: str
    entries: tuple[MetricEntry, ...]


class Alert(NamedTuple):
    """A limit of one metric, on the mean of five steps."""

    metric: str
    above: float | None
    below: float | None
    source: str


@cache
def families() -> tuple[Family, ...]:
    """All entries."""
    text = files("nemo_geomask.diagnosis").joinpath("metrics.toml").read_text(encoding="utf-8")
    return tuple(
        Family(one["name"], one["about"], tuple(_entry(entry) for entry in one["metric"]))
        for one in tomllib.loads(text)["family"]
    )


def _entry(given: Mapping[str, Any]) -> MetricEntry:
    found: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    if (name := found.pop("limit", None)) is not None:
        level = next(level for level in LEVELS if level.name == name)
        plus = found.pop("plus", 0)
        found |= {"below" if level.below else "above": level.drifting + plus, "broken": level.broken + plus}
        found["why"] = level.source
    if {"above", "below"} & found.keys():
        found.setdefault("alerts", found["names"][:1])
    return MetricEntry(**found)


def alerts(labels: Iterable[str] = (), prefix: str = "train/") -> list[Alert]:
    """Every limit there is.

    Args:
        labels: of the recipe's masks.
        prefix: before a metric's name in the log; NeMo-RL's is ``train/``.
    """
    labels = list(labels)
    return [
        Alert(f"{prefix}{each}", entry.above, entry.below, entry.why)
        for family in families()
        for entry in family.entries
        for name in entry.alerts
        for each in ([name.replace(LABEL, label) for label in labels] if LABEL in name else [name])
    ]


def rewrite(text: str, measured: Mapping[str, Sequence[float]]) -> str:
    """The page with its tables.

    Args:
        text: of the page.
        measured: by metric, smallest, median and largest of the lab's steps.
    """
    limits = (cells for family in families() for entry in family.entries for cells in _limits(entry))
    text = between_marks(text, "limits", markdown(("metric", "alert", "broken", "source"), limits), page="metrics.md")
    entries = (line for family in families() for line in _family(family, measured))
    return between_marks(text, "metrics", "\n".join(entries), page="metrics.md")


def _limits(entry: MetricEntry) -> Iterator[tuple[str, str, str, str]]:
    sign = "<" if entry.above is None else ">"
    for name in entry.alerts:
        broken = "" if entry.broken is None else f"{sign} {entry.broken:g}"
        yield f"[`{name}`](#{_anchor(entry)})", _limit(entry), broken, entry.why


def _limit(entry: MetricEntry) -> str:
    signs = ((">", entry.above), ("<", entry.below))
    return " or ".join(f"{sign} {bound:g}" for sign, bound in signs if bound is not None)


def _anchor(entry: MetricEntry) -> str:
    return entry.names[0].replace("/", "-").replace(LABEL, "label")


def _family(family: Family, measured: Mapping[str, Sequence[float]]) -> Iterator[str]:
    yield from (f"## {family.name}", "", family.about, "")
    for entry in family.entries:
        first, *others = entry.names
        yield from (f'<a id="{_anchor(entry)}"></a>', "", f"### `{first}`", "")
        if others:
            yield from (f"and {', '.join(f'`{name}`' for name in others)}", "")
        unit = "" if entry.unit == "–" else f"; {entry.unit}"
        yield f"- **Is** {entry.formula} · {entry.over}{unit}."
        yield f"- **Elsewhere** {entry.peers}."
        yield f"- **Healthy** {entry.healthy}{_in_lab(entry, measured)}."
        if entry.alerts:
            yield f"- **Alert** {_limit(entry)}: {entry.why}."
        yield f"- **Then** {entry.do}"
        yield ""


def _in_lab(entry: MetricEntry, measured: Mapping[str, Sequence[float]]) -> str:
    said = [
        (f"{name.removeprefix('geomask/')} " if len(entry.names) > 1 else "")
        + "{1:.3g} ({0:.3g} to {2:.3g})".format(*measured[name])
        for name in entry.names
        if name in measured and measured[name][0] != measured[name][2]
    ]
    return f". In the lab: {', '.join(said)}" if said else ""


def _measure(folder: Path) -> dict[str, list[float]]:
    """Smallest, median and largest of each metric in a run of the lab."""
    steps = read_logged(folder)
    if not steps:
        raise ArgumentError(f"{folder} is no folder of a run of the lab")
    found = {}
    for name in sorted({name for family in families() for entry in family.entries for name in entry.names}):
        if values := sorted(value for value in steps.get(name, {}).values() if math.isfinite(value)):
            found[name] = [float(f"{each:.3g}") for each in (values[0], values[len(values) // 2], values[-1])]
    return found


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--alerts", nargs="*", metavar="LABEL", help="print the limits; labels of the recipe's masks")
    parser.add_argument("--measured", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    if arguments.measured:
        MEASURED.write_text(json.dumps(_measure(arguments.measured), indent=1) + "\n", encoding="utf-8")
    if arguments.alerts is not None:
        print(json.dumps([alert._asdict() for alert in alerts(arguments.alerts)], ensure_ascii=False, indent=1))
    if arguments.page:
        measured = json.loads(MEASURED.read_text(encoding="utf-8"))
        page = arguments.page
        page.write_text(rewrite(page.read_text(encoding="utf-8"), measured), encoding="utf-8")


if __name__ == "__main__":
    _main()
