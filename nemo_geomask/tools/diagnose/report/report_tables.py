"""Tables of a diagnosis, for the terminal and the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_geomask.tools.diagnose.explain.causes import CAUSES
from nemo_geomask.tools.diagnose.explain.evidence import Evidence
from nemo_geomask.tools.diagnose.explain.verdict import RunDiagnosis
from nemo_geomask.tools.diagnose.measure.bin_rates import BinRates, format_ratio_interval
from nemo_geomask.tools.diagnose.measure.dimensions import DIMENSIONS, DIMENSIONS_BY_NAME, ENVIRONMENT
from nemo_geomask.tools.diagnose.measure.feedback import SHOWN_SCORE, mismatch_feedback, summarize_feedback
from nemo_geomask.tools.diagnose.measure.quantities import (
    AGAINST_EXPECTED,
    BIN_MEASURES,
    QUANTITIES,
    REMOVED_SHARES,
    effective_share,
    measure_bins,
)
from nemo_geomask.tools.diagnose.measure.run_statistics import MAX_ENVIRONMENTS, Window
from nemo_geomask.tools.diagnose.measure.step_sums import ratio_or_nan
from nemo_geomask.tools.diagnose.measure.thresholds import HEALTH_LIMITS
from nemo_geomask.tools.shared.intervals import CONFIDENCE_LABEL
from nemo_geomask.tools.shared.terminal_tables import ABSENT, print_table
from nemo_geomask.tools.shared.terminal_text import escape_line

__all__ = ["STEP", "Decode", "Table", "diagnosis_tables", "print_tables"]

STEP = "step"
"""Value of ``--by`` that shows the table of all steps, instead of a table by dimension."""

Decode = Callable[[Sequence[int]], str]
"""Function from token ids to their text."""

_SHARES = ("of k3", "of |Δ|")
"""Columns of the shares of the mismatch that a cause accounts for."""
_MAX_STEPS = 12
"""Largest number of rows in the table of steps when all tables are shown."""
_ENVIRONMENT_REQUIREMENT = "the names of NeMo-Gym's agents"
"""Data that the table of environments needs besides log-probs."""


@dataclass(frozen=True)
class Table:
    """Table of a diagnosis.

    Attributes:
        key: name in the JSON output.
        title: heading; if the table has no rows, the reason.
        columns: titles of the columns.
        rows: cells, as text or numbers.
        definitions: definitions of columns, by their titles, and of rows, by their first cells.
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
    """Return all tables of a diagnosis that have rows, or the tables of the requested splits.

    Args:
        diagnosis: the diagnosis of a run.
        decode: returns the text of token ids; None: ids are shown.
        splits: for each requested table, a dimension, a pair of dimensions that were surveyed together,
            ``("environment",)`` or ``("step",)``; None: all tables. If the data were not recorded, or all tokens are in
            one bin, the table has no rows and its title says so.
    """
    if splits is not None:
        return [table for names in splits for table in _requested_tables(diagnosis, names)]
    tables = [_number_table(diagnosis), _cause_table(diagnosis), _change_table(diagnosis)]
    tables.append(_step_table(diagnosis, _MAX_STEPS))
    for dimension in DIMENSIONS:
        table = _bin_table(diagnosis.evidence, (dimension.name,))
        tables += [] if table is None else [table]
    environment_table = _environment_table(diagnosis.evidence)
    tables += [] if environment_table is None else [environment_table]
    tables += _worst_tables(diagnosis, decode)
    return [table for table in tables if table.rows]


def _requested_tables(diagnosis: RunDiagnosis, names: tuple[str, ...]) -> list[Table]:
    if names == (STEP,):
        return [_step_table(diagnosis, len(diagnosis.evidence.statistics.steps)), _feedback_table(diagnosis)]
    if names == (ENVIRONMENT,):
        table, requirements = _environment_table(diagnosis.evidence), [_ENVIRONMENT_REQUIREMENT]
    else:
        table = _bin_table(diagnosis.evidence, names)
        requirements = [DIMENSIONS_BY_NAME[name].requirement for name in names]
    if table is None:
        needed = " and ".join(filter(None, requirements))
        reason = f"not recorded ({needed}), or the same everywhere" if needed else "the same everywhere"
        table = Table(",".join(names), f"--by {','.join(names)}: {reason}", (), [])
    return [table]


