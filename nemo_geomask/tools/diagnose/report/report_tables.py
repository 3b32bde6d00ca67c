"""Tables of a diagnosis, for the terminal and the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_geomask.tools.diagnose.explain.causes import CAUSES
from nemo_geomask.tools.diagnose.explain.evidence import Evidence
from nemo_geomask.tools.diagnose.explain.run_diagnosis import RunDiagnosis
from nemo_geomask.tools.diagnose.measure.dimensions import (
    AGAINST_EXPECTED,
    BIN_DEFINITIONS,
    DIMENSIONS_BY_NAME,
    ENVIRONMENT,
    measure_bins,
    sum_environments,
    sum_parts,
)
from nemo_geomask.tools.diagnose.measure.step_sums import ratio_or_nan
from nemo_geomask.tools.diagnose.measure.thresholds import HEALTH_LIMITS, QUANTITIES, REMOVED_SHARES, HealthLimit
from nemo_geomask.tools.shared.intervals import CONFIDENCE_LABEL, ratio_interval
from nemo_geomask.tools.shared.terminal_tables import ABSENT, print_table
from nemo_geomask.tools.shared.terminal_text import escape_line

STEP = "step"
"""Value of ``--by`` that shows the table of all steps, instead of a table by dimension."""

Decode = Callable[[Sequence[int]], str]
"""Function from token ids to their text."""

_SHARES = ("of k3", "of |Δ|")
"""Columns of the shares of the mismatch that a cause accounts for."""
MAX_ENVIRONMENTS = 50
"""Largest number of environments with a row of their own; they are the first ones in the order of their names."""
_MAX_STEPS = 12
"""Largest number of rows in the table of steps when all tables are shown."""


@dataclass(frozen=True)
class Table:
    """Table of a diagnosis, with its key in the JSON output.

    The title of a table without rows is the reason. Definitions are of columns, by their titles, and of rows, by their
    first cells.
    """

    key: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    definitions: Mapping[str, str] = field(default_factory=dict)


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables to the terminal; columns that hold text are aligned to the left."""
    for table in tables:
        text_columns = [
            index for index in range(len(table.columns)) if any(isinstance(row[index], str) for row in table.rows)
        ]
        print_table(table.title, table.columns, table.rows, left_aligned=text_columns)


def diagnosis_tables(
    diagnosis: RunDiagnosis, decode: Decode | None = None, splits: Sequence[tuple[str, ...]] | None = None
) -> list[Table]:
    """Return all tables of a diagnosis that have rows, or those of the requested splits, with rows or without.

    A split is a dimension, a pair of dimensions that were surveyed together, ``("environment",)`` or ``("step",)``.
    """
    if splits is not None:
        all_steps = len(diagnosis.evidence.statistics.steps)
        return [
            _step_table(diagnosis, all_steps) if names == (STEP,) else _bin_table(diagnosis.evidence, names)
            for names in splits
        ]
    tables = [_number_table(diagnosis), _cause_table(diagnosis)]
    tables.append(_step_table(diagnosis, _MAX_STEPS))
    tables += [_bin_table(diagnosis.evidence, (name,)) for name in (*DIMENSIONS_BY_NAME, ENVIRONMENT)]
    tables += _worst_tables(diagnosis, decode)
    return [table for table in tables if table.rows]


def _number_table(diagnosis: RunDiagnosis) -> Table:
    """Return the table of the numbers with health limits, the other quantities, and the shares that masks removed."""
    evidence = diagnosis.evidence
    before, after = evidence.sums_before, evidence.sums_after
    sides, names = ([after] if before is None else [before, after]), evidence.side_names
    if before is None and diagnosis.counted_steps < len(evidence.steps_after):
        # The verdict is read over the last steps alone, so they stand beside all of them.
        sides.append(evidence.statistics.total(evidence.steps_after[-diagnosis.counted_steps :]))
        names = names[1], f"last {diagnosis.counted_steps}"
    rows: list[tuple[Any, ...]] = []
    for number in (*HEALTH_LIMITS, *QUANTITIES):
        estimates = [number.estimate(sums) for sums in sides]
        value, low, high = estimates[-1]
        interval, comparison = f"{low:.4g} to {high:.4g}" if number.has_interval else "", ""
        if isinstance(number, HealthLimit):
            health = diagnosis.readings[number.name].health
            comparison = f"{number.sign} {number.drifting:g} | {number.broken:g}"
            comparison += "" if health == "healthy" else f": {health}"
        elif math.isnan(value):
            continue
        rows.append((number.name, *(estimate.value for estimate in estimates), interval, comparison, number.definition))
    for mask in sorted(after.removed):
        for unit, definition in REMOVED_SHARES:
            suffix = ", of |Δ|" if unit == "capped_abs" else ""
            shares = [sums.removed_share(mask, unit) for sums in sides]
            rows.append((f"mask {mask}{suffix}", *shares, "", "", definition))
    title = "Numbers, Δ = prev − gen of a trained token"
    if diagnosis.health != "healthy" and not diagnosis.unjudged_reason:
        decisive = [name for name, reading in diagnosis.readings.items() if reading.health == diagnosis.health]
        decided = ", ".join(decisive) or "the cause or the change alone, as no number is that far beyond its limit"
        title += f"; {diagnosis.health} by {decided}"
    return Table(
        "numbers", title, ("", *names[-len(sides) :], CONFIDENCE_LABEL, "drifting | broken", "definition"), rows
    )


