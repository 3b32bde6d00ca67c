"""``nemo-geomask bench``: benchmarks of this package and of every peer that can be imported."""

from __future__ import annotations

import argparse

from nemo_geomask.tools import bench

__all__ = ["EXIT_STATUS", "add_arguments", "run"]

EXIT_STATUS = {
    0: "measured; a missed target is in the table, and no error",
    2: "a mistake in the arguments, the recipe or the installation",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Measure log-probs, losses, sequence statistics and steps of a decoder, of nemo_geomask and of every peer that "
        "can be imported, in mixed order: median times with quartiles, memory traffic, peak memory, kernel launches, "
        "collectives and errors against float64."
    )
    bench.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    return bench.run(arguments)
