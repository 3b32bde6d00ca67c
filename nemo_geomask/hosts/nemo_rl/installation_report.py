"""``nemo-geomask doctor``: report on the driver, the workers' environments and the NeMo-RL APIs we rely on."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nemo_geomask
from nemo_geomask.config import LossConfig
from nemo_geomask.errors import GeomaskError, MissingDependencyError, Problem
from nemo_geomask.hosts.nemo_rl import environment_probe, host_api, source_layout, worker_setup
from nemo_geomask.hosts.nemo_rl.accepted_apis import way_out
from nemo_geomask.hosts.nemo_rl.facts import TESTED_VERSIONS, neutral_values_in_source
from nemo_geomask.hosts.nemo_rl.installed_version import accepts_python, describe_version, package_folder
from nemo_geomask.losses import available
from nemo_geomask.yaml_text import inline_yaml

_PROBE_TIMEOUT = 300.0  # seconds
RAY_TIMEOUT = 20.0
"""Seconds within which a running cluster must accept a driver."""


@dataclass
class InstallationReport:
    """Lines to print, and the problems among them.

    Attributes:
        lines: the complete report.
        problems: what the user has to fix; empty if everything works.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add_problem(self, where: str, message: str) -> None:
        """Add something that the user has to fix."""
        self.problems.append(Problem((), message, where=where))

    def start_section(self, title: str) -> None:
        """Start a section of the report."""
        self.lines += ["", title] if self.lines else [title]


def examine_installation(interpreters: Sequence[str] = (), *, ray_address: str | None = None) -> InstallationReport:
    """Examine the driver, and every environment in which a worker may receive a loss.

    Args:
        interpreters: further interpreters to examine, beside those that NeMo-RL lists.
        ray_address: a running Ray cluster, on each of whose nodes the workers' environments are then examined; None:
            on this machine.

    Raises:
        MissingDependencyError: a Ray cluster is requested and Ray is not importable.
    """
    report = InstallationReport()
    report.start_section(f"driver: {sys.executable}")
    driver = environment_probe.probe()
    _add_environment(report, driver, "the driver")
    _add_losses(report)
    _add_api_states(report)
    report.start_section("workers that receive the loss")
    ask = _probe_by_subprocess if ray_address is None else _connect_ray_probe(report, ray_address)
    probe = None if ask is None else functools.cache(ask)  # workers may share an interpreter
    workers = list(_nemo_rl_workers(report))
    if driver["has_nemo_rl"] and any(python is None for _, python in workers):
        _check_lock_file(report)
    for title, python in [*workers, *((f"--worker {python}", python) for python in interpreters)]:
        report.lines.append(f"  {title}")
        if python is None or probe is None:
            continue
        environments = probe(python)
        for environment in environments:
            _add_environment(report, environment, title, indent="    ")
        if not environments:
            report.add_problem(title, f"no answer from {python}")
    return report


def _add_environment(
    report: InstallationReport, environment: Mapping[str, Any], title: str, indent: str = "  "
) -> None:
    """Add what the probe found in an environment, see :func:`~nemo_geomask.hosts.nemo_rl.environment_probe.probe`."""
    if "failed" in environment:
        report.lines.append(f"{indent}{environment['executable']}: {environment['failed']}")
        report.add_problem(title, f"{environment['executable']} does not run: {environment['failed']}")
        return
    interpreter = f"{environment['executable']} on {environment['host']}"
    report.lines.append(f"{indent}{interpreter}")
    required = environment["requires_python"]
    python = (environment["python"], f"nemo_rl requires {required}" if required else "")
    rows = {"python": python, **environment["packages"]}
    width = max(map(len, rows))
    for name, entry in rows.items():
        version, location = entry or ("not importable", "")
        report.lines.append(f"{indent}  {name:<{width}}  {version:<16} {location}".rstrip())
    registered = ", ".join(f"{name} ({owner})" for name, _, owner in environment["losses"]) or "none"
    report.lines.append(f"{indent}  entry points: {registered}")
    errors = environment["errors"]
    if "nemo_geomask" in errors:
        report.add_problem(
            title,
            f"nemo_geomask is not importable in {interpreter} ({errors['nemo_geomask']}). {worker_setup.REMEDY}",
        )
    elif environment["version"] != nemo_geomask.__version__:
        report.add_problem(
            title,
            f"nemo_geomask is {environment['version']} in {interpreter}, but {nemo_geomask.__version__} in the driver; "
            "make them the same",
        )
    elif environment["source"] != environment_probe.source_hash(Path(nemo_geomask.__file__).parent):
        report.add_problem(
            title,
            f"nemo_geomask in {interpreter} is another build of {environment['version']} than the driver's; "
            "rebuild it: `uv sync --reinstall-package nemo-geomask`, and NRL_FORCE_REBUILD_VENVS=true for the workers",
        )
    check_python(report, environment, title, indent)