def _cause_table(diagnosis: RunDiagnosis) -> Table:
    rows: list[tuple[Any, ...]] = []
    shares = {shown.cause.id: shown.share for shown in diagnosis.shown}
    for cause in CAUSES:
        detection = diagnosis.detections[cause.id]
        state: str = "not judged" if diagnosis.unjudged_reason else detection.state
        state += ", a place" if state == "shown" and cause.is_place else ""
        description = detection.description + (f"; a test needs {detection.needs}" if state == "not testable" else "")
        # A value that can't be judged would look like a verdict beside its threshold.
        value = math.nan if state == "not testable" else float(detection.value)
        share = shares.get(cause.id) or ()
        cells = [f"{part.value:.1%} ({part.low:.1%} to {part.high:.1%})" for part in share] or [ABSENT, ABSENT]
        rows.append((cause.id, state, *cells, value, f"> {cause.threshold:g}", description))
    definitions = {
        cause.id: f"{cause.name}; shown if the measured value exceeds the threshold, {cause.rationale}"
        for cause in CAUSES
    }
    for column, name in zip(_SHARES, ("k3", "|Δ| (each at most 1)"), strict=True):
        definitions[column] = (
            f"share of the sum of {name} that the cause accounts for, and its {CONFIDENCE_LABEL} interval"
        )
    return Table("causes", "Causes", ("", "", *_SHARES, "measured", "threshold", "which is"), rows, definitions)


_STEP_COLUMNS = {
    "token_mult_prob_error": "token_mult_prob_error",
    "k3": "geomask/mismatch_k3",
    "noise": "noise",
    "ESS": "effective sample size, tokens",
    "surprise": "surprise",
    "length": "response length",
    "reward": "reward",
}
"""Numbers in the table of steps, by their columns."""


def _step_table(diagnosis: RunDiagnosis, max_steps: int) -> Table:
    """Return the table of at most ``max_steps`` evenly spaced steps, and of the step at which the mismatch rose."""
    statistics = diagnosis.evidence.statistics
    steps = sorted(statistics.steps)
    if len(steps) > max_steps:
        indices = {round(index) for index in np.linspace(0, len(steps) - 1, max_steps)}
        if diagnosis.since in steps:
            indices.add(steps.index(diagnosis.since))
        steps = [steps[index] for index in sorted(indices)]
    by_name = {number.name: number for number in (*HEALTH_LIMITS, *QUANTITIES)}
    numbers = {column: by_name[name] for column, name in _STEP_COLUMNS.items()}
    rows: list[tuple[Any, ...]] = []
    for step in steps:
        sums = statistics.steps[step]
        error, k3, *values = (number.value(sums) if sums["tokens"] else math.nan for number in numbers.values())
        low, high = sums.interval("k3")
        interval = ABSENT if math.isnan(low) else f"{low:.2g} to {high:.2g}"
        rows.append((step, int(sums["all_sequences"]), error, k3, interval, *values))
    definitions = {
        **{column: number.definition for column, number in numbers.items()},
        "sequences": "number of sequences with a trained token",
        CONFIDENCE_LABEL: "interval of k3, by a bootstrap over sequences",
    }
    first, second, *others = numbers
    columns = ("step", "sequences", first, second, CONFIDENCE_LABEL, *others)
    return Table("steps", "Steps", columns, rows, definitions)


_PERCENT_MEASURES = ("tokens", "Δ > 0")


