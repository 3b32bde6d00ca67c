"""The ``diagnose`` command from its options to its output: find runs, survey their records, judge, print and write."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.tools.diagnose.explain.run_diagnosis import RunDiagnosis
from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from nemo_geomask.tools.diagnose.measure.dimensions import DIMENSIONS_BY_NAME, ENVIRONMENT
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.run_survey import survey_run
from nemo_geomask.tools.diagnose.read.record_sources import RunFiles, find_run
from nemo_geomask.tools.diagnose.report.html_report import write_report
from nemo_geomask.tools.diagnose.report.json_formats import DiagnoseOutput, LogVerdictJson
from nemo_geomask.tools.diagnose.report.json_report import diagnosis_json
from nemo_geomask.tools.diagnose.report.report_tables import STEP, Decode, diagnosis_tables, print_tables
from nemo_geomask.tools.diagnose.report.run_verdicts import (
    OverallHealth,
    RunVerdicts,
    find_recorded_runs,
    judge_runs,
)
from nemo_geomask.tools.diagnose.report.sweep_tables import explain_harm, may_do_harm
from nemo_geomask.tools.shared.json_output import JSON_VERSION, to_json
from nemo_geomask.tools.shared.terminal_text import escape_line


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """Options of ``nemo-geomask diagnose``, as its help describes them."""

    directories: Sequence[Path]
    as_json: bool = False
    has_tables: bool = False
    is_brief: bool = False
    tokenizer: str | None = None
    html: Path | None = None
    cache: Path | None = None
    by: Sequence[str] | None = None
    against: Path | None = None
    has_experts: bool | None = None
    skip_damaged: bool = False

    @cached_property
    def splits(self) -> list[tuple[str, ...]] | None:
        """Dimensions, or pairs of them, of each table that is asked for; None: all tables."""
        return None if self.by is None else [_parse_split(text) for text in self.by]

    @cached_property
    def decode(self) -> Decode | None:
        """Function that decodes token ids; None: ids are shown."""
        return None if self.tokenizer is None else _load_decoder(self.tokenizer)


def run_diagnose(options: DiagnoseOptions) -> OverallHealth:
    """Diagnose runs, print the verdicts, write the requested files, and return the worst health.

    Raises:
        ConfigError: options that contradict each other or name something that does not exist.
        DataError: nothing in the folders can be judged, or no run has the data of a split.
        MissingDependencyError: an optional package is missing.
    """
    splits, _ = options.splits, options.decode  # an error of theirs comes before a long survey
    verdicts = _find_and_judge(options)
    for split in splits or ():
        # If only some runs lack the data of a split, their output says so.
        tables = [table for run in verdicts.judged for table in diagnosis_tables(run.diagnosis, splits=[split])]
        if tables and not any(table.rows for table in tables):
            raise DataError(tables[0].title)
    _print_verdicts(verdicts, options)
    _write_files(verdicts, options)
    return verdicts.worst_health


def _find_and_judge(options: DiagnoseOptions) -> RunVerdicts:
    def survey(run: RunFiles, steps: Sequence[int] | None = None) -> RunStatistics:
        statistics = survey_run(run, steps, options.cache)
        if not statistics.steps:
            raise DataError(f"{run.directory}: the records hold no sequence")
        if options.has_experts is not None:
            statistics.experts = int(options.has_experts)
        return statistics

    skip = options.skip_damaged
    reference = None if options.against is None else find_run(options.against, skip_damaged=skip)
    runs, fallbacks = find_recorded_runs(options.directories, skip_damaged=skip)
    if reference is None:
        return judge_runs(runs, fallbacks, lambda run: diagnose(survey(run)))

    def judge_against_reference(run: RunFiles) -> RunDiagnosis:
        steps = _shared_steps(run, reference)
        return diagnose(survey(run, steps), survey(reference, steps), str(reference.directory))

    # The reference may be one of the runs below the folders: leave it out, unless it is the only run. That is an error,
    # which _shared_steps raises.
    runs = [run for run in runs if run.directory.resolve() != reference.directory.resolve()] or runs
    return judge_runs(runs, fallbacks, judge_against_reference)


def _parse_split(text: str) -> tuple[str, ...]:
    """Parse ``--by``: a dimension, two different ones joined by a comma, ``environment`` or ``step``."""
    names = tuple(text.split(","))
    if names in ((STEP,), (ENVIRONMENT,)):
        return names
    if len(names) > 2 or len(set(names)) < len(names) or not set(names) <= set(DIMENSIONS_BY_NAME):
        dimensions = ", ".join(DIMENSIONS_BY_NAME)
        raise ConfigError(
            f"--by {text}: give one or two of {dimensions}, joined by a comma, or {ENVIRONMENT} or {STEP} alone"
        )
    return names


def _load_decoder(name: str) -> Decode:
    """Return a function that decodes token ids with a Hugging Face tokenizer."""
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises errors of many types for an unknown name
        raise ConfigError(f"--tokenizer: {name} can't be loaded ({type(error).__name__}: {error})") from None

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    return decode


def _shared_steps(run: RunFiles, reference: RunFiles) -> list[int]:
    """Return the steps that both runs have, so that equally trained policies are compared."""
    if run.directory.resolve() == reference.directory.resolve():
        raise ConfigError(f"--against {reference.directory}: the run can't be compared with itself; name another run")
    steps = sorted({*run.steps} & {*reference.steps})
    if not steps:
        raise DataError(
            f"{run.directory}: has no step in common with {reference.directory} (steps {run.steps[0]} to "
            f"{run.steps[-1]}, and {reference.steps[0]} to {reference.steps[-1]})"
        )
    return steps


def _print_verdicts(verdicts: RunVerdicts, options: DiagnoseOptions) -> None:
    """Print a verdict for each run and folder, followed by the runs' tables if they are requested."""
    if options.as_json:
        values: DiagnoseOutput = [
            diagnosis_json(run.diagnosis, str(run.files.directory), options.decode, options.splits)
            for run in verdicts.judged
        ]
        values += [
            LogVerdictJson(
                version=JSON_VERSION, run=str(folder), health=verdict.health, verdict=verdict.sentence(folder)
            )
            for folder, verdict in verdicts.fallbacks.items()
        ]
        print(to_json(values))
        return
    for run in verdicts.judged:
        print(f"{run.files.directory}: {run.diagnosis.sentence}")
        for line in run.diagnosis.shown[0].advice if run.diagnosis.shown else ():
            print(f"  {line}")
        if may_do_harm(sums := run.diagnosis.evidence.sums_after):
            print(f"  bias: {explain_harm(sums, sums.pull())}")
        if run.diagnosis.trend:
            print(f"  trend: {run.diagnosis.trend}")
        for note in run.diagnosis.evidence.statistics.file_notes:
            print(f"  files: {escape_line(note)}")
    for folder, verdict in verdicts.fallbacks.items():
        print(f"{folder}: {verdict.sentence(folder)}")
    if options.is_brief or not (options.has_tables or options.splits is not None):
        return
    for run in verdicts.judged:
        if len(verdicts.judged) > 1:
            print(f"\n{run.files.directory}")
        print_tables(diagnosis_tables(run.diagnosis, options.decode, options.splits))


def _write_files(verdicts: RunVerdicts, options: DiagnoseOptions) -> None:
    """Write the report if the options request one, and print its path to standard error.

    Raises:
        DataError: no run has records to show, or the file cannot be written.
        MissingDependencyError: plotly or Jinja is missing.
    """
    if options.html is None:
        return
    if not verdicts.judged:
        raise DataError("--html shows records, and none of these folders has any")
    write_report(
        options.html,
        [(run.files.directory, run.diagnosis) for run in verdicts.judged],
        fallbacks={
            str(folder): (verdict.health, verdict.sentence(folder)) for folder, verdict in verdicts.fallbacks.items()
        },
        decode=options.decode,
    )
    print(f"report: {options.html}", file=sys.stderr)
