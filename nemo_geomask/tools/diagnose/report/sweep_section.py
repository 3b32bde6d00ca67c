"""Tables of the outcome of a sweep, from its JSON."""

from __future__ import annotations

import math
from typing import Any

from nemo_geomask.tools.diagnose.report.json_formats import CandidateJson, SweepJson
from nemo_geomask.tools.diagnose.report.report_tables import Table

MEASURES = ("removed", "bias", "variance", "ess", "advantage")
"""Keys of a candidate's measures, in the order of the columns."""


def sweep_tables(sweep: SweepJson, title: str, marks: tuple[str, str]) -> list[Table]:
    """Return the table of the candidates, and that of the shares of parts that they remove.

    ``marks`` mark the recommended candidate, and one that no other has less bias and less variance than.
    """
    candidates: list[Any] = list(sweep["candidates"])
    parts = list(candidates[0]["removed_of"])[1:] if candidates else []
    rows: list[tuple[Any, ...]] = [
        (
            candidate["name"],
            _mark(candidate, sweep, marks),
            *(_number(candidate[measure]["value"]) for measure in MEASURES),
            ", ".join(map(str, candidate["skipped"])),
            candidate["source"],
        )
        for candidate in candidates
    ]
    removed: list[tuple[Any, ...]] = [
        (candidate["name"], *(_number(candidate["removed_of"].get(part)) for part in parts))
        for candidate in candidates
        if candidate["removed"]["value"]
    ]
    columns = ("candidate", "", *MEASURES, "steps skipped", "source")
    return [
        Table("candidates", title, columns, rows, sweep["definitions"]),
        Table("removed", "Share removed, of tokens that are", ("candidate", *parts), removed),
    ]


def _mark(candidate: CandidateJson, sweep: SweepJson, marks: tuple[str, str]) -> str:
    if candidate["name"] == sweep["recommended"]:
        return marks[0]
    return marks[1] if candidate["on_front"] else ""


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
