"""``nemo-geomask run``: a NeMo-RL script, with the loss that its recipe names."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add", "run"]

_EPILOG = """\
examples, in NeMo-RL's checkout and environment
  nemo-geomask run examples/run_grpo.py --config recipe.yaml
  nemo-geomask run examples/run_grpo.py --config recipe.yaml ++loss_fn.name=gspo loss_fn.token_level_loss=false

A recipe without loss_fn.name trains with NeMo-RL's own loss. In a script of your own, call nemo_geomask.install().
"""


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "run",
        help="run a NeMo-RL script with the loss that its recipe names",
        description="Run a NeMo-RL script as python would, with every policy loss it builds chosen by loss_fn.name.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", metavar="SCRIPT.py", help="NeMo-RL's script, such as examples/run_grpo.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from nemo_geomask.integrations.nemo_rl.launch import launch

    launch(arguments.script, arguments.arguments)
    return 0
