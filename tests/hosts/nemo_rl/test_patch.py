"""Patches of a host library are made once, together, and undone to the identical objects."""

from __future__ import annotations

import sys
import types

import pytest

from nemo_geomask.hosts.nemo_rl import patch


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    patch.undo_all()


def make_host():
    return type("Host", (), {"name": lambda self: "name"})


def in_capitals(original):
    return lambda self: original(self).upper()


def test_an_attribute_is_replaced_once_and_put_back():
    host = make_host()
    original = vars(host)["name"]
    # A new patch of the same thing each time, as a second install makes.
    first, second = (patch.attribute(host, "name", in_capitals) for _ in range(2))
    assert first.apply()
    assert not second.apply()
    second.undo()  # it changed nothing
    assert host().name() == "NAME"
    assert patch.in_force(host, "name")
    for _ in range(2):
        patch.undo_all()
        assert vars(host)["name"] is original
        assert not patch.in_force(host, "name")


def test_an_inherited_attribute_leaves_no_trace():
    host = make_host()
    child = type("Child", (host,), {})
    before = dict(vars(child))
    change = patch.attribute(child, "name", in_capitals)
    assert change.apply()
    assert (child().name(), host().name()) == ("NAME", "name")
    for _ in range(2):
        change.undo()
    assert dict(vars(child)) == before


def test_descriptors_come_back_as_they_were():
    host = type("Host", (), {"make": staticmethod(lambda: 1)})
    original = vars(host)["make"]
    patch.attribute(host, "make", lambda original: staticmethod(lambda: original.__func__() + 1)).apply()
    assert host.make() == 2
    patch.undo_all()
    assert vars(host)["make"] is original


def fails(original):
    raise RuntimeError("no")


def test_all_or_none():
    host, other = make_host(), make_host()
    already = patch.attribute(other, "name", in_capitals)
    already.apply()
    originals = vars(host)["name"], vars(other)["name"]
    changes = [patch.attribute(host, "name", in_capitals), already, patch.attribute(make_host(), "name", fails)]
    with pytest.raises(RuntimeError, match="no"):
        patch.apply_all(changes)
    # What was in force before stays.
    assert (vars(host)["name"], vars(other)["name"]) == originals
    assert patch.in_force(other, "name")


def test_undone_in_reverse():
    undone, owner = [], types.ModuleType("host")
    for name in "ab":
        patch.Patch(owner, name, lambda: None, lambda name=name: undone.append(name)).apply()
    patch.undo_all()
    assert undone == ["b", "a"]


def test_what_other_code_changed_since_is_left(caplog):
    host = make_host()
    patch.attribute(host, "name", in_capitals).apply()
    theirs = in_capitals(vars(host)["name"])
    host.name = theirs
    patch.undo_all()
    assert vars(host)["name"] is theirs
    assert "name was changed by other code in the meantime, and is left as it is" in caplog.text


def make_modules(count=3):
    """Modules that have one function under its name: the first defines it, the others have imported it."""
    modules = [types.ModuleType(f"host_{index}") for index in range(count)]
    exec("def compute(value): return value\n\ndef call(value): return compute(value)", vars(modules[0]))
    for module in modules[1:]:
        module.compute = modules[0].compute
        exec("def call(value): return compute(value)", vars(module))
    return modules


def doubled(original):
    return lambda value: 2 * original(value)


def test_a_function_is_replaced_wherever_it_was_imported():
    modules = make_modules()
    modules[2].compute = different = lambda value: -value
    # The definition's own namespace may come again, as that of any module.
    change = patch.function(modules[0], "compute", doubled, namespaces=[vars(module) for module in modules])
    before = [dict(vars(module)) for module in modules]
    originals = [module.compute for module in modules]
    assert change.apply()
    assert not change.apply()
    assert not patch.function(modules[0], "compute", doubled, namespaces=[vars(modules[1])]).apply()
    assert [module.call(3) for module in modules] == [6, 6, -3]
    assert modules[0].compute is modules[1].compute
    assert modules[2].compute is different  # another function of that name
    assert patch.in_force(modules[0], "compute")
    assert not patch.in_force(modules[1], "compute")
    for _ in range(2):
        change.undo()
    assert [module.compute for module in modules] == originals
    assert [dict(vars(module)) for module in modules] == before
    # It can be applied again, and undone again.
    assert change.apply()
    assert modules[1].call(3) == 6
    patch.undo_all()
    assert [module.compute for module in modules] == originals


