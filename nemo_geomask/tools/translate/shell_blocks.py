"""Blocks of a shell script: loops, groups and the bodies of functions, each a part of the list of commands."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from nemo_geomask.tools.translate.shell_words import ScriptCommand, ScriptWord

# Keywords before a command, each with its change of the depth of branches.
KEYWORDS = {"if": 1, "fi": -1, "case": 1, "esac": -1, "for": 0, "select": 0, "while": 0, "until": 0, "do": 0}
KEYWORDS |= dict.fromkeys(("done", "then", "else", "elif", "{", "}", "!", "time"), 0)
KEYWORDS |= dict.fromkeys(("exec", "nohup", "sudo", "command", "builtin"), 0)
LOOPS = ("for", "select", "while", "until")


def leading_keywords(command: ScriptCommand) -> list[ScriptWord]:
    """Return the keywords before a command."""
    return list(itertools.takewhile(lambda word: word in KEYWORDS and not word.is_quoted, command.words))


def without_keyword(command: ScriptCommand, keyword: str) -> ScriptCommand:
    """Return the first command of a block without its keyword; of ``for NAME``, as one that sets the variable."""
    position = command.words.index(ScriptWord(keyword))
    before, words = command.words[:position], command.words[position + 1 :]
    if keyword in ("for", "select") and words[:1] != ["let"]:
        words = [ScriptWord("read"), *words[:1]]
    return replace(command, words=[*before, *words])


def function_name(commands: Sequence[ScriptCommand]) -> str:
    """Return the name of the function that the first of the commands defines, or an empty text."""
    words = [word for command in commands for word in command.words]
    if words[:1] == ["function"] and len(words) > 1:
        return str(words[1])
    is_definition = [(len(command.words), command.bracket) for command in commands[:2]] == [(1, "("), (0, ")")]
    return str(words[0]) if is_definition else ""


def end_of_block(commands: Sequence[ScriptCommand], start: int, openings: Sequence[str], closing: str) -> int:
    """Return the position after the command that closes the first block from ``start`` on."""
    depth, was_open = 0, False
    for position in range(start, len(commands)):
        words = commands[position].words
        for word in itertools.takewhile(KEYWORDS.__contains__, words[2 * (words[:1] == ["function"]) :]):
            depth += (word in openings) - (word == closing)
            was_open = was_open or word in openings
        if was_open and depth <= 0:
            return position + 1
    return len(commands)


def function_body(commands: Sequence[ScriptCommand]) -> list[ScriptCommand]:
    """Return the commands of a function, without its name and braces."""
    first = next(position for position, command in enumerate(commands) if "{" in command.words)
    words = commands[first].words
    return [replace(commands[first], words=words[words.index(ScriptWord("{")) + 1 :]), *commands[first + 1 : -1]]
