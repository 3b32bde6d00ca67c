"""What importing costs, and the one-way rule between the rooms."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import nemo_geomask

PACKAGE = Path(nemo_geomask.__file__).parent
HEAVY = (
    "ray",
    "hydra",
    "megatron",
    "vllm",
    "transformers",
    "nemo_rl",
    "omegaconf",
    "matplotlib",
    "rich",
    "triton",
    "numpy.f2py",
)

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
    "checks",
    "integrations",
    "bench",
    "lab",
    "cli",
]
# Rooms that share no words: tensors know no settings and settings know no tensors.
APART = {("functional", "config"), ("segments", "config"), ("segments", "functional")}


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


def test_import_is_light():
    code = (
        f"import sys; from nemo_geomask import build_loss; print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert loaded.stdout.strip() == "[]"


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
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("pydantic", "")


def test_import_adds_under_300_ms_to_torch():
    code = "import torch, time; t = time.perf_counter(); import nemo_geomask.losses; print(time.perf_counter() - t)"
    # The best of three: another process on the machine can only slow an import down.
    seconds = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(seconds) < 0.3, seconds
