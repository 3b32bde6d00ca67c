"""The result of a probe as text, JSON and an HTML page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_geomask.optional import require
from nemo_geomask.tools.probe.ledger import LedgerRow
from nemo_geomask.tools.probe.probe_run import ProbeResult
from nemo_geomask.tools.shared.intervals import CONFIDENCE_LABEL
from nemo_geomask.tools.shared.palette import BLUE, VERMILION
from nemo_geomask.tools.shared.terminal_tables import ABSENT, format_table

__all__ = ["as_json", "as_text", "recipe_lines", "sentence", "write_html"]

_COLUMNS = (
    "switch",
    "was → tried",
    "effective",
    "k3 after",
    f"change, {CONFIDENCE_LABEL}",
    "share",
    "speed",
    "verdict",
)


def sentence(result: ProbeResult) -> str:
    """Return the result in one sentence."""
    ledger = result.ledger
    if result.faults:
        fault = result.faults[0]
        return f"{fault.name}: {fault.message}; {fault.fix}."
    size = f"k3 {ledger.baseline.k3:.3g} nats a token"
    if not ledger.has_mismatch:
        return f"There is no mismatch to explain: {size}."
    if not ledger.culprits:
        tried = sum(row.change is not None for row in ledger.rows)
        rest = "" if ledger.is_complete else "; the budget ended before all were tried"
        return f"None of the {tried} switches that were tried explains the mismatch of {size}{rest}."
    parts = [f"{row.switch.title} ({row.switch.key}) {_percent(row.share)}" for row in ledger.culprits[:3]]
    return f"Of the mismatch of {size}, these account for: {'; '.join(parts)}."


def recipe_lines(result: ProbeResult) -> list[str]:
    """Return the lines to set in the recipe, as overrides, each with its price as a comment."""
    return [
        f"++{row.switch.key}={_text(row.switch.value)}" + (f"  # {row.switch.slower}" if row.switch.slower else "")
        for row in result.ledger.culprits
    ]


def as_text(result: ProbeResult) -> list[str]:
    """Return the lines for the terminal."""
    ledger = result.ledger
    lines = [sentence(result), ""]
    if settings := recipe_lines(result):
        lines += ["Set:", *(f"  {line}" for line in settings), ""]
    lines += ["Checks:", *(f"  {check.outcome:10}  {check.name}: {check.message}" for check in result.checks), ""]
    gaps = {**ledger.triangle, **ledger.repetitions}
    if ledger.all_conservative is not None:
        gaps["all conservative values"] = ledger.all_conservative
    rows = [
        (name, each.k3, _percent(each.large), _percent(each.very_large), each.largest) for name, each in gaps.items()
    ]
    lines += [format_table(("gap", "k3", "|Δ| > 0.1", "|Δ| > ln 2", "largest |Δ|"), rows), ""]
    lines += [format_table(_COLUMNS, [_cells(row) for row in ledger.rows], left_aligned=(0, 1, 7))]
    lines += [f"  {row.switch.id}: {row.note}" for row in ledger.rows if row.note]
    half = f"{ledger.prompts} prompts, confirmed on as many others"
    lines += [
        "",
        f"{result.tokens} tokens; {half}. Noise floor: k3 changes by up to {ledger.floor:.2g} between repetitions.",
        f"{ledger.starts} starts, {result.runs} of them run now, in {result.seconds:.0f} s.",
    ]
    return lines


def _cells(row: LedgerRow) -> tuple[str, ...]:
    change = row.change
    return (
        row.switch.id,
        f"{_text(row.was)} → {_text(row.switch.value)}",
        {"not effective": "no", "not testable here": ABSENT, "not tried": ABSENT}.get(row.verdict, "yes"),
        ABSENT if row.after is None else f"{row.after.k3:.3g}",
        ABSENT if change is None else f"{change.value:+.2g} [{change.low:+.2g}, {change.high:+.2g}]",
        _percent(row.share),
        ABSENT if row.throughput is None else f"{row.throughput:+.0%}",
        row.verdict + ("" if row.is_confirmed is None else ", confirmed" if row.is_confirmed else ", not confirmed"),
    )


def _text(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.1%}"


def as_json(result: ProbeResult) -> Mapping[str, Any]:
    """Return the result as JSON values."""
    content = dataclasses.asdict(result)
    return {"sentence": sentence(result), "set": recipe_lines(result), **content}


_PAGE = Path(__file__).with_name("page.html")


def write_html(path: Path, result: ProbeResult) -> None:
    """Write the result as one HTML page that needs no network and no script.

    Raises:
        MissingDependencyError: jinja2 is not installed.
    """
    jinja2 = require("jinja2", "an HTML report needs", "diagnose")
    template = jinja2.Environment(autoescape=True).from_string(_PAGE.read_text(encoding="utf-8"))
    ledger = result.ledger
    gaps = [*ledger.triangle.items(), *ledger.repetitions.items()]
    bars = [
        {
            "name": row.switch.id,
            "share": _percent(row.share),
            "width": f"{30 * min(abs(row.share), 1.0):.2f}",
            "colour": BLUE if row.share > 0 else VERMILION,
        }
        for row in ledger.rows
        if row.share is not None
    ]
    rows = [{"cells": _cells(row), "evidence": _evidence(row)} for row in ledger.rows]
    page = template.render(
        result=result,
        sentence=sentence(result),
        lines=recipe_lines(result),
        bars=bars,
        columns=_COLUMNS,
        rows=rows,
        gaps=gaps,
    )
    path.write_text(page, encoding="utf-8")


def _evidence(row: LedgerRow) -> str:
    """Return what was read back of a switch, and the note."""
    listed = [f"{name}: {before[:80]} → {after[:80]}" for name, (before, after) in list(row.differences.items())[:4]]
    more = len(row.differences) - len(listed)
    return "; ".join([*listed, *([f"{more} more"] if more > 0 else []), *([row.note] if row.note else [])])
