"""Former names of public fields still work, and warn with the new name."""

import pytest

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
