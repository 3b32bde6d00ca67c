"""``nemo-geomask sweep``: what each correction and mask would have done to a run's own batches."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_geomask.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_geomask.diagnosis.sources import RunFiles
    from nemo_geomask.diagnosis.sweep import Outcome

__all__ = ["add", "run"]

_EPILOG = """\
examples
  nemo-geomask sweep logs/exp_001
  nemo-geomask sweep logs/exp_001 --recipe recipe.yaml --recommend
  nemo-geomask sweep records/ --grid --steps 4 --at curr --json > sweep.json
"""


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "sweep",
        help="say what each correction and mask would have done to a run's own batches",
        description="Replay recorded batches through the loss under every correction and mask, at their peers' "
        "defaults and over a grid, and compare what is removed, the gradient's bias against samples of the policy that "
        "trains, and its variance.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run's folder of records or logs")
    parser.add_argument(
        "--steps", type=int, default=8, metavar="N", help="replay so many steps, evenly over the run (default: 8)"
    )
    parser.add_argument("--last", action="store_true", help="those at the end of the run instead")
    parser.add_argument("--grid", action="store_true", help="try other bounds, too")
    parser.add_argument(
        "--at",
        choices=("prev", "curr"),
        default="prev",
        help="log-probs of the current policy: those before the first optimiser step, or where they are recorded those "
        "at the step on each sequence (default: prev)",
    )
    parser.add_argument("--recipe", metavar="RECIPE.yaml", help="its loss_fn is the base, and a candidate as it is")
    parser.add_argument(
        "--recommend",
        action="store_true",
        help="print a loss_fn block alone: least bias where the variance is at most 1.1 times that of no correction",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="where converted logs are kept (default: geomask-records beside them)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from nemo_geomask.diagnosis import sweep
    from nemo_geomask.diagnosis.candidates import CANDIDATES, GRID, of_recipe
    from nemo_geomask.diagnosis.sources import find_runs
    from nemo_geomask.recipe import read_recipe

    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps} must be at least 1")
    runs = find_runs([arguments.directory])
    if len(runs) > 1:
        found = ", ".join(str(run.directory) for run in runs)
        raise ConfigError(f"{arguments.directory} holds several runs: {found}; name one")
    base: dict[str, Any] = {}
    candidates = [*CANDIDATES, *(GRID if arguments.grid else ())]
    if arguments.recipe is not None:
        recipe = read_recipe(arguments.recipe, leave=("data", "env", "logger"))
        base, own = of_recipe(recipe.data.get("loss_fn") or {})
        candidates[1:1] = [own] if own else []
    candidates, unfit = sweep.fitting(candidates, base)
    steps = _chosen(runs[0].steps, arguments.steps, last=arguments.last)
    left: dict[int, int] = {}
    outcomes = sweep.replay(_batches(runs[0], steps, arguments.cache, left), candidates, base, at=arguments.at)
    best, block = sweep.recommend(outcomes, base)
    if arguments.json:
        on_front = {id(outcome) for outcome in sweep.front(outcomes)}
        told = {
            "run": str(runs[0].directory),
            "steps": steps,
            "left_out": left,
            "at": arguments.at,
            "does_not_fit": unfit,
            "recommended": best.candidate.name,
            "loss_fn": block,
            "definitions": sweep.DEFINITIONS,
            "candidates": [{**_as_json(outcome), "on_front": id(outcome) in on_front} for outcome in outcomes],
        }
        print(json.dumps(told, ensure_ascii=False, indent=2))
    elif arguments.recommend:
        print(block)
    else:
        _show(outcomes, best, steps, sum(left.values()))
        if unfit:
            print(f"\ndoes not go with this loss_fn: {', '.join(unfit)}")
        print(f"\n{block}")
    return 0


def _chosen(steps: Sequence[int], count: int, *, last: bool) -> list[int]:
    if last or len(steps) <= count:
        return list(steps[-count:])
    return [steps[round(place * (len(steps) - 1) / max(count - 1, 1))] for place in range(count)]


def _batches(
    run: RunFiles, steps: Sequence[int], cache: Path | None, left: dict[int, int]
) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    from nemo_geomask.diagnosis.run import blocks_of
    from nemo_geomask.diagnosis.sweep import as_batch

    for step in steps:
        batch, over = as_batch(blocks_of(run, step, cache))
        if over:
            left[step] = over
        yield step, batch


def _show(outcomes: Sequence[Outcome], best: Outcome, steps: Sequence[int], left: int) -> None:
    from nemo_geomask.diagnosis.sweep import DEFINITIONS, PARTS, front
    from nemo_geomask.diagnosis.text import Table, show

    on_front = {id(outcome) for outcome in front(outcomes)}
    rows = []
    for outcome in outcomes:
        mark = "→" if outcome is best else "*" if id(outcome) in on_front else ""
        numbers = tuple(outcome.value(name) for name in DEFINITIONS)
        skipped = ", ".join(map(str, outcome.skipped)) or ""
        rows.append((mark, outcome.candidate.name, *numbers, skipped, outcome.candidate.source))
    head = ("", "", *DEFINITIONS, "steps skipped", "source")
    title = f"Steps {', '.join(map(str, steps))}" + (f"; {left} sequences left out" if left else "")
    removing = [outcome for outcome in outcomes if outcome.value("removed") > 0]
    parts = [
        (outcome.candidate.name, *(_share(outcome, place) for place in range(1, len(PARTS)))) for outcome in removing
    ]
    show(
        [
            Table("candidates", f"{title}; *: none has less bias and less variance, →: recommended", head, rows),
            Table("removed", "Share removed, of tokens that are", ("", *PARTS[1:]), parts),
        ]
    )


def _share(outcome: Outcome, place: int) -> float:
    count = float(outcome.tokens[place])
    return float(outcome.removed[place]) / count if count else math.nan


def _as_json(outcome: Outcome) -> dict[str, Any]:
    from nemo_geomask.diagnosis.sweep import DEFINITIONS, PARTS

    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "name": outcome.candidate.name,
        "settings": dict(outcome.candidate.settings),
        "source": outcome.candidate.source,
        **{
            name: {"value": known(outcome.value(name)), "interval": [known(end) for end in outcome.interval(name)]}
            for name in DEFINITIONS
        },
        "removed_of": {part: known(_share(outcome, place)) for place, part in enumerate(PARTS)},
        "skipped": outcome.skipped,
        "metrics": {
            step: {name: known(value) for name, value in found.items()} for step, found in outcome.metrics.items()
        },
    }
