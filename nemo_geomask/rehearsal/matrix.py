"""Rehearsals of many cases, each recorded as data: ``python -m nemo_geomask.rehearsal.matrix``.

``docs/hosts/cases.yaml`` has the cases, ``docs/hosts/<version>.json`` what came of them with one NeMo-RL; the table in
``docs/nemo_rl.md`` is made of both.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nemo_geomask.checks.pages import between_marks, markdown
from nemo_geomask.errors import ConfigError, GeomaskError
from nemo_geomask.integrations.nemo_rl.commit import commit_of
from nemo_geomask.rehearsal.rehearse import Rehearsal, nemo_rl_checkout, rehearse
from nemo_geomask.rehearsal.supervise import ended_by_signals

__all__ = ["Trial", "main", "read_cases", "rewrite", "table"]

_KEPT = ("loss", "grad_norm", "reward", "gen_kl_error", "token_mult_prob_error")


@dataclass(frozen=True)
class Trial:
    """One case.

    Attributes:
        name: what it shows; unique.
        recipe: file, relative to the repository, or of NeMo-RL's: ``$NEMO_RL_ROOT/…``.
        overrides: of the recipe.
        ranks: processes that train.
        steps: rollout batches.
        control: whether NeMo-RL's own loss is compared.
        resume: whether the last step is compared with the same after a checkpoint.
        timeout: seconds of a run.
        mistake: setting of a planted mistake, which is to end the rehearsal with its name; empty: it is to train.
        not_run: why it is not run, by the label of a NeMo-RL; ``all`` is for those that have none of their own.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    steps: int = 2
    control: bool = False
    resume: bool = False
    timeout: float = 900.0
    mistake: str = ""
    not_run: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, label: str) -> str:
        """Why it is not run with a NeMo-RL; empty: it is."""
        return self.not_run.get(label, self.not_run.get("all", ""))

    def as_expected(self, found: Mapping[str, Any]) -> bool:
        """Whether a result is what is to come of it."""
        return bool(found["setting"] == self.mistake if self.mistake else found["outcome"] == "trained")


def read_cases(path: Path) -> tuple[Trial, ...]:
    """The cases of a file.

    Raises:
        ConfigError: two of one name, or a key that no case has.
    """
    import yaml

    found = []
    for case in yaml.safe_load(path.read_text(encoding="utf-8")):
        try:
            found.append(Trial(**{**case, "overrides": tuple(case.get("overrides", ()))}))
        except TypeError as error:
            raise ConfigError(f"{path}: case {case.get('name')!r}: {error}") from None
    names = [case.name for case in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path}: two cases are called {twice[0]!r}")
    return tuple(found)


def _recorded(case: Trial, done: Rehearsal | None, error: str) -> dict[str, Any]:
    runs = () if done is None else (done.outcome, done.control, done.resumed)
    failure = next((run.failure for run in runs if run is not None and run.failure is not None), None)
    metrics = done.outcome.metrics if done is not None and done.outcome is not None else {}
    apart = [each for each in done.comparisons if each.sampled_alike] if done is not None else []
    again = [each for each in done.resumptions if each.sampled_alike] if done is not None else []
    other = next((each for each in (*apart, *again) if not each.equal), None)
    if other is not None:
        error = f"{other.name} of step {other.step} is {other.ours:.9g} and {other.theirs:.9g}"
    if done is not None and done.outcome is None:
        wrong = [each for each in done.findings if each.rule.severity == "error"]
        error = "validation: " + "; ".join(f"{each.rule.id} {each.key}: {each.message}" for each in wrong)
    return {
        "outcome": "trained" if done is not None and done.ok else "failed",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "where": "GPUs" if done is not None and done.gpus else "CPUs",
        "seconds": None if done is None else round(done.seconds),
        "error": error or (f"{failure.stage}: {failure.error}" if failure else None),
        "setting": failure.setting if failure else None,
        "control": max((each.difference for each in apart), default=None),
        "resumed": max((each.difference for each in again), default=None),
        "loss": dict(done.outcome.loss) if done is not None and done.outcome is not None else {},
        "metrics": {
            str(step): {name: values[name] for name in _KEPT if name in values} for step, values in metrics.items()
        },
    }


