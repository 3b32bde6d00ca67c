"""The example distribution ``tests/plugin_example``, installed for a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "plugin_example"


def install_example(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the example where only a path entry finds it; returns the environment with that entry."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "plugin_example"
    shutil.copytree(EXAMPLE, source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, timeout=500)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])}


def run_python(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the arguments in that environment; its outputs are captured."""
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