def check_python(report: InstallationReport, environment: Mapping[str, Any], title: str, indent: str) -> None:
    """Check that an interpreter's version is one that its NeMo-RL declares in ``requires-python``.

    A mismatch is a problem if NeMo-RL is installed there: ``uv`` does not build such an environment, and NeMo-RL itself
    may fail to import in it. If NeMo-RL is only on the path, the environment is one for ``check``, ``rehearse`` and
    ``probe``, such as that of ``make nemo-rl-environment``; ``run`` says itself what it can't import.
    """
    required = environment["requires_python"]
    if required is None:
        return
    try:
        fits = accepts_python(required, environment["python"])
    except (ImportError, ValueError) as error:
        report.lines.append(f"{indent}  python is not compared with {required}: {error}")
        return
    if not fits and not environment["has_nemo_rl"]:
        report.lines.append(
            f"{indent}  for check, rehearse and probe, since NeMo-RL is only on the path, and requires Python "
            f"{required}; train in the environment that `uv sync` makes in its checkout"
        )
    elif not fits:
        report.add_problem(
            title,
            f"{environment['executable']} on {environment['host']} is Python {environment['python']}, but its NeMo-RL "
            f"({environment['packages']['nemo_rl'][1]}) has requires-python {required}, and its scripts may not even "
            "import; use the environment that `uv sync` makes in NeMo-RL's checkout",
        )


def _check_lock_file(report: InstallationReport) -> None:
    """Check that the lock file from which NeMo-RL will build the workers' environments has this package."""
    lock = package_folder().parent / "uv.lock"
    home = str(Path(nemo_geomask.__file__).parent.parent)
    # The path of the driver reaches the workers.
    if home in os.environ.get("PYTHONPATH", "").split(os.pathsep) or not lock.is_file():
        return
    if not re.search(r'^name = "nemo-geomask"$', lock.read_text(encoding="utf-8"), re.MULTILINE):
        report.add_problem(
            str(lock),
            "nemo-geomask is not in it, so the workers' environments that NeMo-RL builds from it will lack the losses. "
            + worker_setup.REMEDY,
        )


def _add_losses(report: InstallationReport) -> None:
    report.start_section("losses, by loss_fn.name")
    for name, entries in available().items():
        report.lines += [f"  {name:<12} {entry.value} ({entry.distribution})" for entry in entries]
        if len(entries) > 1:
            owners = " and ".join(entry.distribution for entry in entries)
            message = f"'{name}' is registered by {owners}; uninstall one of them"
            report.problems.append(Problem(("loss_fn.name",), message))


