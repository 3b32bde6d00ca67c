"""The tables of the pages that are generated from the code are current."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_geomask.config.objectives import OBJECTIVES
from nemo_geomask.errors import ArgumentError
from nemo_geomask.losses import Part
from nemo_geomask.tools.check import RULES, docs_tables

DOCS = Path(__file__).parents[3] / "docs"
LOSSES = (DOCS / "reference" / "loss_reference.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", docs_tables.TABLES)
def test_tables_are_current(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert docs_tables.update_tables(page, text) == text, "run: make docs"


def test_a_formula_that_changes_makes_the_page_stale(monkeypatch):
    changed = replace(OBJECTIVES["gmpo"], parts=(Part("ℓ = changed", "Changed."),))
    monkeypatch.setitem(OBJECTIVES, "gmpo", changed)
    assert docs_tables.update_tables("reference/loss_reference.md", LOSSES) == LOSSES.replace(
        "`ℓ = −Ā·exp(mean_t x_t)`<br>`x_t = min(curr − prev, 0.4) where Ā > 0, max(curr − prev, -0.4) where Ā < 0`",
        "`ℓ = changed`",
    )


def test_page_without_markers_is_an_error():
    with pytest.raises(ArgumentError, match="fields: begin"):
        docs_tables.update_tables("reference/loss_reference.md", "nothing here")


def test_symptoms_name_no_rule_that_is_not_there():
    named = set(re.findall(r"GM\d+", (DOCS / "reference" / "symptoms.md").read_text(encoding="utf-8")))
    assert named
    assert named <= {rule.id for rule in RULES}
