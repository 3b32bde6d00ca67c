"""All rules, and what they find in a recipe."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from nemo_geomask.checks import cluster, engines, gates, general, idle, lengths, memory, sampling, sections
from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.checks.rule import Finding, Rule
from nemo_geomask.errors import ConfigError

__all__ = ["RULES", "Report", "check"]

RULES: tuple[Rule, ...] = (
    *general.RULES,
    *sections.RULES,
    *sampling.RULES,
    *engines.RULES,
    *idle.RULES,
    *gates.RULES,
    *cluster.RULES,
    *lengths.RULES,
    *memory.RULES,
)
_BY_ID = {rule.id: rule for rule in RULES}

# In any file of the chain: "# nemo-geomask: ignore GM108, GM110" and whatever may follow; also by the package's name.
_COMMENT = re.compile(r"#\s*nemo[-_]geomask\s*(?::|(?=\signore\b))\s*(?P<verb>\S*)\s*(?P<ids>\w+(?:\s*,\s*\w+)*)?")


@dataclass(frozen=True)
class Report:
    """What the rules found.

    Attributes:
        findings: errors first, each kind in the order of the rules.
        ignored: those that ``--ignore`` or a comment silenced.
        unjudged: rules that could not be judged, with what is not known.
    """

    findings: tuple[Finding, ...]
    ignored: tuple[Finding, ...] = ()
    unjudged: tuple[tuple[Rule, str], ...] = ()

    def count(self, severity: str) -> int:
        """Findings of one severity."""
        return sum(finding.rule.severity == severity for finding in self.findings)


def check(facts: RecipeFacts, *, ignore: Collection[str] = ()) -> Report:
    """Apply every rule.

    Args:
        facts: the recipe.
        ignore: ids of rules to silence, besides those in comments of the recipe's files.

    Raises:
        ConfigError: an id is not known, or can't be ignored.
    """
    silent = {_known(rule, "--ignore") for rule in ignore}
    for path, text in facts.recipe.files:
        silent |= _commented(path, text)
    found: list[Finding] = []
    unjudged: list[tuple[Rule, str]] = []
    for rule in RULES:
        if rule.needs_loss and facts.loss is None:
            continue
        missing = [name for name in rule.needs if getattr(facts, name) is None]
        if missing:
            unjudged.append((rule, missing[0]))
            continue
        origins = facts.recipe.origins
        found += [Finding(rule, hit.key, hit.message, hit.origin or origins.at(hit.key)) for hit in rule.check(facts)]
    order = ("error", "warning", "note")
    found.sort(key=lambda finding: order.index(finding.rule.severity))
    return Report(
        tuple(finding for finding in found if finding.rule.id not in silent),
        tuple(finding for finding in found if finding.rule.id in silent),
        tuple((rule, name) for rule, name in unjudged if rule.id not in silent),
    )


def _commented(path: Path, text: str) -> set[str]:
    silent: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _COMMENT.search(line):
            where = f"{path}:{number}: {match.group().strip()!r}"
            if match["verb"] != "ignore" or not match["ids"]:
                raise ConfigError(f"{where}: write '# nemo-geomask: ignore GM101, GM102'")
            silent |= {_known(rule, where) for rule in re.split(r"\s*,\s*", match["ids"])}
    return silent


def _known(rule: str, where: str) -> str:
    name = rule.strip().upper()
    if name not in _BY_ID:
        # Ids are not like each other: only one with another spelling of the letters is meant.
        guess = f"GM{re.sub('[^0-9]', '', name)}"
        hint = f"did you mean {guess}?" if guess in _BY_ID else "see nemo-geomask check --list-rules"
        raise ConfigError(f"{where}: there is no rule {rule}; {hint}")
    if not _BY_ID[name].may_be_ignored:
        raise ConfigError(f"{where}: {name} ({_BY_ID[name].title}) can't be ignored")
    return name
