"""Arguments and exit status of ``nemo-geomask diagnose``."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_geomask.cli.arguments import add_limit_option

EXIT_STATUS = {
    0: "healthy; with several runs, the worst of them counts",
    1: "drifting",
    2: "no verdict: nothing to read, a run that can't be read, too short to judge, a cause left open, or records "
    "without the mismatch",
    3: "broken",
}

_STATUS_OF_HEALTH = {"healthy": 0, "drifting": 1, "broken": 3, "unknown": 2}
_EPILOG = """\
examples
  nemo-geomask diagnose logs/exp_001
  nemo-geomask diagnose logs/a logs/b --full
  nemo-geomask diagnose records/ --json > diagnosis.json
  nemo-geomask diagnose logs/a logs/b --html report.html --tokenizer Qwen/Qwen3-30B-A3B
  nemo-geomask diagnose logs/exp_001 --by probability
  nemo-geomask diagnose logs/exp_001 --by entropy,advantage --by turn
  nemo-geomask diagnose logs/exp_001 --by environment
  nemo-geomask diagnose logs/l20 --against logs/h20
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Read the records of a run and report whether the mismatch between generation and training engine is healthy, "
        "since which step it is not, which causes account for which share of it, which causes are ruled out, and which "
        "can't be tested in these records. Records are the flight recorder's Parquet files, or NeMo-RL's "
        "train_data_step{N}.jsonl, which are converted once, into DIR/geomask-records unless --cache says otherwise. A "
        "folder without records is judged by the mismatch metrics that it holds, in metrics.jsonl or in TensorBoard's "
        "files."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "directories",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="folders of records or logs; each folder in them that holds some is a run",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list with an object for each run")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--full", action="store_true", help="print all tables below the verdicts")
    length.add_argument("--brief", action="store_true", help="print only the verdicts (the default, unless with --by)")
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="show tokens as text, decoded by this Hugging Face tokenizer (a name or a folder)",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write an HTML report of all runs side by side, which works offline",
    )
    parser.add_argument(
        "--skip-damaged",
        action="store_true",
        help="leave out files that are damaged and judge the others; the verdict says how many were left out",
    )
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="folder of converted logs (default: geomask-records beside the logs)"
    )
    parser.add_argument(
        "--by",
        action="append",
        metavar="NAME[,NAME]",
        help="show only the mismatch by this dimension: probability, position, turn, length, staleness, reward, "
        "advantage, entropy, two of them joined by a comma, environment, or step; may be given several times",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="DIR",
        help="compare the runs with this one over the steps that both have (other hardware, top-p, cascade attention)",
    )
    parser.add_argument(
        "--experts",
        choices=("yes", "no"),
        help="whether the model has experts, which only records of newer versions say; expert routing is a cause if so",
    )
    add_limit_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from nemo_geomask.tools.diagnose.report.diagnose_command import DiagnoseOptions, run_diagnose

    options = DiagnoseOptions(
        directories=arguments.directories,
        as_json=arguments.json,
        has_tables=arguments.full,
        is_brief=arguments.brief,
        tokenizer=arguments.tokenizer,
        html=arguments.html,
        cache=arguments.cache,
        by=arguments.by,
        against=arguments.against,
        has_experts={"yes": True, "no": False, None: None}[arguments.experts],
        skip_damaged=arguments.skip_damaged,
    )
    return _STATUS_OF_HEALTH[run_diagnose(options)]
