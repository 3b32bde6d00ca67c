"""Check of many recipes at once: which files are recipes, and a report that says once what applies to many of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_geomask.errors import ConfigError, GeomaskError, InputLimitError
from nemo_geomask.recipe.input_limits import read_text
from nemo_geomask.tools.check.check_output import finding_lines, join_sections
from nemo_geomask.tools.check.recipe_check import SEVERITIES, CheckedRecipe, CheckOptions, check_recipe
from nemo_geomask.tools.check.rule import Finding
from nemo_geomask.tools.shared.progress_bar import track
from nemo_geomask.tools.shared.terminal_tables import count_with_noun
from nemo_geomask.tools.shared.terminal_text import escape_line

_RECIPE_SECTION = re.compile(
    r"^(defaults|policy|loss_fn|grpo|ppo|async_rl|sft|dpo|rm|distillation|eval|lab):", re.MULTILINE
)
# A warning that more recipes share is printed once, at the end. Notes are always printed there.
_MAX_RECIPES_IN_DETAIL = 3
_MAX_EXAMPLES = 3  # recipes that the text at the end names for each rule


@dataclass(frozen=True)
class BulkCheck:
    """Result of a check of several recipes."""

    checked: tuple[CheckedRecipe, ...]  # results of the recipes that could be read
    unreadable: tuple[tuple[str, GeomaskError], ...]  # the other recipes, each with what is wrong with it
    skipped: int  # number of YAML files in the given folders that are no recipes

    def count(self, severity: str) -> int:
        """Return the number of findings of one severity; a recipe that can't be read counts its problems as errors."""
        unread = sum(len(error.problems) for _, error in self.unreadable) if severity == "error" else 0
        return unread + sum(checked.report.count(severity) for checked in self.checked)


def check_many(paths: Sequence[str], options: CheckOptions) -> BulkCheck:
    """Check files, and all recipes below folders, except those of virtual environments and in hidden folders.

    Args:
        paths: recipes and folders.
        options: options of every check; ``recipe`` is replaced.

    Raises:
        ConfigError: a folder has no recipe, or an option other than an override is invalid.
    """
    recipes: list[str] = []
    skipped = 0
    for path in paths:
        if not os.path.isdir(path):
            recipes.append(path)
            continue
        files = _yaml_files(Path(path))
        recipe_files = [file for file in files if _is_recipe(file)]
        if not recipe_files:
            raise ConfigError(f"{path}: there is no recipe in this folder; name a folder with YAML files of NeMo-RL")
        recipes += [os.fspath(file) for file in recipe_files]
        skipped += len(files) - len(recipe_files)
    checked: list[CheckedRecipe] = []
    unreadable: list[tuple[str, GeomaskError]] = []
    unique = list(dict.fromkeys(recipes))
    for recipe in track(unique, len(unique), "checking recipes"):
        try:
            checked.append(check_recipe(replace(options, recipe=recipe)))
        except GeomaskError as error:
            unreadable.append((recipe, error))
    return BulkCheck(tuple(checked), tuple(unreadable), skipped)


def _yaml_files(folder: Path) -> list[Path]:
    """Return the YAML files at and below a folder, except those of virtual environments and in hidden folders."""
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        is_environment = "pyvenv.cfg" in names
        folders[:] = [] if is_environment else [name for name in folders if not name.startswith(".")]
        files += [Path(place, name) for name in names if name.endswith((".yaml", ".yml")) and not is_environment]
    return sorted(files)


def _is_recipe(file: Path) -> bool:
    """Return True for a file with a section of a recipe, and for one that can't be read, which check then reports."""
    try:
        return _RECIPE_SECTION.search(read_text(file)) is not None
    except IsADirectoryError:
        return False
    except (InputLimitError, OSError):
        return True
    except UnicodeDecodeError:
        return False


def bulk_as_text(bulk: BulkCheck) -> str:
    """Return the result as text: findings of each recipe, findings that many recipes share, then the counts."""
    recipes_by_rule: dict[str, set[str]] = {}
    for checked in bulk.checked:
        for finding in checked.report.findings:
            recipes_by_rule.setdefault(finding.rule.id, set()).add(str(checked.facts.recipe.path))

    def is_general(finding: Finding) -> bool:
        is_common = len(recipes_by_rule[finding.rule.id]) > _MAX_RECIPES_IN_DETAIL
        return finding.rule.severity == "note" or (finding.rule.severity == "warning" and is_common)

    sections = [[escape_line(f"{path}: can't be checked"), f"  {error}"] for path, error in bulk.unreadable]
    for checked in bulk.checked:
        detailed = [finding for finding in checked.report.findings if not is_general(finding)]
        if detailed:
            lines = [line for finding in detailed for line in finding_lines(finding)]
            sections.append([escape_line(f"{checked.facts.recipe.path}"), *(f"  {line}" for line in lines)])
    general = [finding for checked in bulk.checked for finding in checked.report.findings if is_general(finding)]
    sections += _general_sections(general, recipes_by_rule)
    total = count_with_noun(len(bulk.checked) + len(bulk.unreadable), "recipe")
    counts = ", ".join(count_with_noun(bulk.count(severity), severity) for severity in SEVERITIES)
    skipped = f"; {count_with_noun(bulk.skipped, 'YAML file')} without a section of a recipe left out"
    sections.append([f"{total}: {counts}{skipped if bulk.skipped else ''}"])
    return join_sections(sections)


def _general_sections(findings: Sequence[Finding], recipes_by_rule: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield, for each rule, how many recipes it applies to, and the message for the first of them."""
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.rule.id, finding)
    for rule_id, finding in sorted(first.items()):
        recipes = sorted(recipes_by_rule[rule_id])
        rest = f" and {len(recipes) - _MAX_EXAMPLES} more" if len(recipes) > _MAX_EXAMPLES else ""
        yield [
            f"{finding.rule.severity} {rule_id} in {count_with_noun(len(recipes), 'recipe')}: {finding.rule.title}",
            escape_line(f"  {', '.join(recipes[:_MAX_EXAMPLES])}{rest}"),
            f"  the first, {finding.key}: {finding.message}",
            f"  source: {finding.rule.source}",
        ]
