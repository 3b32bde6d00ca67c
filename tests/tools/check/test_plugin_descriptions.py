"""Corrections of another distribution in the objective that ``check`` prints."""

from nemo_geomask import build_loss
from nemo_geomask.tools.check import describe
from tests.helpers.plugin_corrections import GAPS, SOFTLY


def test_corrections_are_described_and_scheduled():
    shown = "\n".join(
        f"{part.formula} {part.explanation}" for part in describe(build_loss({**SOFTLY, "masks": [GAPS]}))
    )
    assert "ROOT_LEVEL(x_t, Σ_t x_t, n)" in shown
    assert "the sequence's product to the power of 1/√n, bent, [0, 1.5]" in shown
    assert "squared difference is above 0.02" in shown
