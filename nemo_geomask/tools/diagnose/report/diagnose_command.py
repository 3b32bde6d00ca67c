"""The ``diagnose`` command from its options to the verdicts: find runs, survey their records, judge, and render."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.tools.diagnose.explain.verdict import RunDiagnosis, diagnose
from nemo_geomask.tools.diagnose.measure.dimensions import DIMENSIONS_BY_NAME, ENVIRONMENT
from nemo_geomask.tools.diagnose.measure.ray_survey import connect_ray
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.run_survey import survey_run
from nemo_geomask.tools.diagnose.read.record_sources import RunFiles, find_run, map_records
from nemo_geomask.tools.diagnose.report.report_tables import STEP, Decode, diagnosis_tables
from nemo_geomask.tools.diagnose.report.run_verdicts import OverallHealth, RunVerdicts, find_recorded_runs, judge_runs
from nemo_geomask.tools.diagnose.report.run_watch import watch_runs
from nemo_geomask.tools.diagnose.report.sweep_section import read_sweep
from nemo_geomask.tools.diagnose.report.verdict_output import OutputOptions, print_verdicts, write_files

__all__ = ["DiagnoseOptions", "run_diagnose"]


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """Options of ``nemo-geomask diagnose``.

    Attributes:
        directories: folders to search; each folder at or below them that holds records or logs is a run.
        as_json: print JSON.
        has_tables: print all tables below the verdicts; with ``splits``, their tables are printed in any case.
        is_brief: print the verdicts alone, even with ``splits``.
        watch_seconds: seconds between two judgements, which are repeated until Ctrl-C; None: judge once.
        tokenizer: name or folder of a Hugging Face tokenizer that decodes tokens; None: ids are shown.
        html: file of the report; None: no report.
        png: folder of the plots; None: no plots.
        sweeps: files of ``nemo-geomask sweep --json`` that the report shows.
        cache: folder for records converted from logs; None: next to the logs.
        splits: tables to show: each is a dimension, two dimensions joined by a comma, ``environment`` or ``step``;
            None: all tables.
        against: folder of a run to compare with, over the steps that both runs have.
        ray_address: address of the Ray cluster that reads the records; None: this machine reads them.
        has_experts: whether the model has experts; None: as the records say.
        skip_damaged: leave damaged files out and judge the others; else they are an error.
    """

    directories: Sequence[Path]
    as_json: bool = False
    has_tables: bool = False
    is_brief: bool = False
    watch_seconds: float | None = None
    tokenizer: str | None = None
    html: Path | None = None
    png: Path | None = None
    sweeps: Sequence[Path] = ()
    cache: Path | None = None
    splits: Sequence[str] | None = None
    against: Path | None = None
    ray_address: str | None = None
    has_experts: bool | None = None
    skip_damaged: bool = False


def run_diagnose(options: DiagnoseOptions) -> OverallHealth:
    """Diagnose runs, print the verdicts, write the requested files, and return the worst health.

    Raises:
        ConfigError: options that contradict each other or name something that does not exist.
        DataError: nothing in the folders can be judged, or no run has the data of a split.
        MissingDependencyError: an optional package is missing.
    """
    if options.sweeps and options.html is None:
        raise ConfigError("--sweep adds a sweep to the HTML report; name the report's file by --html FILE")
    for path in options.sweeps:
        read_sweep(path)  # fails here rather than after a long survey
    output = OutputOptions(
        as_json=options.as_json,
        has_tables=not options.is_brief and (options.has_tables or options.splits is not None),
        splits=None if options.splits is None else [_parse_split(text) for text in options.splits],
        decode=None if options.tokenizer is None else _load_decoder(options.tokenizer),
        html=options.html,
        png=options.png,
        sweeps=options.sweeps,
        cache=options.cache,
    )
    if options.watch_seconds is not None:
        incompatible = {"--by": options.splits, "--against": options.against, "--ray": options.ray_address}
        if names := [name for name, value in incompatible.items() if value is not None]:
            raise ConfigError(f"--watch can't be combined with {', '.join(names)}; leave out --watch or the others")
        return watch_runs(options.directories, options.watch_seconds, output, skip_damaged=options.skip_damaged)

    verdicts = _find_and_judge(options, output.dimension_pairs)
    for split in output.splits or ():
        _check_has_rows(verdicts, split)
    print_verdicts(verdicts, output)
    write_files(verdicts, output)
    return verdicts.worst_health


def _find_and_judge(options: DiagnoseOptions, dimension_pairs: Sequence[tuple[str, str]]) -> RunVerdicts:
    mapper = map_records if options.ray_address is None else connect_ray(options.ray_address)

    def survey(run: RunFiles, steps: Sequence[int] | None = None) -> RunStatistics:
        statistics = survey_run(run, steps, options.cache, dimension_pairs=dimension_pairs, mapper=mapper)
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


def _check_has_rows(verdicts: RunVerdicts, split: tuple[str, ...]) -> None:
    """Raise DataError if no run has the data of a split; if only some runs lack them, their output says so."""
    tables = [table for run in verdicts.judged for table in diagnosis_tables(run.diagnosis, splits=[split])]
    if tables and not any(table.rows for table in tables):
        raise DataError(tables[0].title)
