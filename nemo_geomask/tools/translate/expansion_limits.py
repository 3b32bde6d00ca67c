"""Limits of what a script or a file with settings expands to."""

from __future__ import annotations

from nemo_geomask.errors import InputLimitError
from nemo_geomask.recipe.input_limits import current_limits, limit_error

__all__ = ["ExpansionBudget", "check_code"]


class ExpansionBudget:
    """Count of what a file expands to, which raises InputLimitError as soon as a limit of input is exceeded.

    Args:
        source: the file, for errors.
    """

    def __init__(self, source: object) -> None:
        self.source = source
        self.limits = current_limits()
        self._characters = self._words = self._files = self._items = 0

    def add_characters(self, count: int) -> None:
        """Count characters that a variable stands for, or those of a setting's full name."""
        self._characters += count
        if self._characters > self.limits.total_characters:
            raise self._error("total_characters", "variables or full names of settings have more than {} characters")

    def add_words(self, count: int) -> None:
        """Count words of commands, those that variables stand for included."""
        self._words += count
        if self._words > self.limits.nodes:
            raise self._error("nodes", "there are more than {} words, each variable replaced")

    def add_items(self, count: int) -> None:
        """Count items of values; of text that is read as YAML, its commas and line breaks."""
        self._items += count
        if self._items > self.limits.nodes:
            raise self._error("nodes", "the values of settings hold more than {} items")

    def add_file(self) -> None:
        """Count a sourced file."""
        self._files += 1
        if self._files > self.limits.files:
            raise self._error("files", "more than {} files are sourced")

    def _error(self, name: str, excess: str) -> InputLimitError:
        return InputLimitError(
            f"{self.source}: {excess.format(f'{getattr(self.limits, name):,}')}, which is over the limit {name}; if "
            f"the file is right, raise it with --limit {name}=NUMBER"
        )


def check_code(text: str, source: object) -> str:
    """Return the text of a program or script; raise InputLimitError if it is longer than ``string_characters``."""
    limits = current_limits()
    if len(text) > limits.string_characters:
        raise limit_error("string_characters", source, limits, len(text))
    return text
