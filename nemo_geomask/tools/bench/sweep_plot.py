"""Plot of the time against each setting that a sweep varies, with one line for each path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.optional import require
from nemo_geomask.tools.shared.palette import line_look

__all__ = ["write_plot"]

_FIELDS = {"tokens": "tokens", "vocab": "vocabulary", "tp": "shards", "fraction": "fraction of tokens that train"}


def write_plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a panel for every setting that has several values when the other settings are those of the first case.

    Raises:
        MissingDependencyError: matplotlib can't be imported.
    """
    require("matplotlib", "--plot needs", "demo").use("Agg")
    pyplot = require("matplotlib.pyplot", "--plot needs", "demo")
    done = [result for result in results if "error" not in result]
    base = done[0]["case"] if done else {}
    panels = {field: _along(done, base, field) for field in _FIELDS}
    panels = {field: line for field, line in panels.items() if len(line) > 1} or {"tokens": done[:1]}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 5), squeeze=False)
    for panel, (field, line) in zip(axes[0], panels.items(), strict=True):
        names = [row["path"] for row in line[0]["paths"]] if line else []
        for index, name in enumerate(names):
            points = [(result["case"][field], _median(result, name)) for result in line]
            points = [(x, y) for x, y in points if y is not None]
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", label=name, **line_look(index))
        panel.set_xlabel(_FIELDS[field])
        panel.set_ylabel("ms, forward and backward")
        panel.set_yscale("log")
        if field != "fraction":
            panel.set_xscale("log", base=2)
        panel.grid(alpha=0.25)
    axes[0][0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _along(results: Sequence[Mapping[str, Any]], base: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    """Return the results whose cases differ from the base only in ``field``, sorted by this field."""
    matches = [
        result
        for result in results
        if all(value == base[name] for name, value in result["case"].items() if name != field)
    ]
    return sorted(matches, key=lambda result: float(result["case"][field]))


def _median(result: Mapping[str, Any], name: str) -> float | None:
    for row in result["paths"]:
        if row["path"] == name and row["status"] == "measured":
            return float(row["ms"]["median"])
    return None
