"""A diagnosis on the terminal: the verdict first, then tables."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_geomask.diagnosis.causes import CAUSES
from nemo_geomask.diagnosis.circle import CERTAIN, circle, verdict
from nemo_geomask.diagnosis.levels import LEVELS
from nemo_geomask.diagnosis.quantities import EXPECTED, MEASURES, NUMBERS, REMOVED_SHARES, measured
from nemo_geomask.diagnosis.read import Array
from nemo_geomask.diagnosis.signs import Evidence
from nemo_geomask.diagnosis.statistics import BY_NAME, CELLS, DIMENSIONS, Window, per
from nemo_geomask.diagnosis.verdict import RunDiagnosis

__all__ = ["STEP", "Decode", "Table", "as_json", "as_text", "show", "tables"]

STEP = "step"
"""What may be asked for beside the dimensions."""

Decode = Callable[[Sequence[int]], str]
_STEPS = 12


@dataclass(frozen=True)
class Table:
    """Rows of text under a title; ``key`` names it for programs, ``definitions`` says what columns hold."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    definitions: Mapping[str, str] = field(default_factory=dict)


def show(found: Sequence[Table]) -> None:
    """Print tables, by rich where it is installed and someone is looking."""
    rich = None
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            rich = [importlib.import_module(f"rich.{name}") for name in ("table", "console", "text")]
    for table in found:
        cells = [tuple(as_text(value) for value in row) for row in table.rows]
        if rich is None or not table.rows:
            print(f"\n{table.title}")
            print("\n".join(_plain(table.columns, cells)))
            continue
        shown = rich[0].Table(title=table.title, title_justify="left")
        for place, name in enumerate(table.columns):
            shown.add_column(name, justify="left" if _is_text(table, place) else "right", overflow="fold")
        for row in cells:
            shown.add_row(*(rich[2].Text(value) for value in row))  # no markup: what was generated may look like it
        rich[1].Console().print(shown)


def _plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(text) for text in column) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        yield "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _is_text(table: Table, place: int) -> bool:
    return any(isinstance(row[place], str) for row in table.rows)


def as_text(value: Any) -> str:
    """A value as it stands in a table."""
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.4g}"
    return str(value)


def tables(
    diagnosis: RunDiagnosis, decode: Decode | None = None, only: Sequence[tuple[str, ...]] | None = None
) -> list[Table]:
    """All that a diagnosis rests on, or its mismatch by what was asked for.

    Args:
        diagnosis: of one run.
        decode: makes text of token ids; without it, ids are shown.
        only: dimensions, pairs of them that were surveyed, and ``("step",)``; where the records have one kind of data
            only, or none, the table has no rows and says so.
    """
    if only is not None:
        return [table for names in only for table in _asked(diagnosis, names)]
    found = [_numbers(diagnosis), _causes(diagnosis), _changes(diagnosis), _steps(diagnosis, _STEPS)]
    found += [table for one in DIMENSIONS if (table := _dimension(diagnosis.evidence, (one.name,))) is not None]
    return [table for table in [*found, *_worst(diagnosis, decode)] if table.rows]


def _asked(diagnosis: RunDiagnosis, names: tuple[str, ...]) -> list[Table]:
    if names == (STEP,):
        return [_steps(diagnosis, len(diagnosis.evidence.statistics.steps)), _circle(diagnosis)]
    table = _dimension(diagnosis.evidence, names)
    if table is None:
        needs = " and ".join(BY_NAME[name].needs for name in names if BY_NAME[name].needs)
        missing = f"not recorded ({needs}), or the same everywhere" if needs else "the same everywhere"
        table = Table(",".join(names), f"--by {','.join(names)}: {missing}", (), [])
    return [table]


def _numbers(diagnosis: RunDiagnosis) -> Table:
    before, after = diagnosis.evidence.sums_before, diagnosis.evidence.sums_after
    rows: list[tuple[Any, ...]] = []
    for level in LEVELS:
        one = level.of(after)
        limit = f"{'<' if level.below else '>'} {level.drifting:g} | {level.broken:g}"
        earlier = () if before is None else (level.of(before).value,)
        rows.append((level.name, *earlier, one.value, f"{one.low:.3g} to {one.high:.3g}", limit, level.definition))
    for number in NUMBERS:
        now = float(number.value(after))
        if math.isnan(now):
            continue
        said = "{:.3g} to {:.3g}".format(*number.interval(after)) if number.boot else ""
        earlier = () if before is None else (float(number.value(before)),)
        rows.append((number.name, *earlier, now, said, "", number.definition))
    for label in sorted(label for label in after.removed if label):
        for of, what in enumerate(REMOVED_SHARES):
            shares = [sums.removed_share(label, of) for sums in (before, after) if sums]
            rows.append((f"mask {label}{', of |Δ|' if of else ''}", *shares, "", "", what))
    columns = diagnosis.evidence.names[before is None :]
    return Table(
        "numbers",
        "Numbers, Δ = prev − gen of a trained token",
        ("", *columns, "95 %", "drifting | broken", "definition"),
        rows,
    )


