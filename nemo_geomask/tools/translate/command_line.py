"""Program and settings among the words of a command line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from nemo_geomask.tools.translate.setting_values import NUMBER, UNRESOLVED, parse_value
from nemo_geomask.tools.translate.shell_words import ScriptWord

__all__ = ["ARRAY", "program_and_arguments", "settings_of_words"]

ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
"""Word that stands for all items of an array."""
_OWN_ARGUMENTS = re.compile(r"\$\{?[@*]")
_ARGUMENT_NAMES = re.compile(r"ARG|FLAG|OPT|EXTRA", re.IGNORECASE)
_SETTING_NAME = re.compile(r"[\w./@-]+")


def program_and_arguments(words: Sequence[ScriptWord]) -> tuple[str, list[ScriptWord]]:
    """Return the innermost program of a command (of ``ray job submit -- python train.py``: train.py), and what follows.

    Options before the program belong to the launcher.
    """
    program, rest = "", list(words)
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        if (before == "-m" and re.fullmatch(r"[A-Za-z_][\w.]*", word)) or (
            word.endswith(".py") and not before.startswith("-") and "=" not in word
        ):
            program, rest = str(word), list(words[index + 1 :])
        elif index < 3 and before in ("", "run", "exec") and word in ("trl", "rl"):
            command = words[index + 1] if word == "trl" and index + 1 < len(words) else ""
            program, rest = f"{word} {command}".strip(), list(words[index + 1 + bool(command) :])
    return program, rest


def settings_of_words(words: Sequence[ScriptWord]) -> tuple[dict[str, Any], list[str], bool]:
    """Return the settings among the words of a command line, descriptions of unread words, and the use of ``$@``.

    These forms are read: ``--a-name value``, ``--a-name 0.2 0.3`` (a list), ``--a-switch``, ``--no-a-switch`` and
    ``a.name=value``.
    """
    settings: dict[str, Any] = {}
    unread: list[str] = []
    position, passes_arguments = 0, False
    while position < len(words):
        word = words[position]
        position += 1
        name, equals, value = word.lstrip("+-").partition("=")
        if word == "--":
            continue
        if word.startswith("--") and not equals:
            name = name.replace("-", "_")
            values = list(itertools.takewhile(_is_value, words[position:]))
            numbers = list(itertools.takewhile(NUMBER.fullmatch, values))
            if len(numbers) > 1:
                settings[name] = [float(number) for number in numbers]
            elif values:
                settings[name] = parse_value(values[0])
            else:
                settings[name.removeprefix("no_")] = not name.startswith("no_")
            position += max(len(numbers), min(len(values), 1))
        elif equals and _SETTING_NAME.fullmatch(name) and not name.startswith("/"):
            settings[name.replace("-", "_")] = parse_value(value)
        elif _OWN_ARGUMENTS.search(word):
            passes_arguments = True
        elif word == "@" and position < len(words):  # prime-rl's way to name a configuration file
            settings["@"] = str(words[position])
            position += 1
        elif word.startswith((UNRESOLVED, "~")):
            unread.append(str(word))
    return settings, unread, passes_arguments


def _is_value(word: ScriptWord) -> bool:
    """Return True unless the word is an option, or a variable whose name says that it holds options."""
    if word.startswith(UNRESOLVED):
        holds_options = not word.is_quoted and _ARGUMENT_NAMES.search(word)
        return not (ARRAY.fullmatch(word) or _OWN_ARGUMENTS.search(word) or holds_options)
    is_option = len(word) > 1 and word.startswith("-") and not word.is_quoted
    return not is_option or NUMBER.fullmatch(word) is not None
