"""From a recipe's path to the outputs: what ``nemo-geomask lab`` does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from nemo_geomask.config.recipe import load_recipe
from nemo_geomask.lab.compare import ComparedLoss, parse_compare
from nemo_geomask.lab.diagnosed import print_diagnosis
from nemo_geomask.lab.optional import require
from nemo_geomask.lab.plot import write_plot
from nemo_geomask.lab.progress import RichProgress
from nemo_geomask.lab.recipe import LabRecipe
from nemo_geomask.lab.report import print_report
from nemo_geomask.lab.run import run_lab

__all__ = ["main"]


def main(
    path: str | Path, overrides: Sequence[str] = (), *, compare: str | None = None, out: Path | None = None
) -> int:
    """Train, write the outputs and print the table.

    Args:
        path: the recipe.
        overrides: ``key.path=value``.
        compare: SPECs, separated by commas; None takes the recipe's ``lab.compare``, or its ``loss_fn`` alone.
        out: folder of the outputs; None makes one under ``results/lab``.

    Returns:
        0, or 130 when interrupted.

    Raises:
        GeomaskError: a mistake in the recipe, a SPEC or the installation.
    """
    path = Path(path)
    recipe = LabRecipe.read(load_recipe(path, overrides, new_keys=True), source=path.name)
    specs = recipe.lab.compare if compare is None else compare
    loss_fn = recipe.loss_fn
    variants = parse_compare(specs, loss_fn, recipe.lab) if specs else (ComparedLoss(_label(loss_fn), loss_fn),)
    console = require("rich.console").Console()
    if not console.is_terminal:
        # A file or a pipe has no width of its own; the default would cut the table.
        console.width = 110
    require("matplotlib")
    folder = out or Path("results", "lab", f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}")

    result = run_lab(recipe, variants, folder, RichProgress(console))
    if not result.variants:
        console.print("No step was completed; nothing to report.")
        return 130
    result.write_summary(folder / "summary.json")
    write_plot(result, folder / "lab.png")
    print_report(result, console)
    print_diagnosis(result, console)
    console.print(f"Plot: {folder / 'lab.png'}", highlight=False, markup=False)
    console.print(f"Metrics, rollouts, summary and settings: {folder}", highlight=False, markup=False)
    interrupted = len(result.variants) < len(variants) or not all(variant.complete for variant in result.variants)
    return 130 if interrupted else 0


def _label(loss_fn: dict[str, object]) -> str:
    return str(loss_fn.get("name", "clipped_pg"))
