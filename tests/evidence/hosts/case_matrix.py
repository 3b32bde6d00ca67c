"""Rehearsals of all cases of the compatibility table: ``python -m tests.evidence.hosts.case_matrix``.

``docs/hosts/cases.yaml`` has the cases and ``docs/hosts/<version>.json`` the results with one version of NeMo-RL. The
table of both is made when the site is built.
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

from nemo_geomask.errors import ConfigError, GeomaskError
from nemo_geomask.hosts.nemo_rl.installed_version import commit_of
from nemo_geomask.tools.rehearse.rehearsal import Rehearsal, nemo_rl_checkout, rehearse
from nemo_geomask.tools.rehearse.supervision import signals_as_exceptions
from tests.helpers.markdown import markdown_table

HOSTS = Path(__file__).parents[3] / "docs" / "hosts"
"""Folder of cases and results."""

_RECORDED_METRICS = ("loss", "grad_norm", "reward", "gen_kl_error", "token_mult_prob_error")


@dataclass(frozen=True)
class Case:
    """A case of the compatibility table.

    Attributes:
        name: unique name that says what the case shows.
        recipe: path relative to the repository, or below ``$NEMO_RL_ROOT``.
        overrides: overrides of the recipe.
        ranks: number of processes that train.
        steps: number of rollout batches.
        control: compare with NeMo-RL's own loss.
        resume: compare the last step with the same step resumed from a checkpoint.
        timeout: time limit of a run, in seconds.
        mistake: setting of a planted mistake that the rehearsal must name; empty: the case must train.
        not_run: reasons for not running it, by the label of a NeMo-RL; ``all`` applies to labels without a reason.
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
        """Return the reason for not running it with a NeMo-RL; empty if it is run."""
        return self.not_run.get(label, self.not_run.get("all", ""))

    def as_expected(self, result: Mapping[str, Any]) -> bool:
        """Return True if the result is the expected one."""
        return bool(result["setting"] == self.mistake if self.mistake else result["outcome"] == "trained")


def read_cases(path: Path) -> tuple[Case, ...]:
    """Return the cases of a file.

    Raises:
        ConfigError: two cases have the same name, or a case has an unknown key.
    """
    import yaml

    cases = []
    for case in yaml.safe_load(path.read_text(encoding="utf-8")):
        try:
            cases.append(Case(**{**case, "overrides": tuple(case.get("overrides", ()))}))
        except TypeError as error:
            raise ConfigError(f"{path}: case {case.get('name')!r}: {error}") from None
    names = [case.name for case in cases]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path}: two cases are called {repeated[0]!r}")
    return tuple(cases)


def _result(case: Case, rehearsal: Rehearsal | None, error: str) -> dict[str, Any]:
    runs = () if rehearsal is None else (rehearsal.outcome, rehearsal.control, rehearsal.resumed)
    failure = next((run.failure for run in runs if run is not None and run.failure is not None), None)
    metrics = rehearsal.outcome.metrics if rehearsal is not None and rehearsal.outcome is not None else {}
    control = [] if rehearsal is None else [each for each in rehearsal.comparisons if each.sampled_alike]
    resumed = [] if rehearsal is None else [each for each in rehearsal.resumptions if each.sampled_alike]
    unequal = next((comparison for comparison in (*control, *resumed) if not comparison.equal), None)
    if unequal is not None:
        error = f"{unequal.name} of step {unequal.step} is {unequal.ours:.9g} and {unequal.theirs:.9g}"
    if rehearsal is not None and rehearsal.outcome is None:
        errors = [finding for finding in rehearsal.findings if finding.rule.severity == "error"]
        error = "validation: " + "; ".join(f"{finding.rule.id} {finding.key}: {finding.message}" for finding in errors)
    return {
        "outcome": "trained" if rehearsal is not None and rehearsal.ok else "failed",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "where": "GPUs" if rehearsal is not None and rehearsal.gpus else "CPUs",
        "seconds": None if rehearsal is None else round(rehearsal.seconds),
        "error": error or (f"{failure.stage}: {failure.error}" if failure else None),
        "setting": failure.setting if failure else None,
        "control": max((comparison.difference for comparison in control), default=None),
        "resumed": max((comparison.difference for comparison in resumed), default=None),
        "loss": dict(rehearsal.outcome.loss) if rehearsal is not None and rehearsal.outcome is not None else {},
        "metrics": {
            str(step): {name: values[name] for name in _RECORDED_METRICS if name in values}
            for step, values in metrics.items()
        },
    }


def result_table(folder: Path = HOSTS) -> str:
    """Return a Markdown table with a row for each case and a column for each NeMo-RL that a folder has results of."""
    hosts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"), reverse=True)]
    columns = [f"{host['version']}" + (f" ({host['commit'][:9]})" if host["commit"] else "") for host in hosts]
    cases = read_cases(folder / "cases.yaml")
    rows = [(case.name, *(_cell(case, host) for host in hosts)) for case in cases]
    return markdown_table(("case", *columns), [*rows, ("all of these in one go", *map(_full_run, hosts))])


def _full_run(host: Mapping[str, Any]) -> str:
    full_run = host.get("whole")
    if not full_run:
        return "in parts"
    return f"{full_run['minutes']} min, {full_run['jobs']} at a time on {full_run['cores']} cores"


