"""``nemo-geomask run``: run a NeMo-RL script with the loss that its recipe names."""

from __future__ import annotations

import argparse

from nemo_geomask.cli.arguments import ACCEPT_HELP
from nemo_geomask.errors import ConfigError

EXIT_STATUS = {
    0: "the script ended; if it exits with a status, that is the command's",
    2: "a mistake in the arguments, the recipe or the installation; the script was not started",
}

_EPILOG = """\
examples, in NeMo-RL's checkout and environment
  nemo-geomask run examples/run_grpo.py --config recipe.yaml
  nemo-geomask run examples/run_grpo.py --config recipe.yaml ++loss_fn.name=gspo loss_fn.token_level_loss=false

A recipe without loss_fn.name trains with NeMo-RL's own loss. A script of your own must import setup by name at its top
level; if it does not, write `setup = nemo_geomask.hosts.nemo_rl.with_geomask(setup)` into it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Run a NeMo-RL script as python would, with the policy loss that loss_fn.name in its recipe names."
    )
    parser.epilog = _EPILOG
    parser.add_argument("--accept", action="append", default=[], metavar="API", help=ACCEPT_HELP)
    parser.add_argument("script", metavar="SCRIPT.py", help="NeMo-RL's script, such as examples/run_grpo.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from nemo_geomask.hosts.nemo_rl.launch import launch

    # The script's own arguments follow it, and NeMo-RL's scripts have no such option.
    if "--accept" in arguments.arguments or any(item.startswith("--accept=") for item in arguments.arguments):
        raise ConfigError("--accept: write it before the script: nemo-geomask run --accept API SCRIPT.py …")
    launch(arguments.script, arguments.arguments, accept=arguments.accept)
    return 0