def _number_table(diagnosis: RunDiagnosis) -> Table:
    """Return the table of the numbers with health limits, the other quantities, and the shares that masks removed."""
    before, after = diagnosis.evidence.sums_before, diagnosis.evidence.sums_after
    rows: list[tuple[Any, ...]] = []
    for limit in HEALTH_LIMITS:
        value, low, high, _ = limit.read(after)
        values = (value,) if before is None else (limit.read(before).value, value)
        health = diagnosis.readings[limit.name].health
        comparison = f"{limit.sign} {limit.drifting:g} | {limit.broken:g}" + (
            f": {health}" if health != "healthy" else ""
        )
        rows.append((limit.name, *values, f"{low:.4g} to {high:.4g}", comparison, limit.definition))
    for quantity in QUANTITIES:
        value = float(quantity.value(after))
        if math.isnan(value):
            continue
        values = (value,) if before is None else (float(quantity.value(before)), value)
        interval = "{:.4g} to {:.4g}".format(*quantity.interval(after)) if quantity.bootstrapped_sum else ""
        rows.append((quantity.name, *values, interval, "", quantity.definition))
    for mask in sorted(after.removed):
        for unit, definition in REMOVED_SHARES:
            shares = [sums.removed_share(mask, unit) for sums in (before, after) if sums]
            suffix = ", of |Δ|" if unit == "capped_abs" else ""
            rows.append((f"mask {mask}{suffix}", *shares, "", "", definition))
    sides = diagnosis.evidence.side_names[before is None :]
    title = "Numbers, Δ = prev − gen of a trained token"
    if diagnosis.health != "healthy" and not diagnosis.unjudged_reason:
        decisive = [name for name, reading in diagnosis.readings.items() if reading.health == diagnosis.health]
        decided = ", ".join(decisive) or "the cause or the change alone, as no number is that far beyond its limit"
        title += f"; {diagnosis.health} by {decided}"
    return Table(
        "numbers",
        title,
        ("", *sides, CONFIDENCE_LABEL, "drifting | broken", "definition"),
        rows,
    )


def _cause_table(diagnosis: RunDiagnosis) -> Table:
    rows: list[tuple[Any, ...]] = []
    for cause in CAUSES:
        detection = diagnosis.detections[cause.id]
        state = "not judged" if diagnosis.unjudged_reason else detection.state
        description = detection.description + (f"; a test needs {detection.needs}" if state == "not testable" else "")
        rows.append(
            (
                cause.id,
                state,
                *_share_cells(diagnosis, cause.id),
                # A value that can't be judged would look like a verdict beside its threshold.
                math.nan if state == "not testable" else float(detection.value),
                f"> {cause.threshold:g}",
                description,
            )
        )
    definitions = {
        cause.id: f"{cause.name}; shown if the measured value exceeds the threshold, {cause.rationale}"
        for cause in CAUSES
    }
    for share, name in zip(_SHARES, ("k3", "|Δ| (each at most 1)"), strict=True):
        definitions[share] = (
            f"share of the sum of {name} that the cause accounts for, and its {CONFIDENCE_LABEL} interval"
        )
    return Table("causes", "Causes", ("", "", *_SHARES, "measured", "threshold", "which is"), rows, definitions)


def _share_cells(diagnosis: RunDiagnosis, cause: str) -> tuple[str, str]:
    shares = {shown.cause.id: shown.ranked.share for shown in diagnosis.shown}
    share = shares.get(cause)
    if share is None:
        return ABSENT, ABSENT
    k3, size = (f"{part.value:.1%} ({part.low:.1%} to {part.high:.1%})" for part in share)
    return k3, size


def _change_table(diagnosis: RunDiagnosis) -> Table:
    rows: list[tuple[Any, ...]] = [
        (
            alarm.metric,
            alarm.since,
            alarm.before,
            alarm.after,
            "slope" if alarm.is_gradual else "jump",
            round(alarm.score, 1),
        )
        for alarm in diagnosis.alarms
    ]
    columns = ("", "since step", "before", "after", "as a", "standard errors")
    return Table("changes", "Numbers that changed", columns, rows)


_STEP_COLUMNS = {
    "step": "",
    "sequences": "",
    "token_mult_prob_error": "token_mult_prob_error",
    "k3": "geomask/mismatch_k3",
    CONFIDENCE_LABEL: "",
    "noise": "noise",
    "ESS": "effective sample size, tokens",
    "surprise": "surprise",
    "length": "response length",
    "reward": "reward",
}
"""Columns of the table of steps; for each, the name of the health limit or quantity that defines it, or ""."""


def _step_table(diagnosis: RunDiagnosis, max_steps: int) -> Table:
    """Return the table of at most ``max_steps`` evenly spaced steps, and of the step at which the mismatch rose."""
    statistics = diagnosis.evidence.statistics
    steps = sorted(statistics.steps)
    if len(steps) > max_steps:
        indices = {round(index) for index in np.linspace(0, len(steps) - 1, max_steps)}
        if diagnosis.since in steps:
            indices.add(steps.index(diagnosis.since))
        steps = [steps[index] for index in sorted(indices)]
    rows: list[tuple[Any, ...]] = []
    for step in steps:
        sums = statistics.steps[step]
        low, high = sums.interval("k3")
        rows.append(
            (
                step,
                int(sums["all_sequences"]),
                sums.mean("prob_error"),
                sums.mean("k3"),
                ABSENT if math.isnan(low) else f"{low:.2g} to {high:.2g}",
                sums.mean("capped_abs", "one_minus_p"),
                effective_share(sums["weight"], sums["weight_squared"], sums["tokens"]),
                sums.mean("surprise"),
                sums.mean("response_tokens", "sequences"),
                sums.mean("reward", "sequences_with_reward"),
            )
        )
    number_definitions = {limit.name: limit.definition for limit in HEALTH_LIMITS}
    number_definitions |= {quantity.name: quantity.definition for quantity in QUANTITIES}
    definitions = {
        column: number_definitions[name] for column, name in _STEP_COLUMNS.items() if name in number_definitions
    }
    definitions["sequences"] = "number of sequences with a trained token"
    definitions[CONFIDENCE_LABEL] = "interval of k3, by a bootstrap over sequences"
    return Table("steps", "Steps", tuple(_STEP_COLUMNS), rows, definitions)


