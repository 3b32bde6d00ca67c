"""Former names of public fields still work, and warn with the new name."""

import pytest
import torch

from nemo_geomask import functional, metrics
from nemo_geomask.config import MaskStatistic, Truncation, WeightLevel
from nemo_geomask.losses import Decision, Part


@pytest.mark.parametrize("correction", [MaskStatistic, WeightLevel, Truncation])
def test_words_of_a_correction(correction):
    renamed = rf"words of nemo_geomask.config.{correction.__name__} is now called description"
    with pytest.warns(DeprecationWarning, match=renamed):
        plugin = correction(abs, words="its size")
    assert plugin == correction(abs, description="its size")
    with pytest.warns(DeprecationWarning, match=renamed):
        assert plugin.words == "its size"


def test_words_of_a_part():
    renamed = "words of nemo_geomask.losses.Part is now called explanation"
    with pytest.warns(DeprecationWarning, match=renamed):
        part = Part(formula="ℓ = 1", words="Constant.")
    assert part == Part("ℓ = 1", "Constant.") == ("ℓ = 1", "Constant.")
    with pytest.warns(DeprecationWarning, match=renamed):
        assert part.words == "Constant."
    with pytest.raises(TypeError, match="a formula and an explanation"):
        Part("ℓ = 1")


def test_why_of_a_decision():
    with pytest.warns(DeprecationWarning, match="Decision.why is now called Decision.reason"):
        assert Decision(False, "vetoed").why == "vetoed"


def test_the_warnings_of_functions_point_at_the_caller():
    with pytest.deprecated_call() as caught:
        assert metrics.summarized is metrics.summarize_step
        functional.outside(torch.zeros(1), 0.0, 1.0)
    assert [warning.filename for warning in caught] == [__file__] * 2
