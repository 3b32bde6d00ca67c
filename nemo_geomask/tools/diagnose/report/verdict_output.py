"""Output of ``nemo-geomask diagnose``: the verdicts on the terminal or as JSON, the HTML report, and the PNGs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_geomask.errors import DataError
from nemo_geomask.tools.diagnose.report.figure_data import diagnosis_figures
from nemo_geomask.tools.diagnose.report.figure_rendering import write_pngs
from nemo_geomask.tools.diagnose.report.html_report import short_names, write_report
from nemo_geomask.tools.diagnose.report.json_formats import DiagnoseOutput, LogVerdictJson
from nemo_geomask.tools.diagnose.report.json_report import diagnosis_json
from nemo_geomask.tools.diagnose.report.report_tables import Decode, diagnosis_tables, print_tables
from nemo_geomask.tools.diagnose.report.run_verdicts import RunVerdicts
from nemo_geomask.tools.diagnose.report.sweep_section import read_sweep
from nemo_geomask.tools.shared.json_output import JSON_VERSION, to_json
from nemo_geomask.tools.shared.terminal_text import escape_line

__all__ = ["OutputOptions", "print_verdicts", "write_files"]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options for the printed output and the written files.

    Attributes:
        as_json: print a JSON list with an object for each run or folder.
        has_tables: print the tables of each run below the verdicts.
        splits: show only the tables by these dimensions, pairs of dimensions, ``("environment",)`` or ``("step",)``;
            None: all tables.
        decode: returns the text of token ids; None: ids are shown.
        html: file of the report; None: no report.
        png: folder of the plots; None: no plots.
        sweeps: files of ``nemo-geomask sweep --json`` that the report shows.
        cache: folder for records converted from logs; None: next to the logs.
    """

    as_json: bool = False
    has_tables: bool = False
    splits: Sequence[tuple[str, ...]] | None = None
    decode: Decode | None = None
    html: Path | None = None
    png: Path | None = None
    sweeps: Sequence[Path] = ()
    cache: Path | None = None

    @property
    def dimension_pairs(self) -> list[tuple[str, str]]:
        """Pairs of dimensions among the splits, by which the survey has to split tokens together."""
        return [(names[0], names[1]) for names in self.splits or () if len(names) == 2]


def print_verdicts(verdicts: RunVerdicts, options: OutputOptions) -> None:
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
        for note in run.diagnosis.evidence.statistics.file_notes:
            print(f"  files: {escape_line(note)}")
    for folder, verdict in verdicts.fallbacks.items():
        print(f"{folder}: {verdict.sentence(folder)}")
    if not options.has_tables:
        return
    for run in verdicts.judged:
        if len(verdicts.judged) > 1:
            print(f"\n{run.files.directory}")
        print_tables(diagnosis_tables(run.diagnosis, options.decode, options.splits))


def write_files(verdicts: RunVerdicts, options: OutputOptions) -> None:
    """Write the report and the PNGs that the options request, and print their paths to standard error.

    Raises:
        DataError: no run has records to show, or a file cannot be written.
        MissingDependencyError: plotly, Jinja or matplotlib is missing.
    """
    if not verdicts.judged and (options.html is not None or options.png is not None):
        raise DataError("--html and --png show records, and none of these folders has any")
    if options.html is not None:
        write_report(
            options.html,
            verdicts.judged,
            fallbacks={
                str(folder): (verdict.health, verdict.sentence(folder))
                for folder, verdict in verdicts.fallbacks.items()
            },
            sweeps=[read_sweep(path) for path in options.sweeps],
            decode=options.decode,
            dimension_pairs=options.dimension_pairs,
            cache=options.cache,
        )
        print(f"report: {options.html}", file=sys.stderr)
    if options.png is not None:
        names = short_names([run.files.directory for run in verdicts.judged])
        paths = write_pngs(diagnosis_figures([run.diagnosis for run in verdicts.judged]), names, options.png)
        print(f"{len(paths)} plots: {options.png}", file=sys.stderr)
