"""``nemo-geomask rehearse``: a recipe, shrunk, through NeMo-RL's own workers, before it goes to a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.cli.arguments import above_zero

__all__ = ["add", "run"]

_EPILOG = """\
What is rehearsed: NeMo-RL's own script, workers, vLLM, refit, loop, logger and checkpoints, with the recipe's loss,
masks, algorithm and settings. What is made up: a tiny random model of the recipe's architecture, a tokenizer, prompts
of three words and the reward (the share of even words). Without GPUs it runs on CPUs, with stand-ins for CUDA.

NeMo-RL is the checkout at NEMO_RL_ROOT; the interpreter is this one, and must have NeMo-RL's requirements and vLLM.

layout
  --ranks processes train, at most: TP is kept as far as it fits, then CP, EP and PP, and data parallelism gets what is
  left. What was left out is said.

exit status
  0  every step was trained
  1  a stage failed, validation included; a loss or gradient norm is NaN; the time was over; --control or --resume found
     another loss or metric
  2  a mistake in the arguments, a recipe that can't be read, no NeMo-RL
  130  Ctrl-C

examples
  nemo-geomask rehearse recipe.yaml
  nemo-geomask rehearse recipe.yaml ++loss_fn.name=gspo --steps 2 --ranks 2 --json rehearsal.json
"""


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "rehearse",
        help="run a recipe, shrunk, through NeMo-RL's own workers on this machine",
        description="Check a NeMo-RL recipe, shrink it to a tiny model of its architecture, and train a few steps "
        "through NeMo-RL's own script and workers, on this machine's GPUs or CPUs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="the recipe")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.path=value",
        help="settings that replace the recipe's, as NeMo-RL takes them: ++key.path=value where it has no such key",
    )
    parser.add_argument("--steps", type=_count, default=3, metavar="N", help="rollout batches (default: 3)")
    parser.add_argument("--ranks", type=_count, default=1, metavar="N", help="processes that train (default: 1)")
    parser.add_argument(
        "--env",
        choices=("builtin", "own"),
        default="builtin",
        help="prompts and rewards: built-in ones (default), or the recipe's own data and environment",
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="run it again with NeMo-RL's own loss, where that has all of the recipe's settings, and compare",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="train the last step again from the checkpoint before it, with the same samples, and compare",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write what was found to this file; -: standard output"
    )
    parser.add_argument(
        "--timeout", type=above_zero, default=600.0, metavar="S", help="seconds until all is ended (default: 600)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="a new or an empty folder, or a rehearsal's, which is replaced (default: results/rehearsal/<recipe>)",
    )
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    # Imported here, so that --help and other commands need none of this.
    from nemo_geomask.rehearsal.pages import as_json, as_text
    from nemo_geomask.rehearsal.rehearse import rehearse

    to_stdout = arguments.json is not None and str(arguments.json) == "-"
    done = rehearse(
        arguments.recipe,
        arguments.overrides,
        steps=arguments.steps,
        ranks=arguments.ranks,
        own_environment=arguments.env == "own",
        timeout=arguments.timeout,
        control=arguments.control,
        resume=arguments.resume,
        folder=arguments.out or Path("results", "rehearsal", Path(arguments.recipe).stem),
        progress=_Said(),
    )
    found = json.dumps(as_json(done), ensure_ascii=False, indent=2, allow_nan=False)
    if to_stdout:
        print(found)
    else:
        print("\n".join(as_text(done)))
        if arguments.json is not None:
            arguments.json.write_text(found + "\n", encoding="utf-8")
    return 0 if done.ok else 1


class _Said:
    """Says on standard error which stage has begun, each once a step at most."""

    def __init__(self) -> None:
        self._seen = 0
        self._last = ""

    def __call__(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events[self._seen :]:
            line = ""
            if event["kind"] == "begin" and event["stage"] != "metrics":
                line = f"{event['stage']} ({event['label']})"
            elif event["kind"] == "metrics" and event["prefix"] == "train" and "loss" in event["values"]:
                line = f"step {event['step']}: loss {event['values']['loss']:.6g}"
            if line and line != self._last:
                print(f"rehearse: {line}", file=sys.stderr, flush=True)
                self._last = line
        self._seen = len(events)