def _causes(diagnosis: RunDiagnosis) -> Table:
    rows: list[tuple[Any, ...]] = []
    for cause in CAUSES:
        found = diagnosis.found[cause.id]
        absent = "not in these records" if math.isnan(found.share) else "ruled out"
        state = "not judged" if diagnosis.unknown else "shown" if found.shown else absent
        rows.append((cause.id, state, float(found.share), f"> {cause.threshold:g}", found.says))
    definitions = {cause.id: f"{cause.name}; shown where it is beyond the threshold, {cause.why}" for cause in CAUSES}
    return Table("causes", "Causes", ("", "", "measured", "threshold", "which is"), rows, definitions)


def _changes(diagnosis: RunDiagnosis) -> Table:
    rows = [
        (one.what, one.since, one.before, one.after, "slope" if one.gradual else "jump", round(one.score, 1))
        for one in diagnosis.alarms
    ]
    return Table("changes", "What has changed", ("", "since step", "before", "after", "as a", "standard errors"), rows)


def _steps(diagnosis: RunDiagnosis, most: int) -> Table:
    steps = sorted(diagnosis.evidence.statistics.steps)
    chosen = steps
    if len(steps) > most:
        places = {round(place) for place in np.linspace(0, len(steps) - 1, most)}
        if diagnosis.since in steps:
            places.add(steps.index(diagnosis.since))
        chosen = [steps[place] for place in sorted(places)]
    rows = []
    for step in chosen:
        sums = diagnosis.evidence.statistics.steps[step]
        ess = sums["weight"] ** 2 / (sums["weight_square"] * sums["tokens"]) if sums["tokens"] else math.nan
        low, high = sums.interval("k3")
        rows.append(
            (
                step,
                int(sums["all_sequences"]),
                sums.mean("prob_error"),
                sums.mean("k3"),
                "–" if math.isnan(low) else f"{low:.2g} to {high:.2g}",
                sums.mean("size", "model"),
                ess,
                sums.mean("surprise"),
                sums.mean("response", "sequences"),
                sums.mean("reward", "rewarded"),
            )
        )
    columns = (
        "step",
        "sequences",
        "token_mult_prob_error",
        "k3",
        "95 %",
        "noise",
        "ESS",
        "surprise",
        "length",
        "reward",
    )
    same = {"k3": "geomask/mismatch_k3", "ESS": "effective sample size, tokens", "length": "response length"}
    known = {level.name: level.definition for level in LEVELS}
    known |= {number.name: number.definition for number in NUMBERS}
    definitions = {name: known[same.get(name, name)] for name in columns if same.get(name, name) in known}
    definitions |= {"sequences": "with a trained token", "95 %": "of k3: a bootstrap over sequences"}
    return Table("steps", "Steps", columns, rows, definitions)


_SHARES = ("tokens", "Δ > 0")


def _circle(diagnosis: RunDiagnosis) -> Table:
    found = circle(diagnosis.evidence.statistics)
    rows = [
        (f"{one.first} → {one.then}", one.correlation, one.score, "shown" if one.shown else "not shown")
        for one in found
    ]
    title = f"What the next step follows. {verdict(found)}"
    columns = ("", "partial rank correlation", "standard errors", f"beyond ±{CERTAIN:g}")
    return Table("circle", title, columns, rows)


