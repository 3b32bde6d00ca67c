"""Objects of a Python program that is followed and not executed: what is known of their parts, and what hides them."""

from __future__ import annotations

import ast
import re
from collections import ChainMap
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nemo_geomask.tools.translate.peer_table import LOSS_WORDS
from nemo_geomask.tools.translate.setting_values import UNRESOLVED, ExpansionBudget
from nemo_geomask.tools.translate.shell_reader import ProgramRun

_READERS = re.compile("asdict|debug|dumps?|info|init|isinstance|items|keys|len|log|print|repr|to_dict|type|values")
"""Functions of other modules that change none of their arguments; classes, in CamelCase, are taken to change none."""
_USES = re.compile("train|evaluate|predict|add_callback|(save|push|log|print|create_model)[a-z_]*|[A-Z].*")
"""Methods of a trainer that leave its settings as they are."""
_NAMESPACES = ("exec", "eval", "globals", "locals")
_CONFIGURATIONS = re.compile(".*(actor|algo|correction|grpo|loss|policy|ppo|train).*config", re.IGNORECASE)
"""Classes that are no constructors, and that may hold settings of a loss."""
DELETED = object()
"""What is stored in place of a value by ``del``."""


class Bound(NamedTuple):
    """Value of a variable or a part, the branches in which it was set, and the line."""

    value: Any
    branches: tuple[int, ...]
    line: int


@dataclass(eq=False)
class Thing:
    """Object with named parts: a configuration, a dict, a namespace, or one that the file does not contain."""

    code: ast.AST  # what makes it
    branches: tuple[int, ...] = ()  # branches in which it is made
    kind: str = ""  # name of a configuration class, "dict", "function" or "parser"; empty for any other object
    parts: dict[str, Bound] = field(default_factory=dict)
    may_be: Sequence[Any] = ()  # objects that it may be; of a parser, what it returns
    hidden_by: str = ""  # code that may have changed its parts
    is_used: bool = False  # True after a call that may have read its parts
    is_from_docstring: bool = False  # True for settings of a command in the docstring of the file

    def hide(self, code: ast.AST) -> None:
        """Mark the parts as changed by code that can't be followed."""
        self.hidden_by = self.hidden_by or shown_code(code)


def is_of_library(thing: Thing) -> bool:
    """Return True for a class or module of a system, which code must not change."""
    is_name = isinstance(thing.code, (ast.Name, ast.Attribute))
    return is_name and re.search("trl|trainer", ast.unparse(thing.code), re.IGNORECASE) is not None


