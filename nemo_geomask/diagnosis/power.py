"""How often planted causes are named, and how often nothing is where nothing is wrong.

``python -m nemo_geomask.diagnosis.power --seeds 20 [DIR …]`` measures; DIR are clean logs to look at as well. ``--page
docs/diagnose.md`` writes the tables of what was measured, and of the causes, into the page.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.checks.pages import between_marks, markdown
from nemo_geomask.diagnosis.causes import CAUSES
from nemo_geomask.diagnosis.levels import LEVELS
from nemo_geomask.diagnosis.planted import PLANTS, STRENGTHS, RunShape, planted_run
from nemo_geomask.diagnosis.run import survey_run
from nemo_geomask.diagnosis.sources import find_runs
from nemo_geomask.diagnosis.verdict import RunDiagnosis, diagnose

__all__ = ["measure", "measure_plants", "rewrite"]

ONSET = 7
CLEAN = 100


def _name(found: RunDiagnosis) -> str:
    return found.cause.id if found.cause is not None else found.health


def measure_plants(seeds: int, causes: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """What is named, by plant and strength; in half of the runs the cause is there from the first step on."""
    planted: dict[str, list[dict[str, Any]]] = {}
    for cause in causes:
        plant, planted[cause] = PLANTS[cause], []
        for strength in plant.strengths:
            named: Counter[str] = Counter()
            onset_right = onset_asked = 0
            for seed in range(seeds):
                onset = 1 if plant.from_start and seed % 2 else ONSET
                found = diagnose(planted_run(1000 + seed, cause, strength, onset=onset))
                named[_name(found)] += 1
                if onset == ONSET and _name(found) == cause:
                    onset_asked += 1
                    onset_right += found.since is not None and abs(found.since - ONSET) <= 1
            planted[cause].append({"strength": strength, "named": dict(named), "onset": [onset_right, onset_asked]})
    return planted


def measure(seeds: int, clean: int, logs: list[Path]) -> dict[str, Any]:
    """All of it, as JSON."""
    began = time.monotonic()
    planted = measure_plants(seeds, list(PLANTS))
    false = {seed: found for seed in range(clean) if (found := diagnose(planted_run(seed))).health != "healthy"}
    runs = find_runs(logs) if logs else []
    of_logs = [diagnose(survey_run(run)) for run in runs]
    shape = RunShape()
    return {
        "seeds": seeds,
        "steps": shape.steps,
        "sequences": shape.prompts * shape.samples,
        "onset": ONSET,
        "planted": planted,
        "clean": clean,
        "false_alarms": [found.sentence for found in false.values()],
        "lab_runs": len(of_logs),
        "lab_false_alarms": [found.sentence for found in of_logs if found.health != "healthy"],
        "seconds": round(time.monotonic() - began),
    }


def rewrite(text: str, measured: dict[str, Any]) -> str:
    """The page with its tables: causes, levels, what was measured."""
    for mark, table in (("causes", _causes()), ("levels", _levels()), ("power", _power(measured))):
        text = between_marks(text, mark, table, page="diagnose.md")
    return text


def _causes() -> str:
    rows = ((f"`{one.id}`", one.name, f"> {one.threshold:g}: {one.why}", one.action) for one in CAUSES)
    return markdown(("cause", "what it is", "shown when", "what to do"), rows)


def _levels() -> str:
    rows = []
    for one in LEVELS:
        sign = "<" if one.below else ">"
        rows.append((one.name, one.definition, f"{sign} {one.drifting:g}", f"{sign} {one.broken:g}", one.source))
    return markdown(("number", "definition", "drifting", "broken", "source"), rows)


def _power(measured: dict[str, Any]) -> str:
    seeds = measured["seeds"]
    table = []
    for cause, rows in measured["planted"].items():
        instead = [
            ", ".join(f"{name} {count}" for name, count in row["named"].items() if name not in (cause, "healthy"))
            for row in rows[:2]
        ]
        table.append(
            (
                f"`{cause}`",
                *(f"{row['named'].get(cause, 0)} of {seeds}" for row in rows),
                f"{', '.join(format(row['strength'], 'g') for row in rows)} {PLANTS[cause].unit}",
                "; ".join(said or "–" for said in instead),
            )
        )
    onsets = [row["onset"] for rows in measured["planted"].values() for row in rows[1:]]
    right, asked = (sum(pair[place] for pair in onsets) for place in (0, 1))
    lines = [
        markdown(("planted", *STRENGTHS, "strengths", "named instead (weak; middle)"), table),
        "",
        f"{measured['steps']} steps of {measured['sequences']} sequences; from step {measured['onset']} on, and every "
        "second run from the first step on, but for stale engine, routing and precision, which are nothing but "
        f"a change. All others were called healthy. "
        f"At the two higher strengths the first step was told to within one in {right} of {asked} runs. "
        f"False alarms: {len(measured['false_alarms'])} in {measured['clean']} clean runs, "
        f"{len(measured['lab_false_alarms'])} in {measured['lab_runs']} of the lab.",
    ]
    return "\n".join(lines)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--only", nargs="+", choices=list(PLANTS), help="measure these again, of what is in --out")
    parser.add_argument("--out", type=Path, default=Path("docs/diagnose/power.json"))
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    if arguments.only:
        measured = json.loads(arguments.out.read_text(encoding="utf-8"))
        measured["planted"] |= measure_plants(measured["seeds"], arguments.only)
        arguments.out.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    elif arguments.seeds:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        measured = measure(arguments.seeds, CLEAN, arguments.logs)
        arguments.out.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    if arguments.page:
        measured = json.loads(arguments.out.read_text(encoding="utf-8"))
        page = arguments.page
        page.write_text(rewrite(page.read_text(encoding="utf-8"), measured), encoding="utf-8")


if __name__ == "__main__":
    _main()
