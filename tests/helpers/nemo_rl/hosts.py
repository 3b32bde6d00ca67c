"""The NeMo-RL that is importable here, and how to run it on a CPU in a process of its own."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "host"


@functools.cache
def root() -> Path | None:
    """The checkout whose ``nemo_rl`` is importable."""
    spec = importlib.util.find_spec("nemo_rl")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(location) / "algorithms").is_dir():
            return Path(location).parent
    return None


def environment(**variables: str) -> dict[str, str]:
    """Of a process that runs NeMo-RL without a GPU."""
    path = [str(HERE / "site"), str(HERE), *(entry for entry in sys.path if entry)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONWARNINGS": "ignore",
        "RAY_AUTH_MODE": "disabled",
        "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


@functools.cache
def reason_to_skip(module: str) -> str | None:
    """Why ``module`` can't be imported in such a process, or None."""
    if root() is None:
        return "NeMo-RL is not importable here"
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], env=environment(), capture_output=True, text=True, timeout=500
    )
    return None if done.returncode == 0 else f"{module}: {done.stderr.strip().splitlines()[-1]}"


def require(module: str) -> None:
    """Skip the calling test where ``module`` can't be imported."""
    reason = reason_to_skip(module)
    if reason:
        pytest.skip(reason)


def report(script: str, *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> dict:
    """What a script of ``host`` prints behind ``report:``, in such a process."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=env or environment(),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("report:"))
    return json.loads(line.removeprefix("report:"))


def lines(path: Path) -> list[dict]:
    """A file of one JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
