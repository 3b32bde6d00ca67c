"""A diagnosis as JSON, for ``nemo-geomask diagnose --json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from nemo_geomask.tools.diagnose.explain.cause_selection import ExplainedShare, ShownCause
from nemo_geomask.tools.diagnose.explain.causes import CAUSES
from nemo_geomask.tools.diagnose.explain.run_diagnosis import RunDiagnosis
from nemo_geomask.tools.diagnose.measure.thresholds import HEALTH_LIMITS
from nemo_geomask.tools.diagnose.report.json_formats import CauseJson, DiagnosisJson, LevelJson, NamedCauseJson
from nemo_geomask.tools.diagnose.report.report_tables import Decode, diagnosis_tables
from nemo_geomask.tools.shared.json_output import JSON_VERSION, replace_nonfinite


def diagnosis_json(
    diagnosis: RunDiagnosis,
    directory: str,
    decode: Decode | None = None,
    splits: Sequence[tuple[str, ...]] | None = None,
) -> DiagnosisJson:
    """Return the diagnosis of a run in a folder for ``--json``; numbers that are not finite are None."""
    first = diagnosis.shown[0] if diagnosis.shown else None
    causes: list[CauseJson] = []
    shown = {ranked.cause.id: ranked for ranked in diagnosis.shown}
    for tested in CAUSES:
        detection = diagnosis.detections[tested.id]
        causes.append(
            {
                "id": tested.id,
                "measured": detection.value,
                "threshold": tested.threshold,
                "why": tested.rationale,
                "shown": detection.is_shown,
                "state": detection.state,
                "needs": detection.needs,
                "detectable_share": detection.detectable_share,
                "share": None if tested.id not in shown else _share_json(shown[tested.id].share),
                "since": shown[tested.id].since if tested.id in shown else None,
                "says": detection.description,
                "steps": list(detection.steps),
            }
        )
    levels: dict[str, LevelJson] = {}
    for limit in HEALTH_LIMITS:
        reading = diagnosis.readings[limit.name]
        levels[limit.name] = {
            "value": reading.value,
            "interval": (reading.low, reading.high),
            "health": reading.health,
            "drifting": limit.drifting,
            "broken": limit.broken,
            "definition": limit.definition,
            "source": limit.source,
        }
    values: DiagnosisJson = {
        "version": JSON_VERSION,
        "run": directory,
        "health": "unknown" if diagnosis.unjudged_reason else diagnosis.health,
        "verdict": diagnosis.sentence,
        "since": diagnosis.since,
        "against": None if diagnosis.comparison is None else diagnosis.comparison._asdict(),
        "cause": None if first is None else _cause_json(first),
        "steps": sorted(diagnosis.evidence.statistics.steps),
        "named": [ranked.cause.id for ranked in diagnosis.shown],
        "causes": causes,
        "levels": levels,
        "tables": {
            table.key: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
            for table in diagnosis_tables(diagnosis, decode, splits)
            if table.key != "causes"
        },
        "files": list(diagnosis.evidence.statistics.file_notes),
    }
    return cast(DiagnosisJson, replace_nonfinite(values))


def _cause_json(shown: ShownCause) -> NamedCauseJson:
    cause = shown.cause
    return {
        "id": cause.id,
        "name": cause.name,
        "action": shown.action,
        "is_known": not cause.is_place,
        "place": shown.detection.place,
        "likely": shown.likely,
    }


def _share_json(share: ExplainedShare | None) -> dict[str, Any] | None:
    """Return the share of the mismatch that a cause accounts for; None if it can't be measured."""
    return None if share is None else {name: estimate._asdict() for name, estimate in share._asdict().items()}
