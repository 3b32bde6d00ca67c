"""``nemo-geomask doctor``."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

import nemo_geomask
from nemo_geomask.cli import main
from nemo_geomask.hosts.nemo_rl import environment_probe, installation_report, installed_version
from nemo_geomask.objectives.registry import Entry

pytestmark = pytest.mark.slow

OWN = nemo_geomask.__version__
REGISTRY = """
import sys
ACTOR_ENVIRONMENT_REGISTRY = {
    "nemo_rl.models.policy.workers.a.Built": "uv run --extra mcore",
    "nemo_rl.models.policy.workers.a.Unbuilt": "uv run --extra mcore",
    "nemo_rl.models.policy.workers.a.Drivers": sys.executable,
    "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker": "uv run --extra vllm",
}
"""


@pytest.fixture
def registered(host, tmp_path, monkeypatch):
    host()
    folder = tmp_path / "nemo_rl"
    (folder / "distributed" / "ray_actor_environment_registry.py").write_text(REGISTRY, encoding="utf-8")
    classes = "".join(f"class {name}: ...\n" for name in ("Built", "Unbuilt", "Drivers"))
    (folder / "models" / "policy" / "workers" / "a.py").write_text(classes, encoding="utf-8")
    python = tmp_path / "venvs" / "nemo_rl.models.policy.workers.a.Built" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path / "venvs"))
    # A real NeMo-RL that the tests run against is not the workers'.
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in path if not Path(entry, "nemo_rl").is_dir()))
    return python


def test_all_is_well(registered, capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == f"driver: {sys.executable}"
    for words in (
        "nemo_rl        9.8.7",
        "ok      nemo_rl.algorithms.grpo: setup (for every run",
        "absent  nemo_rl.algorithms.ppo: setup (for every run",
        "gspo         nemo_geomask.objectives.gspo:GSPO (nemo-geomask)",
        "workers.a.Unbuilt: not built yet",
        "workers.a.Drivers\n",
        "ok      worker nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker\n",
        "absent  worker nemo_rl.modelopt.models.policy.workers.megatron_quant_policy_worker.MegatronQuantPolicy",
        "new     worker nemo_rl.models.policy.workers.a.Built\n",
        "ok      keys of a batch in nemo_rl.algorithms.grpo\n",
    ):
        assert words in printed
    assert "VllmGenerationWorker" not in printed
    assert printed.count("entry points: ") == 3  # the driver, Built and Drivers
    assert printed.endswith("no problems\n")


def test_a_worker_without_the_package(registered, capsys):
    # -S leaves site-packages out, and with them everything but the standard library.
    registered.write_text(f'#!/bin/sh\ncd / && exec {sys.executable} -S "$@"\n', encoding="utf-8")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "problem 1: nemo_rl.models.policy.workers.a.Built: nemo_geomask is not importable in" in printed
    assert "uv add nemo-geomask" in printed
    assert "problem 2" not in printed


def test_a_worker_of_another_version(host, capsys, monkeypatch):
    host()
    monkeypatch.setattr(installation_report.nemo_geomask, "__version__", "9.9.9")
    assert main(["doctor", "--worker", sys.executable]) == 1
    printed = capsys.readouterr().out
    assert f"--worker {sys.executable}: nemo_geomask is {OWN} in {sys.executable} on" in printed
    assert "but 9.9.9 in the driver; make them the same" in printed


def test_an_interpreter_that_does_not_run(host, tmp_path, capsys):
    host()
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n", encoding="utf-8")
    python.chmod(0o755)
    assert main(["doctor", "--worker", str(python), "--worker", "/absent/python"]) == 1
    printed = capsys.readouterr().out
    assert f"problem 1: --worker {python}: {python} does not run: no space left" in printed
    assert "problem 2: --worker /absent/python: /absent/python does not run: [Errno 2] No such file" in printed


def test_without_nemo_rl(host, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        installed_version.importlib.util,
        "find_spec",
        lambda name, *rest: None if name.startswith("nemo_rl") else find_spec(name, *rest),
    )
    assert main(["doctor"]) == 1
    assert "problem 1: NeMo-RL is not importable here" in capsys.readouterr().out


def test_a_name_claimed_twice(host, capsys, monkeypatch):
    host()
    entries = {"x": (Entry("x", "a:X", "one"), Entry("x", "b:X", "two"))}
    monkeypatch.setattr(installation_report, "available", lambda: entries)
    assert main(["doctor"]) == 1
    assert "problem 1: loss_fn.name: 'x' is registered by one and two; uninstall one of them" in capsys.readouterr().out


def test_ray_that_is_not_there(host, monkeypatch, capsys):
    host()
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["doctor", "--ray"]) == 2
    assert "--ray needs Ray" in capsys.readouterr().err


def declare(folder, wanted, how):
    """Let the NeMo-RL in ``folder`` require a Python."""
    if how == "checkout":
        text = f'[project]\nname = "nemo-rl"\nrequires-python = "{wanted}"\n'
        (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    else:
        (folder / "nemo_rl-9.8.7.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: nemo-rl\nVersion: 9.8.7\nRequires-Python: {wanted}\n"
        (folder / "nemo_rl-9.8.7.dist-info" / "METADATA").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("wanted", "fits", "how"),
    [(">=3.99.14,<4", False, "distribution"), (">=3.11", True, "checkout"), (">=3.99.14,<4", True, "checkout")],
)
def test_a_python_that_nemo_rl_does_not_take(registered, tmp_path, monkeypatch, capsys, wanted, fits, how):
    pytest.importorskip("packaging", reason="compares versions; Ray and others bring it")
    declare(tmp_path, wanted, how)
    registry = tmp_path / "nemo_rl" / "distributed" / "ray_actor_environment_registry.py"
    one_worker = [line for line in REGISTRY.splitlines() if "Drivers" not in line]
    registry.write_text("\n".join(one_worker), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the worker
    assert main(["doctor"]) == (0 if fits else 1)
    printed = capsys.readouterr().out
    assert printed.count(f"nemo_rl requires {wanted}\n") == 2  # the driver and Built
    says = (
        f"is Python {platform.python_version()}, but its NeMo-RL ({tmp_path}/nemo_rl/__init__.py) has requires-python"
    )
    assert printed.count(f"{says} {wanted}, ") == (0 if fits else 2)
    assert ("problem 1: the driver: " in printed) == (not fits)
    # An environment in which NeMo-RL is only on the path, as that for rehearsals, trains nothing.
    assert printed.count("for check, rehearse and probe, ") == (2 if how == "checkout" and "3.99" in wanted else 0)


@pytest.mark.parametrize(
    ("locked", "on_path", "problems"), [("torch", False, 1), ("torch", True, 0), ("nemo-geomask", False, 0)]
)
def test_a_lock_file_without_the_package(registered, tmp_path, monkeypatch, capsys, locked, on_path, problems):
    """NeMo-RL has yet to build the environment of the worker Unbuilt."""
    declare(tmp_path, ">=3.11", "distribution")
    (tmp_path / "uv.lock").write_text(f'[[package]]\nname = "{locked}"\n', encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(Path(nemo_geomask.__file__).parent.parent) if on_path else "")
    assert main(["doctor"]) == problems
    assert capsys.readouterr().out.count(f"{tmp_path}/uv.lock: nemo-geomask is not in it, ") == problems


def test_the_checkout_of_the_variable_is_examined(host, tmp_path, monkeypatch, capsys):
    host()
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "nemo_rl", other / "nemo_rl")
    monkeypatch.setenv("NEMO_RL_ROOT", str(other))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        monkeypatch.delitem(sys.modules, name)
    main(["doctor"])
    assert f" {other}/nemo_rl/__init__.py" in capsys.readouterr().out


def test_the_metadata_of_another_nemo_rl_says_nothing(host, tmp_path, monkeypatch):
    host()
    (tmp_path / "site").mkdir()
    declare(tmp_path / "site", "<3.11", "distribution")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert environment_probe.probe()["requires_python"] is None


@pytest.mark.parametrize(
    ("required", "version", "problems", "line"),
    [
        # A Python built from a branch is its release.
        (">=3.13.5,<3.14", "3.13.5+", 0, None),
        (">=3.13.5,<3.14", "3.13.4+", 1, None),
        (">=3.13.5,<3.14", "3.14.0rc1", 1, None),
        ("at least 3.11", "3.11.0", 0, "Invalid specifier"),
        (">=3.11", "3.11.0", 0, "packaging"),
    ],
)
def test_a_python_is_compared_with_what_nemo_rl_requires(monkeypatch, required, version, problems, line):
    if line == "packaging":
        monkeypatch.setitem(sys.modules, "packaging.specifiers", None)
    else:
        pytest.importorskip("packaging")
    packages = {"nemo_rl": ("9.8.7", "/nemo_rl/__init__.py")}
    environment = {"executable": "python", "host": "here", "requires_python": required, "packages": packages}
    environment["has_nemo_rl"] = True
    report = installation_report.InstallationReport()
    installation_report.check_python(report, {**environment, "python": version}, "worker", "")
    assert len(report.problems) == problems
    assert [f"python is not compared with {required}: " in text and line in text for text in report.lines] == [
        True
    ] * bool(line)


RAY = """
import sys, time


