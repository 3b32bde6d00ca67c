"""Changes to a host are made once, together, and taken back to the very same objects."""

from __future__ import annotations

import pickle
import types

import pytest

from nemo_geomask.hosts.nemo_rl import patch


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    patch.undo_all()


def kind():
    return type("Host", (), {"own": lambda self: "own"})


def shouting(original):
    return lambda self: original(self).upper()


def test_an_attribute_is_replaced_once_and_put_back():
    host = kind()
    original = vars(host)["own"]
    for _ in range(3):
        # A new patch of the same thing each time, as a second install makes.
        patch.attribute(host, "own", shouting).apply()
    assert host().own() == "OWN"
    assert patch.in_force(host, "own")
    patch.undo_all()
    assert vars(host)["own"] is original
    assert not patch.in_force(host, "own")
    patch.undo_all()


def test_an_inherited_attribute_leaves_no_trace():
    host = kind()
    child = type("Child", (host,), {})
    before = dict(vars(child))
    change = patch.attribute(child, "own", shouting)
    assert change.apply()
    assert not change.apply()
    assert (child().own(), host().own()) == ("OWN", "own")
    change.undo()
    change.undo()
    assert dict(vars(child)) == before


def test_one_that_changed_nothing_takes_nothing_back():
    host = kind()
    first, second = (patch.attribute(host, "own", shouting) for _ in range(2))
    assert first.apply()
    assert not second.apply()
    second.undo()
    assert host().own() == "OWN"
    first.undo()
    assert host().own() == "own"


def test_descriptors_come_back_as_they_were():
    host = type("Host", (), {"make": staticmethod(lambda: 1)})
    original = vars(host)["make"]
    patch.attribute(host, "make", lambda found: staticmethod(lambda: found.__func__() + 1)).apply()
    assert host.make() == 2
    patch.undo_all()
    assert vars(host)["make"] is original


def test_all_or_none():
    host, other = kind(), kind()
    already = patch.attribute(other, "own", shouting)
    already.apply()

    def fails(original):
        raise RuntimeError("no")

    originals = vars(host)["own"], vars(other)["own"]
    changes = [patch.attribute(host, "own", shouting), already, patch.attribute(kind(), "own", fails)]
    with pytest.raises(RuntimeError, match="no"):
        patch.apply_all(changes)
    # What was in force before stays.
    assert (vars(host)["own"], vars(other)["own"]) == originals
    assert patch.in_force(other, "own")


def test_undone_in_reverse():
    seen, owner = [], types.ModuleType("host")
    for name in "ab":
        patch.Patch(owner, name, lambda: None, lambda name=name: seen.append(name)).apply()
    patch.undo_all()
    assert seen == ["b", "a"]


def test_what_somebody_else_changed_since_is_left(caplog):
    host = kind()
    patch.attribute(host, "own", shouting).apply()
    theirs = shouting(vars(host)["own"])
    host.own = theirs
    patch.undo_all()
    assert vars(host)["own"] is theirs
    assert "own was changed by other code in the meantime, and is left as it is" in caplog.text


class Sent:
    """Something that NeMo-RL sends to another process."""

    def one(self):
        return "plain"

    def other(self):
        return "plain"


def _ones(kind):
    return {"one": lambda self: "changed"}


def _others(kind):
    return {"other": lambda self: "changed"}


@pytest.mark.parametrize("first", ["one", "other"])
@pytest.mark.parametrize("undone", ["one", "other"])
def test_what_is_sent_takes_the_methods_of_all_changes_along(first, undone):
    pickle.dumps(Sent())  # which notes something in the class
    before = dict(vars(Sent))
    patches = {"one": patch.carried(Sent, "one", _ones), "other": patch.carried(Sent, "other", _others)}
    for name in (first, *(patches.keys() - {first})):
        assert patches[name].apply()
    arrived = pickle.loads(pickle.dumps(Sent()))
    assert isinstance(arrived, Sent)
    assert (arrived.one(), arrived.other()) == ("changed", "changed")
    patches[undone].undo()
    arrived = pickle.loads(pickle.dumps(Sent()))
    assert getattr(arrived, undone)() == "plain"
    assert {arrived.one(), arrived.other()} == {"plain", "changed"}
    patch.undo_all()
    assert type(pickle.loads(pickle.dumps(Sent()))) is Sent
    assert dict(vars(Sent)) == before
