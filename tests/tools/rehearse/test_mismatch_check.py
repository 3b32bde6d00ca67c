"""Diagnosis of a rehearsal's records: healthy ones, and each fault by its name."""

from __future__ import annotations

import pytest

from nemo_geomask.tools.rehearse.mismatch_check import check_mismatch, healthy_limits
from tests.tools.rehearse.made_records import write_record

DENSE = healthy_limits("bfloat16", "bfloat16", experts=False)
EXACT = healthy_limits("float32", "float32", experts=False)


def diagnosed(folder, fault="", limits=DENSE, **how):
    for step in (1, 2, 3):
        write_record(folder, step, fault, **how)
    return check_mismatch(folder, limits)


def test_healthy_records(tmp_path):
    found = diagnosed(tmp_path)
    assert (found.cause, found.unjudged) == ("", "")
    assert found.tokens == 3 * 8 * 14
    assert 0.003 < found.noise < 0.03
    assert found.sentence.startswith("healthy: noise of a typical token 0.0")


@pytest.mark.parametrize(
    ("fault", "cause", "setting"),
    [
        ("temperature", "another temperature in the sampler", "policy.generation.temperature"),
        ("top_p", "renormalised by top-p or top-k in the sampler only", "policy.generation.top_p"),
        ("shift", "shifted by one token", "policy.generation"),
        ("nan", "NaN or infinite", "policy.precision"),
    ],
)
def test_each_fault_by_its_name(tmp_path, fault, cause, setting):
    found = diagnosed(tmp_path, fault)
    assert cause in found.cause
    assert setting in found.setting
    assert found.details
    assert found.fix


def test_a_mismatch_of_bfloat16_is_none_of_float32(tmp_path):
    found = diagnosed(tmp_path, limits=EXACT)
    assert "larger mismatch" in found.cause
    assert diagnosed(tmp_path, limits=EXACT, noise=1e-5).cause == ""


def test_float32_limits_hold_only_where_both_engines_are_exact():
    assert healthy_limits("float32", "bfloat16", experts=True) == healthy_limits("bfloat16", "bfloat16", experts=True)
    assert EXACT.noise < DENSE.noise


def test_nothing_to_judge_by(tmp_path):
    assert "has no records" in check_mismatch(tmp_path / "none", DENSE).sentence
    write_record(tmp_path, 1, sequences=1)
    assert "only 14 trained tokens" in check_mismatch(tmp_path, DENSE).unjudged
