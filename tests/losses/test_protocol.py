"""Enums of NeMo-RL's loss protocol, with and without NeMo-RL."""

import enum
import sys
import types

import pytest

from nemo_geomask.losses.protocol import LossInputType, LossType, MetricNormalizer, resolve

INTERFACES = "nemo_rl.algorithms.loss.interfaces"


@pytest.fixture
def interfaces(monkeypatch):
    """A module in the place of NeMo-RL's, which has one of the enums alone, as v0.7.0's lacks MetricNormalizer."""
    names = INTERFACES.split(".")
    for depth in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:depth]), types.ModuleType(".".join(names[:depth])))
    module = sys.modules[INTERFACES]
    module.LossType = enum.Enum("LossType", {"ANY_NAME": "token_level", "ANOTHER": "sequence_level"})
    return module


def test_a_member_is_nemo_rls_own_of_the_same_value(interfaces):
    assert resolve(LossType.TOKEN_LEVEL) is interfaces.LossType.ANY_NAME
    assert resolve(LossType.SEQUENCE_LEVEL) is interfaces.LossType.ANOTHER


def test_a_member_that_nemo_rl_lacks_is_ours(interfaces):
    assert resolve(MetricNormalizer.TOKENS) is MetricNormalizer.TOKENS


def test_without_nemo_rl_members_are_ours(monkeypatch):
    monkeypatch.setitem(sys.modules, INTERFACES, None)
    assert resolve(LossInputType.LOGIT) is LossInputType.LOGIT
