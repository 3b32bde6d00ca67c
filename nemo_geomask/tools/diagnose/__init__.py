"""Diagnosis of a recorded run: its mismatch between generation and training engine, since when, and the likely cause.

This package implements ``nemo-geomask diagnose`` and ``nemo-geomask sweep``. Other tools import the names that are
listed here, and nothing from its modules::

    run = find_run(Path("logs/exp_001"))
    diagnosis = diagnose(survey_run(run))
    write_report(Path("report.html"), [(run.directory, diagnosis)])
"""

# ruff: noqa: F403 -- for type checkers alone; _MODULES names what other tools use
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_geomask.tools.diagnose.explain.run_diagnosis import *
    from nemo_geomask.tools.diagnose.explain.verdict import *
    from nemo_geomask.tools.diagnose.measure.dimensions import *
    from nemo_geomask.tools.diagnose.measure.logprob_checks import *
    from nemo_geomask.tools.diagnose.measure.logprob_gap import *
    from nemo_geomask.tools.diagnose.measure.run_statistics import *
    from nemo_geomask.tools.diagnose.measure.run_survey import *
    from nemo_geomask.tools.diagnose.measure.step_survey import *
    from nemo_geomask.tools.diagnose.read.record_sources import *
    from nemo_geomask.tools.diagnose.report.correction_sweep import *
    from nemo_geomask.tools.diagnose.report.html_report import *
    from nemo_geomask.tools.diagnose.report.measured_run import *

_NAMES = {
    "explain.run_diagnosis": ("RunDiagnosis",),
    "explain.verdict": ("diagnose",),
    "measure.dimensions": ("BIN_SUMS", "DIMENSIONS_BY_NAME", "sum_parts"),
    "measure.logprob_checks": ("UNSURE_LOGPROB",),
    "measure.logprob_gap": (
        *("LogprobGap", "LogprobPairs", "exchanged_share", "logit_noise", "measure_gap", "select_pairs"),
        "shifted_share",
    ),
    "measure.run_statistics": ("RunStatistics",),
    "measure.run_survey": ("read_step", "survey_run"),
    "measure.step_survey": ("survey_block", "trainer_column"),
    "read.record_sources": ("RunFiles", "find_run", "find_runs"),
    "report.correction_sweep": ("padded_batch",),
    "report.html_report": ("write_report",),
    "report.measured_run": ("MeasuredRun", "measure_run"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    # Imported when used, because the modules need numpy, which the `diagnose` extra installs.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
