"""``nemo-geomask run``: run a NeMo-RL script with the loss that its recipe names."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_geomask.cli.arguments import ACCEPT_HELP, positive_integer
from nemo_geomask.errors import ConfigError

EXIT_STATUS = {
    0: "the script ended, or --preflight-only found nothing; if it exits with a status, that is the command's",
    1: "the preflight found a fault and stopped the run, or the run ended before it was judged",
    2: "a mistake in the arguments, the recipe or the installation; the script was not started",
}

_EPILOG = """\
examples, in NeMo-RL's checkout and environment
  nemo-geomask run examples/run_grpo.py --config recipe.yaml
  nemo-geomask run examples/run_grpo.py --config recipe.yaml ++loss_fn.name=gspo loss_fn.token_level_loss=false

  nemo-geomask run examples/run_grpo.py --config recipe.yaml --preflight 2
  nemo-geomask run examples/run_grpo.py --config recipe.yaml --preflight-only --prompts prompts.jsonl

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
    _add_preflight(parser.add_argument_group("preflight, after the script"))


def _add_preflight(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--preflight",
        nargs="?",
        const=2,
        type=positive_integer,
        metavar="N",
        help="record and judge the first N steps of the run (default: 2); then go on, or stop with the reason",
    )
    parser.add_argument("--preflight-only", action="store_true", help="stop after them in any case (N: 2 by default)")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="with --preflight-only: take the prompts from this file, a JSON object with input and output a line",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results", "preflight"),
        metavar="DIR",
        help="folder for its records and report, which is emptied (default: results/preflight)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from nemo_geomask.hosts.nemo_rl.launch import launch

    # The script's own arguments follow it, and NeMo-RL's scripts have no such option.
    if "--accept" in arguments.arguments or any(item.startswith("--accept=") for item in arguments.arguments):
        raise ConfigError("--accept: write it before the script: nemo-geomask run --accept API SCRIPT.py …")
    parser = argparse.ArgumentParser(prog="nemo-geomask run", add_help=False, allow_abbrev=False)
    _add_preflight(parser)
    options, script_arguments = parser.parse_known_args(arguments.arguments, namespace=arguments)
    if options.preflight is None and not options.preflight_only:
        launch(arguments.script, arguments.arguments, accept=arguments.accept)
        return 0
    from nemo_geomask.tools.rehearse.preflight import Preflight

    preflight = Preflight(
        script_arguments,
        steps=options.preflight or 2,
        always_stops=options.preflight_only,
        prompts=options.prompts,
        folder=options.out,
    )
    script_arguments = [*script_arguments, *preflight.overrides]
    launch(arguments.script, script_arguments, accept=arguments.accept, before_start=preflight.begin)
    preflight.require_verdict()
    return 0
