"""Words and commands of a shell script, and the program and settings among the words of a command.

Quotes, comments, redirections and here-documents are resolved.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_geomask.tools.translate.setting_values import NUMBER, UNRESOLVED, parse_value

LITERAL_DOLLAR = "\ue000"
"""Stands for a dollar that the shell does not expand: in single quotes, or after a backslash."""


class ScriptWord(str):
    """A word of the script; expansions of a quoted one are not split."""

    is_quoted = False  # True if it begins with a quote
    has_quotes = False


def script_word(text: str, is_quoted: bool) -> ScriptWord:
    """Return the text as a word that is marked as quoted or not."""
    word = ScriptWord(text)
    word.is_quoted = is_quoted
    return word


@dataclass
class ScriptCommand:
    """A simple command: its words, and the arrays that it assigns."""

    words: list[ScriptWord] = field(default_factory=list)
    arrays: dict[str, list[ScriptWord]] = field(default_factory=dict)
    is_conditional: bool = False  # the command stands after && or ||, or in a pipeline or the background
    bracket: str = ""  # the bracket of a subshell that ends the command
    line: int = 1


class ScriptScanner:
    """Scanner that reads a script from left to right; ``at`` is the position of the next character."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def commands(self) -> Iterator[ScriptCommand]:
        """Yield the simple commands of the script, without comments, redirections and here-documents.

        Raises: ValueError: a quote or a bracket is not closed.
        """
        command, heredocs, is_redirection = ScriptCommand(), list[str](), False
        line, counted = 1, 0
        for token in self._tokens():
            if isinstance(token, ScriptWord):
                if is_redirection:
                    is_redirection = False
                elif token == "&&" or token == "||":  # escaped, so that a shell on another machine gets it
                    yield command
                    command = ScriptCommand(line=line)
                else:
                    command.words.append(token)
            elif token.startswith("<<") and token != "<<<":
                heredocs.append(token[2:])
            elif token == "=(":
                words = list(itertools.takewhile(lambda item: item != ")", self._tokens(in_array=True)))
                name = str(command.words.pop())
                command.arrays[name] = [word for word in words if isinstance(word, ScriptWord)]
            elif token[0] in "<>":
                is_redirection = not token.endswith("&")
            else:
                command.bracket = token if token in "()" else ""
                command.is_conditional |= token in ("|", "&")
                yield command
                line, counted = line + self.text.count("\n", counted, self.at), self.at
                command = ScriptCommand(is_conditional=token in ("&&", "||", "|"), line=line)
                if token == "\n" and heredocs:
                    self._skip_heredocs(heredocs)
                    heredocs = []
        yield command

    def _tokens(self, in_array: bool = False) -> Iterator[str]:
        """Yield words, and operators as plain strings."""
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            if text.startswith("\\\n", self.at) or char in " \t\r" or (char == "\n" and in_array):
                self.at += 2 if char == "\\" else 1
            elif char == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif arithmetic := re.compile(r"\(\(((?:[^()]|\([^()]*+\))*+)\)\)").match(text, self.at):
                self.at = arithmetic.end()
                yield ScriptWord("let")
                yield ScriptWord(arithmetic[1])
            elif heredoc := re.compile(r"<<-?\s*[\"']?(\w+)[\"']?").match(text, self.at):
                self.at = heredoc.end()
                yield "<<" + heredoc[1]
            elif match := re.compile(r"\d?>>?&?\d?|<<?<?|&>>?|&&|\|\||;;|[;&|()\n]").match(text, self.at):
                self.at = match.end()
                if re.fullmatch(r"\d?>&\d", match[0]):
                    continue
                yield match[0]
                if in_array and match[0] == ")":
                    return
            else:
                word = self._word()
                if word.endswith("=") and text.startswith("(", self.at) and re.fullmatch(r"\w+\+?=", word):
                    self.at += 1
                    yield word
                    yield "=("
                else:
                    yield word

    def _word(self) -> ScriptWord:
        text, start, parts, is_quoted = self.text, self.at, list[str](), self.text[self.at] in "\"'"
        while self.at < len(text) and text[self.at] not in " \t\r\n;&|()<>":
            char = text[self.at]
            if char == "'":
                end = self._find("'", self.at + 1)
                parts.append(text[self.at + 1 : end].replace("$", LITERAL_DOLLAR))
                self.at = end + 1
            elif char == '"':
                parts.append(self._quoted())
            elif char == "\\":
                if text.startswith("\\\n", self.at):
                    break
                parts.append(text[self.at + 1 : self.at + 2].replace("$", LITERAL_DOLLAR))
                self.at += 2
            elif char in "$`":
                parts.append(self._expansion())
            else:
                parts.append(char)
                self.at += 1
        word = script_word("".join(parts), is_quoted)
        word.has_quotes = '"' in text[start : self.at]
        return word

    def _quoted(self) -> str:
        parts, text = list[str](), self.text
        self.at += 1
        while text[self.at : self.at + 1] != '"':
            char = text[self.at : self.at + 1]
            if not char:
                raise ValueError("a double quote is not closed")
            if char == "\\" and text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                parts.append(text[self.at + 1 : self.at + 2].replace("\n", "").replace("$", LITERAL_DOLLAR))
                self.at += 2
            elif char in "$`":
                parts.append(self._expansion())
            else:
                parts.append(char)
                self.at += 1
        self.at += 1
        return "".join(parts)

    def _expansion(self) -> str:
        """Return ``$…`` or a command substitution as it is written."""
        text, start = self.text, self.at
        if text[start] == "`":
            self.at = self._find("`", start + 1) + 1
            return UNRESOLVED + text[start : self.at]
        for opening, closing in (("$(", ")"), ("${", "}")):
            if text.startswith(opening, start):
                self.at, depth = start + 2, 1
                while depth:
                    char = text[self.at : self.at + 1]
                    if not char:
                        raise ValueError(f"'{opening}' is not closed")
                    if char in "\"'" and opening == "$(":
                        self.at = self._find(char, self.at + 1)
                    depth += (char == opening[1]) - (char == closing)
                    self.at += 1
                return text[start : self.at].replace('"', "") if opening == "${" else text[start : self.at]
        match = re.compile(r"\$(\w+|[@*#?!$-])?").match(text, start)
        assert match is not None
        self.at = match.end()
        return match[0]

    def _find(self, char: str, start: int) -> int:
        end = self.text.find(char, start)
        if end < 0:
            raise ValueError(f"a quote {char} is not closed")
        return end

    def _skip_heredocs(self, delimiters: Sequence[str]) -> None:
        for delimiter in delimiters:
            match = re.compile(rf"^[ \t]*{re.escape(delimiter)}[ \t]*$", re.MULTILINE).search(self.text, self.at)
            self.at = len(self.text) if match is None else match.end()


ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
"""Word that stands for all items of an array."""
OWN_ARGUMENTS = re.compile(r"\$\{?[@*]")
_ARGUMENT_NAMES = re.compile(r"ARG|FLAG|OPT|EXTRA", re.IGNORECASE)
_SETTING_NAME = re.compile(r"[\w./@-]+")