def is_initialized():
    return False


def init(address, **options):
    if address == "silent:1":
        time.sleep(60)
    if address == "auto":
        print("INFO connecting", file=sys.stderr)
        raise ConnectionError("Could not find any running Ray instance.")
    print("initialised", address, sorted(options))
"""


@pytest.fixture
def ray(registered, tmp_path, monkeypatch):
    """A Ray of a few lines, here and in other processes."""
    folder = tmp_path / "with_ray"
    folder.mkdir()
    (folder / "ray.py").write_text(textwrap.dedent(RAY), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    sys.modules.pop("ray", None)


@pytest.mark.parametrize(
    ("words", "variable", "tried", "reason"),
    [
        ([], None, "auto", "ConnectionError: Could not find any running Ray instance"),
        ([], "head:6379", "auto (RAY_ADDRESS=head:6379)", "ConnectionError: Could not find any running Ray instance"),
        (["silent:1"], "head:6379", "silent:1", "no answer within 2 s"),
    ],
)
def test_no_cluster_to_ask(ray, monkeypatch, capsys, words, variable, tried, reason):
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setattr(installation_report, "RAY_TIMEOUT", 2.0 if words else 300.0)
    assert main(["doctor", "--ray", *words]) == 1
    printed = capsys.readouterr()
    (line,) = (line for line in printed.out.splitlines() if line.startswith("problem "))
    assert line == (
        f"problem 1: --ray {tried}: no Ray cluster answers: {reason}. Start one by `ray start --head`, or name one "
        "that runs: --ray HOST:PORT"
    )
    assert "workers.a.Drivers" in printed.out
    assert "Traceback" not in printed.out + printed.err


def test_a_cluster_that_answers_is_asked(ray, monkeypatch, capsys):
    monkeypatch.setattr(installation_report, "RAY_TIMEOUT", 300.0)
    asked = []
    monkeypatch.setattr(
        installation_report.worker_setup,
        "on_every_node",
        lambda env: asked.append(env) or [installation_report.environment_probe.probe()],
    )
    assert main(["doctor", "--ray", "head:1"]) == 0
    assert "initialised head:1 ['ignore_reinit_error', 'log_to_driver', 'runtime_env']" in capsys.readouterr().out
    assert {env["py_executable"] for env in asked} >= {sys.executable}
