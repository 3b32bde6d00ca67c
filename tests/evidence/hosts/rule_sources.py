"""Rules of check against NeMo-RL's source: ``python -m tests.evidence.hosts.rule_sources CHECKOUT …``.

For each rule that names words of NeMo-RL's source, say where each checkout has them. Where it has none of them, the
rule must be silent on its probes, those of ``tests/tools/check/rule_cases.py``; at least one checkout must have them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import yaml

from nemo_geomask.hosts.nemo_rl.installed_version import commit_of
from nemo_geomask.hosts.nemo_rl.source_words import source_texts
from nemo_geomask.recipe import ROOT_VARIABLE, read_recipe
from nemo_geomask.tools.check import RULES, RecipeFacts, Rule, check
from tests.helpers.markdown import markdown_table
from tests.tools.check.rule_cases import CASES, changed

_OWN_KEYS = ("reads", "gpu", "kl", "megatron", "classes", "inherited")  # of a case, which are no settings


def places(checkout: Path, text: str) -> list[str]:
    """Return file and line of each place of NeMo-RL's source that has a text."""
    found = []
    for path, source in source_texts(checkout).items():
        if (start := source.find(text)) >= 0:
            found.append(f"{path.relative_to(checkout)}:{source.count(chr(10), 0, start) + 1}")
    return found


def fires(rule: Rule, checkout: Path, folder: Path) -> bool:
    """Return True if the rule finds one of its probes on a checkout."""
    os.environ[ROOT_VARIABLE] = str(checkout)
    for probe, _ in CASES[rule.id]:
        path = folder / "recipe.yaml"
        settings = {key: value for key, value in probe.items() if key not in _OWN_KEYS}
        path.write_text(yaml.safe_dump(changed(settings)), encoding="utf-8")
        facts = RecipeFacts.from_recipe(read_recipe(path, leave=("data", "env", "logger")))
        if any(finding.rule is rule for finding in check(facts).findings):
            return True
    return False


def main(arguments: list[str]) -> int:
    """Print the table; return 1 if a rule speaks of a refusal that is gone, or if no checkout has one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path)
    checkouts = [path.resolve() for path in parser.parse_args(arguments).checkouts]
    rows, problems = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rule in RULES:
            cells = []
            for checkout in checkouts if rule.refusals else ():
                found = [place for text in rule.refusals for place in places(checkout, text)[:1]]
                is_silent = not fires(rule, checkout, Path(folder))
                cells.append(f"{found[0]} ({len(found)} of {len(rule.refusals)})" if found else "gone")
                if not found and not is_silent:
                    problems.append(f"{rule.id} fires on {checkout}, which has none of its refusals")
            for text in filter(None, rule.refusals):
                if not any(places(checkout, text) for checkout in checkouts):
                    problems.append(f"{rule.id}: no checkout has {text!r}")
            if cells:
                rows.append((rule.id, *cells))
    print(markdown_table(("rule", *(f"{path.name} {(commit_of(path) or '')[:9]}" for path in checkouts)), rows))
    print("\n".join(problems) or "every refusal is in a checkout, and no rule speaks of one that is gone")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
