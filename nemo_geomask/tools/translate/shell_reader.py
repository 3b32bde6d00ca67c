"""Reader of shell scripts: which programs a script runs, and the settings on their command lines.

Nothing is executed. Variables, arrays, defaults (``${A:-1}``) and integer arithmetic are resolved as far as the script
determines them. A variable whose value depends on a branch stays unresolved, as does one of the environment.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_geomask.tools.translate.setting_values import NUMBER, UNRESOLVED, parse_value
from nemo_geomask.tools.translate.shell_words import ScriptCommand, ScriptWord, split_commands

__all__ = ["ProgramRun", "line_settings", "program_runs"]


@dataclass(frozen=True)
class ProgramRun:
    """A program that a script runs, and the settings on its command line.

    Attributes:
        program: module or file; empty for a command that names neither.
        settings: settings by name; the last of several with one name wins.
        unread: descriptions of words that may contain more settings, such as a variable of the environment.
        passes_arguments: True if the script passes on its own arguments.
        is_from_docstring: True for a command in the docstring of a Python file.
    """

    program: str
    settings: dict[str, Any]
    unread: tuple[str, ...] = ()
    passes_arguments: bool = False
    is_from_docstring: bool = False

    def with_settings(self, settings: dict[str, Any]) -> ProgramRun:
        """Return the same run with other settings."""
        return replace(self, settings=settings)


_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-=])((?:[^${}]|\$\{\w+\}|\$\w+)*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)", re.DOTALL)
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_OWN_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*][^}]*\}")
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_SUBSTITUTION_DEPTH = 6
"""Number of passes over a word, for variables whose values contain variables."""
_DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")
_ARGUMENT_NAMES = re.compile(r"ARG|FLAG|OPT|EXTRA", re.IGNORECASE)
_SETTING_NAME = re.compile(r"[\w./@-]+")


def program_runs(text: str, folder: Path | None = None) -> list[ProgramRun]:
    """Return the commands of a script that have settings or a program, in order.

    Args:
        text: the script.
        folder: folder of the script, for files that it sources.
    """
    script = _Script(folder)
    script.run(text)
    script.add_unused_arrays()
    return script.runs


def line_settings(text: str) -> dict[str, Any]:
    """Return all settings in a script or on a command line, whatever program they belong to."""
    return {name: value for run in program_runs(text) for name, value in run.settings.items()}


class _Script:
    """Variables of a script and the runs of its programs, as far as the script has been read."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.variables: dict[str, str | list[ScriptWord]] = {}
        self.ambiguous: set[str] = set()
        self.branch_depth = 0
        self.runs: list[ProgramRun] = []
        self.unread: list[str] = []
        self.used_arrays: set[str] = set()

    def add_unused_arrays(self) -> None:
        """Add a run for each unused array, which a script that sources this one may use."""
        for name, items in self.variables.items():
            if isinstance(items, list) and name not in self.used_arrays:
                self._add_run(items)

    def run(self, text: str) -> None:
        for command in split_commands(text):
            self._run_command(command)

    def _run_command(self, command: ScriptCommand) -> None:
        words = command.words
        while words and words[0] in _KEYWORDS and not words[0].is_quoted:
            self.branch_depth = max(0, self.branch_depth + _KEYWORDS[words[0]])
            words = words[1:]
        is_conditional = bool(self.branch_depth) or command.follows_condition
        if words and words[0] in _DECLARATIONS:
            words = [word for word in words[1:] if not word.startswith("-")]
        for name, items in command.arrays.items():
            self._assign_array(name, items, is_conditional)
        for position, word in enumerate(words):
            match = _ASSIGNMENT.fullmatch(word)
            if match is None or "." in match[1]:
                words = words[position:]
                break
            self._assign(match[1], self._substitute(match[3]), is_conditional, is_append=bool(match[2]))
        else:
            words = []
        if words and words[0] in ("source", ".") and len(words) > 1:
            self._source(words[1])
        elif words:
            self._add_run(self._expanded(words))

    def _assign_array(self, name: str, items: list[ScriptWord], is_conditional: bool) -> None:
        is_append, name = name.endswith("+="), name.rstrip("+=")
        if is_append and is_conditional:
            shown = " ".join(items)
            items = [ScriptWord(f"{UNRESOLVED}{{{name}: only some branches add '{shown}'}}")]
        expanded = self._expanded(items)
        before = self.variables.get(name, [])
        if is_append:
            self.variables[name] = [*(before if isinstance(before, list) else [ScriptWord(before)]), *expanded]
        elif is_conditional and before != expanded:
            shown = " ".join([*(before if isinstance(before, list) else []), *expanded])
            self._set(name, [ScriptWord(f"{UNRESOLVED}{{{name}: only some branches add '{shown}'}}")])
        else:
            self._set(name, expanded)

    def _assign(self, name: str, value: str, is_conditional: bool, is_append: bool) -> None:
        before = self.variables.get(name)
        if is_append and is_conditional:
            value = f"{UNRESOLVED}{{{name}: only some branches add '{value}'}}"
        if is_append:
            self.variables[name] = f"{before or ''}{value}" if not isinstance(before, list) else before
        elif is_conditional and before != value:
            self._mark_ambiguous(name)
        else:
            self._set(name, value)

    def _set(self, name: str, value: str | list[ScriptWord]) -> None:
        self.variables[name] = value
        self.ambiguous.discard(name)

    def _mark_ambiguous(self, name: str) -> None:
        self.variables.pop(name, None)
        self.ambiguous.add(name)

    def _source(self, word: str) -> None:
        """Read a file that the script sources, if it lies where the script says, relative to the script's folder."""
        tail = re.sub(r"^\$\{?\w+\}?/", "", word)
        if self.folder is not None and UNRESOLVED not in tail and not tail.startswith("/"):
            path = self.folder / tail
            if path.is_file():
                self.run(path.read_text(encoding="utf-8"))
                return
        self.unread.append(f"source {word}")

    def _substitute(self, word: str) -> str:
        for _ in range(_SUBSTITUTION_DEPTH):
            before = word
            word = _ARITHMETIC.sub(self._arithmetic, _VARIABLE.sub(self._value, word))
            if word == before:
                break
        return word

    def _value(self, match: re.Match[str]) -> str:
        braced, operation, default, plain = match.groups()
        name = braced or plain
        value = self.variables.get(name)
        if isinstance(value, str):
            return value
        if default is None or name in self.ambiguous:
            return match[0]
        if operation == "=":
            self.variables[name] = default
        return default

    def _arithmetic(self, match: re.Match[str]) -> str:
        expression = re.sub(r"\b[A-Za-z_]\w*\b", self._number_of, match[1])
        try:
            return str(_integer(ast.parse(expression.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]

    def _number_of(self, match: re.Match[str]) -> str:
        value = self.variables.get(match[0], match[0])
        return value if isinstance(value, str) else match[0]

    def _expanded(self, words: Sequence[ScriptWord]) -> list[ScriptWord]:
        expanded: list[ScriptWord] = []
        for word in words:
            array = _ARRAY.fullmatch(word)
            plain = re.fullmatch(r"\$\{?(\w+)\}?", word)
            items = self.variables.get(array[1]) if array else self.variables.get(plain[1]) if plain else None
            if isinstance(items, list):
                expanded += items
                self.used_arrays.add((array or plain)[1])  # type: ignore[index]
                continue
            if array and isinstance(items, str):
                word = ScriptWord(f"${array[1]}")
            text = self._substitute(word)
            is_split = (plain or array) and not word.is_quoted and text != word and not text.startswith(UNRESOLVED)
            expanded += self._expanded_text(text) if is_split else [_script_word(text, word.is_quoted)]
        return expanded

    def _expanded_text(self, text: str) -> list[ScriptWord]:
        try:
            return [word for command in split_commands(text.replace("\n", " ")) for word in command.words]
        except ValueError:
            return [ScriptWord(text)]

    def _add_run(self, words: list[ScriptWord]) -> None:
        program, rest = _program_and_arguments(words)
        settings, unread, passes_arguments = _settings_of_words(rest if program else words)
        if not (program or settings):
            return
        # ${NAME} is a variable of the environment here, and not a reference to the setting NAME.
        settings = {
            name: re.sub(r"\$\{(\w+)\}", r"$\1", value) if isinstance(value, str) else value
            for name, value in settings.items()
        }
        self.runs.append(ProgramRun(program, settings, (*self.unread, *unread), passes_arguments))


# Keywords before a command, each with its change of the depth of branches.
_KEYWORDS = {"if": 1, "fi": -1, "case": 1, "esac": -1, "for": 0, "while": 0, "until": 0, "do": 0, "done": 0}
_KEYWORDS |= dict.fromkeys(("then", "else", "elif", "{", "}", "!", "time", "exec", "nohup", "sudo", "eval"), 0)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def _integer(node: ast.expr) -> int:
    """Return the value of an arithmetic expression of integers, with the shell's division."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_integer(node.operand)
    raise ValueError("not an arithmetic expression of integers")


def _script_word(text: str, is_quoted: bool) -> ScriptWord:
    """Return the text as a word that is marked as quoted or not."""
    word = ScriptWord(text)
    word.is_quoted = is_quoted
    return word


def _program_and_arguments(words: Sequence[ScriptWord]) -> tuple[str, list[ScriptWord]]:
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


def _settings_of_words(words: Sequence[ScriptWord]) -> tuple[dict[str, Any], list[str], bool]:
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
        return not (_ARRAY.fullmatch(word) or _OWN_ARGUMENTS.search(word) or holds_options)
    is_option = len(word) > 1 and word.startswith("-") and not word.is_quoted
    return not is_option or NUMBER.fullmatch(word) is not None
