"""``nemo-geomask lab report``: the table of all runs in a folder, the sentences under it, and its numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.lab.optional import require
from nemo_geomask.lab.outcome import TARGET, VariantSummary, by_variant, outcomes
from nemo_geomask.lab.plot import write_plot
from nemo_geomask.lab.runs import Course, read_curves

__all__ = ["report"]

Row = dict[str, Any]


def report(
    places: Sequence[Path],
    out: Path,
    console: Any,
    *,
    baseline: str | None = None,
    first: str | None = None,
    target: float = TARGET,
) -> list[VariantSummary]:
    """Print the table of all runs in some folders; write ``summary.json`` and ``lab.png``.

    Args:
        places: the folders.
        out: where the files go.
        console: a ``rich.console.Console``.
        baseline: label of the variant that others are compared with; None: ``first``, or the first that there is.
        first: a label, if there is one of it.
        target: reward to which the time is taken.

    Raises:
        ConfigError: there are no runs, or none of the baseline's label.
    """
    curves = read_curves(places)
    labels = list(by_variant(curves))
    if baseline is not None and baseline not in labels:
        raise ConfigError(f"--baseline: no run of '{baseline}' here; there are {', '.join(labels)}")
    baseline = baseline or (first if first in labels else labels[0])
    curves.sort(key=lambda curve: curve.label != baseline)
    found = outcomes(curves, target=target)
    _print(found, baseline, console)
    summary = {
        **{key: curves[0].facts[key] for key in ("chance", "sampler", "precision")},
        "baseline": baseline,
        "variants": [outcome.row for outcome in found],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    write_plot(curves, out / "lab.png")
    console.print(f"Plot: {out / 'lab.png'}", highlight=False, markup=False)
    return found


def _number(style: str, *keys: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        values = [row.get(key) for key in keys]
        return " / ".join("–" if value is None else format(value, style) for value in values)

    return cell


def _if_applied(cell: Callable[[Row], str]) -> Callable[[Row], str]:
    # Without correction the loss still reports the weight that it did not apply.
    return lambda row: cell(row) if row["corrected"] else f"({cell(row)})"


def _interval(row: Row) -> str:
    found = row["interval"]
    return "–" if found is None else f"{found[0]:+.3f} … {found[1]:+.3f}"


def _of_seeds(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]} of {len(row['seeds'])}"


_LINES: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("seeds finished", lambda row: str(len(row["seeds"]))),
    ("reward, first step", _number(".3f", "reward_first")),
    ("reward, last 10 steps", _number(".3f", "reward_last")),
    ("  less baseline's, same seeds", _number("+.3f", "difference")),
    ("  95% interval of that", _interval),
    ("validation, last", _number(".3f", "validation")),
    ("collapsed", _of_seeds("collapses")),
    ("reached the target", _of_seeds("reached")),
    ("  after steps, median", _number(".0f", "steps_to_target")),
    ("mismatch, mean |Δ|", _number(".2e", "mismatch_abs")),
    ("mismatch, k3", _number(".2e", "mismatch_k3")),
    ("weight, mean", _if_applied(_number(".3f", "weight"))),
    ("weight, ESS fraction", _if_applied(_number(".3f", "ess_fraction"))),
    ("removed by masks", _number(".1%", "removed")),
    ("clipped, low / high", _number(".1%", "clip_fraction_low", "clip_fraction_high")),
    ("seconds", _number(".0f", "seconds")),
)


def _print(found: Sequence[VariantSummary], baseline: str, console: Any) -> None:
    table = require("rich.table").Table(title=f"baseline {baseline}; same weights and prompts on a seed")
    table.add_column("means over seeds", no_wrap=True)
    for outcome in found:
        table.add_column(outcome.label.replace(":", "\n:").replace("+", "\n+").replace(" ", "\n"), justify="right")
    for name, cell in _LINES:
        table.add_row(name, *(cell(outcome.row) for outcome in found))
    console.print(table)
    first = found[0].curves[0].facts
    seeds = {seed for outcome in found for seed in outcome.row["seeds"]}
    for line in (
        f"Nothing was injected: the mismatch is {first['sampler']} against {first['precision']} training. Random "
        f"answers earn {first['chance']:.3f}; the target is {found[0].row['target']:g}.",
        "Δ = log π_train − log μ_generation of each sampled token; k3 estimates KL(μ ‖ π_train). ESS: effective sample "
        "size of the weights over their number. In brackets: weights that were not applied.",
        "" if len(seeds) > 1 else "One seed does not rank variants: --seeds 1..5 before you conclude.",
        *(_trouble(outcome) for outcome in found),
    ):
        if line:
            console.print(line, highlight=False, markup=False)


def _trouble(outcome: VariantSummary) -> str:
    """What went wrong numerically or is not there yet, or nothing."""
    row, parts = outcome.row, []
    if row["skipped_updates"]:
        parts.append(f"{row['skipped_updates']:.0%} of the updates had a non-finite gradient and were skipped")
    dropped = sum(_dropped(curve) for curve in outcome.curves)
    if dropped:
        steps = sum(curve.steps for curve in outcome.curves)
        parts.append(f"sequences with non-finite log-probs were dropped in {dropped} of {steps} steps")
    trouble = f"{' and '.join(parts)}; means are over finite values alone" if parts else ""
    left = f"not finished on seeds {', '.join(map(str, row['unfinished']))}" if row["unfinished"] else ""
    left += "".join(f"; on seed {seed}, {error}" for seed, error in sorted(row["errors"].items()))
    return f"{outcome.label}: {'; '.join(filter(None, (trouble, left))).rstrip('.')}." if trouble or left else ""


def _dropped(curve: Course) -> int:
    return sum(value > 0 for value in curve.series("geomask/dropped_sequences"))
