"""Where the sides part: operators in order, against numbers computed by hand."""

import math

import pytest

from nemo_geomask.tools.probe.locations import layer_differences
from nemo_geomask.tools.probe.probe_report import location_lines

FLOAT32, BFLOAT16 = "19 torch.float32", "4 tokens 2×9 logits torch.bfloat16 training False"


def layers(**others):
    quiet = {"0 attention": 1e-7, "0 MLP": 1e-7, "0 layer": 1e-7, "1 attention": 1e-7, "1 MLP": 2e-7, "1 layer": 1e-7}
    replayed = {"final norm": 1e-8, **quiet, "1 router": 0.0, **others}
    own = {"0 layer": 1e-7, "1 layer": 3e-7, "1 router": 0.25, "1 MLP": 1e-7}
    return {"own": own, "replayed": replayed, "head": [[-1.0, -2.0]], "error": ""}


def test_the_first_operator_beyond_rounding_is_named_in_the_order_of_the_forward_pass():
    loud = {"1 layer": 0.5, "final norm": 0.1, "1 MLP": 0.02, "1 attention": 1e-3}
    result = layer_differences(layers(**loud), [[-1.0, -2.5]], [FLOAT32, FLOAT32])
    assert result.first == "1 attention"
    assert result.floor == pytest.approx(16 * 2**-24)
    assert list(result.arising)[-1] == "final norm"
    assert (result.grown, result.routes) == ({"0 layer": 1e-7, "1 layer": 3e-7}, {"1 router": 0.25})
    assert result.routes_of_same_input == {"1 router": 0.0}
    assert result.head_k3 == pytest.approx((math.exp(0.5) - 1 - 0.5) / 2)
    text = "\n".join(location_lines(result))
    assert "the attention of layer 1: 0.001 of its output" in text
    assert "tokens with other experts by layer: 25.0%" in text


def test_the_coarser_dtype_sets_what_rounding_explains():
    result = layer_differences(layers(**{"1 MLP": 0.02}), [[-1.0, -2.0]], [FLOAT32, BFLOAT16])
    assert (result.first, result.head_k3) == ("", 0.0)
    assert result.floor == pytest.approx(16 / 256)
    assert "no operator differs" in location_lines(result)[0]


def test_equal_states_and_heads_leave_what_comes_after_the_logits():
    assert layer_differences(layers(), [[-1.0, -2.0]], [FLOAT32]).is_equal
    assert not layer_differences(layers(), [[-1.0, -2.5]], [FLOAT32]).is_equal  # the head differs
    assert not layer_differences(layers(**{"0 MLP": 0.1}), [[-1.0, -2.0]], [FLOAT32]).is_equal
    grown = {**layers(), "own": {"0 layer": 0.1}}
    assert not layer_differences(grown, [[-1.0, -2.0]], [FLOAT32]).is_equal
    assert not layer_differences(None, [], []).is_equal
    # Rounding of bfloat16 may be the whole mismatch.
    rounded = {**layers(), "own": {"0 layer": 0.01, "1 layer": 0.013}}
    assert not layer_differences(rounded, [[-1.0, -2.0]], [BFLOAT16]).is_equal


def test_states_that_were_not_compared_say_why():
    failed = {"error": "EngineError: the engine is compiled"}
    assert "the engine is compiled" in location_lines(layer_differences(failed, [], []))[0]
    assert layer_differences(None, [], []).error
