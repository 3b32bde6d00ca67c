"""What ``nemo-geomask doctor`` finds out: the driver, the workers' environments, NeMo-RL's seams."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nemo_geomask
from nemo_geomask.errors import GeomaskError, MissingDependencyError, Problem
from nemo_geomask.integrations.nemo_rl import probe, seams, source, workers
from nemo_geomask.losses import available

__all__ = ["RAY_PATIENCE", "Diagnosis", "diagnose", "hold_python"]

_PATIENCE = 300.0
RAY_PATIENCE = 20.0  # seconds until a cluster that runs has let a driver in


@dataclass
class Diagnosis:
    """Lines to read, and what is wrong.

    Attributes:
        lines: the whole report.
        problems: what has to be put right; empty where everything is well.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def problem(self, where: str, message: str) -> None:
        """Something to be put right."""
        self.problems.append(Problem((), message, where=where))

    def section(self, title: str) -> None:
        """Start a part of the report."""
        self.lines += ["", title] if self.lines else [title]


def diagnose(interpreters: Sequence[str] = (), *, ray_address: str | None = None) -> Diagnosis:
    """Look at the driver, and at every environment in which a worker may receive a loss.

    Args:
        interpreters: further ones to look at, beside those of NeMo-RL's own list.
        ray_address: a running Ray cluster; the workers' environments are then looked at on each of its nodes, else on
            this machine.

    Returns:
        The report.

    Raises:
        MissingDependencyError: Ray is asked for and not importable.
    """
    found = Diagnosis()
    driver = probe.probe()
    found.section(f"driver: {sys.executable}")
    _environment(found, driver, "the driver")
    _losses(found)
    _seams(found)
    found.section("workers that receive the loss")
    ask = _by_subprocess if ray_address is None else _by_ray(found, ray_address)
    for title, python in [*_nemo_rl_workers(found), *((f"--worker {python}", python) for python in interpreters)]:
        found.lines.append(f"  {title}")
        if python is None or ask is None:
            continue
        reports = ask(python)
        for report in reports:
            _environment(found, report, title, indent="    ")
        if not reports:
            found.problem(title, f"no answer from {python}")
    return found


def _environment(found: Diagnosis, report: Mapping[str, Any], title: str, indent: str = "  ") -> None:
    if "failed" in report:
        found.lines.append(f"{indent}{report['executable']}: {report['failed']}")
        found.problem(title, f"{report['executable']} does not run: {report['failed']}")
        return
    found.lines.append(f"{indent}{report['executable']} on {report['host']}")
    wanted = report["requires_python"]
    rows = {"python": (report["python"], f"nemo_rl requires {wanted}" if wanted else ""), **report["packages"]}
    width = max(map(len, rows))
    for name, entry in rows.items():
        version, location = entry or ("not importable", "")
        found.lines.append(f"{indent}  {name:<{width}}  {version:<16} {location}".rstrip())
    registered = ", ".join(f"{name} ({owner})" for name, _, owner in report["losses"]) or "none"
    found.lines.append(f"{indent}  entry points: {registered}")
    errors = report["errors"]
    if "nemo_geomask" in errors:
        found.problem(
            title,
            f"nemo_geomask is not importable in {report['executable']} on {report['host']} "
            f"({errors['nemo_geomask']}). {workers.REMEDY}",
        )
    elif report["version"] != nemo_geomask.__version__:
        found.problem(
            title,
            f"nemo_geomask is {report['version']} in {report['executable']} on {report['host']}, but "
            f"{nemo_geomask.__version__} in the driver; make them the same",
        )
    hold_python(found, report, title, indent)


def hold_python(found: Diagnosis, report: Mapping[str, Any], title: str, indent: str) -> None:
    """Hold an interpreter against what its NeMo-RL declares.

    A mismatch is a problem, not a mere remark: ``uv`` builds no such environment, so somebody went round it, and what
    then fails is NeMo-RL's own import, before anything of this package is reached.
    """
    wanted = report["requires_python"]
    if wanted is None:
        return
    try:
        specifiers = importlib.import_module("packaging.specifiers")
        # A Python built from a branch calls itself 3.13.5+.
        fits = specifiers.SpecifierSet(wanted).contains(report["python"].rstrip("+"), prereleases=True)
    except (ImportError, ValueError) as error:
        found.lines.append(f"{indent}  python is not held against {wanted}: {error}")
        return
    if not fits:
        found.problem(
            title,
            f"{report['executable']} on {report['host']} is Python {report['python']}, but its NeMo-RL "
            f"({report['packages']['nemo_rl'][1]}) has requires-python {wanted}, and its scripts may not even import; "
            "use the environment that `uv sync` makes in NeMo-RL's checkout",
        )


