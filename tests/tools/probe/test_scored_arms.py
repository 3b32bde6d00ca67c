"""The answer of a request as one vector: another shape and values that no gap can be computed of are errors."""

import math

import pytest

from nemo_geomask.errors import DataError
from nemo_geomask.tools.probe.scored_arms import EXCLUDED, FrozenTokens

pytest.importorskip("numpy", reason="the probe's statistics need numpy (diagnose extra)")


@pytest.fixture
def tokens():
    return FrozenTokens.from_frozen(
        {
            "sequences": [[1, 2, 5, 6], [1, 7]],
            "prompt_lengths": [2, 1],
            "prompts": [0, 1],
            "sampled": [[-1.0, -2.0], [-3.0]],
            "by_trainer": [False, True],
        }
    )


def test_responses_follow_each_other_and_excluded_tokens_have_a_finite_value(tokens):
    found = tokens.flat([[-0.5, -math.inf], [-3.0]], "base")
    assert found.tolist() == [-0.5, EXCLUDED, -3.0]
    assert tokens.signed(found).tolist() == [-0.5, EXCLUDED, 3.0]


@pytest.mark.parametrize("answer", [[[-0.5], [-3.0]], [[-0.5, -1.0]], [[-0.5, -1.0], [-3.0], [-1.0]]])
def test_another_number_of_tokens_is_an_error(tokens, answer):
    with pytest.raises(DataError, match=r"^base scored \[.*\] tokens; the frozen responses have \(2, 1\)$"):
        tokens.flat(answer, "base")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_log_prob_is_an_error(tokens, value):
    with pytest.raises(DataError, match=rf"^base has the log-prob {value} for token 1; no gap can be computed$"):
        tokens.flat([[-0.5, value], [-3.0]], "base")
