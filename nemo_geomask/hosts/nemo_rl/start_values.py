"""Values of NeMo-RL's start as :mod:`start_run` knows them, and the modules of its source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nemo_geomask.hosts.nemo_rl.source_words import parsed
from nemo_geomask.recipe.input_limits import read_source

NO_KEYS: frozenset[str] = frozenset()


class Unknown:
    """Object of which nothing is known but the attributes that the source has set on it."""

    def __init__(self) -> None:
        self.attributes: dict[str, Traced] = {}

    def __str__(self) -> str:
        return "…"

    __repr__ = __str__


class Traced(NamedTuple):
    """Value, and the dotted keys of the recipe from which it follows."""

    value: Any
    keys: frozenset[str] = NO_KEYS


UNKNOWN = Traced(Unknown())


class RecipeSection(dict[Any, Any]):
    """Section of the recipe, or a mapping that the source makes; its items are :class:`Traced`."""

    path: str | None = None  # dotted key, empty for the whole recipe; None for a mapping that the source makes
    declared_by: SourceClass | None = None
    is_open: bool = False  # True if it may have further items

    def keys_of(self, name: object) -> frozenset[str]:
        """Return the dotted key of an item, as a set; an empty one if it has none."""
        return NO_KEYS if self.path is None else frozenset({f"{self.path}.{name}" if self.path else str(name)})

    def shallow_copy(self) -> RecipeSection:
        """Return a section with the same items."""
        copied = RecipeSection(self)
        copied.path, copied.declared_by, copied.is_open = self.path, self.declared_by, self.is_open
        return copied


@dataclass(frozen=True, eq=False)
class SourceModule:
    """Module of NeMo-RL, and the statements that bind its names."""

    name: str
    path: Path
    bindings: Mapping[str, ast.AST]


@dataclass(frozen=True, eq=False)
class SourceClass:
    """Class of NeMo-RL."""

    node: ast.ClassDef
    module: SourceModule


@dataclass(eq=False)
class SourceObject:
    """Instance of a class of NeMo-RL."""

    of: SourceClass
    attributes: dict[str, Traced] = field(default_factory=dict)


@dataclass(eq=False)
class Names:
    """Names of a function or a module, and of what is around it."""

    module: SourceModule
    values: dict[str, Traced] = field(default_factory=dict)
    outer: Names | None = None
    conditions: list[frozenset[str]] = field(default_factory=list)  # keys of the tests around the current statement
    decided_by: frozenset[str] = NO_KEYS  # keys of the tests that decide whether the function returns early
    function: SourceFunction | None = None


@dataclass(frozen=True, eq=False)
class SourceFunction:
    """Function of NeMo-RL, with the names around it; a method is bound to its instance or class."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    names: Names
    bound_to: Traced | None = None
    defined_in: SourceClass | None = None


@functools.cache
def source_module(checkout: Path, name: str) -> SourceModule | None:
    """Return a module by its dotted name, without bindings if Python can't parse it; None if there is none."""
    path = checkout.joinpath(*name.split("."))
    file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
    if file is None:
        return None
    pending: list[ast.AST] = [*parsed(read_source(file)).body]
    bindings: dict[str, ast.AST] = {}
    while pending:
        statement = pending.pop(0)
        for bound in bound_names(statement):
            bindings.setdefault(bound, statement)
        pending += statement.body if isinstance(statement, ast.If | ast.Try) else []
    return SourceModule(name, file, bindings)


def bound_names(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds."""
    match statement:
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            yield name
        case ast.Import(aliases) | ast.ImportFrom(_, aliases):
            yield from (each.asname or each.name.partition(".")[0] for each in aliases)
        case ast.Assign(targets):
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
        case ast.AnnAssign(ast.Name(name), _, ast.expr()):
            yield name


@functools.cache
def text_of(node: ast.AST) -> str:
    """Return the source text of a node."""
    return ast.unparse(node)


@functools.cache
def kinds_in(node: ast.AST) -> frozenset[type]:
    """Return the kinds of a node and of all nodes in it."""
    return frozenset(map(type, ast.walk(node)))


def is_known(value: object) -> bool:
    """Return True if a value is a plain one, or made of plain ones."""
    match value:
        case RecipeSection():
            return not value.is_open and all(is_known(item.value) for item in value.values())
        case list() | tuple() | set() | frozenset():
            return all(map(is_known, value))
    return not isinstance(value, Unknown | SourceModule | SourceClass | SourceFunction | SourceObject)


def truth(value: object) -> bool | None:
    """Return whether Python takes a value for true; None if that is unknown."""
    if isinstance(value, Unknown) or (isinstance(value, RecipeSection) and value.is_open):
        return None
    return bool(value)


def keys_of(*values: Traced) -> frozenset[str]:
    """Return the keys from which several values follow."""
    return NO_KEYS.union(*(each.keys for each in values))
