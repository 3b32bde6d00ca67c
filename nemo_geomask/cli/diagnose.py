"""``nemo-geomask diagnose``: what is wrong with a run, since when, and why."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_geomask.cli.arguments import above_zero
from nemo_geomask.errors import ConfigError, DataError, GeomaskError, MissingDependencyError

if TYPE_CHECKING:
    from nemo_geomask.diagnosis.sources import RunFiles
    from nemo_geomask.diagnosis.statistics import Statistics
    from nemo_geomask.diagnosis.verdict import RunDiagnosis

__all__ = ["add", "run"]

_EXIT = {"healthy": 0, "drifting": 1, "broken": 3, "unknown": 2}
_EPILOG = """\
exit status (of several runs, the worst)
  0  healthy
  1  drifting
  2  no verdict: nothing to read, or records that say nothing of the mismatch
  3  broken

examples
  nemo-geomask diagnose logs/exp_001
  nemo-geomask diagnose logs/a logs/b --brief
  nemo-geomask diagnose records/ --json > diagnosis.json
  nemo-geomask diagnose logs/exp_001 --watch 60 --brief
  nemo-geomask diagnose logs/a logs/b --html report.html --tokenizer Qwen/Qwen3-30B-A3B
  nemo-geomask diagnose logs/exp_001 --by probability
  nemo-geomask diagnose logs/exp_001 --by entropy,advantage --by turn
  nemo-geomask diagnose logs/l20 --against logs/h20
  nemo-geomask diagnose logs/exp_001 --ray auto