def _bin_table(evidence: Evidence, names: tuple[str, ...]) -> Table:
    """Return the table of the mismatch by one or two dimensions, or by environment.

    If all tokens are in one bin, or the data were not recorded, it has no rows, and its title says so.
    """
    key, before_name = ",".join(names), evidence.side_names[0]
    sides = [side for side in (evidence.tokens, evidence.tokens_before) if side is not None]
    dimensions = [DIMENSIONS_BY_NAME[name] for name in names if name != ENVIRONMENT]
    requirements = [dimension.requirement for dimension in dimensions]
    title = f"By {' and '.join(f'{dimension.name} ({dimension.unit})' for dimension in dimensions)}"
    if names == (ENVIRONMENT,):
        recorded = {name for side in sides for name in side.names[ENVIRONMENT].tolist()} - {None}
        environments = sorted(recorded)[:MAX_ENVIRONMENTS]
        labels = [*map(escape_line, environments), f"others (after the first {MAX_ENVIRONMENTS} by name)"]
        title, requirements = "By environment", ["the names of NeMo-Gym's agents"]
        sums = [sum_environments(side, environments) for side in sides]
    else:
        sums = [sum_parts(side, names) for side in sides]
    if np.count_nonzero(sums[0][:, 0]) < 2:
        needed = " and ".join(filter(None, requirements))
        reason = f"not recorded ({needed}), or the same everywhere" if needed else "the same everywhere"
        return Table(key, f"--by {key}: {reason}", (), [])

    def label(index: int) -> str:
        if not dimensions:
            return labels[index]
        bins = map(int, np.unravel_index(index, [dimension.bin_count for dimension in dimensions]))
        return " · ".join(dimension.label(number, number) for dimension, number in zip(dimensions, bins, strict=True))

    bins_after = measure_bins(sums[0])
    bins_before = measure_bins(sums[1]) if len(sums) > 1 else None
    rows = []
    for index in np.flatnonzero(sums[0][:, 0]).tolist():
        row: list[Any] = [label(index)]
        for name, values in bins_after.measures.items():
            value = float(values[index])
            row.append(f"{value:.1%}" if name in _PERCENT_MEASURES else value)
            if name == AGAINST_EXPECTED:
                row.append(_format_ratio_interval(value, bins_after.error[index]))
        if bins_before is not None:
            ratio = ratio_or_nan(float(bins_after.rate[index]), float(bins_before.rate[index]))
            error = math.hypot(bins_after.error[index], bins_before.error[index])
            row += (ratio, _format_ratio_interval(ratio, error))
        rows.append(tuple(row))
    columns = [""]
    for name in BIN_DEFINITIONS:
        columns += [name, CONFIDENCE_LABEL] if name == AGAINST_EXPECTED else [name]
    definitions = {**BIN_DEFINITIONS, CONFIDENCE_LABEL: f"interval of {AGAINST_EXPECTED}, over sequences"}
    if bins_before is not None:
        ratio_column, interval_column = f"against {before_name}", f"{CONFIDENCE_LABEL} of that"
        columns += [ratio_column, interval_column]
        definitions[ratio_column] = f"mean |Δ| over mean 1 − p, relative to the same tokens of {before_name}"
        definitions[interval_column] = "interval of the column before, over sequences"
    return Table(key, title, tuple(columns), rows, definitions)


def _format_ratio_interval(ratio: float, relative_error: float) -> str:
    """Return the confidence interval of a ratio as text; ``ABSENT`` if it is not finite."""
    low, high = ratio_interval(ratio, relative_error)
    return ABSENT if math.isnan(low) else f"{low:.3g} to {high:.3g}"


def _worst_tables(diagnosis: RunDiagnosis, decode: Decode | None) -> list[Table]:
    statistics = diagnosis.evidence.statistics
    sequences: list[tuple[Any, ...]] = [
        (worst.step, worst.row, worst.group, worst.tokens, worst.mean_abs_delta, worst.k1)
        for worst in statistics.worst_sequences
    ]
    tokens: list[tuple[Any, ...]] = []
    for worst in statistics.worst_tokens:
        # repr, because generated text may hold control characters.
        context = " ".join(map(str, worst.context)) if decode is None else repr(decode(worst.context))
        tokens.append((worst.step, worst.row, worst.position, worst.gen, worst.prev, context))
    context_column = "ids up to it" if decode is None else "text up to it"
    columns = ("step", "row", "group", "tokens", "|Δ|", "k1")
    token_columns = ("step", "row", "token", "gen", "prev", context_column)
    return [
        Table("worst_sequences", "Sequences with the largest mean |Δ|", columns, sequences),
        Table("worst_tokens", "Tokens with the largest |Δ|", token_columns, tokens),
    ]
