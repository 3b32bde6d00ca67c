"""Measurement of the detectors: how often planted causes are named, and how often a clean run raises a false alarm.

``python -m tests.evidence.diagnose.detection_power --seeds 20 [DIR …]`` measures, with the clean logs in DIR as
well. ``--page docs/evidence/diagnosis.md`` writes the tables of causes, health limits and results into the page.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.tools.diagnose.explain.causes import CAUSES
from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from nemo_geomask.tools.diagnose.measure.run_survey import survey_run
from nemo_geomask.tools.diagnose.measure.thresholds import HEALTH_LIMITS
from nemo_geomask.tools.diagnose.read.record_sources import find_runs
from tests.evidence.diagnose.planted_causes import PLANTED_CAUSES, STRENGTHS, planted_run
from tests.evidence.diagnose.planted_logs import RunShape
from tests.helpers.markdown import markdown_table, replace_marked_text

ONSET = 7
"""First step with the planted cause, in runs that begin without it."""
CLEAN_RUNS = 100
FIRST_PLANTED_SEED = 1000


def measure_planted_causes(seeds: int, causes: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Diagnose synthetic runs with each planted cause at each strength.

    In every second run the cause is present from the first step on, if it can be detected in such a run.

    Returns:
        By cause, an entry for each strength. ``named`` counts how often each cause or health was named. ``onset`` holds
        two counts: the runs whose first step was right within one step, and the runs in which it was judged, which are
        those that begin without the cause and were diagnosed correctly.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    for cause in causes:
        planted, results[cause] = PLANTED_CAUSES[cause], []
        for strength in planted.strengths:
            named: Counter[str] = Counter()
            right_onsets = judged_onsets = 0
            for seed in range(seeds):
                onset = 1 if planted.is_detectable_from_start and seed % 2 else ONSET
                diagnosis = diagnose(planted_run(FIRST_PLANTED_SEED + seed, cause, strength, onset=onset))
                name = diagnosis.health if diagnosis.cause is None else diagnosis.cause.id
                named[name] += 1
                if onset == ONSET and name == cause:
                    judged_onsets += 1
                    right_onsets += diagnosis.since is not None and abs(diagnosis.since - ONSET) <= 1
            results[cause].append({"strength": strength, "named": dict(named), "onset": [right_onsets, judged_onsets]})
    return results


def measure_clean_runs(count: int, logs: Sequence[Path]) -> dict[str, Any]:
    """Diagnose clean synthetic runs and the clean recorded runs in ``logs``; return counts and the false alarms."""
    synthetic = [diagnose(planted_run(seed)) for seed in range(count)]
    recorded = [diagnose(survey_run(run)) for run in (find_runs(logs) if logs else [])]
    return {
        "clean": count,
        "false_alarms": [diagnosis.sentence for diagnosis in synthetic if diagnosis.health != "healthy"],
        "lab_runs": len(recorded),
        "lab_false_alarms": [diagnosis.sentence for diagnosis in recorded if diagnosis.health != "healthy"],
    }


def _measure_all(seeds: int, logs: Sequence[Path]) -> dict[str, Any]:
    start_time, shape = time.monotonic(), RunShape()
    return {
        "seeds": seeds,
        "steps": shape.steps,
        "sequences": shape.prompts * shape.samples,
        "onset": ONSET,
        "planted": measure_planted_causes(seeds, list(PLANTED_CAUSES)),
        **measure_clean_runs(CLEAN_RUNS, logs),
        "seconds": round(time.monotonic() - start_time),
    }


def rewrite(text: str, results: dict[str, Any]) -> str:
    """Return the page's text with generated tables of the causes, the health limits and the results."""
    for mark, table in (("causes", _cause_table()), ("levels", _limit_table()), ("power", _power_table(results))):
        text = replace_marked_text(text, mark, table, page="diagnosis.md")
    return text


def _cause_table() -> str:
    rows = (
        (
            f"`{cause.id}`",
            cause.name,
            f"> {cause.threshold:g}: {cause.rationale}",
            f"likely: {'; '.join(cause.likely)}. To tell them apart: {cause.action}"
            if cause.is_place
            else cause.action,
        )
        for cause in CAUSES
    )
    return markdown_table(("cause or place", "what it is", "shown when", "what to do"), rows)


