"""What the records of a comparison say of each variant's mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.errors import GeomaskError
from nemo_geomask.lab.runs import Course

__all__ = ["print_diagnosis"]


def print_diagnosis(curves: Sequence[Course], out: Path, console: Any) -> None:
    """Print a verdict for each variant that was recorded, on its first seed, and write the report on all of them.

    What stands in the way is printed, too: the training is done, and its results are there.
    """
    recorded = {curve.label: curve for curve in reversed(curves) if curve.facts["loss_fn"].get("record")}
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

    found, names, logged = [], [], []
    try:
        for label, curve in reversed(recorded.items()):
            (run,) = find_runs([Path(curve.facts["loss_fn"]["record"]["dir"])])
            found.append((run, diagnose(survey_run(run))))
            names.append(label)
            logged.append(as_series(curve.history))
            say(f"{label}: {found[-1][1].headline}")
        path = out / "report.html"
        report(path, found, names=names, logged=logged)
        say(f"Diagnosis of what was recorded: {path}")
    except GeomaskError as error:
        say(f"No diagnosis: {error}")
