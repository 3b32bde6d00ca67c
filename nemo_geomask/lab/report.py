"""The table at the end, and the sentences under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nemo_geomask.lab.optional import require
from nemo_geomask.lab.results import LabResult, Row

__all__ = ["print_report"]


def _number(style: str, *keys: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        values = [row.get(key) for key in keys]
        return " / ".join("–" if value is None else format(value, style) for value in values)

    return cell


def _if_applied(cell: Callable[[Row], str]) -> Callable[[Row], str]:
    # Without correction the loss still reports the weight that it did not apply.
    return lambda row: cell(row) if row["corrected"] else f"({cell(row)})"


_LINES: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("reward, first step", _number(".3f", "reward_first")),
    ("reward, last 10 steps", _number(".3f", "reward_last")),
    ("  times chance", _number(".1f", "times_chance")),
    ("mismatch, mean |Δ|", _number(".2e", "mismatch_abs")),
    ("mismatch, k3", _number(".2e", "mismatch_k3")),
    ("weight, mean", _if_applied(_number(".3f", "weight"))),
    ("weight, ESS fraction", _if_applied(_number(".3f", "ess_fraction"))),
    ("removed by masks", _number(".1%", "removed")),
    ("clipped, low / high", _number(".1%", "clip_fraction_low", "clip_fraction_high")),
    ("steps", _number("d", "steps")),
    ("seconds", _number(".0f", "seconds")),
)


def print_report(result: LabResult, console: Any) -> None:
    """Print the comparison, a column a variant, to a ``rich.console.Console``."""
    table = require("rich.table").Table(title=f"seed {result.seed}, all from the same weights and prompts")
    table.add_column("means over all steps", no_wrap=True)
    rows = [{**variant.summary(), "times_chance": None} for variant in result.variants]
    for variant, row in zip(result.variants, rows, strict=True):
        heading = variant.label.replace(":", "\n:").replace("+", "\n+")
        table.add_column(heading if variant.complete else f"{heading}\n(interrupted)", justify="right")
        if variant.final_reward is not None:
            row["times_chance"] = variant.final_reward / result.chance
    for name, cell in _LINES:
        table.add_row(name, *(cell(row) for row in rows))
    console.print(table)
    for line in (
        f"Nothing was injected: the mismatch is {result.sampler} against {result.precision} training. Random answers "
        f"earn {result.chance:.3f}.",
        "Δ = log π_train − log μ_generation of each sampled token; k3 estimates KL(μ ‖ π_train). ESS: effective sample "
        "size of the weights over their number. In brackets: weights that were not applied.",
        result.finding,
        *(variant.trouble for variant in result.variants),
    ):
        if line:
            console.print(line, highlight=False, markup=False)
