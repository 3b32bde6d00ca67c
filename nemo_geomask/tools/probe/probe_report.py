"""The result of a probe as text and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nemo_geomask.tools.probe.ledger import LedgerRow
from nemo_geomask.tools.probe.locations import LayerDifferences
from nemo_geomask.tools.probe.probe_run import ProbeResult
from nemo_geomask.tools.shared.intervals import CONFIDENCE_LABEL
from nemo_geomask.tools.shared.json_output import JSON_VERSION
from nemo_geomask.tools.shared.terminal_tables import ABSENT, format_table
from nemo_geomask.yaml_text import as_yaml

_COLUMNS = (
    "switch",
    "was → tried",
    "effective",
    "k3 after",
    f"change, {CONFIDENCE_LABEL}",
    "share",
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
    if ledger.is_within_noise:
        return (
            f"The scores are not repeatable: of the mismatch of {size}, noise makes up to "
            f"{max(ledger.noise, ledger.floor):.3g}; see the gaps of each side with its repetitions."
        )
    if not ledger.culprits:
        tried = sum(row.change is not None for row in ledger.rows)
        rest = "" if ledger.is_complete else "; the budget ended before all were tried"
        return f"None of the {tried} switches that were tried explains the mismatch of {size}{rest}."
    parts = [
        f"{row.switch.title} ({row.switch.key}) {_percent(row.share)}"
        + (", which other prompts do not confirm" if row.is_confirmed is False else "")
        for row in ledger.culprits[:3]
    ]
    after = ledger.all_conservative
    remainder = "" if after is None else f" All conservative values leave {after.k3:.3g}."
    return f"Of the mismatch of {size}, these account for: {'; '.join(parts)}.{remainder}"


def recipe_lines(result: ProbeResult) -> list[str]:
    """Return the overrides that set the conservative values, each with its price as a comment; none with a fault.

    What has to change with a value is on the same line.
    """
    if result.faults:
        return []
    return [
        " ".join(_override(*setting) for setting in ((row.switch.key, row.switch.value), *row.also.items()))
        + (f"  # {row.switch.slower}" if row.switch.slower else "")
        for row in result.ledger.culprits
    ]


def _override(key: str, value: Any) -> str:
    """Return a value as an override; an empty mapping is taken out, since merged it would change nothing."""
    return f"~{key}" if value == {} else f"++{key}={as_yaml(value)}"


def _notes(row: LedgerRow) -> list[str]:
    """Return what a row's cells don't say: why there are no numbers, and what else was changed."""
    notes = [row.note] if row.note else []
    if row.change is not None and row.also:
        notes.append("together with " + ", ".join(f"{key}: {as_yaml(value)}" for key, value in row.also.items()))
    if row.change is not None and row.ran is not None:
        notes.append(f"the probe ran with {as_yaml(row.ran)} in place of the recipe's {as_yaml(row.was)}")
    if row.last_share is not None:
        notes.append(f"set back among all conservative values, {_percent(row.last_share)} of the mismatch returns")
    return [f"{row.switch.id}: {note}" for note in notes]


def as_text(result: ProbeResult) -> list[str]:
    """Return the lines for the terminal."""
    ledger = result.ledger
    lines = [sentence(result), ""]
    if settings := recipe_lines(result):
        lines += ["Set:", *(f"  {line}" for line in settings), ""]
    lines.append("Checks:")
    for check in result.checks:
        reason = f"{check.message}; {check.fix}" if check.fix else check.message
        lines.append(f"  {check.outcome:10}  {check.name}: {reason}")
    lines.append("")
    gaps = {**ledger.triangle, **ledger.repetitions}
    if ledger.all_conservative is not None:
        gaps["all conservative values"] = ledger.all_conservative
    rows = [
        (name, each.k3, _percent(each.large), _percent(each.very_large), each.largest) for name, each in gaps.items()
    ]
    lines += [format_table(("gap", "k3", "|Δ| > 0.1", "|Δ| > ln 2", "largest |Δ|"), rows), ""]
    lines += [format_table(_COLUMNS, [_cells(row) for row in ledger.rows], left_aligned=(0, 1, 6))]
    lines += [f"  {line}" for row in ledger.rows for line in _notes(row)]
    lines += [f"  not probed: {part}" for part in result.unprobed]
    lines += ["", *_where(result)]
    half = f"{ledger.prompts} prompts, confirmed on as many others"
    lines += [
        "",
        f"{result.tokens} tokens; {half}. Noise floor: k3 changes by up to {ledger.floor:.2g} between repetitions.",
        f"{ledger.starts} starts, {result.runs} of them run now, in {result.seconds:.0f} s.",
    ]
    return lines


def _where(result: ProbeResult) -> list[str]:
    """Return the lines on where the sides part."""
    lines = ["Where:"]
    for name, layers in result.layers.items():
        lines += [f"  {name}: {line}" for line in location_lines(layers)]
    baseline = result.layers.get("baseline")
    if result.ledger.has_mismatch and baseline is not None and baseline.is_equal:
        lines.append(
            "  both sides have the same hidden states and logits: they part in what is done with the logits "
            "(temperature, top-p, log-prob mode), or in the engine's decode"
        )
    return lines


def location_lines(layers: LayerDifferences) -> list[str]:
    """Return what the hidden states say, in one line a thought."""
    if layers.error:
        return [f"hidden states were not compared: {layers.error}"]
    lines = []
    if layers.first:
        size = layers.arising[layers.first]
        lines.append(
            f"the first operator that differs for the same input is {_operator(layers.first)}: "
            f"{size:.2g} of its output, where rounding explains {layers.floor:.2g}"
        )
    elif layers.arising:
        name = max(layers.arising, key=lambda key: layers.arising[key])
        lines.append(
            f"no operator differs for the same input by more than rounding explains ({layers.floor:.2g}); "
            f"the largest is {layers.arising[name]:.2g}, of {_operator(name)}"
        )
    if layers.head_k3 is not None:
        lines.append(f"head and log-softmax alone, on the engine's last hidden states: k3 {layers.head_k3:.2g}")
    if layers.grown:
        lines.append("hidden states by layer differ by " + _listed(layers.grown))
    if layers.routes:
        lines.append("tokens with other experts by layer: " + _listed(layers.routes, percent=True))
        lines.append("the same for equal inputs: " + _listed(layers.routes_of_same_input, percent=True))
    return lines


def _operator(name: str) -> str:
    number, _, part = name.partition(" ")
    return f"the {part} of layer {number}" if number.isdecimal() and part != "layer" else name


def _listed(values: Mapping[str, float], *, percent: bool = False) -> str:
    return ", ".join(f"{value:.1%}" if percent else f"{value:.2g}" for value in values.values())


def _cells(row: LedgerRow) -> tuple[str, ...]:
    change = row.change
    return (
        row.switch.id,
        f"{_text(row.was)} → {_text(row.switch.value)}",
        {"not effective": "no", "not testable here": ABSENT, "not tried": ABSENT}.get(row.verdict, "yes"),
        ABSENT if row.after is None else f"{row.after.k3:.3g}",
        ABSENT if change is None else f"{change.value:+.2g} [{change.low:+.2g}, {change.high:+.2g}]",
        _percent(row.share),
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
    return {"version": JSON_VERSION, "sentence": sentence(result), "set": recipe_lines(result), **content}
