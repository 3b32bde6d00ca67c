"""``nemo-geomask doctor``: check that NeMo-RL can use the losses, here and in its workers."""

from __future__ import annotations

import argparse
import os
import sys

EXIT_STATUS = {
    0: "no problems",
    1: "problems; each is printed",
    2: "a mistake in the arguments",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Report versions, whether packages can be imported, registered losses, and the NeMo-RL APIs that nemo-geomask "
        "relies on, here and in every environment in which a worker receives a loss. NeMo-RL is the checkout at "
        "NEMO_RL_ROOT, if it is set, or else the one that is importable."
    )
    parser.add_argument(
        "--worker", action="append", default=[], metavar="PYTHON", help="check this interpreter too (repeatable)"
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="check the workers' environments on every node of a running Ray cluster instead of this machine",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from nemo_geomask.hosts.nemo_rl.installation_report import examine_installation
    from nemo_geomask.recipe.recipe_file import ROOT_VARIABLE

    if root := os.environ.get(ROOT_VARIABLE):  # the NeMo-RL that check and rehearse examine, here and in workers
        sys.path.insert(0, root)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    report = examine_installation(arguments.worker, ray_address=arguments.ray)
    print("\n".join(report.lines))
    print()
    for number, problem in enumerate(report.problems, start=1):
        print(f"problem {number}: {problem}")
    if not report.problems:
        print("no problems")
    return 1 if report.problems else 0
