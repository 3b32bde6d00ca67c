"""Diagnosis of a recorded run: its mismatch between generation and training engine, since when, and the likely cause.

This package implements ``nemo-geomask diagnose`` and ``nemo-geomask sweep``. Other tools import the names that are
listed here, and nothing from its modules::

    run = find_run(Path("logs/exp_001"))
    diagnosis = diagnose(survey_run(run))
    write_report(Path("report.html"), [(run, diagnosis)])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_geomask.tools.diagnose.dimensions import DIMENSIONS_BY_NAME
    from nemo_geomask.tools.diagnose.html_report import write_report
    from nemo_geomask.tools.diagnose.logged_metrics import metric_series
    from nemo_geomask.tools.diagnose.logprob_checks import UNSURE_LOGPROB
    from nemo_geomask.tools.diagnose.measured_run import MeasuredRun, measure_run
    from nemo_geomask.tools.diagnose.record_sources import RunFiles, find_run, find_runs
    from nemo_geomask.tools.diagnose.run_statistics import BIN_SUMS, RunStatistics
    from nemo_geomask.tools.diagnose.run_survey import read_step, survey_run
    from nemo_geomask.tools.diagnose.step_survey import survey_block
    from nemo_geomask.tools.diagnose.verdict import RunDiagnosis, diagnose

__all__ = [
    "BIN_SUMS",
    "DIMENSIONS_BY_NAME",
    "UNSURE_LOGPROB",
    "MeasuredRun",
    "RunDiagnosis",
    "RunFiles",
    "RunStatistics",
    "diagnose",
    "find_run",
    "find_runs",
    "measure_run",
    "metric_series",
    "read_step",
    "survey_block",
    "survey_run",
    "write_report",
]

_MODULES = {
    "BIN_SUMS": "run_statistics",
    "DIMENSIONS_BY_NAME": "dimensions",
    "MeasuredRun": "measured_run",
    "RunDiagnosis": "verdict",
    "RunFiles": "record_sources",
    "RunStatistics": "run_statistics",
    "UNSURE_LOGPROB": "logprob_checks",
    "diagnose": "verdict",
    "find_run": "record_sources",
    "find_runs": "record_sources",
    "measure_run": "measured_run",
    "metric_series": "logged_metrics",
    "read_step": "run_survey",
    "survey_block": "step_survey",
    "survey_run": "run_survey",
    "write_report": "html_report",
}


def __getattr__(name: str) -> Any:
    # Imported when used, because the modules need numpy, which the `diagnose` extra installs.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