def _add_api_states(report: InstallationReport) -> None:
    try:
        package = package_folder()
        states = [*host_api.compare_all(package), *source_layout.compare_layout(package)]
        version = describe_version()
    except (MissingDependencyError, ImportError) as error:
        report.start_section("NeMo-RL")
        report.lines.append(f"  {error}")
        report.problems += error.problems if isinstance(error, GeomaskError) else [Problem((), str(error))]
        return
    report.start_section(f"NeMo-RL {version} (tested: {TESTED_VERSIONS})")
    for state in states:
        label = "absent" if state.is_absent else "new" if state.is_new else "wrong" if state.difference else "ok"
        report.lines.append(f"  {label:<7} {state.api}" + (f": {state.difference}" if state.difference else ""))
        if state.difference:
            report.add_problem(f"NeMo-RL {version}", f"{state.api}: {state.difference}{way_out(state.differences)}")
    for key, values in neutral_values_in_source(package.parent).items():
        if key not in LossConfig.model_fields:
            default = f"its default is {inline_yaml(values[0])}" if values else "no value is known to change nothing"
            report.lines.append(f"  new     loss_fn.{key}, which only NeMo-RL's own loss reads; {default}")


def _nemo_rl_workers(report: InstallationReport) -> Iterator[tuple[str, str | None]]:
    """Yield a title and the interpreter of each worker class that receives a loss; None if it is not built yet."""
    try:
        registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
        importlib.import_module("nemo_rl.utils.venvs")
    except ImportError as error:
        message = f"NeMo-RL's list of them can't be imported: {error}"
        report.lines.append(f"  {message}")
        # It is not needed where a requirement such as Ray is missing; if it moved, no worker is examined.
        if (error.name or "").startswith("nemo_rl."):
            report.add_problem("workers that receive the loss", message)
        return
    for worker_class in filter(host_api.receives_loss, registry.ACTOR_ENVIRONMENT_REGISTRY):
        python = worker_setup.worker_interpreter(worker_class)
        note = "" if python else ": not built yet; NeMo-RL will, from its own project's dependencies"
        yield f"{worker_class}{note}", python


def _probe_by_subprocess(python: str) -> list[dict[str, Any]]:
    try:
        done = subprocess.run(
            [python, "-c", inspect.getsource(environment_probe)],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [{"executable": python, "failed": str(error)}]
    answer = next((line for line in done.stdout.splitlines() if line.startswith(environment_probe.MARK)), None)
    if answer is None:
        return [{"executable": python, "failed": _last_error_line(done)}]
    environment: dict[str, Any] = json.loads(answer.removeprefix(environment_probe.MARK))
    return [environment]


def _last_error_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a failed process wrote to stderr, for display only."""
    return (done.stderr.strip().splitlines() or ["no output"])[-1]


_CONNECT = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"


def _connect_ray_probe(report: InstallationReport, address: str) -> Callable[[str], list[dict[str, Any]]] | None:
    """Connect to a Ray cluster; return a function that probes an interpreter on every node, None if that fails."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise MissingDependencyError(f"--ray needs Ray, which comes with NeMo-RL: {error}") from error
    if not ray.is_initialized():
        # Another process tries first: if no cluster answers, Ray retries for minutes and then ends its own process.
        try:
            done = subprocess.run(
                [sys.executable, "-c", _CONNECT, address],
                capture_output=True,
                text=True,
                timeout=RAY_TIMEOUT,
                check=False,
            )
            failure = _last_error_line(done).removesuffix(".") if done.returncode else None
        except subprocess.TimeoutExpired:
            failure = f"no answer within {RAY_TIMEOUT:g} s"
        if failure is not None:
            # With auto, Ray reads this variable first.
            env_address = os.environ.get("RAY_ADDRESS") if address == "auto" else None
            tried = f"{address} (RAY_ADDRESS={env_address})" if env_address else address
            report.lines.append("  examined on no node, since no Ray cluster answers")
            report.add_problem(
                f"--ray {tried}",
                f"no Ray cluster answers: {failure}. Start one by `ray start --head`, or "
                "name one that runs: --ray HOST:PORT",
            )
            return None
    environment = {key: value for key, value in os.environ.items() if key == "PYTHONPATH"}
    ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": environment}, ignore_reinit_error=True)
    return lambda python: worker_setup.on_every_node({"py_executable": python})
