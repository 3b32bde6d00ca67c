"""Reader of shell scripts: which programs a script runs, and the settings on their command lines.

Nothing is executed. Variables, arrays, defaults (``${A:-1}``) and integer arithmetic are resolved as far as the script
determines them. A variable whose value depends on a branch stays unresolved, as does one of the environment.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_geomask.errors import InputLimitError
from nemo_geomask.recipe.input_limits import read_text
from nemo_geomask.tools.translate.setting_values import UNRESOLVED, ExpansionBudget, check_code
from nemo_geomask.tools.translate.shell_blocks import (
    KEYWORDS,
    LOOPS,
    end_of_block,
    function_body,
    function_name,
    leading_keywords,
    without_keyword,
)
from nemo_geomask.tools.translate.shell_variables import (
    ARITHMETIC_EFFECT,
    ASSIGNMENT,
    NAME,
    ShellVariables,
    Variables,
    shown,
)
from nemo_geomask.tools.translate.shell_words import (
    ScriptCommand,
    ScriptScanner,
    ScriptWord,
    program_and_arguments,
    script_word,
    settings_of_words,
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
    is_from_docstring: bool = False  # True for a command in the docstring of a Python file

    def with_settings(self, settings: dict[str, Any]) -> ProgramRun:
        """Return the same run with other settings."""
        return replace(self, settings=settings)


_SETTERS = ("coproc", "getopts", "mapfile", "read", "readarray")
"""Builtins that set the variables that they name."""
_BUILTINS = (".", "eval", "let", "printf", "return", "set", "source", "trap", "unset", "wait")
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
    script.add_unused()
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


class _Script(ShellVariables):
    """Variables of a script and the runs of its programs, as far as the script has been read."""

    def __init__(self, folder: Path | None, budget: ExpansionBudget) -> None:
        super().__init__(budget)
        self.folder = folder
        self.open_files: list[Path] = []
        self.functions: dict[str, tuple[list[ScriptCommand], bool]] = {}  # their bodies, and whether each is certain
        self.uncalled: set[str] = set()
        self.open_functions: dict[str, set[str]] = {}  # those that are followed, and their local variables
        self.branch_depth = self.case_depth = 0
        self.subshells: list[tuple[Variables, dict[str, str], int]] = []
        self.runs: list[ProgramRun] = []
        self._places = [] if folder is None else _places_to_source_from(folder.resolve())

    def add_unused(self) -> None:
        """Add runs of functions that are not called and of unused arrays, which a script that sources this may use."""
        for name in [name for name in self.functions if name in self.uncalled]:
            self._call([ScriptWord(name)])
        for name, items in self.variables.items():
            if isinstance(items, list) and name not in self.used_arrays:
                self._add_run(items)

    def run(self, text: str) -> None:
        """Follow the commands of a script."""
        depth = self.branch_depth
        self._run_commands(list(ScriptScanner(check_code(text, self.budget.source)).commands()))
        self.branch_depth = depth

    def _run_commands(self, commands: Sequence[ScriptCommand]) -> None:
        end = 0
        for position, command in enumerate(commands):
            if position < end:
                continue
            self.line = command.line
            self.budget.add("words", 1 + len(command.words) + sum(map(len, command.arrays.values())))
            block = next((word for word in leading_keywords(command) if word in (*LOOPS, "{")), "")
            name = function_name(commands[position : position + 4])
            if name and not any(
                word == "{" for command in commands[position : position + 4] for word in command.words[:4]
            ):
                self.refuse([f"{name}()"])  # its body is no group
                name = ""
            elif name:
                end = end_of_block(commands, position, ("{",), "}")
                is_certain = not (self.branch_depth or command.is_conditional)
                others = [] if is_certain or name not in self.functions else self.functions[name][0]
                self.functions[name] = [*others, *function_body(commands[position:end])], is_certain
                self.uncalled.add(name)
            elif block:
                end = end_of_block(commands, position, *((("{",), "}") if block == "{" else (LOOPS, "done")))
                body = [without_keyword(command, block), *commands[position + 1 : end]]
                depth = command.is_conditional or commands[end - 1].is_conditional
                self.branch_depth += depth
                self._run_commands(body) if block == "{" else self._repeat(body)
                self.branch_depth = max(0, self.branch_depth - depth)
            else:
                self._follow(command)
            last = commands[max(end - 1, position)]
            if last.bracket == "(" and not name:
                self.subshells.append((dict(self.variables), dict(self.unknown), self.case_depth))
            elif (
                command is last
                and last.bracket == ")"
                and [item[2] for item in self.subshells[-1:]] == [self.case_depth]
            ):
                self.variables, self.unknown, _ = self.subshells.pop()  # the others end a pattern of a case

    def _repeat(self, body: Sequence[ScriptCommand]) -> None:
        """Follow a loop until no further pass changes a variable; what it changes is unknown in it and afterwards."""
        forgotten: set[str] = set()
        while True:
            before, runs, variables, unknown = self.state(), len(self.runs), {**self.variables}, {**self.unknown}
            self._run_commands(body)
            after = self.state()
            changed = {name for name in before | after if before.get(name, ()) != after.get(name, ())} - forgotten
            forgotten |= changed
            self.variables, self.unknown = variables, unknown
            self.forget(forgotten, "in a loop")
            if not changed:
                return
            del self.runs[runs:]

    def _follow(self, command: ScriptCommand) -> None:
        words = command.words
        for word in leading_keywords(command):
            words = words[1:] if word != "case" else []
            self.branch_depth = max(0, self.branch_depth + KEYWORDS[word])
            self.case_depth += {"case": 1, "esac": -1}.get(word, 0)
        self.is_conditional = bool(self.branch_depth) or command.is_conditional
        for name, items in command.arrays.items():
            self.assign_array(name, items)
        if words and words[0] in _DECLARATIONS:
            self._declare(words, {name.rstrip("+=") for name in command.arrays})
            return
        assigned = list(itertools.takewhile(bool, map(ASSIGNMENT.fullmatch, words)))
        words = words[len(assigned) :]
        for match in assigned:
            if not words and match is not None:
                self.assign(match[0])
            elif match is not None and words[0] in (*self.functions, "eval", "source", "."):
                self.forget([match[1]], "for one command")
        if words:  # assignments before a command are that command's alone
            self._run_command(words)

    def _declare(self, words: list[ScriptWord], names: set[str]) -> None:
        """Follow ``local``, ``export`` and others; ``names`` are those of the arrays that it makes."""
        options = {option for word in words[1:] if word.startswith("-") for option in word}
        is_local = bool(self.open_functions) and words[0] not in ("export", "readonly")
        for word in words[1:]:
            if match := ASSIGNMENT.fullmatch(word):
                self.assign(word)
                names.add(match[1])
            elif NAME.fullmatch(word) and is_local:
                self.forget([word], "by no value")
                names.add(word)
        is_other = any(UNRESOLVED in word.partition("=")[0] for word in words)
        if is_other or options & set("gilnu"):  # it assigns to another name, or other values
            self.refuse(words)
        if words[0] == "readonly" or "r" in options:
            self.locked |= names
        if is_local:
            self.open_functions[next(reversed(self.open_functions))].update(names)

    def _run_command(self, words: list[ScriptWord]) -> None:
        """Follow a command after its assignments: a builtin, a function of the script, or a program."""
        head, raw, words = words[0], words, self.expanded(words)
        self.budget.add("items", sum(word.count(",") + word.count("\n") for word in words))
        if head in ("source", "."):
            self._source(raw[1]) if len(raw) > 1 else self.refuse(raw)
        elif head == "set" and ("--" in words or (words[1:2] and words[1][:1] not in ("-", "+"))):
            self.has_own_arguments = False
        elif head == "unset":
            for word in words[1:]:
                self.variables.pop(word, None)
                self.unknown.pop(word, None)
                if self.is_conditional or not NAME.fullmatch(word):
                    self.forget(NAME.findall(word), "or not by 'unset'")
        elif head == "let":
            if any(map(ARITHMETIC_EFFECT.search, words)):
                self.forget(NAME.findall(" ".join(words)), "by arithmetic")
        elif head == "return":
            self.branch_depth += 1  # what follows in the function may not run
        elif head == "eval":
            text = shown(" ".join(words[1:]))
            if re.search(r"(?:^|[;&|\n])\s*[$`]", text):
                self.refuse(raw)
            depth, self.branch_depth = self.branch_depth, self.branch_depth + self.is_conditional
            self.run(text)
            self.branch_depth = depth
        elif head == "trap":
            if not {*words[2:]} <= {"EXIT", "INT", "TERM", "HUP", "SIGINT", "SIGTERM", "SIGHUP", "0"}:
                self.refuse(raw)
        elif head in _SETTERS or (head in ("printf", "wait") and {"-v", "-p"} & {*words}):
            options = [position for position, word in enumerate(raw) if word in ("-v", "-p") and head != "read"]
            named = raw[options[0] + 1 :][:1] if options else raw[1:]
            self.forget([name for word in named for name in NAME.findall(word)], f"by '{head}'")
            if any(UNRESOLVED in word for word in named):
                self.refuse(raw)
        elif words:
            if words[0] in self.functions:
                if program_and_arguments(words)[0]:
                    self.refuse(raw)
                self._call(words)
            self._add_run(words)
            is_builtin = words[0] in (*_SETTERS, *_DECLARATIONS, *_BUILTINS, *self.functions)
            if UNRESOLVED in head and "]]" not in words and (is_builtin or not program_and_arguments(words)[0]):
                self.refuse(raw)

    def _call(self, words: Sequence[ScriptWord]) -> None:
        """Follow the body of a function, with unknown arguments; its local variables are unknown afterwards."""
        name = words[0]
        self.uncalled.discard(name)
        if name in self.open_functions:
            self.refuse(words)
            return
        body, is_certain = self.functions[name]
        outer = self.has_own_arguments, self.branch_depth, self.line
        self.has_own_arguments &= words[1:] == ["$@"]
        self.branch_depth += self.is_conditional or not is_certain
        self.open_functions[name] = set()
        self._run_commands(body)
        self.forget(self.open_functions.pop(name), f"in {name}")
        self.has_own_arguments, self.branch_depth, self.line = outer

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

    def _add_run(self, words: list[ScriptWord]) -> None:
        words = [script_word(shown(word), word.is_quoted) for word in words]
        program, rest = program_and_arguments(words)
        settings, unread = settings_of_words(rest if program else words)
        if not (program or settings):
            return
        settings = {key: self.explained(value) for key, value in settings.items()}
        self.runs.append(ProgramRun(program, settings, (*self.unread, *map(self.explained, unread))))


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
