"""How often ``diagnose`` names the place and the cause of a planted fault, and how often it names a wrong cause.

Protocol, fixed before the run whose figures are in ``docs/evidence/mixtures.json``:

- Each fault of ``mixtures.FAULTS`` at its three strengths, with the seeds 201 to 205; thresholds were chosen on others.
- 100 clean runs: the kinds of ``mixtures.CLEAN`` in turn, with the seeds 1001 to 1100.
- *Wrong cause*: what is named first is a cause, not a place, and not one of the fault's causes.
- *Place right*: what is named first is a region of one of the fault's places, or for a fault of all tokens one of its
  causes, or for a fault of few tokens "a few tokens everywhere" or one of its causes. It is counted where the fault has
  at least half of the mismatch, which the same run without the fault tells.
- *Silent*: nothing is named.

``python -m tests.evidence.diagnose.measure_mixtures`` writes the figures, and with ``--page`` the table.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from nemo_geomask.tools.diagnose.explain.run_diagnosis import RunDiagnosis
from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_survey import survey_block
from nemo_geomask.tools.diagnose.read.record_reader import RecordBlock
from tests.evidence.diagnose.mixtures import CLEAN, FAULTS, make_run

FIGURES = Path("docs/evidence/mixtures.json")
SEEDS = range(201, 206)
CLEAN_SEEDS = range(1001, 1101)


def survey(blocks: Sequence[RecordBlock], options: dict[str, bool]) -> RunStatistics:
    """Return the statistics of a synthetic run."""
    statistics = RunStatistics(experts=64 if options.get("experts") else None)
    for block in blocks:
        statistics.add(survey_block(block))
    return statistics


def mismatch(blocks: Sequence[RecordBlock], onset: int) -> float:
    """Return the sum of min(|Δ|, 1) over the trained tokens from a step on."""
    total = 0.0
    for block in blocks[onset - 1 :]:
        delta = (block.tokens["prev"].astype(float) - block.tokens["gen"])[block.tokens["mask"]]
        total += float(np.minimum(np.abs(delta), 1).sum())
    return total


def named_first(diagnosis: RunDiagnosis) -> tuple[str, tuple[str, ...]]:
    """Return the id of what is named first, and the factors of its region; both are empty if nothing is."""
    if not diagnosis.shown:
        return "", ()
    first = diagnosis.shown[0]
    place = first.detection.place
    for region in diagnosis.evidence.location.regions:
        if region.description == place:
            return first.cause.id, tuple(factor.id for factor in region.factors)
    return first.cause.id, ("few",) if first.cause.id == "few_tokens" else ("all",)


def judge(name: str, strength: float, seed: int) -> dict[str, Any]:
    """Diagnose one run with a fault, and compare what is named first with the truth."""
    fault = FAULTS[name]
    blocks = make_run(seed, name, strength)
    diagnosis = diagnose(survey(blocks, fault.options))
    id_, factors = named_first(diagnosis)
    is_cause = bool(id_) and not diagnosis.shown[0].cause.is_place
    clean = mismatch(make_run(seed, None, options=fault.options), fault.onset)
    is_right = bool(set(factors) & set(fault.places)) or id_ in fault.causes
    if {"all", "few"} & set(fault.places):
        is_right = id_ in fault.causes or (id_ == "few_tokens" and "few" in fault.places)
    return {
        "name": name,
        "strength": strength,
        "share": 1 - clean / mismatch(blocks, fault.onset),
        "named": id_ or diagnosis.health,
        "is_place_right": is_right,
        "is_cause_wrong": is_cause and id_ not in fault.causes,
        "since": diagnosis.since,
        "headline": diagnosis.headline,
    }


def judge_clean(seed: int) -> dict[str, Any]:
    """Diagnose one clean run."""
    kinds = list(CLEAN)
    kind = kinds[seed % len(kinds)]
    diagnosis = diagnose(survey(make_run(seed, None, options=CLEAN[kind]), CLEAN[kind]))
    health = "not judged" if diagnosis.unjudged_reason else diagnosis.health
    return {"kind": kind, "health": health, "headline": diagnosis.headline}


def summarise(runs: Sequence[dict[str, Any]], clean: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of the protocol, over all faults and by fault."""
    major = [run for run in runs if run["share"] >= 0.5]
    faults = {}
    for name in dict.fromkeys(run["name"] for run in runs):
        mine = [run for run in runs if run["name"] == name]
        large = [run for run in mine if run["share"] >= 0.5]
        faults[name] = {
            "runs": len(mine),
            "wrong_cause": sum(run["is_cause_wrong"] for run in mine),
            "major": len(large),
            "place_right": sum(run["is_place_right"] for run in large),
            "minor_right": sum(run["is_place_right"] for run in mine if run["share"] < 0.5),
            "named": dict(Counter(run["named"] for run in mine)),
        }
    return {
        "runs": len(runs),
        "wrong_cause": sum(run["is_cause_wrong"] for run in runs),
        "major": len(major),
        "place_right": sum(run["is_place_right"] for run in major),
        "clean": len(clean),
        "not_healthy": sum(run["health"] != "healthy" for run in clean),
        "faults": faults,
    }


def _judge(job: tuple[str, float, int]) -> dict[str, Any]:
    return judge(*job)


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--clean", type=int, default=len(CLEAN_SEEDS), help="number of clean runs")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=FIGURES)
    parser.add_argument("--verbose", action="store_true", help="print the verdict of each run")
    arguments = parser.parse_args()
    jobs = [(name, s, seed) for name in arguments.only for s in FAULTS[name].strengths for seed in arguments.seeds]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        runs = []
        for run in pool.map(_judge, jobs):
            runs.append(run)
            if arguments.verbose or run["is_cause_wrong"]:
                is_right = "right" if run["is_place_right"] else "not right"
                print(f"{run['name']} {run['strength']:g}, {is_right}, share {run['share']:.2f}: {run['headline']}")
        clean = []
        for run in pool.map(judge_clean, list(CLEAN_SEEDS)[: arguments.clean]):
            clean.append(run)
            if run["health"] != "healthy":
                print(f"clean {run['kind']}: {run['headline']}")
    figures = summarise(runs, clean)
    print(json.dumps({key: value for key, value in figures.items() if key != "faults"}))
    for name, counts in figures["faults"].items():
        print(f"{name:26s} {counts}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
