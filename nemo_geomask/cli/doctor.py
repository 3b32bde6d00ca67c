"""``nemo-geomask doctor``: can NeMo-RL, here and in its workers, use the losses?"""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add", "run"]


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check NeMo-RL, its workers' environments and the registered losses",
        description="Report versions, importability, registered losses and NeMo-RL's seams, here and in every "
        "environment in which a worker receives a loss. Exit status: 0 if all is well, 1 if not.",
    )
    parser.add_argument(
        "--worker", action="append", default=[], metavar="PYTHON", help="look at this interpreter too (repeatable)"
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="look at the workers' environments on every node of a running Ray cluster, not on this machine alone",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from nemo_geomask.integrations.nemo_rl.diagnosis import diagnose

    found = diagnose(arguments.worker, ray_address=arguments.ray)
    print("\n".join(found.lines))
    print()
    for number, problem in enumerate(found.problems, start=1):
        print(f"problem {number}: {problem}")
    if not found.problems:
        print("all is well")
    return 1 if found.problems else 0
