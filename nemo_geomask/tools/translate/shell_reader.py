"""Reader of shell scripts: which programs a script runs, and the settings on their command lines.

Nothing is executed. Variables, arrays, defaults (``${A:-1}``) and integer arithmetic are resolved as far as the script
determines them. A variable whose value depends on a branch stays unresolved, as does one of the environment.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_geomask.errors import InputLimitError
from nemo_geomask.recipe.input_limits import read_text
from nemo_geomask.tools.translate.setting_values import UNRESOLVED, ExpansionBudget, check_code
from nemo_geomask.tools.translate.shell_arithmetic import evaluate_arithmetic
from nemo_geomask.tools.translate.shell_words import (
    ARRAY,
    LITERAL_DOLLAR,
    ScriptCommand,
    ScriptScanner,
    ScriptWord,
    program_and_arguments,
    settings_of_words,
    split_commands,
)


@dataclass(frozen=True)
class ProgramRun:
    """A program that a script runs, and the settings on its command line.

    Attributes:
        unread: descriptions of words that may contain more settings, such as a variable of the environment.
    """

    program: str  # module or file; empty for a command that names neither
    settings: dict[str, Any]  # settings by name; the last of several with one name wins
    unread: tuple[str, ...] = ()
    passes_arguments: bool = False  # True if the script passes on its own arguments
    is_from_docstring: bool = False  # True for a command in the docstring of a Python file

    def with_settings(self, settings: dict[str, Any]) -> ProgramRun:
        """Return the same run with other settings."""
        return replace(self, settings=settings)


# Possessive quantifiers keep the time of these patterns linear in the length of a word.
_VARIABLE = re.compile(r"\$\{(\w++)(?::?([-=])((?:[^${}]|\$\{\w++\}|\$\w++)*+))?\}|\$(\w++)")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*+\))*+)\)\)")
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_SEQUENCE = re.compile(r"\$\(seq (?:(\d{1,9}) )?(?:(\d{1,9}) )?(\d{1,9})\)")
_SUBSTITUTION_DEPTH = 6
"""Number of passes over a word, for variables whose values contain variables."""
_DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")


def program_runs(text: str, folder: Path | None = None, source: object = "the script") -> list[ProgramRun]:
    """Return the commands of a script that have settings or a program, in order.

    Args:
        text: the script.
        folder: folder of the script, for files that it sources.
        source: name of the script, for errors.

    Raises:
        InputLimitError: the script is too long, or its variables or sourced files expand to too much.
    """
    script = _Script(folder, ExpansionBudget(source))
    script.run(text)
    script.add_unused_arrays()
    return script.runs


def docstring_run(docstring: str) -> ProgramRun:
    """Return the command in the docstring of a Python file, which says how to run it; of several, none is certain."""
    runs = [run for run in program_runs(_commands_of(docstring)) if run.program.endswith(".py")]
    if len(runs) != 1:
        return ProgramRun("", {}, ("the command line, from which its settings come",))
    return replace(runs[0], is_from_docstring=True)


def line_settings(text: str) -> dict[str, Any]:
    """Return all settings in a script or on a command line, whatever program they belong to."""
    return {name: value for run in program_runs(text) for name, value in run.settings.items()}


def _commands_of(docstring: str) -> str:
    """Return the lines of a docstring that start or continue a command."""
    kept, continues = [], False
    for line in docstring.splitlines():
        if (
            continues
            or line.split(" ")[0].split("=")[0] in ("python", "python3", "accelerate", "trl", "torchrun", "uv")
            or (line[:1].isupper() and "=" in line.split(" ")[0])
        ):
            kept.append(line)
            continues = line.endswith("\\")
        else:
            continues = False
    return "\n".join(kept)


class _Script:
    """Variables of a script and the runs of its programs, as far as the script has been read."""

    def __init__(self, folder: Path | None, budget: ExpansionBudget) -> None:
        self.folder = folder
        self.budget = budget
        self.open_files: list[Path] = []
        self.variables: dict[str, str | list[ScriptWord]] = {}
        self.ambiguous: set[str] = set()
        self.branch_depth = self.case_depth = 0
        self.subshells: list[tuple[dict[str, str | list[ScriptWord]], set[str], int]] = []
        self.runs: list[ProgramRun] = []
        self.unread: list[str] = []
        self.used_arrays: set[str] = set()
        self._places = [] if folder is None else _places_to_source_from(folder.resolve())

    def add_unused_arrays(self) -> None:
        """Add a run for each unused array, which a script that sources this one may use."""
        for name, items in self.variables.items():
            if isinstance(items, list) and name not in self.used_arrays:
                self._add_run(items)

    def run(self, text: str) -> None:
        for command in ScriptScanner(check_code(text, self.budget.source)).commands():
            self.budget.add("words", len(command.words) + sum(map(len, command.arrays.values())))
            self._run_command(command)

    def _run_command(self, command: ScriptCommand) -> None:
        self._follow(command)
        if command.bracket == "(":
            self.subshells.append((dict(self.variables), set(self.ambiguous), self.case_depth))
        elif command.bracket == ")" and self.subshells and self.subshells[-1][2] == self.case_depth:
            self.variables, self.ambiguous, _ = self.subshells.pop()  # the others end a pattern of a case

    def _follow(self, command: ScriptCommand) -> None:
        words = command.words
        while words and words[0] in _KEYWORDS and not words[0].is_quoted:
            self.branch_depth = max(0, self.branch_depth + _KEYWORDS[words[0]])
            self.case_depth += {"case": 1, "esac": -1}.get(words[0], 0)
            words = words[1:]
        is_conditional = bool(self.branch_depth) or command.follows_condition
        if words and words[0] in _DECLARATIONS:
            words = [word for word in words[1:] if _ASSIGNMENT.fullmatch(word)]
        elif words and words[0] == "unset":
            for word in words[1:]:
                self.variables.pop(word, None)
                (self.ambiguous.add if is_conditional else self.ambiguous.discard)(word)
        for name, items in command.arrays.items():
            self._assign_array(name, items, is_conditional)
        assignments = list(itertools.takewhile(bool, map(_ASSIGNMENT.fullmatch, words)))
        words = words[len(assignments) :]
        for match in assignments if not words else ():  # before a command, they are that command's alone
            assert match is not None
            self._assign(match[1], self._substitute(match[3]), is_conditional, is_append=bool(match[2]))
        if words and words[0] in ("source", ".") and len(words) > 1:
            self._source(words[1])
        elif words:
            words = self._expanded(words)
            self.budget.add("items", sum(word.count(",") + word.count("\n") for word in words))
            self._add_run(words)

    def _assign_array(self, name: str, items: list[ScriptWord], is_conditional: bool) -> None:
        is_append, name = name.endswith("+="), name.rstrip("+=")
        before = self.variables.get(name, [])
        if is_conditional and isinstance(before, list):
            self.budget.add("characters", sum(map(len, before)) + sum(map(len, items)))
        if is_append and is_conditional:
            shown = shlex.join(items)
            items = [ScriptWord(f"{UNRESOLVED}{{{name}: only some branches add '{shown}'}}")]
        expanded = self._expanded(items)
        if is_append:
            self.budget.add("words", len(before))
            self.variables[name] = [*(before if isinstance(before, list) else [ScriptWord(before)]), *expanded]
        elif is_conditional and before != expanded:
            shown = shlex.join([*(before if isinstance(before, list) else []), *expanded])
            self._set(name, [ScriptWord(f"{UNRESOLVED}{{{name}: only some branches add '{shown}'}}")])
        else:
            self._set(name, expanded)

    def _assign(self, name: str, value: str, is_conditional: bool, is_append: bool) -> None:
        before = self.variables.get(name)
        if is_append and isinstance(before, str):
            self.budget.add("characters", len(before))
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
        """Read a file that the script sources, if it lies where the script says, relative to the script's folder.

        It has to lie where :func:`_places_to_source_from` says: what is elsewhere, such as a file of secrets or
        ``/proc/self/environ``, is not the script author's to have read.
        """
        tail = re.sub(r"^\$\{?\w+\}?/", "", word)
        if self.folder is not None and UNRESOLVED not in tail and not tail.startswith("/"):
            path = self.folder / tail
            self.budget.add("files", 1)
            try:
                may_read = path not in self.open_files and any(map(path.resolve().is_relative_to, self._places))
                text = read_text(path) if may_read else None
            except (OSError, RuntimeError, UnicodeDecodeError, InputLimitError):  # the second: a loop of links
                text = None
            if text is not None:
                self.open_files.append(path)
                self.run(text)
                self.open_files.pop()
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
            self.budget.add("characters", len(value))
            return value
        if default is None or name in self.ambiguous:
            return match[0]
        if operation == "=":
            self.variables[name] = default
        return default

    def _arithmetic(self, match: re.Match[str]) -> str:
        expression = re.sub(r"\b[A-Za-z_]\w*\b", self._number_of, match[1])
        value = evaluate_arithmetic(expression)
        return match[0] if value is None else str(value)

    def _number_of(self, match: re.Match[str]) -> str:
        value = self.variables.get(match[0])
        if not isinstance(value, str):
            return match[0]
        self.budget.add("characters", len(value))
        return value

    def _expanded(self, words: Sequence[ScriptWord]) -> list[ScriptWord]:
        expanded: list[ScriptWord] = []
        for word in words:
            array = ARRAY.fullmatch(word)
            plain = re.fullmatch(r"\$\{?(\w+)\}?", word)
            items = self.variables.get(array[1]) if array else self.variables.get(plain[1]) if plain else None
            if isinstance(items, list):
                self.budget.add("words", len(items))
                expanded += items
                self.used_arrays.add((array or plain)[1])  # type: ignore[index]
                continue
            if numbers := _SEQUENCE.fullmatch(word):
                first, step, last = (int(numbers[1] or 1), int(numbers[2] or 1), int(numbers[3]))
                self.budget.add("words", last // max(step, 1))
                expanded += map(ScriptWord, map(str, range(first, last + 1, max(step, 1))))
                continue
            if array and isinstance(items, str):
                word = ScriptWord(f"${array[1]}")
            text = self._substitute(word)
            is_split = (plain or array) and not word.is_quoted and text != word and not text.startswith(UNRESOLVED)
            words_of_text = self._expanded_text(text) if is_split else [_script_word(text, word.is_quoted)]
            self.budget.add("words", len(words_of_text) if is_split else 0)
            expanded += words_of_text
        return expanded

    def _expanded_text(self, text: str) -> list[ScriptWord]:
        try:
            return [word for command in split_commands(text.replace("\n", " ")) for word in command.words]
        except ValueError:
            return [ScriptWord(text)]

    def _add_run(self, words: list[ScriptWord]) -> None:
        # ${NAME} is a variable of the environment here, and not a reference to the setting NAME.
        words = [
            _script_word(re.sub(r"\$\{(\w+)\}", r"$\1", word).replace(LITERAL_DOLLAR, "$"), word.is_quoted)
            for word in words
        ]
        program, rest = program_and_arguments(words)
        settings, unread, passes_arguments = settings_of_words(rest if program else words)
        if not (program or settings):
            return
        self.runs.append(ProgramRun(program, settings, (*self.unread, *unread), passes_arguments))


def _places_to_source_from(folder: Path) -> list[Path]:
    """Return the folders whose files a script in ``folder`` may have read.

    They are the outermost checkout that the script lies in, or its folder, and the current folder if the script lies in
    it; never the root of the file system or the user's home.
    """
    private = {Path(folder.anchor), Path.home()}
    checkouts = [parent for parent in (folder, *folder.parents) if (parent / ".git").exists() and parent not in private]
    places = [checkouts[-1] if checkouts else folder]
    current = Path.cwd()
    if folder.is_relative_to(current) and current not in private:
        places.append(current)
    return places


# Keywords before a command, each with its change of the depth of branches.
_KEYWORDS = {"if": 1, "fi": -1, "case": 1, "esac": -1, "for": 0, "while": 0, "until": 0, "do": 0, "done": 0}
_KEYWORDS |= dict.fromkeys(("then", "else", "elif", "{", "}", "!", "time", "exec", "nohup", "sudo", "eval"), 0)


def _script_word(text: str, is_quoted: bool) -> ScriptWord:
    """Return the text as a word that is marked as quoted or not."""
    word = ScriptWord(text)
    word.is_quoted = is_quoted
    return word
