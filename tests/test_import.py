"""What importing costs, and the one-way rule between the rooms."""

import ast
import functools
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import networkx
import pytest

import nemo_geomask

PACKAGE = Path(nemo_geomask.__file__).parent
CHECKOUT = Path(__file__).parents[1]
# Rooms from the bottom up: a room imports only from itself and from those before it.
ORDER = [
    "yaml_text",
    "errors",
    "data_keys",
    "plugin_imports",
    "config",
    "functional",
    "objectives",
    "segments",
    "kernels",
    "parallel",
    "metrics",
    "losses",
    "optional",
    "recipe",
    "records",
    "testing",
    "hosts",
    "tools/shared",
    "tools/translate",
    "tools/diagnose",
    "tools/check",
    "tools/rehearse",
    "tools/probe",
    "tools/bench",
    "tools/lab",
    "cli",
]
# Within diagnose, in the order of the data.
DIAGNOSE_ORDER = ["read", "measure", "locate", "explain", "report"]
# Rooms that share no words: tensors know no settings and settings know no tensors.
APART = {("functional", "config"), ("segments", "config"), ("segments", "functional")}


def test_the_architectures_page_has_the_rooms_in_their_order():
    page = (PACKAGE.parent / "docs" / "background" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    rooms = [row.rstrip("/").removesuffix(".py") for row in rows if row.endswith(("/", ".py"))]
    assert [room for room in rooms if room in ORDER] == ORDER


def _room(parts: tuple[str, ...]) -> str:
    """Room of a module, given its dotted parts below the package."""
    return "/".join(parts[:2]) if parts[0] == "tools" and len(parts) > 1 else parts[0]


@functools.cache
def _tree(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _import_statements(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Import | ast.ImportFrom)]


def _imports(path: Path):
    for node in _import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            # `from nemo_geomask import functional` names a room too.
            if node.module in ("nemo_geomask", "nemo_geomask.tools"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.stem != "__init__" or path.parent.parent != PACKAGE)
MODULES = [path for path in MODULES if path != PACKAGE / "__init__.py"]


def _own_room(path: Path) -> str:
    return _room(path.relative_to(PACKAGE).with_suffix("").parts)


def _forbidden_imports(path: Path):
    """Yield a sentence for each import of a room that the module's own comes before, or shares no words with."""
    room = _own_room(path)
    if room not in ORDER:
        yield f"{path}: room '{room}' has no place in the order"
        return
    for name in _imports(path):
        parts = tuple(name.split(".")[1:])
        if not name.startswith("nemo_geomask.") or parts == ("tools",):
            continue
        other = _room(parts)
        if other not in ORDER:  # a name of the package itself, such as build_loss
            is_allowed = room in ("tools/lab", "cli")
        else:
            is_allowed = ORDER.index(other) <= ORDER.index(room) and (room, other) not in APART
        if not is_allowed:
            yield f"{path} ({room}) imports {name}"


def test_rooms_import_only_from_rooms_before_them():
    assert [sentence for path in MODULES for sentence in _forbidden_imports(path)] == []


def _rooms_below_diagnose(name: str) -> int:
    """Place in the order of the data; a file beside the rooms may import from all of them."""
    parts = name.removeprefix("nemo_geomask.tools.diagnose").strip(".").split(".")
    return DIAGNOSE_ORDER.index(parts[0]) if parts[0] in DIAGNOSE_ORDER else len(DIAGNOSE_ORDER)


def test_a_log_passes_the_rooms_of_diagnose_one_way():
    rooms = PACKAGE / "tools" / "diagnose"
    assert {path.name for path in rooms.iterdir() if (path / "__init__.py").is_file()} == set(DIAGNOSE_ORDER)
    backwards = [
        f"{path.relative_to(rooms)} imports {name}"
        for path in rooms.rglob("*.py")
        for name in _imports(path)
        if name.startswith("nemo_geomask.tools.diagnose")
        and _rooms_below_diagnose(name) > _rooms_below_diagnose(_dotted(path))
    ]
    assert backwards == []


# Tools whose public functions other tools may use; tools/shared is for all of them.
SHARED_TOOLS = ("check", "diagnose", "translate")


def _imports_of_other_tools(path: Path):
    """Yield module and imported names of each import from another tool than the module's own."""
    own = path.relative_to(PACKAGE / "tools").parts[0].removesuffix(".py")
    for node in _import_statements(path):
        if isinstance(node, ast.ImportFrom):
            imports = [(node.module, [alias.name for alias in node.names])]
        else:
            imports = [(alias.name, []) for alias in node.names]
        for module, names in imports:
            parts = module.split(".")
            if parts[:2] == ["nemo_geomask", "tools"] and parts[2:3] not in ([own], ["shared"]):
                yield module, names


TOOL_MODULES = [path for path in MODULES if path.is_relative_to(PACKAGE / "tools")]


def test_tools_use_only_the_public_functions_of_others():
    imports = [(path, *found) for path in TOOL_MODULES for found in _imports_of_other_tools(path)]
    for path, module, names in imports:
        assert module in [f"nemo_geomask.tools.{name}" for name in SHARED_TOOLS], f"{path} imports {module}"
        public = importlib.import_module(module).__all__
        assert set(names) <= set(public), f"{path} imports {set(names) - set(public)}, which {module} does not export"


def test_config_needs_no_torch():
    imports = [name for path in MODULES if _own_room(path) == "config" for name in _imports(path)]
    assert imports
    assert not any(name.split(".")[0] == "torch" for name in imports)


def _dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports_at_run_time(tree: ast.AST):
    """Pairs of module and name that a module imports, at its top or in a function; name is None for a plain import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for branch in node.orelse:
                yield from _imports_at_run_time(branch)
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)
        yield from _imports_at_run_time(node)


def import_circles(trees: dict[str, ast.AST]) -> set[frozenset[str]]:
    """Sets of modules each of which imports all the others, directly or not.

    ``from package import name`` counts as an import of the module that ``package/__init__.py`` has the name from: a
    room's ``__init__`` re-exports what its modules define, and these may import each other through it.
    """
    imports = {module: list(_imports_at_run_time(tree)) for module, tree in trees.items()}
    packages = {module.rpartition(".")[0] for module in trees}

    def defining_module(module, name):
        if f"{module}.{name}" in trees:
            return f"{module}.{name}"
        source = next((source for source, other in imports.get(module, ()) if other == name), None)
        return defining_module(source, name) if module in packages and source in trees else module

    graph = networkx.DiGraph()
    for module, pairs in imports.items():
        for source, name in pairs:
            target = source if name is None else defining_module(source, name)
            if target in trees and target != module:
                graph.add_edge(module, target)
    return {frozenset(modules) for modules in networkx.strongly_connected_components(graph) if len(modules) > 1}


def test_no_circle_of_imports():
    trees = {_dotted(path): _tree(path) for path in PACKAGE.rglob("*.py")}
    assert import_circles(trees) == set()


@pytest.mark.parametrize(
    ("sources", "circles"),
    [
        ({"p.a": "import p.b", "p.b": "from p.a import x"}, [{"p.a", "p.b"}]),
        ({"p.a": "import p.b", "p.b": "def f():\n    from p import a"}, [{"p.a", "p.b"}]),
        ({"p.a": "import p.b", "p.b": "if TYPE_CHECKING:\n    from p.a import x"}, []),
        # Through the package, which has x from p.a and y from p.b.
        (
            {"p": "from p.a import x\nfrom p.b import y", "p.a": "import p.b", "p.b": "from p import x"},
            [{"p.a", "p.b"}],
        ),
        ({"p": "from p.a import x\nfrom p.b import y", "p.a": "import p.b", "p.c": "from p import x"}, []),
    ],
)
def test_circles_are_found(sources, circles):
    trees = {"p": ast.parse(""), **{module: ast.parse(text) for module, text in sources.items()}}
    assert import_circles(trees) == set(map(frozenset, circles))


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
    assert not {"yaml", "omegaconf", "hydra"} & added("nemo_geomask.tools.translate", "nemo_geomask.cli", after="torch")


@pytest.mark.slow
def test_lazy_parts_of_torch_stay_lazy():
    """The compiler and the symbolic algebra take longer to import than all the rest."""
    code = "import sys, nemo_geomask.losses; print({'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
@pytest.mark.parametrize("line", ["check recipe.yaml", "schema", "translate --from nemo_rl recipe.yaml"])
def test_commands_that_read_settings_import_no_torch(line, tmp_path):
    """The modules of the objectives name formulas, which are imported when one is computed."""
    block = "loss_fn: {name: gspo, token_level_loss: false, masks: [{preset: geometric, min: 0.99, max: 1.01}]}"
    (tmp_path / "recipe.yaml").write_text(block, encoding="utf-8")
    code = f"""
        import sys
        from nemo_geomask.cli import main
        main({line.split()})
        print({{"torch", "numpy", "scipy"}} & set(sys.modules), file=sys.stderr)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=500, cwd=tmp_path
    )
    assert (done.stderr.strip(), bool(done.stdout)) == ("set()", True)


@pytest.mark.slow
def test_tensor_code_needs_no_pydantic():
    code = """
        import sys
        sys.modules["pydantic"] = None
        import nemo_geomask.functional, nemo_geomask.kernels, nemo_geomask.parallel, nemo_geomask.segments
        import nemo_geomask.tools.bench
        try:
            import nemo_geomask
            nemo_geomask.build_loss
        except ImportError as error:
            print(error.name)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=500)
    assert (done.stdout.strip(), done.stderr) == ("pydantic", "")


@pytest.mark.slow
def test_the_tests_of_a_gpu_start_without_pydantic(tmp_path):
    """As `make gpu` starts them, where there is little beside torch."""
    (tmp_path / "pydantic.py").write_text("raise ModuleNotFoundError", encoding="utf-8")
    words = ["--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "tests/gpu", "tests/tools/lab/test_on_gpu.py"],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_gpu_kernels" in done.stdout