def program_and_arguments(words: Sequence[ScriptWord]) -> tuple[str, list[ScriptWord]]:
    """Return the innermost program of a command (of ``ray job submit -- python train.py``: train.py), and what follows.

    Options before the program belong to the launcher. Another script is a program, too: ``bash train.sh``.
    """
    program, rest = "", list(words)
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        if (before == "-m" and re.fullmatch(r"[A-Za-z_][\w.]*", word)) or (
            word.endswith((".py", ".sh")) and not before.startswith("-") and "=" not in word
        ):
            program, rest = str(word), list(words[index + 1 :])
        elif index < 3 and before in ("", "run", "exec") and word in ("trl", "rl", "swift", "megatron"):
            command = words[index + 1] if word != "rl" and index + 1 < len(words) else ""
            program, rest = f"{word} {command}".strip(), list(words[index + 1 + bool(command) :])
    return program, rest


def settings_of_words(words: Sequence[ScriptWord]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings among the words of a command line, and the words that may hold others.

    These forms are read: ``--a-name value``, ``--a-name 0.2 0.3`` (a list), ``--a-switch``, ``--no-a-switch`` and
    ``a.name=value``.
    """
    settings: dict[str, Any] = {}
    unread: list[str] = []
    position = 0
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
        elif word == "@" and position < len(words):  # prime-rl's way to name a configuration file
            settings["@"] = str(words[position])
            position += 1
        elif word.startswith("~") or ((equals or UNRESOLVED in word) and not OWN_ARGUMENTS.match(word)):
            unread.append(str(word))  # what the script's own arguments add is not the script's
    return settings, unread


def _is_value(word: ScriptWord) -> bool:
    """Return True unless the word is an option, or a variable whose name says that it holds options."""
    if word.startswith(UNRESOLVED):
        holds_options = not word.is_quoted and _ARGUMENT_NAMES.search(word)
        return not (ARRAY.fullmatch(word) or OWN_ARGUMENTS.search(word) or holds_options)
    is_option = len(word) > 1 and word.startswith("-") and not word.is_quoted
    return not is_option or NUMBER.fullmatch(word) is not None