def _feedback_table(diagnosis: RunDiagnosis) -> Table:
    correlations = mismatch_feedback(diagnosis.evidence.statistics)
    rows: list[tuple[Any, ...]] = [
        (f"{pair.leader} → {pair.follower}", pair.correlation, pair.score, "shown" if pair.is_shown else "not shown")
        for pair in correlations
    ]
    title = f"Does the mismatch predict another number's next step, or the reverse? {summarize_feedback(correlations)}"
    columns = ("", "partial rank correlation", "standard errors", f"beyond ±{SHOWN_SCORE:g}")
    return Table("circle", title, columns, rows)


_PERCENT_MEASURES = ("tokens", "Δ > 0")


def _bin_table(evidence: Evidence, names: tuple[str, ...]) -> Table | None:
    """Return the table of the mismatch by one or two dimensions; None if all tokens are in one bin, or unrecorded."""
    dimensions = [DIMENSIONS_BY_NAME[name] for name in names]
    shape = [dimension.bin_count for dimension in dimensions]

    def label(index: int) -> str:
        bins = map(int, np.unravel_index(index, shape))
        return " · ".join(dimension.label(number, number) for dimension, number in zip(dimensions, bins, strict=True))

    title = f"By {' and '.join(f'{dimension.name} ({dimension.unit})' for dimension in dimensions)}"
    return _table_of_bins(",".join(names), title, label, evidence.after, evidence.before, evidence.side_names[0])


def _environment_table(evidence: Evidence) -> Table | None:
    """Return the table of the mismatch by environment; None if all tokens are of one, or unrecorded."""
    other_names = set() if evidence.before is None else evidence.before.environments
    names = sorted(evidence.after.environments | other_names)[:MAX_ENVIRONMENTS]
    labels = [*map(escape_line, names), f"others (after the first {MAX_ENVIRONMENTS} by name)"]
    before = None if evidence.before is None else evidence.before.by_environment(names)
    after = evidence.after.by_environment(names)
    return _table_of_bins(ENVIRONMENT, "By environment", labels.__getitem__, after, before, evidence.side_names[0])


def _table_of_bins(
    key: str,
    title: str,
    label: Callable[[int], str],
    window_after: Window,
    window_before: Window | None,
    before_name: str,
) -> Table | None:
    """Return the table of the mismatch in the bins of a window; None if all tokens are in one bin, or unrecorded.

    Args:
        key: key of the bins in the windows, and of the table.
        title: heading.
        label: returns the name of a bin, by its index.
        window_after: the window.
        window_before: the window to compare with; None if there is none.
        before_name: name of the window to compare with.
    """
    bin_sums = window_after.bin_sums.get(key)
    if bin_sums is None or np.count_nonzero(bin_sums[:, 0]) < 2:
        return None
    after = BinRates(window_after, key)
    before = None if window_before is None or key not in window_before.bin_sums else BinRates(window_before, key)
    rows = []
    for index, values in measure_bins(bin_sums).items():
        row: list[Any] = [label(index)]
        for name, value in values.items():
            row.append(f"{value:.1%}" if name in _PERCENT_MEASURES else value)
            if name == AGAINST_EXPECTED:
                row.append(format_ratio_interval(value, after.error[index]))
        if before is not None:
            ratio = ratio_or_nan(float(after.rate[index]), float(before.rate[index]))
            row += (ratio, format_ratio_interval(ratio, math.hypot(after.error[index], before.error[index])))
        rows.append(tuple(row))
    columns = [""]
    for measure in BIN_MEASURES:
        columns += [measure.name, CONFIDENCE_LABEL] if measure.name == AGAINST_EXPECTED else [measure.name]
    definitions = {measure.name: measure.definition for measure in BIN_MEASURES}
    definitions[CONFIDENCE_LABEL] = f"interval of {AGAINST_EXPECTED}, over sequences"
    if before is not None:
        ratio_column, interval_column = f"against {before_name}", f"{CONFIDENCE_LABEL} of that"
        columns += [ratio_column, interval_column]
        definitions[ratio_column] = f"mean |Δ| over mean 1 − p, relative to the same tokens of {before_name}"
        definitions[interval_column] = "interval of the column before, over sequences"
    return Table(key, title, tuple(columns), rows, definitions)


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
    return [
        Table(
            "worst_sequences",
            "Sequences with the largest mean |Δ|",
            ("step", "row", "group", "tokens", "|Δ|", "k1"),
            sequences,
        ),
        Table(
            "worst_tokens",
            "Tokens with the largest |Δ|",
            ("step", "row", "token", "gen", "prev", context_column),
            tokens,
        ),
    ]
