"""What the records of a comparison say of each variant's mismatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_geomask.errors import GeomaskError
from nemo_geomask.lab.results import LabResult

__all__ = ["print_diagnosis"]


def print_diagnosis(result: LabResult, console: Any) -> None:
    """Print a verdict for each variant that was recorded, and write the report on all of them.

    What stands in the way is printed, too: the training is done, and its results are there.
    """
    recorded = [variant for variant in result.variants if variant.loss_fn.get("record")]
    if not recorded:
        return
    # Without records, the lab needs none of it.
    from nemo_geomask.diagnosis.logged import as_series
    from nemo_geomask.diagnosis.report import report
    from nemo_geomask.diagnosis.run import survey_run
    from nemo_geomask.diagnosis.sources import find_runs
    from nemo_geomask.diagnosis.verdict import diagnose

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    found = []
    try:
        for variant in recorded:
            (run,) = find_runs([Path(variant.loss_fn["record"]["dir"])])
            found.append((run, diagnose(survey_run(run))))
            say(f"{variant.label}: {found[-1][1].headline}")
        path = result.out / "report.html"
        logged = [as_series(variant.history) for variant in recorded]
        report(path, found, names=[variant.label for variant in recorded], logged=logged)
        say(f"Diagnosis of what was recorded: {path}")
    except GeomaskError as error:
        say(f"No diagnosis: {error}")
