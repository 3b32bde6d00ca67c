"""Errors carry problems, are the built-ins that fit, and travel between processes."""

import inspect
import pickle

import pytest

from nemo_geomask import errors
from nemo_geomask.errors import ConfigError, GeomaskError, Problem

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, GeomaskError)]
PROBLEMS = (Problem(("loss_fn.a", "loss_fn.b"), "at odds", frozenset({"a"})), Problem(("loss_fn.c",), "wrong"))


@pytest.mark.parametrize("kind", CLASSES)
def test_survives_pickle(kind):
    for error in (kind("wrong"), kind(*PROBLEMS)):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), copy.problems, str(copy)) == (kind, error.problems, str(error))


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind is not GeomaskError])
def test_is_a_built_in_too(kind):
    built_in = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    assert built_in[0] not in (Exception, BaseException, object)


def test_settings_are_refused_as_nemo_rl_refuses_them():
    with pytest.raises(AssertionError, match="wrong"):
        raise ConfigError("wrong")


def test_is_a_line_a_problem_that_begins_with_its_keys():
    assert str(ConfigError(*PROBLEMS)) == "loss_fn.a, loss_fn.b: at odds\nloss_fn.c: wrong"
    assert str(ConfigError("wrong", Problem((), "more", where="recipe.yaml"))) == "wrong\nrecipe.yaml: more"


def test_a_message_alone_is_a_problem_without_keys():
    assert ConfigError("wrong").problems == (Problem((), "wrong"),)
