"""Attributes of the importable NeMo-RL that are replaced: how many, which, and that they are put back."""

from __future__ import annotations

import pytest

from tests.helpers.nemo_rl import hosts

pytestmark = pytest.mark.slow

MOST = {
    "driver": 0,
    "worker, padded rows": 0,
    "worker, packed rows": 2,
    "worker, geomask, padded rows": 3,
    "worker, geomask_linear, packed rows": 10,
    "all": 11,
}


@pytest.fixture(scope="module")
def report():
    hosts.require("nemo_rl.algorithms.grpo")
    return hosts.report("patched_attributes.py")


@pytest.mark.parametrize("case", MOST)
def test_no_more_is_replaced_than_is_listed_and_all_is_put_back(report, case):
    assert report["modules"] > 50
    replaced, left = report["cases"][case]
    assert len(replaced) <= MOST[case]
    assert (case == "worker, packed rows") <= (len(replaced) == 2)
    listed = set(report["listed"])
    assert [places for places in replaced if not listed.intersection(places)] == []
    assert left == []