def _dimension(evidence: Evidence, names: tuple[str, ...]) -> Table | None:
    """None where there is one kind of data only."""
    key = ",".join(names)
    cells = evidence.after.cells.get(key)
    if cells is None or np.count_nonzero(cells[:, 0]) < 2:
        return None
    kinds = [BY_NAME[name] for name in names]
    shape = [one.bins for one in kinds]
    here = _Rates(evidence.after, key)
    there = None if evidence.before is None or key not in evidence.before.cells else _Rates(evidence.before, key)
    rows = []
    for place, values in measured(cells).items():
        labels = (one.label(int(at), int(at)) for one, at in zip(kinds, np.unravel_index(place, shape), strict=True))
        row: list[Any] = [" · ".join(labels)]
        for name, value in values.items():
            row.append(f"{value:.1%}" if name in _SHARES else value)
            if name == EXPECTED:
                row.append(_interval(value, here.error[place]))
        if there is not None:
            times = per(float(here.rate[place]), float(there.rate[place]))
            row += (times, _interval(times, math.hypot(here.error[place], there.error[place])))
        rows.append(tuple(row))
    title = f"By {' and '.join(f'{one.name} ({one.unit})' for one in kinds)}"
    columns = [""]
    for measure in MEASURES:
        columns += [measure.name, "95 %"] if measure.name == EXPECTED else [measure.name]
    definitions = {measure.name: measure.definition for measure in MEASURES} | {
        "95 %": f"of {EXPECTED}, over sequences"
    }
    if there is not None:
        columns += [f"against {evidence.names[0]}", "95 % of that"]
        definitions[columns[-2]] = "mean |Δ| over mean 1 − p, in units of what it is there in the same part"
        definitions[columns[-1]] = "over sequences"
    return Table(key, title, tuple(columns), rows, definitions)


class _Rates:
    """The mismatch in units of 1 − p, bin by bin, and its relative standard error over sequences."""

    def __init__(self, window: Window, key: str) -> None:
        self._cells: Array = window.cells[key]
        size, model = self.cell("size"), self.cell("model")
        with np.errstate(invalid="ignore", divide="ignore"):
            self.rate: Array = size / model
            size2, both, model2 = window.clustered[key].T
            square = size2 - 2 * self.rate * both + np.square(self.rate) * model2
            self.error: Array = np.sqrt(np.maximum(square, 0.0)) / size

    def cell(self, name: str) -> Array:
        """Of each bin."""
        return self._cells[:, CELLS.index(name)]


def _interval(value: float, error: float) -> str:
    """95 % of a ratio, given the standard error of its logarithm."""
    if not math.isfinite(value) or not math.isfinite(error):
        return "–"
    low, high = (value * math.exp(sign * 1.96 * min(error, 9.0)) for sign in (-1, 1))
    return f"{low:.3g} to {high:.3g}"


def _worst(diagnosis: RunDiagnosis, decode: Decode | None) -> Iterable[Table]:
    statistics = diagnosis.evidence.statistics
    rows = [(*facts[:3], facts[3], size, facts[4]) for size, facts in statistics.worst_sequences]
    columns = ("step", "row", "group", "tokens", "|Δ|", "k1")
    yield Table("worst_sequences", "Sequences with the largest mean |Δ|", columns, rows)
    tokens = []
    for _, (step, row, place, gen, prev, ids) in statistics.worst_tokens:
        # repr: a generated text may hold control characters.
        text = " ".join(map(str, ids)) if decode is None else repr(decode(ids))
        tokens.append((step, row, place, gen, prev, text))
    columns = ("step", "row", "token", "gen", "prev", "ids up to it" if decode is None else "text up to it")
    yield Table("worst_tokens", "Tokens with the largest |Δ|", columns, tokens)


def as_json(
    diagnosis: RunDiagnosis,
    directory: str,
    decode: Decode | None = None,
    only: Sequence[tuple[str, ...]] | None = None,
) -> dict[str, Any]:
    """The same for programs; numbers that are none are null."""
    cause = diagnosis.cause
    return {
        "run": directory,
        "health": "unknown" if diagnosis.unknown else diagnosis.health,
        "verdict": diagnosis.sentence,
        "since": diagnosis.since,
        "against": None if diagnosis.versus is None else diagnosis.versus._asdict(),
        "cause": None if cause is None else {"id": cause.id, "name": cause.name, "action": cause.action},
        "steps": sorted(diagnosis.evidence.statistics.steps),
        "causes": [
            {
                "id": one.id,
                "measured": _number(found.share),
                "threshold": one.threshold,
                "why": one.why,
                "shown": found.shown,
                "says": found.says,
                "steps": list(found.steps),
            }
            for one in CAUSES
            for found in [diagnosis.found[one.id]]
        ],
        "levels": {
            level.name: {
                "value": _number(reading.value),
                "interval": [_number(reading.low), _number(reading.high)],
                "health": reading.health,
                "drifting": level.drifting,
                "broken": level.broken,
                "definition": level.definition,
                "source": level.source,
            }
            for level in LEVELS
            for reading in [diagnosis.levels[level.name]]
        },
        "tables": {
            table.key: [dict(zip(table.columns, map(_number, row), strict=True)) for row in table.rows]
            for table in tables(diagnosis, decode, only)
            if table.key != "causes"
        },
    }


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