def test_only_namespaces_that_have_the_function_are_changed():
    modules, namespace = make_modules(), {"other": 1}
    patch.function(modules[0], "compute", doubled, namespaces=[namespace, vars(modules[1])]).apply()
    assert [module.call(3) for module in modules] == [6, 6, 3]
    assert namespace == {"other": 1}
    original = modules[2].compute
    modules[1].compute = theirs = lambda value: -value  # other code changes it since
    patch.undo_all()
    assert modules[1].compute is theirs
    assert modules[0].compute is original


def test_a_wrapper_that_fails_changes_no_namespace():
    modules = make_modules()
    originals = [module.compute for module in modules]
    change = patch.function(modules[0], "compute", fails, namespaces=map(vars, modules))
    with pytest.raises(RuntimeError, match="no"):
        patch.apply_all([change])
    assert [module.compute for module in modules] == originals
    assert not patch.in_force(modules[0], "compute")


class Library:
    """A NeMo-RL whose module ``train`` defines a function, and the class of a worker that uses it."""

    def __init__(self, monkeypatch):
        self.train, self.worker = (types.ModuleType(f"nemo_rl.{name}") for name in ("train", "worker"))
        exec("def forward(value): return value", vars(self.train))
        self.worker.forward = self.train.forward
        for module in (types.ModuleType("nemo_rl"), self.train, self.worker):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def copied(self, code, name="nemo_rl.worker", **variables):
        """Functions of this code as Ray's by-value pickling leaves them: their globals are a copy, of no module."""
        namespace = {"__builtins__": __builtins__, "__name__": name, "forward": self.train.forward, **variables}
        exec(code, namespace)
        return namespace


METHOD = "def step(self, value): return forward(value)"


def as_wrapped(function):
    """A decorator of another package, whose wrapper has the method in its closure only."""

    def wrapper(*args):
        return function(*args)

    return wrapper


@pytest.mark.parametrize(
    ("decorator", "base"),
    [
        (lambda function: function, False),
        (lambda function: as_wrapped(as_wrapped(function)), True),
        (staticmethod, False),
        (lambda function: classmethod(as_wrapped(function)), False),
    ],
    ids=["plain", "decorated and inherited", "static method", "class method"],
)
def test_methods_that_came_by_value_are_reached(monkeypatch, decorator, base):
    """As Ray pickles the class of a worker: code, and a copy of the globals that the code uses."""
    library = Library(monkeypatch)
    namespace = library.copied(METHOD)
    assert namespace is not vars(library.worker)
    worker_class = type("Worker", (), {"__module__": "nemo_rl.worker", "step": decorator(namespace["step"])})
    actor = (type("Actor", (worker_class,), {}) if base else worker_class)()
    arguments = (None, 3) if decorator is staticmethod else (3,)
    assert actor.step(*arguments) == 3
    namespaces = patch.nemo_rl_namespaces(actor)
    assert any(item is namespace for item in namespaces)
    assert all(any(item is vars(module) for item in namespaces) for module in (library.train, library.worker))
    assert not any(item is namespace for item in patch.nemo_rl_namespaces(None))
    patch.function(library.train, "forward", doubled, namespaces=namespaces).apply()
    assert actor.step(*arguments) == 6
    assert library.worker.forward(3) == 6
    patch.undo_all()
    assert actor.step(*arguments) == 3
    assert namespace["forward"] is library.worker.forward is library.train.forward


def test_namespaces_of_other_packages_are_left_out(monkeypatch):
    library = Library(monkeypatch)
    other = library.copied(METHOD, name="somebody.worker")
    similar = types.ModuleType("nemo_rl_extras")
    monkeypatch.setitem(sys.modules, similar.__name__, similar)
    actor = type("Worker", (), {"step": other["step"]})()
    namespaces = patch.nemo_rl_namespaces(actor)
    assert not any(item is other or item is vars(similar) or item is globals() for item in namespaces)


def test_closures_that_are_empty_or_refer_to_themselves(monkeypatch):
    library = Library(monkeypatch)
    namespace = library.copied(
        """
def make():
    def recursive(self, depth): return recursive(self, depth - 1) if depth else forward(3)
    def unfinished(self): return later
    if not forward: later = 1
    return recursive, unfinished

recursive, unfinished = make()
"""
    )
    actor = type("Worker", (), {"recursive": namespace["recursive"], "unfinished": namespace["unfinished"]})()
    assert any(item is namespace for item in patch.nemo_rl_namespaces(actor))
