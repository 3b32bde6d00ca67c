"""What importing costs, and the one-way rule between the rooms."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import nemo_geomask

PACKAGE = Path(nemo_geomask.__file__).parent
# A room imports only from itself and from those before it. metrics stands before losses, which report through it.
ORDER = [
    "errors",
    "config",
    "functional",
    "segments",
    "kernels",
    "parallel",
    "metrics",
    "losses",
    "optional",
    "recipe",
    "records",
    "checks",
    "translate",
    "diagnosis",
    "integrations",
    "processes",
    "testing",
    "rehearsal",
    "bench",
    "lab",
    "cli",
]
# Rooms that share no words: tensors know no settings and settings know no tensors.
APART = {("functional", "config"), ("segments", "config"), ("segments", "functional")}


def test_the_architectures_page_has_the_rooms_in_their_order():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    rooms = [row.rstrip("/").removesuffix(".py") for row in rows if row.endswith(("/", ".py"))]
    assert [room for room in rooms if room in ORDER] == ORDER


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            # `from nemo_geomask import functional` names a room too.
            if node.module == "nemo_geomask":
                yield from (f"nemo_geomask.{alias.name}" for alias in node.names)


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_room_imports_only_from_rooms_before_it(path):
    room = _room(path)
    assert room in ORDER, f"{path}: room '{room}' has no place in the order"
    for name in _imports(path):
        if not name.startswith("nemo_geomask."):
            continue
        other = name.split(".")[1]
        if other not in ORDER:  # a name of the package itself, such as build_loss
            assert room in ("lab", "cli"), f"{path} imports {name}"
            continue
        assert ORDER.index(other) <= ORDER.index(room), f"{path} ({room}) imports {name}"
        assert (room, other) not in APART, f"{path} ({room}) imports {name}"


@pytest.mark.parametrize("path", [path for path in MODULES if _room(path) == "config"], ids=lambda path: path.name)
def test_config_needs_no_torch(path):
    assert not any(name.split(".")[0] == "torch" for name in _imports(path))


def added(*modules, after="sys"):
    """Packages outside the standard library that the modules import, with those already there after another."""
    code = f"""
        import sys, {after}
        before = set(sys.modules)
        import {", ".join(modules)}
        names = {{name.split(".")[0] for name in set(sys.modules) - before}}
        print(*sorted(names - sys.stdlib_module_names - {{"nemo_geomask"}}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    # The interpreter's build settings, a module that the standard library names after the machine.
    return {name for name in done.stdout.split() if not name.startswith("_sysconfigdata")}


@pytest.mark.slow
def test_the_package_and_its_errors_import_nothing():
    assert added("nemo_geomask", "nemo_geomask.errors") == set()


@pytest.mark.slow
def test_what_a_record_holds_is_known_without_torch():
    assert added("nemo_geomask.records") == set()


@pytest.mark.slow
def test_losses_import_pydantic_beside_torch_and_no_more():
    # All of pydantic, parts of which it imports when they are used.
    pydantic = added("pydantic.fields", "pydantic.main", "pydantic.types")
    assert added("nemo_geomask.losses", after="torch") <= pydantic


@pytest.mark.slow
def test_what_an_extra_installs_is_imported_when_it_is_used():
    assert not {"yaml", "omegaconf", "hydra"} & added("nemo_geomask.translate", "nemo_geomask.cli", after="torch")


@pytest.mark.slow
def test_lazy_parts_of_torch_stay_lazy():
    """The compiler and the symbolic algebra take longer to import than all the rest."""
    code = "import sys, nemo_geomask.losses; print({'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_tensor_code_needs_no_pydantic():
    code = """
        import importlib, sys
        sys.modules["pydantic"] = None
        for name in ("parallel", "kernels", "segments", "functional", "bench"):
            importlib.import_module(f"nemo_geomask.{name}")
        try:
            import nemo_geomask
            nemo_geomask.build_loss
        except ImportError as error:
            print(error.name)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=500)
    assert (done.stdout.strip(), done.stderr) == ("pydantic", "")