def _limit_table() -> str:
    rows = (
        (
            limit.name,
            limit.definition,
            f"{limit.sign} {limit.drifting:g}",
            f"{limit.sign} {limit.broken:g}",
            limit.source,
        )
        for limit in HEALTH_LIMITS
    )
    return markdown_table(("number", "definition", "drifting", "broken", "source"), rows)


def _power_table(results: dict[str, Any]) -> str:
    seeds = results["seeds"]
    rows = []
    for cause, by_strength in results["planted"].items():
        other_names = [
            ", ".join(f"{name} {count}" for name, count in entry["named"].items() if name not in (cause, "healthy"))
            for entry in by_strength[:2]
        ]
        strengths = ", ".join(format(entry["strength"], "g") for entry in by_strength)
        rows.append(
            (
                f"`{cause}`",
                *(f"{entry['named'].get(cause, 0)} of {seeds}" for entry in by_strength),
                f"{strengths} {PLANTED_CAUSES[cause].unit}",
                "; ".join(names or "–" for names in other_names),
            )
        )
    onsets = [entry["onset"] for by_strength in results["planted"].values() for entry in by_strength[1:]]
    right, judged = sum(onset[0] for onset in onsets), sum(onset[1] for onset in onsets)
    caption = (
        f"{results['steps']} steps of {results['sequences']} sequences. The cause begins at step {results['onset']}, "
        "and in every second run at the first step, except for stale engine, routing and precision, which show only as "
        "a change. In all other runs no cause was named. At the two higher strengths the first step was right within "
        f"one step in {right} of {judged} runs. False alarms: {len(results['false_alarms'])} in {results['clean']} "
        "clean runs"
    )
    lab = f", {len(results['lab_false_alarms'])} in {results['lab_runs']} of the lab" if results["lab_runs"] else ""
    caption += f"{lab}."
    head = ("planted", *STRENGTHS, "strengths", "named instead (weak; middle)")
    return f"{markdown_table(head, rows)}\n\n{caption}"


def rewrite_mixtures(text: str, figures: dict[str, Any]) -> str:
    """Return the page's text with the table of the mixtures, whose figures ``measure_mixtures`` measures."""
    rows = []
    for name, counts in figures["faults"].items():
        others = ", ".join(
            f"{id_} {count}" for id_, count in sorted(counts["named"].items(), key=lambda item: -item[1])
        )
        minor = counts["runs"] - counts["major"]
        rows.append(
            (
                name.replace("_", " "),
                f"{counts['place_right']} of {counts['major']}",
                f"{counts['minor_right']} of {minor}",
                str(counts["wrong_cause"]),
                others,
            )
        )
    head = ("fault", "right, of half of the excess or more", "right, of less", "wrong cause", "named first")
    caption = (
        f"A wrong cause first in {figures['wrong_cause']} of {figures['runs']} runs; right in {figures['place_right']} "
        f"of {figures['major']} where the fault has half of the mismatch. Of {figures['clean']} clean runs, "
        f"{figures['not_healthy']} are not healthy."
    )
    return replace_marked_text(text, "mixtures", f"{markdown_table(head, rows)}\n\n{caption}", page="diagnosis.md")


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", type=Path, metavar="DIR", help="folders of clean recorded runs")
    parser.add_argument("--seeds", type=int, help="number of runs for each cause and strength")
    parser.add_argument("--only", nargs="+", choices=list(PLANTED_CAUSES), help="measure only these causes again")
    parser.add_argument("--out", type=Path, default=Path("docs/diagnose/power.json"), help="file of the results")
    parser.add_argument("--page", type=Path, help="page whose tables are rewritten")
    arguments = parser.parse_args()
    out: Path = arguments.out
    results: dict[str, Any] | None = None
    if arguments.only:
        results = json.loads(out.read_text(encoding="utf-8"))
        results["planted"] |= measure_planted_causes(results["seeds"], arguments.only)
    elif arguments.seeds:
        results = _measure_all(arguments.seeds, arguments.logs)
    if results is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if arguments.page:
        page: Path = arguments.page
        results = json.loads(out.read_text(encoding="utf-8"))
        text = rewrite(page.read_text(encoding="utf-8"), results)
        mixtures = json.loads(page.with_name("mixtures.json").read_text(encoding="utf-8"))
        page.write_text(rewrite_mixtures(text, mixtures), encoding="utf-8")


if __name__ == "__main__":
    _main()
