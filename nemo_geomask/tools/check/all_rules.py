"""Table of all rules, and the function that applies them to a recipe."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.check import (
    backend_rules,
    batch_rules,
    bound_rules,
    cluster_rules,
    engine_rules,
    length_rules,
    logit_memory,
    logprob_rules,
    no_effect_rules,
    recipe_rules,
    reward_rules,
    sampling_rules,
    section_rules,
    shape_rules,
    startup_rules,
    type_rules,
    validation_rules,
    value_rules,
)
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Finding, Rule

__all__ = ["RULES", "Report", "check"]

_MODULES = (
    backend_rules,
    batch_rules,
    bound_rules,
    cluster_rules,
    engine_rules,
    length_rules,
    logit_memory,
    logprob_rules,
    no_effect_rules,
    recipe_rules,
    reward_rules,
    sampling_rules,
    section_rules,
    shape_rules,
    startup_rules,
    type_rules,
    validation_rules,
    value_rules,
)
RULES: tuple[Rule, ...] = tuple(
    sorted((rule for module in _MODULES for rule in module.RULES), key=lambda rule: rule.id)
)
"""All rules, by id."""
_BY_ID = {rule.id: rule for rule in RULES}

# "# nemo-geomask: ignore GM108, GM110 (reason)" in the recipe or a file that it inherits from. The name may be written
# with an underscore, and the colon left out before "ignore".
_COMMENT = re.compile(r"#\s*nemo[-_]geomask\s*(?::|(?=\signore\b))\s*(?P<verb>\S*)\s*(?P<ids>\w+(?:\s*,\s*\w+)*)?")

_SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Report:
    """Findings of the rules in a recipe.

    Attributes:
        findings: errors first, then warnings, then notes, each in the order of the rules.
        ignored: findings that ``--ignore`` or a comment silenced.
        unchecked: rules that could not be checked, each with the attribute of :class:`RecipeFacts` that is unknown.
    """

    findings: tuple[Finding, ...]
    ignored: tuple[Finding, ...] = ()
    unchecked: tuple[tuple[Rule, str], ...] = ()

    def count(self, severity: str) -> int:
        """Return the number of findings of one severity."""
        return sum(finding.rule.severity == severity for finding in self.findings)


def check(facts: RecipeFacts, *, ignore: Collection[str] = ()) -> Report:
    """Apply every rule to a recipe.

    Args:
        facts: facts about the recipe.
        ignore: ids of rules to silence, in addition to those in comments of the recipe's files.

    Raises:
        ConfigError: an id does not exist, or its rule can't be ignored.
    """
    ignored_ids = {_resolve_id(rule_id, "--ignore") for rule_id in ignore}
    for path, text in facts.recipe.files:
        ignored_ids |= _ids_in_comments(path, text)
    origins = facts.recipe.origins
    findings: list[Finding] = []
    unchecked: list[tuple[Rule, str]] = []
    for rule in RULES:
        if (rule.needs_loss and not facts.has_config) or (facts.is_lab and not rule.applies_to_lab):
            continue
        unknown = next((name for name in rule.needs if getattr(facts, name) is None), None)
        if unknown is None:
            findings += [
                Finding(rule, hit.key, hit.message, hit.origin or origins.at(hit.key))
                for hit in rule.check(facts)
                # GM001 reports an invalid setting; what the other rules make of its default would mislead.
                if not (rule.needs_loss and facts.is_unsettled(hit.key, hit.message))
            ]
        elif rule.id not in ignored_ids:
            unchecked.append((rule, unknown))
    findings.sort(key=lambda finding: _SEVERITIES.index(finding.rule.severity))
    return Report(
        tuple(finding for finding in findings if finding.rule.id not in ignored_ids),
        tuple(finding for finding in findings if finding.rule.id in ignored_ids),
        tuple(unchecked),
    )


def _ids_in_comments(path: Path, text: str) -> set[str]:
    """Return the ids of the rules that comments of a file silence."""
    ids: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _COMMENT.search(line):
            location = f"{path}:{number}: {match.group().strip()!r}"
            if match["verb"] != "ignore" or not match["ids"]:
                raise ConfigError(f"{location}: write '# nemo-geomask: ignore GM101, GM102'")
            ids |= {_resolve_id(rule_id, location) for rule_id in re.split(r"\s*,\s*", match["ids"])}
    return ids


def _resolve_id(rule_id: str, location: str) -> str:
    """Return the id in upper case; ``location`` is the option or comment that an error names."""
    name = rule_id.strip().upper()
    if name not in _BY_ID:
        # Many ids differ from one another by one digit, so the guess keeps the digits and corrects the letters only.
        guess = f"GM{re.sub('[^0-9]', '', name)}"
        hint = f"did you mean {guess}?" if guess in _BY_ID else "see nemo-geomask check --list-rules"
        raise ConfigError(f"{location}: there is no rule {rule_id}; {hint}")
    if not _BY_ID[name].may_be_ignored:
        raise ConfigError(f"{location}: {name} ({_BY_ID[name].title}) can't be ignored")
    return name
