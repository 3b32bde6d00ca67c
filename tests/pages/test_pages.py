"""The pages have what is made from the code: committed tables are current, and every part of the site has its place."""

import re

import pytest

from nemo_geomask.tools.check import RULES
from nemo_geomask.tools.diagnose.measure.metric_guide import metric_families
from tests.pages.__main__ import COMMITTED, DOCS, SITE, update


@pytest.mark.parametrize("page", COMMITTED)
def test_committed_tables_are_current(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert update(page, text) == text, "run: make docs"


def test_every_part_of_the_site_has_one_place():
    pages = [path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")]
    assert sorted(re.findall(r"<!-- site: (\w+) -->", "\n".join(pages))) == sorted(SITE)


@pytest.mark.parametrize("name", SITE)
def test_a_part_of_the_site_is_made(name):
    text = SITE[name]()
    assert "\n## " in f"\n{text}" or "|---|" in text


def test_every_metric_has_an_anchor_to_which_the_limits_link():
    anchors = re.findall(r'<a id="([^"]+)">', SITE["metrics"]())
    assert len(set(anchors)) == len(anchors) == sum(len(family.entries) for family in metric_families())
    assert set(re.findall(r"\]\(#([^)]+)\)", SITE["metric_limits"]())) <= set(anchors)


def test_symptoms_name_no_rule_that_is_not_there():
    named = set(re.findall(r"GM\d+", (DOCS / "reference" / "symptoms.md").read_text(encoding="utf-8")))
    assert named
    assert named <= {rule.id for rule in RULES}
