"""Our loss against what other systems' own code answered, on settings translated from theirs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from nemo_geomask import build_loss
from tests.tools.translate.peers import pages
from tests.tools.translate.peers.compare import RECORDED, compared, differs, index
from tests.tools.translate.peers.problems import problem

CASES = [(peer, case) for peer in RECORDED for case in index(peer)["cases"]]
PAGE = Path(__file__).parents[4] / "docs" / "peers.md"


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "case"), CASES, ids=[f"{peer}: {case}" for peer, case in CASES])
def test_translated_settings_do_what_theirs_do(peer, case):
    found = compared(peer, case)
    assert found.trained >= index(peer)["cases"][case]["count"] / 10, "too few batches with a gradient to compare"
    if found.translation.not_expressed:
        assert found.verdict != "same", "what is said not to be expressed makes no difference"
    else:
        assert found.verdict == differs(peer).get(case, "same"), (found.losses, found.gradients)
    assert found.verdict == "same" or found.translation.not_expressed or found.translation.differences


@pytest.mark.parametrize("peer", RECORDED)
def test_expected_differences_are_of_cases(peer):
    assert set(differs(peer)) <= set(index(peer)["cases"])


def test_problems_are_those_that_were_recorded():
    # RandomState's stream is frozen; a float of the last batch says so.
    assert problem(99).prev.double().sum().item() == pytest.approx(-33.10107309138402, abs=1e-6)
    assert np.mean([problem(seed).mask.mean() for seed in range(20)]) > 0.5


PAPERS = re.findall(r"`(\{name: .*?\})`", PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", PAPERS)
def test_every_papers_yaml_is_valid(text):
    build_loss(yaml.safe_load(text))


def test_papers_are_there():
    assert len(PAPERS) > 15


def test_page_is_current():
    text = PAGE.read_text(encoding="utf-8")
    assert pages.rewrite(text) == text, "run: make docs"
