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
    from nemo_geomask.tools.diagnose.explain.run_diagnosis import RunDiagnosis
    from nemo_geomask.tools.diagnose.explain.verdict import diagnose
    from nemo_geomask.tools.diagnose.measure.dimensions import DIMENSIONS_BY_NAME
    from nemo_geomask.tools.diagnose.measure.logprob_checks import UNSURE_LOGPROB
    from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
    from nemo_geomask.tools.diagnose.measure.run_survey import read_step, survey_run
    from nemo_geomask.tools.diagnose.measure.step_survey import survey_block
    from nemo_geomask.tools.diagnose.measure.thresholds import BIN_SUMS
    from nemo_geomask.tools.diagnose.read.logged_metrics import metric_series
    from nemo_geomask.tools.diagnose.read.record_sources import RunFiles, find_run, find_runs
    from nemo_geomask.tools.diagnose.report.html_report import write_report
    from nemo_geomask.tools.diagnose.report.measured_run import MeasuredRun, measure_run

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
    "BIN_SUMS": "measure.thresholds",
    "DIMENSIONS_BY_NAME": "measure.dimensions",
    "MeasuredRun": "report.measured_run",
    "RunDiagnosis": "explain.run_diagnosis",
    "RunFiles": "read.record_sources",
    "RunStatistics": "measure.run_statistics",
    "UNSURE_LOGPROB": "measure.logprob_checks",
    "diagnose": "explain.verdict",
    "find_run": "read.record_sources",
    "find_runs": "read.record_sources",
    "measure_run": "report.measured_run",
    "metric_series": "read.logged_metrics",
    "read_step": "measure.run_survey",
    "survey_block": "measure.step_survey",
    "survey_run": "measure.run_survey",
    "write_report": "report.html_report",
}


def __getattr__(name: str) -> Any:
    # Imported when used, because the modules need numpy, which the `diagnose` extra installs.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
