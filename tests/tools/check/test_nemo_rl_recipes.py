"""Findings of ``check`` over NeMo-RL's own recipes, each kind of which was judged against NeMo-RL's source.

``nemo_rl_findings.json`` has them by version, rule and key, with the number of recipes. ``nemo_rl_judgements.yaml``
says of each rule why NeMo-RL's maintainers would agree. With ``NEMO_RL_ROOT``, this records them anew:
``python -m tests.tools.check.test_nemo_rl_recipes VERSION``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from nemo_geomask.hosts.nemo_rl.source_words import numbers_in_recipes, settings_in_recipes
from nemo_geomask.recipe import nemo_rl_root
from nemo_geomask.tools.check import RULES
from nemo_geomask.tools.check.bound_rules import is_unusual
from nemo_geomask.tools.check.bulk_check import check_many
from nemo_geomask.tools.check.recipe_check import CheckOptions

DATA = Path(__file__).with_name("nemo_rl_findings.json")
RECORDED = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
JUDGEMENTS = yaml.safe_load(Path(__file__).with_name("nemo_rl_judgements.yaml").read_text(encoding="utf-8"))

# By the number of numbers in the recipes of main, v0.7.0 and v0.6.0 that eight others at their key judge: how many of
# them GM011 would report.
UNUSUAL = {3932: 6, 2487: 7, 1483: 9}


def survey(root: Path) -> dict:
    """Return the number of recipes, those that can't be read, and how many recipes have each finding."""
    os.environ.setdefault("HF_HOME", "/nowhere")  # recipes look for data there
    bulk = check_many([str(root / "examples")], CheckOptions(recipe=""))
    counts = Counter(
        (f"{finding.rule.id} {finding.rule.severity}", re.sub(r"\[\d+\]", "[]", finding.key))
        for checked in bulk.checked
        for finding in checked.report.findings
    )
    findings: dict[str, dict[str, int]] = {}
    for (rule, key), count in sorted(counts.items()):
        findings.setdefault(rule, {})[key] = count
    unreadable = [os.path.relpath(path, root) for path, _ in bulk.unreadable]
    return {"recipes": len(bulk.checked), "unreadable": unreadable, "findings": findings}


def test_every_kind_of_finding_is_judged():
    found = {rule for version in RECORDED.values() for rule in version["findings"]}
    assert found
    assert {rule.split()[0] for rule in found} == set(JUDGEMENTS)
    severities = {f"{rule.id} {rule.severity}" for rule in RULES}
    assert found <= severities
    assert all(len(reason) > 40 for reason in JUDGEMENTS.values())


def test_no_recipe_of_nemo_rls_is_unreadable():
    assert [path for version in RECORDED.values() for path in version["unreadable"]] == []


@pytest.mark.slow
def test_nemo_rls_recipes_have_the_recorded_findings():
    root = nemo_rl_root()
    if root is None or not (root / "examples" / "configs" / "recipes").is_dir():
        pytest.skip("needs a NeMo-RL checkout: NEMO_RL_ROOT")
    found = survey(root)
    recorded = next((version for version in RECORDED.values() if version["recipes"] == found["recipes"]), None)
    if recorded is None:
        pytest.skip("this checkout of NeMo-RL has other recipes than the recorded versions")
    assert found == recorded


@pytest.mark.slow
def test_hardly_a_number_in_nemo_rls_recipes_is_unlike_the_others():
    root = nemo_rl_root()
    if root is None or not (root / "examples" / "configs" / "recipes").is_dir():
        pytest.skip("needs a NeMo-RL checkout: NEMO_RL_ROOT")
    judged = unusual = 0
    for section, key in settings_in_recipes(root):
        numbers = numbers_in_recipes(root, section, key)
        for place, number in enumerate(numbers):
            others = numbers[:place] + numbers[place + 1 :]
            judged += len(others) >= 8
            unusual += is_unusual(number, others)
    if judged not in UNUSUAL:
        pytest.skip("this checkout of NeMo-RL has other recipes than the recorded versions")
    assert unusual == UNUSUAL[judged]


if __name__ == "__main__":
    checkout = nemo_rl_root()
    assert checkout is not None, "set NEMO_RL_ROOT"
    DATA.write_text(json.dumps({**RECORDED, sys.argv[1]: survey(checkout)}, indent=1) + "\n", encoding="utf-8")
