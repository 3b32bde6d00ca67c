"""How the package and its tests are kept: names that stand for one thing, tests that stand alone."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest

import nemo_geomask

TESTS = Path(__file__).parent
PACKAGE = Path(nemo_geomask.__file__).parent


@functools.cache
def classes():
    """Of the package: where each is defined, by name, without the underscore of a private one."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append((path.relative_to(PACKAGE).as_posix(), node))
    return found


# What is still to be renamed; nothing may join it.
SHARED: set[str] = set()


def test_no_two_classes_share_a_name():
    shared = {name: [path for path, _ in places] for name, places in classes().items() if len(places) > 1}
    assert set(shared) <= SHARED, shared


def errors():
    """Every class that derives from GeomaskError, by name."""
    known = {"GeomaskError"}
    while True:
        more = {
            name
            for name, places in classes().items()
            if any(isinstance(base, ast.Name) and base.id in known for _, node in places for base in node.bases)
        }
        if more <= known:
            return known
        known |= more


def test_every_error_can_be_had_from_the_package():
    assert errors() <= set(nemo_geomask.__all__)


@pytest.mark.parametrize("name", sorted(nemo_geomask.__all__))
def test_every_name_of_the_package_is_there(name):
    assert getattr(nemo_geomask, name) is not None
    assert name in dir(nemo_geomask)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'nemo_geomask' has no attribute 'no_such'"):
        nemo_geomask.no_such  # noqa: B018


def private(name):
    return name.startswith("_") and not name.endswith("__")


def offences(path):
    """Imports of other tests, and private names of the package."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ours = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            ours |= {alias.asname or "nemo_geomask" for alias in node.names if alias.name.startswith("nemo_geomask")}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if (node.module or "").startswith("nemo_geomask"):
                ours |= {alias.asname or alias.name for alias in node.names}
                yield from (alias.name for alias in node.names if private(alias.name))
        else:
            continue
        yield from (name for name in names if name.startswith("tests.") and ".test_" in name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and root(node.value) in ours:
            yield node.attr
        # monkeypatch.setattr(module, "_name", …) and its like
        if isinstance(node, ast.Call) and len(node.args) > 1 and root(node.args[0]) in ours:
            named = node.args[1]
            if isinstance(named, ast.Constant) and isinstance(named.value, str) and private(named.value):
                yield named.value


def root(node):
    """``a`` of ``a.b.c``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_tests_read_neither_private_names_nor_each_other():
    found = {path.relative_to(TESTS).as_posix(): sorted(set(offences(path))) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}