def table(cases: Sequence[Trial], hosts: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row a case, a column a NeMo-RL."""
    columns = [f"{host['version']}" + (f" ({host['commit'][:9]})" if host["commit"] else "") for host in hosts]
    rows = [(case.name, *(_cell(case, host) for host in hosts)) for case in cases]
    return markdown(("case", *columns), [*rows, ("all of these in one go", *map(_whole, hosts))])


def _whole(host: Mapping[str, Any]) -> str:
    whole = host.get("whole")
    return f"{whole['minutes']} min, {whole['jobs']} at a time on {whole['cores']} cores" if whole else "in parts"


def _cell(case: Trial, host: Mapping[str, Any]) -> str:
    found = host["cases"].get(case.name)
    if found is None:
        why = case.why_not(host["version"])
        return f"not run: {why}" if why else "not run"
    if case.mistake and case.as_expected(found):
        return f"names `{case.mistake}` after {found['seconds']} s"
    if found["outcome"] != "trained":
        return f"fails: {found['error']}"
    control = "" if found["control"] is None else f", control within {found['control']:.1g}"
    resumed = "" if found.get("resumed") is None else f", resumed within {found['resumed']:.1g}"
    return f"{len(found['metrics'])} steps, {found['seconds']} s on {found['where']}{control}{resumed}"


def rewrite(text: str, folder: Path) -> str:
    """A page's text with the table of a folder of cases and results between its marks.

    Raises:
        ArgumentError: the text has no marks.
    """
    hosts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"), reverse=True)]
    return between_marks(text, "hosts", table(read_cases(folder / "cases.yaml"), hosts), page="the page")


def _version(checkout: Path) -> str:
    """By a file of its own: main calls itself by the last release's number."""
    scope: dict[str, Any] = {}
    for line in (checkout / "nemo_rl" / "package_info.py").read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and name.strip() in ("MAJOR", "MINOR", "PATCH"):
            scope[name.strip()] = value.strip()
    return ".".join(scope.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and record them; 0 where each that was run came out as it should."""
    parser = argparse.ArgumentParser(prog="python -m nemo_geomask.rehearsal.matrix", description=__doc__)
    parser.add_argument("--hosts", type=Path, default=Path("docs/hosts"), help="folder of cases and results")
    parser.add_argument("--page", type=Path, default=Path("docs/nemo_rl.md"), help="page that has the table")
    parser.add_argument("--label", help="name of this NeMo-RL (default: the version that it calls itself by)")
    parser.add_argument("--commit", help="of this NeMo-RL, where it is no git checkout")
    parser.add_argument("--only", action="append", help="run only the cases whose names begin so (repeatable)")
    jobs = min(4, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=jobs, help=f"cases at a time, 6 GB each (default here: {jobs})")
    parser.add_argument("--table", action="store_true", help="run nothing, rewrite the table")
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}; at least 1 case runs at a time")
    good = True
    if not given.table:
        checkout = nemo_rl_checkout()
        label = given.label or f"v{_version(checkout)}"
        path = given.hosts / f"{label}.json"
        host = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"cases": {}}
        commit = given.commit or commit_of(checkout)
        if (host.get("commit") or commit) != commit:
            parser.error(f"{path} has results of commit {host['commit']}, this is {commit}: say --label, or remove it")
        cases = read_cases(given.hosts / "cases.yaml")
        only = tuple(given.only or ("",))
        chosen = [case for case in cases if not case.why_not(label) and case.name.startswith(only)]
        if not chosen:
            parser.error(f"no case that {label} is to run begins with {' or '.join(map(repr, only))}")
        began = time.monotonic()
        with ended_by_signals(), contextlib.closing(_each(chosen, given.jobs)) as ended:
            for case, found in ended:
                print(
                    f"{label}: {case.name}: {_cell(case, {'cases': {case.name: found}})}", file=sys.stderr, flush=True
                )
                good = good and case.as_expected(found)
                results = {**host["cases"], case.name: found}
                if case.name not in host["cases"]:
                    host.pop("whole", None)  # it was another whole
                ordered = {each.name: results[each.name] for each in cases if each.name in results}
                host |= {"version": label, "commit": commit, "cases": ordered}
                _write(path, host)
        minutes = round((time.monotonic() - began) / 60)
        print(f"{label}: {len(chosen)} cases in {minutes} min, {given.jobs} at a time", file=sys.stderr, flush=True)
        if not given.only:
            host["whole"] = {"minutes": minutes, "jobs": given.jobs, "cores": os.cpu_count()}
            _write(path, host)
    given.page.write_text(rewrite(given.page.read_text(encoding="utf-8"), given.hosts), encoding="utf-8")
    return 0 if good else 1


def _write(path: Path, host: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(host, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _each(cases: Sequence[Trial], jobs: int) -> Generator[tuple[Trial, dict[str, Any]], None, None]:
    """Each with its result, in the order in which they end. Each in a process that adopts what its rehearsal leaves."""
    context = multiprocessing.get_context("spawn")
    left = list(reversed(cases))
    running: dict[Any, tuple[Trial, Any]] = {}
    try:
        while left or running:
            while left and len(running) < jobs:
                case = left.pop()
                answer, sender = context.Pipe(duplex=False)
                process = context.Process(target=_send, args=(case, sender))
                process.start()
                sender.close()
                running[answer] = case, process
            ready: list[Any] = wait(list(running))
            for ended in ready:
                case, process = running[ended]
                try:
                    found = ended.recv()
                except EOFError:
                    process.join()
                    found = _recorded(case, None, f"its process ended with exit code {process.exitcode}")
                del running[ended]
                yield case, found
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def _send(case: Trial, sender: Any) -> None:
    # Ctrl-C comes to this process as well; the matrix ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ended_by_signals():
        sender.send(_run(case))


def _run(case: Trial) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = rehearse(
                os.path.expandvars(case.recipe),
                case.overrides,
                steps=case.steps,
                ranks=case.ranks,
                control=case.control,
                resume=case.resume,
                timeout=case.timeout,
                folder=Path(folder, "out"),
            )
        except GeomaskError as error:
            return _recorded(case, None, str(error))
    return _recorded(case, done, "")


if __name__ == "__main__":
    sys.exit(main())
