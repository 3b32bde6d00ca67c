"""Each tool can be deleted, with its command and its tests, and what remains still works."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nemo_geomask
from nemo_geomask.cli import COMMANDS

ROOT = Path(nemo_geomask.__file__).parents[1]
TOOLS = ROOT / "nemo_geomask" / "tools"
NAMES = sorted(path.parent.name for path in TOOLS.glob("*/__init__.py") if path.parent.name != "shared")

# Tools that can not be imported without another one, and are deleted with it.
REQUIRED = {("bench", "check"), ("rehearse", "check"), ("rehearse", "diagnose")}
# Tools that import another one in a function, for an option or an output that needs it.
OPTIONAL = {("check", "diagnose"), ("lab", "diagnose")}
# Tools whose tests on NeMo-RL's workers need another one, and are skipped without it.
IN_TESTS = {("probe", "rehearse")}


def imported_modules(node: ast.AST, *, in_functions: bool):
    """Yield the modules that a module imports when it is imported, or in its functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not in_functions:
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield child.module
        yield from imported_modules(child, in_functions=in_functions)


@functools.cache
def dependencies(*, in_functions: bool) -> set[tuple[str, str]]:
    """Return the pairs of a tool and another tool that it imports."""
    pairs = set()
    for name in NAMES:
        for path in (TOOLS / name).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for module in imported_modules(tree, in_functions=in_functions):
                parts = module.split(".")
                if parts[:2] == ["nemo_geomask", "tools"] and len(parts) > 2 and parts[2] not in (name, "shared"):
                    pairs.add((name, parts[2]))
    return pairs


def test_a_tool_depends_only_on_those_known():
    here = {(tool, other) for tool, other in REQUIRED if {tool, other} <= set(NAMES)}
    assert dependencies(in_functions=False) == here
    assert dependencies(in_functions=True) - here == {
        (tool, other) for tool, other in OPTIONAL if {tool, other} <= set(NAMES)
    }


def with_dependents(tool: str) -> set[str]:
    """Return the tool and those that can not be imported without it."""
    deleted = {tool}
    while dependents := {one for one, other in dependencies(in_functions=False) if other in deleted} - deleted:
        deleted |= dependents
    return deleted


def test_a_tools_tests_need_only_what_the_tool_needs():
    known = REQUIRED | OPTIONAL | IN_TESTS
    needed = {
        (tool, parts[2])
        for tool in NAMES
        for path in (ROOT / "tests" / "tools" / tool).rglob("*.py")
        for module in imported_modules(ast.parse(path.read_text(encoding="utf-8")), in_functions=False)
        if (parts := module.split("."))[:2] == ["nemo_geomask", "tools"] and len(parts) > 2
    }
    assert {(tool, other) for tool, other in needed if other not in (tool, "shared")} <= known


def copy_without(tools: set[str], target: Path) -> None:
    """Copy the repository's package, tests and pages, and delete the tools' modules, commands and tests."""
    for name in ("nemo_geomask", "tests", "docs", "recipes"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, target)
    for tool in tools:
        shutil.rmtree(target / "nemo_geomask" / "tools" / tool)
        shutil.rmtree(target / "tests" / "tools" / tool, ignore_errors=True)
    for command in COMMANDS:
        if command.package.removeprefix("tools.") in tools:
            (target / f"{command.module.replace('.', '/')}.py").unlink()


# In one process: import every module, and list the commands in the order of the help. A module may need a library that
# is installed only beside vLLM, NeMo-RL or a GPU.
IMPORT = """
import importlib, sys
from pathlib import Path

for path in sorted(Path("nemo_geomask").rglob("*.py")):
    parts = path.with_suffix("").parts
    if path.name == "__main__.py":
        continue
    try:
        importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    except ImportError as error:
        if (error.name or "nemo_geomask").startswith("nemo_geomask"):
            raise
assert Path(sys.modules["nemo_geomask"].__file__).is_relative_to(Path.cwd())
"""
# In one process: import the libraries that take long, and then fork a process for each copy of the package.
IN_EACH_COPY = f"""
import contextlib, importlib, os, sys

for name in ("torch.distributed.fsdp", "torch._dynamo", "scipy.stats", "transformers", "matplotlib.pyplot", "hydra"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
assert "nemo_geomask" not in sys.modules

for folder in sys.argv[1:]:
    process = os.fork()
    if process == 0:
        os.chdir(folder)
        sys.path.insert(0, folder)
        exec({IMPORT!r})
        from nemo_geomask.cli import main

        with open("help.txt", "w") as file, contextlib.redirect_stdout(file), contextlib.suppress(SystemExit):
            main(["--help"])
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0, folder
"""
# Collect every test, and run those that look at the package as a whole.
COLLECT_AND_TEST = """
import pytest

class Selection:
    def pytest_collection_modifyitems(self, config, items):
        rooms = ("tests/test_import.py", "tests/test_house.py", "tests/cli/")
        selected, rest = [], []
        for item in items:
            is_selected = item.nodeid.startswith(rooms) and not item.get_closest_marker("slow")
            (selected if is_selected else rest).append(item)
        config.hook.pytest_deselected(items=rest)
        items[:] = selected

sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--assert=plain", "tests"], plugins=[Selection()]))
"""


def run(code: str, *arguments: str | Path, folder: Path) -> str:
    """Return what Python code prints in a folder, from which it imports."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=450,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_without_a_tool_the_rest_can_be_imported(tmp_path):
    folders = {tool: tmp_path / tool for tool in NAMES}
    remaining = {}
    for tool, folder in folders.items():
        deleted = with_dependents(tool)
        copy_without(deleted, folder)
        remaining[tool] = [
            command.name
            for command in COMMANDS
            if not {name.removeprefix("tools.") for name in (command.package, *command.needs)} & deleted
        ]
    run(IN_EACH_COPY, *folders.values(), folder=tmp_path)
    listed = {
        tool: re.findall(r"^    ([a-z][\w-]*)(?:  |$)", (folder / "help.txt").read_text(), flags=re.MULTILINE)
        for tool, folder in folders.items()
    }
    assert listed == remaining


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_without_any_tool_the_rest_works(tmp_path):
    copy_without(set(NAMES), tmp_path)
    assert re.search(r"^\d+ passed", run(IMPORT + COLLECT_AND_TEST, folder=tmp_path).splitlines()[-1])
