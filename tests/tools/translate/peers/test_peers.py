"""This package's loss, under translated settings, against the recorded answers of the peers' own code."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from nemo_geomask import build_loss
from tests.tools.translate.peers.batches import random_batch
from tests.tools.translate.peers.compare import RECORDED, compare_case, expected_differences, index

CASES = [(peer, case) for peer in RECORDED for case in index(peer)["cases"]]
GUIDE = Path(__file__).parents[4] / "docs" / "how_to" / "peers.md"


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "case"), CASES, ids=[f"{peer}: {case}" for peer, case in CASES])
def test_translated_settings_have_the_same_effect(peer, case):
    comparison = compare_case(peer, case)
    assert comparison.trained >= index(peer)["cases"][case]["count"] / 10, "too few batches with a gradient to compare"
    if comparison.translation.not_expressed:
        assert comparison.verdict != "same", "a setting is reported as not expressed, but the losses agree"
    else:
        assert comparison.verdict == expected_differences(peer).get(case, "same"), (
            comparison.losses,
            comparison.gradients,
        )
    assert comparison.verdict == "same" or comparison.translation.not_expressed or comparison.translation.differences


@pytest.mark.parametrize("peer", RECORDED)
def test_expected_differences_are_of_cases(peer):
    assert set(expected_differences(peer)) <= set(index(peer)["cases"])


def test_random_batches_are_those_of_the_recording():
    # One sum suffices: the batches share one stream of random numbers.
    assert random_batch(99).prev.double().sum().item() == pytest.approx(-33.10107309138402, abs=1e-6)
    assert np.mean([random_batch(seed).mask.mean() for seed in range(20)]) > 0.5


PAPERS = re.findall(r"`(\{name: .*?\})`", GUIDE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", PAPERS)
def test_every_papers_yaml_is_valid(text):
    build_loss(yaml.safe_load(text))


def test_page_has_the_papers():
    assert len(PAPERS) > 15