def _cell(case: Case, host: Mapping[str, Any]) -> str:
    result = host["cases"].get(case.name)
    if result is None:
        why = case.why_not(host["version"])
        return f"not run: {why}" if why else "not run"
    if case.mistake and case.as_expected(result):
        return f"names `{case.mistake}` after {result['seconds']} s"
    if result["outcome"] != "trained":
        return f"fails: {result['error']}"
    control = "" if result["control"] is None else f", control within {result['control']:.1g}"
    resumed = "" if result.get("resumed") is None else f", resumed within {result['resumed']:.1g}"
    return f"{len(result['metrics'])} steps, {result['seconds']} s on {result['where']}{control}{resumed}"


def _version(checkout: Path) -> str:
    """Return the version in the checkout's package_info.py; main carries the number of the last release."""
    scope: dict[str, Any] = {}
    for line in (checkout / "nemo_rl" / "package_info.py").read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and name.strip() in ("MAJOR", "MINOR", "PATCH"):
            scope[name.strip()] = value.strip()
    return ".".join(scope.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and record the results; return 0 if every result is the expected one."""
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.hosts.case_matrix", description=__doc__)
    parser.add_argument("--hosts", type=Path, default=HOSTS, help="folder of cases and results")
    parser.add_argument("--label", help="name of this NeMo-RL (default: the version that it calls itself by)")
    parser.add_argument("--commit", help="commit of this NeMo-RL, if its folder is no git checkout")
    parser.add_argument("--only", action="append", help="run only the cases whose names begin so (repeatable)")
    jobs = min(4, os.cpu_count() or 1)
    parser.add_argument(
        "--jobs", type=int, default=jobs, help=f"cases at a time, which take 6 GB of memory each (default here: {jobs})"
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; at least 1 case runs at a time")
    all_as_expected = True
    checkout = nemo_rl_checkout()
    label = options.label or f"v{_version(checkout)}"
    path = options.hosts / f"{label}.json"
    host = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"cases": {}}
    commit = options.commit or commit_of(checkout)
    if (host.get("commit") or commit) != commit:
        parser.error(
            f"{path} has results of commit {host['commit']}, this is {commit}: give another --label, or remove it"
        )
    cases = read_cases(options.hosts / "cases.yaml")
    only = tuple(options.only or ("",))
    chosen = [case for case in cases if not case.why_not(label) and case.name.startswith(only)]
    if not chosen:
        parser.error(f"no case that {label} is to run begins with {' or '.join(map(repr, only))}")
    began = time.monotonic()
    with signals_as_exceptions(), contextlib.closing(_run_cases(chosen, options.jobs)) as ended:
        for case, result in ended:
            print(f"{label}: {case.name}: {_cell(case, {'cases': {case.name: result}})}", file=sys.stderr, flush=True)
            all_as_expected = all_as_expected and case.as_expected(result)
            results = {**host["cases"], case.name: result}
            if case.name not in host["cases"]:
                host.pop("whole", None)  # the case list has changed since
            ordered = {each.name: results[each.name] for each in cases if each.name in results}
            host |= {"version": label, "commit": commit, "cases": ordered}
            _write(path, host)
    minutes = round((time.monotonic() - began) / 60)
    print(f"{label}: {len(chosen)} cases in {minutes} min, {options.jobs} at a time", file=sys.stderr, flush=True)
    if not options.only:
        host["whole"] = {"minutes": minutes, "jobs": options.jobs, "cores": os.cpu_count()}
        _write(path, host)
    return 0 if all_as_expected else 1


def _write(path: Path, host: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(host, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _run_cases(cases: Sequence[Case], jobs: int) -> Generator[tuple[Case, dict[str, Any]], None, None]:
    """Yield cases with their results as they end; each runs in a process that ends what its rehearsal leaves behind."""
    context = multiprocessing.get_context("spawn")
    pending = list(reversed(cases))
    running: dict[Any, tuple[Case, Any]] = {}
    try:
        while pending or running:
            while pending and len(running) < jobs:
                case = pending.pop()
                answer, sender = context.Pipe(duplex=False)
                process = context.Process(target=_send, args=(case, sender))
                process.start()
                sender.close()
                running[answer] = case, process
            ready: list[Any] = wait(list(running))
            for ended in ready:
                case, process = running[ended]
                try:
                    result = ended.recv()
                except EOFError:
                    process.join()
                    result = _result(case, None, f"its process ended with exit code {process.exitcode}")
                del running[ended]
                yield case, result
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def _send(case: Case, sender: Any) -> None:
    # Ctrl-C reaches this process too; the parent ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals_as_exceptions():
        sender.send(_run(case))


def _run(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            rehearsal = rehearse(
                os.path.expandvars(case.recipe),
                case.overrides,
                steps=case.steps,
                ranks=case.ranks,
                control=case.control,
                resume=() if case.resume else None,
                timeout=case.timeout,
                folder=Path(folder, "out"),
            )
        except GeomaskError as error:
            return _result(case, None, str(error))
    return _result(case, rehearsal, "")


if __name__ == "__main__":
    sys.exit(main())
