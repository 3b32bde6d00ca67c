"""Quantiles and effective sample size of a step, from its histograms and moments, against plain arithmetic."""

from __future__ import annotations

import math

import pytest

from nemo_geomask.metrics import summarize_step

NAME = "geomask/mismatch"


def bins(**fractions: float) -> dict[str, float]:
    """The metrics of a histogram whose bins, by number, hold these fractions."""
    return {f"{NAME}_bin_{index:02}": fractions.get(f"b{index}", 0.0) for index in range(34)}


def edge(index: int) -> float:
    """Upper edge of a bin; each is a factor of √2 wide, and the first ends at 2^-13."""
    return 2.0**-13 * math.sqrt(2.0) ** index


def test_a_quantile_is_interpolated_in_the_logarithm():
    summary = summarize_step(bins(b3=0.25, b10=0.5, b20=0.25))
    # Half of the tokens: a quarter lies below bin 10, so half of bin 10.
    assert summary[f"{NAME}_q50"] == pytest.approx(edge(9) * math.sqrt(2.0) ** 0.5)
    assert summary[f"{NAME}_q99"] == pytest.approx(edge(19) * math.sqrt(2.0) ** 0.96)
    assert summary[f"{NAME}_q999"] == pytest.approx(edge(19) * math.sqrt(2.0) ** 0.996)
    assert not any("_bin_" in name for name in summary)


def test_a_quantile_at_the_edge_of_a_bin_is_that_edge():
    assert summarize_step(bins(b3=0.5, b10=0.5))[f"{NAME}_q50"] == pytest.approx(edge(3))


def test_a_quantile_in_the_first_bin_is_linear():
    assert summarize_step(bins(b0=0.8, b5=0.2))[f"{NAME}_q50"] == pytest.approx(0.625 * 2.0**-13)
    # Of what there is, where the fractions don't add up to 1.
    assert summarize_step(bins(b0=0.4, b5=0.1))[f"{NAME}_q50"] == pytest.approx(0.625 * 2.0**-13)
    assert summarize_step(bins())[f"{NAME}_q50"] == 0.0


def test_the_maximum_is_at_most_the_edge_of_the_last_bin_that_is_not_empty():
    assert summarize_step(bins(b4=1.0))[f"{NAME}_max"] == pytest.approx(edge(4))
    assert summarize_step({**bins(b4=1.0), f"{NAME}_max": 3.0})[f"{NAME}_max"] == pytest.approx(edge(4))
    below = edge(4) * 0.9
    summary = summarize_step({**bins(b4=1.0), f"{NAME}_max": below})
    assert summary[f"{NAME}_max"] == below
    assert summary[f"{NAME}_q999"] == below  # no quantile exceeds it
    assert summarize_step(bins(b33=1.0))[f"{NAME}_max"] == math.inf
    assert summarize_step(bins(b32=1.0))[f"{NAME}_max"] == pytest.approx(edge(32))
    assert summarize_step(bins())[f"{NAME}_max"] == edge(0)


def test_a_metric_that_only_ends_like_a_bin_stays():
    other = {"mine_bin_00": 0.5}
    summary = summarize_step({**other, **bins(b4=1.0)})
    assert summary["mine_bin_00"] == 0.5
    assert summary[f"{NAME}_max"] == pytest.approx(edge(4))


def test_the_effective_sample_size_is_that_of_the_weights():
    weights = [0.5, 1.0, 2.0, 0.25]
    count = len(weights) + 1  # one without a weight
    mean, square = sum(weights) / count, sum(weight**2 for weight in weights) / count
    moments = {"geomask/weight_mean": mean, "geomask/weight_sq": square}
    expected = sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
    live = {"geomask/weight_live": len(weights) / count}
    assert summarize_step({**moments, **live})["geomask/weight_ess"] == pytest.approx(expected)
    assert summarize_step(moments)["geomask/weight_ess"] == pytest.approx(expected * len(weights) / count)
    raw = {"geomask/weight_raw_mean": mean, "geomask/weight_raw_sq": square}
    assert summarize_step({**moments, **live, **raw})["geomask/lr_factor"] == pytest.approx(expected**0.5)
    for missing in ({}, {"geomask/weight_mean": 1.0}, {**moments, "geomask/weight_sq": 0.0}):
        assert "geomask/weight_ess" not in summarize_step(missing)