def _losses(found: Diagnosis) -> None:
    found.section("losses, by loss_fn.name")
    for name, entries in available().items():
        found.lines += [f"  {name:<12} {entry.value} ({entry.distribution})" for entry in entries]
        if len(entries) > 1:
            owners = " and ".join(entry.distribution for entry in entries)
            message = f"'{name}' is registered by {owners}; uninstall one of them"
            found.problems.append(Problem(("loss_fn.name",), message))


def _seams(found: Diagnosis) -> None:
    try:
        findings = seams.inspect()
        found.section(f"NeMo-RL {source.version()} (tested: {source.TESTED})")
    except (MissingDependencyError, ImportError) as error:
        found.section("NeMo-RL")
        found.lines.append(f"  {error}")
        found.problems += error.problems if isinstance(error, GeomaskError) else [Problem((), str(error))]
        return
    for finding in findings:
        state = "absent" if finding.absent else "wrong" if finding.problem else "ok"
        found.lines.append(f"  {state:<7} {finding.seam}" + (f": {finding.problem}" if finding.problem else ""))
        if finding.problem:
            found.problem(f"NeMo-RL {source.version()}", f"{finding.seam}: {finding.problem}")


def _nemo_rl_workers(found: Diagnosis) -> Iterator[tuple[str, str | None]]:
    try:
        registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
        venvs = importlib.import_module("nemo_rl.utils.venvs")
    except ImportError as error:
        found.lines.append(f"  NeMo-RL's list of them can't be imported: {error}")
        return
    folder = Path(os.environ.get("NEMO_RL_VENV_DIR", venvs.DEFAULT_VENV_DIR))
    for actor, command in registry.ACTOR_ENVIRONMENT_REGISTRY.items():
        if not workers.receives_loss(actor):
            continue
        # As NeMo-RL: what starts with uv is an environment of the actor's own, under its name.
        if not command.startswith("uv"):
            yield actor, shlex.split(command)[0] if command != sys.executable else command
            continue
        python = folder / actor / "bin" / "python"
        if python.exists():
            yield actor, str(python)
        else:
            yield f"{actor}: not built yet; NeMo-RL will, from its own project's dependencies, in {folder}", None


def _by_subprocess(python: str) -> list[dict[str, Any]]:
    try:
        done = subprocess.run(
            [python, "-c", inspect.getsource(probe)], capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [{"executable": python, "failed": str(error)}]
    answer = next((line for line in done.stdout.splitlines() if line.startswith(probe.MARK)), None)
    if answer is None:
        return [{"executable": python, "failed": _last_words(done)}]
    report: dict[str, Any] = json.loads(answer.removeprefix(probe.MARK))
    return [report]


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """What a process that failed said last, to be shown; nothing is concluded from it."""
    return (done.stderr.strip().splitlines() or ["no output"])[-1]


_CONNECT = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"


def _by_ray(found: Diagnosis, address: str) -> Callable[[str], list[dict[str, Any]]] | None:
    """How to ask on every node of a cluster; None, and a problem, where no cluster lets a driver in."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise MissingDependencyError(f"--ray needs Ray, which comes with NeMo-RL: {error}") from error
    if not ray.is_initialized():
        # By another process first: where nobody answers, Ray retries for minutes and then ends the process it is in.
        try:
            done = subprocess.run(
                [sys.executable, "-c", _CONNECT, address],
                capture_output=True,
                text=True,
                timeout=RAY_PATIENCE,
                check=False,
            )
            failure = _last_words(done).removesuffix(".") if done.returncode else None
        except subprocess.TimeoutExpired:
            failure = f"no answer within {RAY_PATIENCE:g} s"
        if failure is not None:
            # To Ray, auto means the variable first.
            variable = os.environ.get("RAY_ADDRESS") if address == "auto" else None
            tried = f"{address} (RAY_ADDRESS={variable})" if variable else address
            found.lines.append("  looked at on no node, since there is no Ray cluster to ask")
            found.problem(
                f"--ray {tried}",
                f"no Ray cluster answers: {failure}. Start one by `ray start --head`, or "
                "name one that runs: --ray HOST:PORT",
            )
            return None
    environment = {key: value for key, value in os.environ.items() if key == "PYTHONPATH"}
    ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": environment}, ignore_reinit_error=True)
    return lambda python: workers.on_every_node({"py_executable": python})
