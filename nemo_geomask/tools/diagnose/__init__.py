"""Diagnosis of a recorded run: its mismatch between generation and training engine, since when, and the likely cause.

This package implements ``nemo-geomask diagnose`` and ``nemo-geomask sweep``. Other tools import the names that are
listed here, and nothing from its modules::

    run = find_run(Path("logs/exp_001"))
    diagnosis = diagnose(survey_run(run))
    write_report(Path("report.html"), [(run.directory, diagnosis)])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_geomask.tools.diagnose.explain.run_diagnosis import RunDiagnosis
    from nemo_geomask.tools.diagnose.explain.verdict import diagnose
    from nemo_geomask.tools.diagnose.measure.dimensions import BIN_SUMS, DIMENSIONS_BY_NAME, sum_parts
    from nemo_geomask.tools.diagnose.measure.logprob_checks import UNSURE_LOGPROB
    from nemo_geomask.tools.diagnose.measure.logprob_gap import (
        LogprobGap,
        LogprobPairs,
        exchanged_share,
        logit_noise,
        measure_gap,
        select_pairs,
        shifted_share,
    )
    from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
    from nemo_geomask.tools.diagnose.measure.run_survey import read_step, survey_run
    from nemo_geomask.tools.diagnose.measure.step_survey import survey_block, trainer_column
    from nemo_geomask.tools.diagnose.read.record_sources import RunFiles, find_run, find_runs
    from nemo_geomask.tools.diagnose.report.correction_sweep import padded_batch
    from nemo_geomask.tools.diagnose.report.html_report import write_report
    from nemo_geomask.tools.diagnose.report.measured_run import MeasuredRun, measure_run

__all__ = [
    "BIN_SUMS",
    "DIMENSIONS_BY_NAME",
    "UNSURE_LOGPROB",
    "LogprobGap",
    "LogprobPairs",
    "MeasuredRun",
    "RunDiagnosis",
    "RunFiles",
    "RunStatistics",
    "diagnose",
    "exchanged_share",
    "find_run",
    "find_runs",
    "logit_noise",
    "measure_gap",
    "measure_run",
    "padded_batch",
    "read_step",
    "select_pairs",
    "shifted_share",
    "sum_parts",
    "survey_block",
    "survey_run",
    "trainer_column",
    "write_report",
]

_MODULES = {
    "BIN_SUMS": "measure.dimensions",
    "DIMENSIONS_BY_NAME": "measure.dimensions",
    "LogprobGap": "measure.logprob_gap",
    "LogprobPairs": "measure.logprob_gap",
    "MeasuredRun": "report.measured_run",
    "RunDiagnosis": "explain.run_diagnosis",
    "RunFiles": "read.record_sources",
    "RunStatistics": "measure.run_statistics",
    "UNSURE_LOGPROB": "measure.logprob_checks",
    "diagnose": "explain.verdict",
    "exchanged_share": "measure.logprob_gap",
    "find_run": "read.record_sources",
    "find_runs": "read.record_sources",
    "logit_noise": "measure.logprob_gap",
    "measure_gap": "measure.logprob_gap",
    "measure_run": "report.measured_run",
    "padded_batch": "report.correction_sweep",
    "read_step": "measure.run_survey",
    "select_pairs": "measure.logprob_gap",
    "shifted_share": "measure.logprob_gap",
    "sum_parts": "measure.dimensions",
    "survey_block": "measure.step_survey",
    "survey_run": "measure.run_survey",
    "trainer_column": "measure.step_survey",
    "write_report": "report.html_report",
}


def __getattr__(name: str) -> Any:
    # Imported when used, because the modules need numpy, which the `diagnose` extra installs.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
