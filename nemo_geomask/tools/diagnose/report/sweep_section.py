"""The outcome of a sweep, from its JSON: the tables of the terminal and of the page, and the page's section."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nemo_geomask.errors import DataError
from nemo_geomask.recipe.input_limits import current_limits
from nemo_geomask.tools.diagnose.read.json_lines import open_log, parse_json
from nemo_geomask.tools.diagnose.report.figure_data import Curve, Figure
from nemo_geomask.tools.diagnose.report.json_formats import CandidateJson, SweepJson
from nemo_geomask.tools.diagnose.report.page_tables import PageTable, merge_tables
from nemo_geomask.tools.diagnose.report.report_tables import Table

MEASURES = ("removed", "bias", "variance", "ess", "advantage")
"""Keys of a candidate's measures, in the order of the columns."""


def read_sweep(path: Path) -> SweepJson:
    """Return the object that ``nemo-geomask sweep --json`` printed.

    Raises: DataError: the file can't be read, or holds something else.
    """
    limits = current_limits()
    with open_log(path) as file:
        sweep = parse_json(file.read(limits.line_bytes + 1), f"--sweep {path}", limits)
    try:
        return TypeAdapter(SweepJson).validate_python(sweep)
    except (ValidationError, OverflowError) as error:
        reason = ""
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f": {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DataError(
            f"--sweep: {path} is not what `nemo-geomask sweep DIR --json` of this version prints{reason}"
        ) from None


@dataclass(frozen=True)
class SweepSection:
    """A sweep in the page: its run, the recommended candidate and its loss_fn block, a figure and tables."""

    run: str
    recommended: str
    block: str
    figure: Figure
    tables: list[PageTable]


def build_sweep_section(number: int, sweep: SweepJson, directories: Sequence[str]) -> SweepSection:
    """Return the section of the sweep with an index; the page's runs, by their folders, choose the colour.

    Raises: DataError: the sweep is of a run that the report does not show.
    """
    try:
        run_paths = [Path(directory).resolve() for directory in directories]
        run_index = run_paths.index(Path(sweep["run"]).resolve())
    except (ValueError, RuntimeError, OSError):  # not among them, or its path is a loop of links
        listed = ", ".join(directories)
        raise DataError(
            f"--sweep: the sweep is of {sweep['run']}, which is none of the report's runs: {listed}"
        ) from None
    marks = ("recommended", "on the front")
    candidates: list[Any] = list(sweep["candidates"])
    curves = []
    for style, mark in enumerate((*marks, "")):
        marked = [candidate for candidate in candidates if _mark(candidate, sweep, marks) == mark]
        bias, variance = (tuple(_number(one[key]["value"]) for one in marked) for key in ("bias", "variance"))
        labels = tuple(candidate["name"] for candidate in marked)
        curves.append(Curve(run_index, mark or "others", bias, variance, style=style, labels=labels))
    figure = Figure(
        f"sweep {number}",
        "Bias against variance",
        definition=(
            "Bias and variance of the gradient under each candidate; none has less of both than one on the front"
        ),
        section="sweep",
        x_title="bias",
        y_title="variance",
        views={"": curves},
        is_scatter=True,
    )
    tables = sweep_tables(sweep, f"Candidates on {sweep['run']}", marks)
    merged = [merged for table in tables if table.rows for merged in merge_tables([(0, table)])]
    recommended = sweep["recommended"] or f"none ({sweep['no_recommendation']})"
    return SweepSection(sweep["run"], recommended, sweep["loss_fn"] or "", figure, merged)


def sweep_tables(sweep: SweepJson, title: str, marks: tuple[str, str]) -> list[Table]:
    """Return the table of the candidates, and that of the shares of parts that they remove.

    ``marks`` mark the recommended candidate, and one that no other has less bias and less variance than. Measures of
    all trained tokens have columns of their own where tokens without a gradient are left out of the others.
    """
    candidates: list[Any] = list(sweep["candidates"])
    has_silent = sweep["tokens"]["with_gradient"] < sweep["tokens"]["trained"]
    of_all = list(candidates[0]["of_all_trained_tokens"]) if has_silent and candidates else []
    parts = list(candidates[0]["removed_of"])[1:] if candidates else []
    rows: list[tuple[Any, ...]] = [
        (
            candidate["name"],
            _mark(candidate, sweep, marks),
            *(_number(candidate[measure]["value"]) for measure in MEASURES),
            *(_number(candidate["of_all_trained_tokens"].get(name)) for name in of_all),
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
    columns = ("candidate", "", *MEASURES, *(f"{name}, of all" for name in of_all), "steps skipped", "source")
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
