"""Benchmarks of our log-probs, losses, sequence statistics and steps, with every peer that can be imported.

They need torch and, on a GPU, Triton. Peers that can't be imported are listed with the reason.
"""

from __future__ import annotations

import argparse

from nemo_geomask.tools.bench.bench_arguments import add_arguments

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmarks that the arguments select, see :func:`nemo_geomask.tools.bench.command.run`."""
    from nemo_geomask.tools.bench import command  # needs torch

    return command.run(arguments)
