"""Every part of the pages that is made from the code can be made, and has its place."""

import re
from pathlib import Path

import pytest

from nemo_geomask.tools.check import RULES
from tests.pages.__main__ import SITE, main
from tests.pages.metric_guide import metric_families

DOCS = Path(__file__).parents[2] / "docs"


def test_every_part_of_the_site_has_one_place():
    pages = [path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")]
    # A reader of the checkout sees the line above the marker; the site has the part in the place of both.
    marked = re.findall(
        r"^\*.*`python -m tests.pages (\w+)`.*`make site`.*\n<!-- site: (\w+) -->", "\n".join(pages), re.M
    )
    assert sorted(marked) == sorted((name, name) for name in SITE)


def test_a_part_is_printed_as_the_line_above_its_marker_says(capsys):
    main(["rules", "objectives"])
    assert capsys.readouterr().out == f"{SITE['rules']()}\n\n{SITE['objectives']()}\n\n"


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
