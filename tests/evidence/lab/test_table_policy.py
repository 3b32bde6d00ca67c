"""Tables that are trained, beside the theory's formula."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evidence.lab.table_policy import CASES, predicted_error, trained_error

STORED = json.loads((Path(__file__).parents[3] / "docs" / "evidence" / "table_policy.json").read_text())["rows"]
WEIGHT = {"use_importance_sampling_correction": True, "is_correction_level": "token"}


def test_the_stored_runs_end_where_the_page_says():
    assert [(row["length"], row["noise"]) for row in STORED] == list(CASES)
    for row in STORED:
        assert row["none"] == pytest.approx(predicted_error(row["noise"], row["length"]), abs=0.006)
        assert row["token weight"] < 0.0025


def test_a_shorter_run_ends_there_too():
    assert trained_error(0.05, 24, {}, steps=600) == pytest.approx(predicted_error(0.05, 24), abs=0.02)
    assert trained_error(0.05, 24, WEIGHT, steps=600) < 0.02
