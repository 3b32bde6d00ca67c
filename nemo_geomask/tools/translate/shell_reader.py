"""Reader of shell scripts: which programs a script runs, and the settings on their command lines.

Nothing is executed. Variables, arrays, defaults (``${A:-1}``) and integer arithmetic are resolved as far as the script
determines them. A variable that a branch or a function sets stays unresolved, as does one of the environment.
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
from nemo_geomask.tools.translate.shell_variables import (
    ARITHMETIC_EFFECT,
    ASSIGNMENT,
    NAME,
    ShellVariables,
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


_SETTERS = ("coproc", "eval", "getopts", "mapfile", "read", "readarray", "unset")
"""Builtins that set the variables that they name."""
_DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")
_LOOPS = ("for", "select", "while", "until")
_CLOSING = {"fi": "if", "esac": "case", "done": "loop", "}": "{"}
_KEYWORDS = {"if", "case", *_LOOPS, *_CLOSING, "{", "do", "then", "else", "elif", "!", "time"}
_KEYWORDS |= {"exec", "nohup", "sudo", "command", "builtin", "function"}
"""Words before a command."""


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
    """Variables of a script and the runs of its programs, as far as the script has been read.

    A loop is read once, without the variables that it sets. A function is read where it is defined; what it sets is
    unknown from there on, and a program that it runs is named, since it may get other values where it is called.

    Attributes:
        blocks: the kind of each block that is open: ``if``, ``case``, ``loop``, ``{``, ``(`` or ``function``.
    """

    def __init__(self, folder: Path | None, budget: ExpansionBudget) -> None:
        super().__init__(budget)
        self.folder = folder
        self.open_files: list[Path] = []
        self.functions: set[str] = set()
        self.blocks: list[str] = []
        self.runs: list[ProgramRun] = []
        self._places = [] if folder is None else _places_to_source_from(folder.resolve())

    def add_unused(self) -> None:
        """Add runs of unused arrays, which a script that sources this may use."""
        for name, items in self.variables.items():
            if isinstance(items, list) and name not in self.used_arrays:
                self._add_run(items)

    def run(self, text: str) -> None:
        """Follow the commands of a script."""
        outer, self.blocks = self.blocks, [*self.blocks]
        loops: list[set[str]] = []
        commands = list(ScriptScanner(check_code(text, self.budget.source)).commands())
        for position, command in enumerate(commands):
            self.line = command.line
            self.budget.add("words", 1 + len(command.words) + sum(map(len, command.arrays.values())))
            words, is_definition = command.words, False
            while words and words[0] in _KEYWORDS and not words[0].is_quoted:
                keyword, words = words[0], words[1:]
                if keyword in _LOOPS:
                    loops.append(_names_set(commands[position : _end_of_loop(commands, position)]))
                    self.forget(loops[-1], "in a loop")
                    self.blocks.append("loop")
                    words = words if words[:1] == ["let"] or keyword in ("while", "until") else []
                elif keyword == "case":
                    self.blocks.append(keyword)
                    words = []
                elif keyword in ("if", "{"):
                    self.blocks.append(keyword)
                elif keyword in _CLOSING:
                    self._close(_CLOSING[keyword])
                    if keyword == "done" and loops:
                        self.forget(loops.pop(), "in a loop")
                elif keyword == "function" and words:
                    self._define(words[0], commands[position : position + 4])
                    words, is_definition = words[1:], True
            following = commands[position + 1 : position + 2]
            if len(words) == 1 and command.bracket == "(" and [(x.words, x.bracket) for x in following] == [([], ")")]:
                self._define(words[0], commands[position : position + 4])
                words, is_definition = [], True
            self.is_in_function = "function" in self.blocks
            self.is_conditional = command.is_conditional or any(block != "loop" for block in self.blocks)
            self._follow(command, words)
            if command.bracket == "(" and not is_definition:
                self.blocks.append("(")
            elif command.bracket == ")" and self.blocks[-1:] == ["("]:
                self.blocks.pop()  # other brackets end a pattern of a case
        self.blocks = outer

    def _define(self, name: str, commands: Sequence[ScriptCommand]) -> None:
        """Begin the body of a function, which ends where its brace closes."""
        self.functions.add(name)
        self.blocks.append("function")
        if not any("{" in command.words for command in commands):
            self.refuse([f"{name}()"])

    def _close(self, block: str) -> None:
        if block in self.blocks:
            del self.blocks[len(self.blocks) - 1 - self.blocks[::-1].index(block) :]
        if block == "{" and self.blocks[-1:] == ["function"]:
            self.blocks.pop()

    def _follow(self, command: ScriptCommand, words: list[ScriptWord]) -> None:
        """Follow a command without its keywords."""
        for name, items in command.arrays.items():
            self.assign_array(name, items)
        if words and words[0] in _DECLARATIONS:
            for word in words[1:]:
                if ASSIGNMENT.fullmatch(word):
                    self.assign(word)
            options = {option for word in words[1:] if word.startswith("-") for option in word}
            if any(UNRESOLVED in word.partition("=")[0] for word in words) or options & set("ilnu"):
                self.refuse(words)  # it assigns to another name, or other values
            return
        assigned = list(itertools.takewhile(ASSIGNMENT.fullmatch, words))
        words = words[len(assigned) :]
        for word in assigned:
            if not words:
                self.assign(word)
            elif words[0] in ("source", "."):
                self.forget(NAME.findall(word)[:1], "for one command")
        if words:  # assignments before a command are that command's alone
            self._run_command(words)

    def _run_command(self, words: list[ScriptWord]) -> None:
        """Follow a command after its assignments: a builtin, a function of the script, or a program."""
        head, raw, words = words[0], words, self.expanded(words)
        self.budget.add("items", sum(word.count(",") + word.count("\n") for word in words))
        if head in ("source", "."):
            self._source(raw[1]) if len(raw) > 1 else self.refuse(raw)
        elif head == "set" and ("--" in words or (words[1:2] and words[1][:1] not in ("-", "+"))):
            self.has_own_arguments = False
        elif head == "let":
            if any(map(ARITHMETIC_EFFECT.search, words)):
                self.forget(NAME.findall(" ".join(words)), "by arithmetic")
        elif head in _SETTERS or (head in ("printf", "wait") and {"-v", "-p"} & {*words}):
            self.forget(NAME.findall(" ".join(raw[1:])), f"by '{head}'")
            if head == "eval" or (head != "unset" and any(UNRESOLVED in word for word in raw[1:3])):
                self.refuse(raw)
        elif words:
            program = program_and_arguments(words)[0]
            is_unknown = UNRESOLVED in head and "]]" not in words and not program
            if is_unknown or (program and (self.is_in_function or words[0] in self.functions)):
                self.refuse(raw)
            if program or not self.is_in_function:
                self._add_run(words)

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


def _end_of_loop(commands: Sequence[ScriptCommand], start: int) -> int:
    """Return the position of the command that closes the loop that a command begins."""
    depth = 0
    for position in range(start, len(commands)):
        keywords = list(itertools.takewhile(_KEYWORDS.__contains__, commands[position].words))
        depth += sum(word in _LOOPS for word in keywords) - ("done" in keywords)
        if depth == 0:
            return position
    return len(commands)


def _names_set(commands: Sequence[ScriptCommand]) -> set[str]:
    """Return the variables that commands may set."""
    names = {name.rstrip("+=") for command in commands for name in command.arrays}
    for command in commands:
        words = list(itertools.dropwhile((_KEYWORDS - {*_LOOPS}).__contains__, command.words))
        names |= {match[1] for word in words if (match := ASSIGNMENT.fullmatch(word))}
        names |= {*re.findall(r"\$\{(\w+):?=", " ".join(words))}
        if words and words[0] in (*_LOOPS, *_SETTERS, "let", "printf", "wait"):
            names |= {*NAME.findall(" ".join(words))}
    return names


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
