"""``nemo-geomask rehearse``: run a small version of a recipe through NeMo-RL's own workers."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.cli.arguments import ACCEPT_HELP, positive_integer, positive_number

EXIT_STATUS = {
    0: "every step was trained by the loss that the recipe names, and the report names no fault",
    1: "anything else: a stage failed, validation included; no loss or another one was called; a step was vetoed, or "
    "its masks kept nothing; loss or gradient norm is NaN; sampler and trainer disagree on weights, or on log-probs by "
    "more than in a healthy tiny model; a record was lost; the time limit was reached; --control or a plain "
    "--resume gave another loss or metric",
    2: "a mistake in the arguments, a recipe that can't be read, no NeMo-RL",
}

_EPILOG = """\
A rehearsal runs NeMo-RL's own script, workers, vLLM, refit, training loop, logger and checkpoints, with the recipe's
loss, masks, algorithm and settings. These are replaced: the model, by a tiny random one of the same architecture; the
tokenizer; the prompts, by three words each; and the reward, by the fraction of even words. Without GPUs it runs on
CPUs, with shims for CUDA.

NeMo-RL is the checkout at NEMO_RL_ROOT; the interpreter is this one, and must have NeMo-RL's requirements and vLLM.

layout
  At most --ranks processes train. TP takes as many of them as it can, then CP, EP and PP; data parallelism takes the
  rest. The report names the sizes that were reduced.

examples
  nemo-geomask rehearse recipe.yaml
  nemo-geomask rehearse recipe.yaml --dry-run
  nemo-geomask rehearse recipe.yaml ++checkpointing.enabled=true --resume loss_fn.ratio_clip_max=0.3
  nemo-geomask rehearse recipe.yaml ++loss_fn.name=dppo --steps 2 --ranks 2 --json rehearsal.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Check a NeMo-RL recipe, shrink it to a tiny model of its architecture, and train a few steps "
        "through NeMo-RL's own script and workers, on this machine's GPUs or CPUs."
    )
    parser.epilog = _EPILOG
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="the recipe")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.path=value",
        help="settings that replace the recipe's, as NeMo-RL takes them: ++key.path=value where it has no such key",
    )
    parser.add_argument("--steps", type=positive_integer, default=3, metavar="N", help="rollout batches (default: 3)")
    parser.add_argument(
        "--ranks", type=positive_integer, default=1, metavar="N", help="processes that train (default: 1)"
    )
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
        nargs="*",
        type=_override,
        metavar="key.path=value",
        help="train the last step again from the checkpoint before it, with the same samples, and compare; settings "
        "that follow apply to the resumed run alone",
    )
    parser.add_argument("--validate", action="store_true", help="validate after each step, on the built-in prompts")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="then score the same tokens by sampler and trainer, as nemo-geomask probe does with a single start",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan, run nothing; with --json -, every change with its reason, and the command",
    )
    parser.add_argument("--accept", action="append", default=[], metavar="API", help=ACCEPT_HELP)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report as JSON to this file; -: standard output"
    )
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=600.0,
        metavar="S",
        help="seconds after which the rehearsal is stopped (default: 600)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="a new or an empty folder, or a rehearsal's, which is replaced (default: results/rehearsal/<recipe>)",
    )


def _override(text: str) -> str:
    if "=" not in text and not text.startswith("~"):
        raise argparse.ArgumentTypeError(f"'{text}' is not key.path=value; a recipe comes before --resume")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from nemo_geomask.recipe.shipped_files import find_recipe
    from nemo_geomask.tools.rehearse.rehearsal import rehearse
    from nemo_geomask.tools.rehearse.rehearsal_report import as_json, as_text
    from nemo_geomask.tools.shared.json_output import to_json

    to_stdout = arguments.json is not None and str(arguments.json) == "-"
    folder = arguments.out or Path("results", "rehearsal", Path(arguments.recipe).stem)
    progress = _ProgressPrinter(arguments.steps)
    try:
        rehearsal = rehearse(
            str(find_recipe(arguments.recipe)),
            arguments.overrides,
            steps=arguments.steps,
            ranks=arguments.ranks,
            own_environment=arguments.env == "own",
            timeout=arguments.timeout,
            control=arguments.control,
            resume=arguments.resume,
            validate=arguments.validate,
            dry_run=arguments.dry_run,
            accept=arguments.accept,
            folder=folder,
            progress=progress,
        )
    except (KeyboardInterrupt, SystemExit) as interruption:
        event = "interrupted by Ctrl-C" if isinstance(interruption, KeyboardInterrupt) else "ended by a signal"
        print(
            f"\nrehearse: {event} {progress.place}; nothing is judged. All its processes have ended; what they wrote "
            f"is in {folder}",
            file=sys.stderr,
        )
        raise
    report = to_json(as_json(rehearsal))
    if to_stdout:
        print(report)
    else:
        print("\n".join(as_text(rehearsal)))
        if arguments.json is not None:
            arguments.json.write_text(report + "\n", encoding="utf-8")
    if not arguments.probe or arguments.dry_run or not rehearsal.ok:
        return 0 if rehearsal.ok else 1
    return _run_probe(arguments, folder.with_name(f"{folder.name}-probe"), to_stdout=to_stdout)


def _run_probe(arguments: argparse.Namespace, folder: Path, *, to_stdout: bool) -> int:
    """Run the part of a probe that needs a single start; return 1 if a check finds a fault."""
    from nemo_geomask.cli.probe import probe_recipe
    from nemo_geomask.tools.probe.probe_report import as_text

    if (folder / "probe.json").is_file():
        shutil.rmtree(folder)
    recipe = (arguments.recipe, arguments.overrides)
    result = probe_recipe(*recipe, folder=folder, switches=["requests"], budget=0.0, ranks=arguments.ranks)
    heading = "probe of what needs no further start; nemo-geomask probe tries the other settings:"
    print("\n".join(["", heading, *as_text(result)]), file=sys.stderr if to_stdout else sys.stdout)
    return 1 if result.faults else 0


class _ProgressPrinter:
    """Prints each stage to standard error when it begins, at most once in a row, and the time that steps will take.

    Args:
        steps: number of steps of a run.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._printed_events = 0
        self._last_line = ""

    @property
    def place(self) -> str:
        """Place in the run that was printed last."""
        return f"in {self._last_line}" if self._last_line else "before NeMo-RL had begun"

    def __call__(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events[self._printed_events :]:
            line = ""
            if event["kind"] == "begin" and event["stage"] != "metrics":
                line = f"{event['stage']} ({event['label']})"
            elif event["kind"] == "metrics" and event["prefix"] == "train" and "loss" in event["values"]:
                line = f"step {event['step']} of {self._steps}: loss {event['values']['loss']:.6g}"
            if line and line != self._last_line:
                time_left = self._time_left(event, events) if event["kind"] == "metrics" else ""
                print(f"rehearse: {line}{time_left}", file=sys.stderr, flush=True)
                self._last_line = line
        self._printed_events = len(events)

    def _time_left(self, step: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str:
        """Return the time that the run's other steps take if each takes as long as the last one; empty if unknown."""
        steps = [event for event in events if event["kind"] == "metrics" and event["prefix"] == "train"]
        before = [event["at"] for event in steps if event["step"] == step["step"] - 1]
        remaining_steps = self._steps - step["step"]
        if not before or remaining_steps <= 0:
            return ""
        return f", about {remaining_steps * (step['at'] - before[-1]):.0f} s of training left in this run"
