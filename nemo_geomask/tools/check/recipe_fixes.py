"""Fixes of findings, written into the user's file: ``check --diff`` and ``check --fix``."""

from __future__ import annotations

import difflib
import os
from typing import NamedTuple

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe import Recipe
from nemo_geomask.recipe.input_limits import read_text
from nemo_geomask.recipe.yaml_edit import rename_in_text, set_in_text
from nemo_geomask.tools.check.rule import Finding
from nemo_geomask.tools.shared.atomic_write import write_atomically
from nemo_geomask.yaml_text import inline_yaml


class FixedRecipe(NamedTuple):
    """Text of a recipe's own file with the fixes of its findings.

    Attributes:
        refused: what could not be applied, each with the reason.
    """

    before: str
    after: str
    applied: tuple[Finding, ...]
    refused: tuple[str, ...]

    def diff(self, path: object) -> str:
        """Return the change as a patch; empty if there is none."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, f"{path}", f"{path}"))


def fix_recipe(recipe: Recipe, findings: tuple[Finding, ...]) -> FixedRecipe:
    """Apply the fixes of errors and warnings to the text of a recipe's own file; inherited settings are set there.

    A fix is left out if another one has set the same key to another value, or an override on the command line sets it.
    """
    before = after = recipe.files[-1][1]
    applied: list[Finding] = []
    refused: list[str] = []
    values: dict[str, object] = {}
    for finding in findings:
        if not finding.fix or finding.rule.severity == "note":
            continue
        edited = after
        try:
            for key, value in finding.fix.items():
                entry = recipe.origins.entries.get(key)
                if entry is not None and entry.origin.line is None:
                    raise ConfigError(f"{key}: change the {entry.origin}, which the file can't")
                if values.get(key, value) != value:
                    raise ConfigError(f"{key}: another finding has set {inline_yaml(values[key])}; check again")
                if finding.is_misspelt:
                    edited = rename_in_text(edited, finding.key, key.rpartition(".")[2])
                else:
                    edited = set_in_text(edited, key, value, inline_yaml(value))
        except ConfigError as error:
            refused.append(f"{finding.rule.id} {error}")
            continue
        after = edited
        values.update(finding.fix)
        applied.append(finding)
    return FixedRecipe(before, after, tuple(applied), tuple(refused))


def write_fixes(recipe: Recipe, fixed: FixedRecipe) -> None:
    """Write the fixed text into the recipe's own file.

    Raises: ConfigError: the file is a link, has changed since it was read, or can't be written.
    """
    path = recipe.path
    try:
        if path.is_symlink():
            raise ConfigError(f"{path}: is a link, and --fix writes through none; name the file itself")
        content, mode = path.read_bytes(), path.stat().st_mode
        if read_text(path) != fixed.before:
            raise ConfigError(f"{path}: has changed since it was read; check it again")
        write_atomically(path, fixed.after.replace("\n", "\r\n") if b"\r\n" in content else fixed.after)
        os.chmod(path, mode)
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror or error}") from None
