"""Variables of a shell script: their assignments, and the expansion of words.

A variable is known, unset, or unknown, with what hides its value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from nemo_geomask.tools.translate.setting_values import UNRESOLVED, ExpansionBudget
from nemo_geomask.tools.translate.shell_arithmetic import evaluate_arithmetic
from nemo_geomask.tools.translate.shell_words import (
    ARRAY,
    LITERAL_DOLLAR,
    OWN_ARGUMENTS,
    ScriptWord,
    script_word,
)

Variables = dict[str, str | list[ScriptWord]]

# Possessive quantifiers keep the time of these patterns linear in the length of a word.
_VARIABLE = re.compile(r"\$\{(\w++)(?::?([-=])((?:[^${}]|\$\{\w++\}|\$\w++)*+))?\}|\$(\w++)")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*+\))*+)\)\)")
ASSIGNMENT = re.compile(r"(\w+)(\[.*\])?(\+?)=(.*)", re.DOTALL)
NAME = re.compile(r"\b[A-Za-z_]\w*")
ARITHMETIC_EFFECT = re.compile(r"<<=|>>=|(?<![=!<>])=(?!=)|\+\+|--")
"""Operator by which arithmetic changes a variable."""
_SEQUENCE = re.compile(r"\$\(seq (?:(\d{1,9}) )?(?:(\d{1,9}) )?(\d{1,9})\)")
_UNQUOTED_WORD = re.compile(rf"(?:[${LITERAL_DOLLAR}](?:\((?:[^()]|\([^()]*+\))*+\)|\{{[^{{}}]*+\}})|\S)++")
"""Word between blanks; an expansion that is not known stays one word."""
_SUBSTITUTION_DEPTH = 6
"""Number of passes over a word, for defaults that contain variables."""


class ShellVariables:
    """Variables of a script, as far as it has been followed.

    Attributes:
        unknown: what hides the value of each variable that is not known.
        locked: variables that a function sets; later assignments do not make them known.
        unread: commands that may set any variable.
        line: line of the present command.
        is_conditional: True if the present command may not run.
        is_in_function: True in the body of a function.
        has_own_arguments: True while the positional parameters are the arguments of the script.
    """

    def __init__(self, budget: ExpansionBudget) -> None:
        self.budget = budget
        self.variables: Variables = {}
        self.unknown: dict[str, str] = {}
        self.locked: set[str] = set()
        self.used_arrays: set[str] = set()
        self.unread: list[str] = []
        self.line = 1
        self.is_conditional = self.is_in_function = False
        self.has_own_arguments = True

    def forget(self, names: Iterable[str], reason: str) -> None:
        """Mark variables as unknown from here on."""
        for name in names:
            self._note_in_function(name)
            self.variables.pop(name, None)
            self.unknown[name] = f"set {reason}, line {self.line}"

    def set(self, name: str, value: str | list[ScriptWord]) -> None:
        """Set a variable, unless a function may change it."""
        if name in self.locked:
            self.forget([name], "by a function")
        else:
            self.variables[name] = value
            self.unknown.pop(name, None)

    def _note_in_function(self, name: str) -> None:
        if self.is_in_function:
            self.locked.add(name)

    def refuse(self, words: Sequence[str]) -> None:
        """Note a command that may set any variable."""
        self.unread.append(f"{shown(' '.join(words)[:60])} (line {self.line})")

    def explained(self, value: Any) -> Any:
        """Return a value with what hides the variables in it."""
        names = re.findall(r"\$\{?(\w+)", value) if isinstance(value, str) else []
        reasons = dict.fromkeys(f"{name} is {self.unknown[name]}" for name in names if name in self.unknown)
        return f"{value} ({'; '.join(reasons)})" if reasons else value

    def assign(self, word: str) -> None:
        """Follow ``NAME=value``, ``NAME+=value`` or ``NAME[index]=value``."""
        match = ASSIGNMENT.fullmatch(word)
        assert match is not None
        name, index, append, value = match.groups()
        self._note_in_function(name)
        value, before = _frozen(self.substitute(value)), self.variables.get(name)
        if index is not None:
            self.forget([name], "by its items")
            return
        if append and self.is_conditional:
            value = f"{LITERAL_DOLLAR}{{{name}: only some branches add '{value}'}}"
        if append and isinstance(before, str):
            self.budget.add("characters", len(before))
        if append and name in self.unknown:
            return
        if append and isinstance(before, list):  # it is added to the first item
            self.forget([name], "by its items")
        elif append:
            self.set(name, f"{before or ''}{value}")
        elif self.is_conditional and before != value:
            self.forget([name], "in a branch")
        else:
            self.set(name, value)

    def assign_array(self, name: str, items: list[ScriptWord]) -> None:
        """Follow ``NAME=(…)`` or ``NAME+=(…)``."""
        is_append, name = name.endswith("+="), name.rstrip("+=")
        self._note_in_function(name)
        before = self.variables.get(name, [])
        if self.is_conditional and isinstance(before, list):
            self.budget.add("characters", sum(map(len, before)) + sum(map(len, items)))
        expanded = [script_word(_frozen(word), word.is_quoted) for word in self.expanded(items)]
        if is_append and self.is_conditional:
            expanded = [_of_some_branches(name, expanded)]
        if is_append:
            self.budget.add("words", len(before))
            first = before if isinstance(before, list) else [ScriptWord(before)]
            unknown = [ScriptWord(f"{LITERAL_DOLLAR}{name}")] if name in self.unknown else []
            self.set(name, [*first, *unknown, *expanded])
        elif self.is_conditional and before != expanded:
            self.set(name, [_of_some_branches(name, [*(before if isinstance(before, list) else []), *expanded])])
        else:
            self.set(name, expanded)

    def substitute(self, word: str) -> str:
        """Return the word with the variables and the arithmetic in it replaced, as far as they are known."""
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
        if isinstance(value, list):
            self.used_arrays.add(name)
            value = value[0] if value and LITERAL_DOLLAR not in value[0] else None
        if isinstance(value, str) and (value or default is None or f":{operation}" not in match[0]):
            self.budget.add("characters", len(value))
            return str(value)
        if default is None or name in self.unknown or (name.isdigit() and not self.has_own_arguments):
            return match[0]
        if operation == "=":
            self.assign(f"{name}={default}")
        return default

    def _arithmetic(self, match: re.Match[str]) -> str:
        value = self._number(match[1])
        if value is None and ARITHMETIC_EFFECT.search(match[1]):
            self.forget(NAME.findall(match[1]), "by arithmetic")
        return match[0] if value is None else str(value)

    def _number(self, expression: str) -> int | None:
        return evaluate_arithmetic(NAME.sub(self._number_of, expression))

    def _number_of(self, match: re.Match[str]) -> str:
        value = self.variables.get(match[0])
        if not isinstance(value, str):
            return match[0]
        self.budget.add("characters", len(value))
        return f"({value})" if value else "0"

    def expanded(self, words: Sequence[ScriptWord]) -> list[ScriptWord]:
        """Return the words that a command gets."""
        expanded: list[ScriptWord] = []
        for word in words:
            array = ARRAY.fullmatch(word)
            items = self.variables.get(array[1]) if array else None
            if array and isinstance(items, list) and not (word.is_quoted and "*" in word):
                self.budget.add("words", len(items))
                expanded += items
                self.used_arrays.add(array[1])
                continue
            if OWN_ARGUMENTS.search(word) and not self.has_own_arguments:
                expanded.append(ScriptWord(re.sub(r"(\$\{?)[@*]", r"\1positional arguments", word)))
                continue
            if numbers := _SEQUENCE.fullmatch(word):
                first, step, last = (int(numbers[1] or 1), int(numbers[2] or 1), int(numbers[3]))
                self.budget.add("words", last // max(step, 1))
                expanded += map(ScriptWord, map(str, range(first, last + 1, max(step, 1))))
                continue
            if array and isinstance(items, str):
                word = ScriptWord(f"${array[1]}")
            text = self.substitute(word)
            is_split = not word.has_quotes and text != word and not text.startswith(UNRESOLVED)
            words_of_text = _words_of(text) if is_split else [script_word(text, word.is_quoted)]
            self.budget.add("words", len(words_of_text) if is_split else 0)
            expanded += words_of_text
        return expanded


def shown(text: str) -> str:
    """Return the text with its dollars as in the script; ``${NAME}`` is a variable, not a reference to a setting."""
    return re.sub(r"\$\{(\w+)\}", r"$\1", text).replace(LITERAL_DOLLAR, "$")


def _frozen(text: str) -> str:
    """Return a value with its unknown variables marked, so that no later assignment to these reaches it."""
    return re.sub(r"\$\{(\w+)\}", r"$\1", text).replace("$", LITERAL_DOLLAR)


def _of_some_branches(name: str, items: Sequence[str]) -> ScriptWord:
    return ScriptWord(f"{LITERAL_DOLLAR}{{{name}: only some branches add '{shlex.join(items)}'}}")


def _words_of(text: str) -> list[ScriptWord]:
    """Return the words of an expanded value that is not quoted: quotes in it are characters, as for the shell."""
    return [ScriptWord(_frozen(word)) for word in _UNQUOTED_WORD.findall(text)]