def dotted_name(node: ast.AST) -> list[str]:
    """Return the parts of ``a.b.c``; of ``f(…).b.c``, those after the call."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)]


def shown_code(code: ast.AST) -> str:
    """Return code with its line, for messages."""
    return f"{ast.unparse(code)} (line {getattr(code, 'lineno', 1)})"


class ProgramState:
    """Variables and objects of a program, as far as its statements have been followed.

    Args:
        constructors: names of configuration classes.
        budget: count of what the file expands to.
    """

    def __init__(self, constructors: Sequence[str], budget: ExpansionBudget) -> None:
        self.constructors, self.budget = constructors, budget
        self.scope: ChainMap[str, Bound] = ChainMap({"__name__": Bound("__main__", (), 0)})
        self.branches: tuple[int, ...] = ()
        self.line = 0
        self.things: list[Thing] = []  # configurations and dicts, in the order of their making
        self.unread: list[str] = []  # code that may change what every configuration does

    def made(self, code: ast.AST, kind: str, parts: dict[str, Bound] | None = None, hidden_by: str = "") -> Thing:
        """Return a new configuration or dict."""
        self.things.append(Thing(code, self.branches, kind, dict(parts or {}), hidden_by=hidden_by))
        return self.things[-1]

    def bind(self, parts: MutableMapping[str, Bound], name: str, value: Any) -> None:
        """Set or delete a variable or a part."""
        before = parts.get(name)
        if before is not None and before.value is value:
            return
        if value is DELETED and before is not None and before.branches != self.branches:
            value = Thing(ast.Name(name, lineno=self.line))
        if value is DELETED:
            parts.pop(name, None)
        else:
            parts[name] = Bound(value, self.branches, self.line)
            if before is not None and isinstance(value, Thing) and value.kind in self.constructors:
                self.supersede(before.value)

    def read(self, bound: Bound) -> Any:
        """Return the value of a variable or part, unless it was set in a branch that this code is not in."""
        if self.branches[: len(bound.branches)] == bound.branches:
            return bound.value
        code = ast.Name("a value that a branch or loop sets", lineno=bound.line)
        return Thing(code, may_be=[bound.value])

    def supersede(self, thing: Any) -> None:
        """Forget a configuration that no call has got and that another replaces."""
        if isinstance(thing, Thing) and not thing.is_used and thing.branches == self.branches:
            self.things = [other for other in self.things if other is not thing or thing.kind == "dict"]

    def write(self, owner: Any, name: Any, value: Any, code: ast.expr) -> None:
        """Set or delete a part of an object."""
        if not isinstance(owner, Thing):
            return
        self.budget.add("steps", 1)
        if is_of_library(owner):
            self.unread.append(shown_code(code))
        if isinstance(owner.code, ast.Call) and not owner.kind:  # a trainer is changed
            self.hide_all(owner.parts.values(), code)
        for thing in owner.may_be:
            self.write(thing, name, Thing(code), code)
        if isinstance(name, (Thing, list)):
            owner.hide(code)
        elif owner.kind != "parser":
            # Of a configuration that was handed on, the program may have read the value before.
            is_late = owner.is_used and owner.kind != "dict"
            self.bind(owner.parts, str(name), Thing(code) if is_late else value)

    def reachable(self, values: Iterable[Any]) -> list[Thing]:
        """Return the objects that code can change if it has these values."""
        found: dict[int, Thing] = {}
        pending = list(values)
        while pending:
            value = pending.pop()
            self.budget.add("steps", 1)
            if isinstance(value, list):
                pending += value
            elif isinstance(value, Bound):
                pending.append(value.value)
            elif isinstance(value, Thing) and id(value) not in found:
                found[id(value)] = value
                if value.kind != "function":
                    pending += [*value.parts.values(), *value.may_be]
        return list(found.values())

    def hide_all(self, values: Iterable[Any], code: ast.AST) -> None:
        """Mark the configurations and dicts among the reachable objects as changed by code that can't be followed."""
        for thing in self.reachable(values):
            if thing.kind in ("dict", *self.constructors):
                thing.hide(code)

    def called_elsewhere(self, node: ast.Call, name: str, owner: Any, values: list[Any]) -> Thing:
        """Return the unknown result of a function that the file does not contain, which may change its arguments."""
        values = self.reachable(values)
        things = [item for item in values if item.kind in ("dict", *self.constructors)]
        is_class_here = isinstance(owner, Thing) and isinstance(owner.code, ast.ClassDef)
        is_class = name[:1].isupper() and not is_class_here
        calls_back = any(item.kind == "function" for item in values) and not name.endswith("Trainer")
        is_reader = _READERS.fullmatch(name) is not None
        for thing in self.things if name in _NAMESPACES and isinstance(node.func, ast.Name) else things:
            thing.is_used = True
            if calls_back or not (is_class or is_reader):
                thing.hide(node)
        if isinstance(owner, Thing) and owner.kind and not is_reader:
            owner.hide(node)
        elif isinstance(owner, Thing) and isinstance(owner.code, ast.Call) and not (is_reader or _USES.fullmatch(name)):
            self.hide_all(owner.parts.values(), node)
        if not (is_class or is_reader) and any(is_of_library(item) or self._is_constructor(item) for item in values):
            self.unread.append(shown_code(node))
        settings = [keyword.arg or "" for keyword in node.keywords]
        if _CONFIGURATIONS.fullmatch(name) and any(map(LOSS_WORDS.search, settings)):
            self.unread.append(shown_code(node))
        result = Thing(node, may_be=owner.may_be if isinstance(owner, Thing) and owner.kind != "function" else ())
        result.may_be = self.reachable([owner, *values]) if is_reader else result.may_be
        result.parts = {**owner.parts} if is_class_here else {}
        for thing in things:
            self.bind(result.parts, "args", thing)  # the name by which a trainer of TRL keeps its configuration
        return result

    def _is_constructor(self, thing: Thing) -> bool:
        return (dotted_name(thing.code) or [""])[-1] in self.constructors

    def update(self, thing: Thing, other: Any, code: ast.expr) -> None:
        """Set the parts that a dict has, as ``dict.update`` does."""
        if isinstance(other, Thing) and other.kind == "dict":
            for name, bound in other.parts.items():
                self.bind(thing.parts, name, self.read(bound))
            thing.hidden_by = thing.hidden_by or other.hidden_by
        else:
            thing.hide(code)

    def part(self, owner: Any, name: Any, code: ast.expr) -> Any:
        """Return an attribute or item of an object."""
        if isinstance(owner, list) and type(name) is int and -len(owner) <= name < len(owner):
            return owner[name]
        if name == "__dict__" or not isinstance(owner, Thing):
            return owner if isinstance(owner, Thing) else Thing(code)
        bound = None if owner.hidden_by else owner.parts.get(str(name))
        return Thing(code, may_be=owner.may_be) if bound is None else self.read(bound)

    def program_run(self, thing: Thing) -> ProgramRun:
        """Return a configuration or a dict as the settings of a program."""
        self.branches = thing.branches
        settings = {name: self.plain(self.read(bound)) for name, bound in thing.parts.items()}
        unread = (thing.hidden_by,) if thing.hidden_by else ()
        return ProgramRun(thing.kind, settings, unread, is_from_docstring=thing.is_from_docstring)

    def plain(self, value: Any) -> Any:
        """Return a value as settings have it; what is unknown is marked as unresolved."""
        if isinstance(value, list):
            return [self.plain(item) for item in value]
        if not isinstance(value, Thing):
            return value
        if value.kind == "dict" and not value.hidden_by:
            return {name: self.plain(self.read(bound)) for name, bound in value.parts.items()}
        code = value.hidden_by or shown_code(value.code)
        self.budget.add("characters", len(code))  # an expression may hold others that are read, too
        return UNRESOLVED + code