"""


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "diagnose",
        help="say what is wrong with a run's mismatch, since when, and why",
        description="Read what a run has recorded (the flight recorder's Parquet files, or NeMo-RL's "
        "train_data_step{N}.jsonl, which become such files once) and say whether its mismatch between generation and "
        "training engine is healthy, since which step it isn't, the likely cause, and what was ruled out.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="folders of records or logs; folders in them are runs"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each run, in a list")
    parser.add_argument("--brief", action="store_true", help="print the verdict alone")
    parser.add_argument(
        "--watch", type=above_zero, metavar="SECONDS", help="look again so often, until Ctrl-C, and say what is new"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="show tokens as text, by this tokenizer of Hugging Face (a name or a folder)",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a report that works offline, of all runs side by side; with --watch, at each new step",
    )
    parser.add_argument("--png", type=Path, metavar="DIR", help="draw the report's plots as PNGs into a folder")
    parser.add_argument(
        "--sweep",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="take what `nemo-geomask sweep DIR --json > FILE` has found into the report",
    )
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="where converted logs are kept (default: geomask-records beside them)"
    )
    parser.add_argument(
        "--by",
        action="append",
        metavar="NAME[,NAME]",
        help="show the mismatch by this alone: probability, position, turn, length, staleness, reward, advantage, "
        "entropy, two of them at once, or step; may be given several times",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="DIR",
        help="hold the runs against this one, over the steps that both have (hardware, top-p, cascade attention)",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="read on a Ray cluster (auto, host:port, …; without an address, one on this machine is started)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    # Imported here, so that --help and other commands need no optional package.
    from nemo_geomask.diagnosis.report import read_sweep
    from nemo_geomask.diagnosis.run import survey_run
    from nemo_geomask.diagnosis.text import tables
    from nemo_geomask.diagnosis.verdict import diagnose

    if arguments.sweep and arguments.html is None:
        raise ConfigError("--sweep is what the report shows; name its file by --html")
    for path in arguments.sweep:
        read_sweep(path)  # before anything that takes long
    only = None if arguments.by is None else [_dimensions(text) for text in arguments.by]
    crosses = [(names[0], names[1]) for names in only or () if len(names) == 2]
    decode = None if arguments.tokenizer is None else _decoder(arguments.tokenizer)
    if arguments.watch is not None:
        if alone := [f"--{name}" for name in ("by", "against", "ray") if getattr(arguments, name) is not None]:
            raise ConfigError(f"--watch looks at a run as a whole, on this machine; leave out {', '.join(alone)}")
        return _watch(arguments, decode)
    sums = partial(survey_run, cache=arguments.cache, crosses=crosses, over=_over(arguments.ray))
    other = None if arguments.against is None else _only(arguments.against)
    runs, others = _runs(arguments.directories)
    if other is not None:  # which may lie below one of the folders
        runs = [run for run in runs if run.directory.resolve() != other.directory.resolve()] or runs
    found = []
    for run in runs:
        try:
            if other is None:
                found.append((run, diagnose(sums(run))))
            else:
                steps = _shared(run, other)
                found.append((run, diagnose(sums(run, steps), sums(other, steps), str(other.directory))))
        except MissingDependencyError:
            raise
        except GeomaskError as error:
            others[run.directory] = _Unrecorded("unknown", str(error))
    if not found and all(one.health == "unknown" for one in others.values()):
        raise DataError(*(one.says for one in others.values()))
    for names in only or ():
        asked = [tables(diagnosis, only=[names]) for _, diagnosis in found]
        if asked and not any(table.rows for one in asked for table in one):
            raise DataError(asked[0][0].title)
    _print(arguments, found, others, decode, only)
    _write(arguments, found, others, decode, crosses)
    return _status([diagnosis for _, diagnosis in found], others)


def _dimensions(text: str) -> tuple[str, ...]:
    """One dimension or two, or ``step``."""
    from nemo_geomask.diagnosis.statistics import BY_NAME
    from nemo_geomask.diagnosis.text import STEP

    names = tuple(text.split(","))
    if names != (STEP,) and (len(names) > 2 or len(set(names)) < len(names) or not set(names) <= set(BY_NAME)):
        raise ConfigError(f"--by {text}: give one or two of {', '.join(BY_NAME)}, joined by a comma, or {STEP} alone")
    return names


def _over(address: str | None) -> Callable[..., Iterator[Any]]:
    if address is not None:
        from nemo_geomask.diagnosis.cluster import over_ray

        return over_ray(address)
    from nemo_geomask.diagnosis.sources import over_files

    return over_files


def _only(directory: Path) -> RunFiles:
    from nemo_geomask.diagnosis.sources import find_runs

    runs = find_runs([directory])
    if len(runs) > 1:
        raise ConfigError(f"--against {directory} holds several runs: {', '.join(str(run.directory) for run in runs)}")
    return runs[0]


def _shared(run: RunFiles, other: RunFiles) -> list[int]:
    """A policy is compared with one that has been trained as long."""
    if run.directory.resolve() == other.directory.resolve():
        raise ConfigError(f"{run.directory} is the run that it is held against")
    steps = sorted({*run.steps} & {*other.steps})
    if not steps:
        raise DataError(
            f"{run.directory}: has no step in common with {other.directory} (steps {run.steps[0]} to "
            f"{run.steps[-1]}, and {other.steps[0]} to {other.steps[-1]})"
        )
    return steps


class _Unrecorded(NamedTuple):
    """A folder without records that can be read: the verdict by its metrics, or what is wrong with it."""

    health: str
    says: str

    @property
    def news(self) -> str:
        """What makes it another."""
        return self.says if self.health == "unknown" else self.health

    def verdict(self, path: Path) -> str:
        """In one line."""
        said = " ".join(self.says.removeprefix(f"{path}: ").splitlines())
        return f"not judged: {said}" if self.health == "unknown" else said


def _runs(directories: Sequence[Path]) -> tuple[list[RunFiles], dict[Path, _Unrecorded]]:
    """The recorded runs of each folder, and the folders that have none."""
    from nemo_geomask.diagnosis.sources import find_runs

    found, others = [], {}
    for directory in directories:
        try:
            found += find_runs([directory])
        except DataError as error:
            others[directory] = _by_metrics(directory, str(error))
    return found, others


def _by_metrics(directory: Path, error: str) -> _Unrecorded:
    from nemo_geomask.diagnosis.logged import judge_logged, read_logged

    try:
        judged = judge_logged(read_logged(directory))
    except GeomaskError as unread:
        return _Unrecorded("unknown", f"{error}; {unread}")
    return _Unrecorded("unknown", error) if judged is None else _Unrecorded(judged.health, judged.sentence)


def _print(
    arguments: argparse.Namespace,
    found: Sequence[tuple[RunFiles, RunDiagnosis]],
    others: Mapping[Path, _Unrecorded],
    decode: Callable[[Sequence[int]], str] | None,
    only: Sequence[tuple[str, ...]] | None = None,
) -> None:
    from nemo_geomask.diagnosis.text import as_json, show, tables

    if arguments.json:
        objects = [as_json(diagnosis, str(run.directory), decode, only) for run, diagnosis in found]
        objects += [
            {"run": str(path), "health": other.health, "verdict": other.verdict(path)} for path, other in others.items()
        ]
        print(json.dumps(objects, ensure_ascii=False, indent=2))
        return
    for run, diagnosis in found:
        print(f"{run.directory}: {diagnosis.sentence}")
        if diagnosis.cause is not None:
            print(f"  to do: {diagnosis.cause.action}")
    for path, other in others.items():
        print(f"{path}: {other.verdict(path)}")
    if not arguments.brief:
        for run, diagnosis in found:
            if len(found) > 1:
                print(f"\n{run.directory}")
            show(tables(diagnosis, decode, only))


def _write(
    arguments: argparse.Namespace,
    found: Sequence[tuple[RunFiles, RunDiagnosis]],
    others: Mapping[Path, _Unrecorded],
    decode: Callable[[Sequence[int]], str] | None,
    pairs: Sequence[tuple[str, str]] = (),
) -> None:
    """The report and the PNGs, where they are asked for."""
    if not found and (arguments.html is not None or arguments.png is not None):
        raise DataError("--html and --png show records, and none of these folders has any")
    from nemo_geomask.diagnosis.draw import write_pngs
    from nemo_geomask.diagnosis.figures import figures_of
    from nemo_geomask.diagnosis.report import read_sweep, report, short_names

    if arguments.html is not None:
        sweeps = [read_sweep(path) for path in arguments.sweep]
        said = {str(path): (other.health, other.verdict(path)) for path, other in others.items()}
        report(arguments.html, found, others=said, sweeps=sweeps, decode=decode, pairs=pairs, cache=arguments.cache)
        print(f"report: {arguments.html}", file=sys.stderr)
    if arguments.png is not None:
        names = short_names([run.directory for run, _ in found])
        written = write_pngs(figures_of([diagnosis for _, diagnosis in found]), names, arguments.png)
        print(f"{len(written)} plots: {arguments.png}", file=sys.stderr)


def _status(found: Sequence[RunDiagnosis], others: Mapping[Path, _Unrecorded]) -> int:
    healths = ["unknown" if diagnosis.unknown else diagnosis.health for diagnosis in found]
    return max(_EXIT[health] for health in [*healths, *(other.health for other in others.values())])


def _watch(arguments: argparse.Namespace, decode: Callable[[Sequence[int]], str] | None) -> int:
    """Take in each step once its files rest, and say what has become of the verdict."""
    from nemo_geomask.diagnosis.statistics import Statistics
    from nemo_geomask.diagnosis.verdict import diagnose

    taken: dict[Path, Statistics] = {}
    seen: dict[Path, tuple[int, int]] = {}
    said: dict[Path, str] = {}
    wrong: dict[Path, str] = {}
    status = 0
    try:
        while True:
            found, grown = [], False
            runs, others = _runs(arguments.directories)
            for run in runs:
                statistics = taken.setdefault(run.directory, Statistics())
                steps = [step for step in run.steps if step not in statistics.steps and _rest(run, step, seen)]
                before = len(statistics.steps)
                if steps and (error := _take(statistics, run, steps, arguments.cache)):
                    others[run.directory] = _Unrecorded("unknown", error)
                grown |= len(statistics.steps) > before  # a file may hold no sequence
                if statistics.steps:
                    found.append((run, diagnose(statistics)))
            now = {run.directory: f"{one.health} {one.since} {bool(one.unknown)}" for run, one in found}
            news = [(run, one) for run, one in found if said.get(run.directory) != now[run.directory]]
            # Of a verdict by metrics, only the health: its numbers are new ones every time.
            bad = {path: other for path, other in others.items() if wrong.get(path) != other.news}
            said, wrong = said | now, {path: other.news for path, other in others.items()}
            if news or bad:
                _print(arguments, news, bad, decode)
            if grown and found:
                _write(arguments, found, others, decode)
            if found or others:
                status = _status([one for _, one in found], others)
            time.sleep(arguments.watch)
    except KeyboardInterrupt:
        return status


def _take(statistics: Statistics, run: RunFiles, steps: Sequence[int], cache: Path | None) -> str:
    """Take in the steps that can be read; what is wrong with the others."""
    from nemo_geomask.diagnosis.run import survey_run

    try:
        statistics.add(survey_run(run, steps, cache))
    except MissingDependencyError:
        raise
    except GeomaskError as error:
        if len(steps) == 1:
            return str(error)
    else:
        return ""
    return "\n".join(filter(None, (_take(statistics, run, [step], cache) for step in steps)))


def _rest(run: RunFiles, step: int, seen: dict[Path, tuple[int, int]]) -> bool:
    """Whether the step's files are as they were at the last look."""
    before = [seen.get(path) for path in run.paths([step])]
    now = []
    for path in run.paths([step]):
        try:
            status = path.stat()
        except OSError:  # gone
            return False
        now.append((status.st_size, status.st_mtime_ns))
        seen[path] = now[-1]
    return before == now


def _decoder(name: str) -> Callable[[Sequence[int]], str]:
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise ConfigError(f"--tokenizer: {name} can't be had ({type(error).__name__}: {error})") from None

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    return decode
