"""Arguments and exit status of ``nemo-geomask sweep``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EXIT_STATUS = {
    0: "candidates compared, and one of them recommended, which may be no correction",
    1: "compared, but none recommended: fewer than 32 sequences have a token with a gradient",
    2: "nothing compared: no records, no trained token, advantages of 0 throughout, or a mistake in the arguments",
}

_EPILOG = """\
examples
  nemo-geomask sweep logs/exp_001
  nemo-geomask sweep logs/exp_001 --recipe recipe.yaml --recommend
  nemo-geomask sweep records/ --grid --steps 4 --at curr --json > sweep.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Replay recorded batches through the loss under every correction and mask, with the bounds that other systems "
        "use by default, and compare which tokens each removes, the bias of its gradient (against the gradient on "
        "samples of the policy that trains) and the variance of its gradient."
    )
    parser.epilog = _EPILOG
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of one run's records or logs")
    parser.add_argument(
        "--steps",
        type=int,
        default=8,
        metavar="N",
        help="replay N steps, evenly spaced over the run (default: 8)",
    )
    parser.add_argument("--last", action="store_true", help="replay the last steps of the run instead")
    parser.add_argument("--grid", action="store_true", help="also try narrower and wider bounds")
    parser.add_argument(
        "--at",
        choices=("prev", "curr"),
        default="prev",
        help="log-probs to take for the current policy's: prev, as before the first optimiser step on the batch, or "
        "curr, as recorded at the optimiser step that trained on the sequence (default: prev)",
    )
    parser.add_argument(
        "--recipe",
        metavar="RECIPE.yaml",
        help="use this recipe's loss_fn: its corrections are one candidate, its other settings apply to all candidates "
        "(default: the recorded loss_fn, or clipped_pg if none is recorded)",
    )
    parser.add_argument(
        "--recommend",
        action="store_true",
        help="print only a loss_fn block: least bias, with a variance of at most 1.1 times that without correction, "
        "or 2 times if the bias may persist",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--skip-damaged",
        action="store_true",
        help="leave out files that are damaged and replay the others; the table says how many were left out",
    )
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="folder of converted logs (default: geomask-records beside the logs)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from nemo_geomask.recipe.shipped_files import find_recipe
    from nemo_geomask.tools.diagnose.report.sweep_command import run_sweep

    reason = run_sweep(
        arguments.directory,
        step_count=arguments.steps,
        last_steps_only=arguments.last,
        include_grid=arguments.grid,
        at=arguments.at,
        recipe=arguments.recipe and str(find_recipe(arguments.recipe)),
        output="json" if arguments.json else "block" if arguments.recommend else "tables",
        cache=arguments.cache,
        skip_damaged=arguments.skip_damaged,
    )
    if reason:
        print(f"nemo-geomask: no recommendation: {reason}", file=sys.stderr)
    return 1 if reason else 0
