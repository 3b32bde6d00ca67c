"""The cost of recording a step: every way is measured on every step, and its file is weighed."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow", reason="records are Parquet (diagnose extra)")

from nemo_geomask.tools.bench.record_bench import draw_batch, measure


def test_both_ways_of_our_recorder_are_measured(tmp_path):
    costs = measure(draw_batch(8, 32), tmp_path, repeats=2)
    assert {"records", "with a verdict"} <= costs.keys()
    for cost in costs.values():
        assert len(cost.laps) == 2
        assert all(lap.first > 0 and lap.total >= lap.first for lap in cost.laps)
        assert cost.bytes > 100
    ours = {name: len(list((tmp_path / name).rglob("step-*.parquet"))) for name in ("records", "with a verdict")}
    assert ours == {"records": 4, "with a verdict": 4}  # two of them to warm up
