"""How a place in NeMo-RL that this package relies on is described, and compared with the installed source.

A version number says little here (NeMo-RL's main calls itself 0.6.0), so the source itself is read. Nothing of NeMo-RL
is imported for it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_geomask.errors import GeomaskError, MissingDependencyError
from nemo_geomask.integrations.nemo_rl.commit import commit_of

__all__ = [
    "LOSS_CLASS",
    "TESTED",
    "Builder",
    "SeamError",
    "SeamState",
    "Signature",
    "Uses",
    "compared",
    "root",
    "targets",
    "version",
]

TESTED = "v0.6.0, v0.7.0 and main of August 2026"
LOSS_CLASS = "ClippedPGLossFn"
_LOSS_PACKAGE = "nemo_rl.algorithms.loss"


class SeamError(GeomaskError, RuntimeError):
    """The installed NeMo-RL builds or calls its policy loss in a way that is not known here."""


@dataclass(frozen=True)
class Signature:
    """A method whose parameters this package relies on.

    Attributes:
        module: where it is defined.
        path: dotted path inside the module, ``Class.method``.
        accepted: the parameter lists known, each name with its stars.
    """

    module: str
    path: str
    accepted: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.path}({', '.join(self.accepted[-1])})"

    def problem(self, tree: ast.Module) -> str | None:
        """What differs in the source, or None."""
        node: ast.AST | None = tree
        for name in self.path.split("."):
            node = next((child for child in _body(node) if getattr(child, "name", None) == name), None)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return "is not defined there"
        found = tuple(_parameters(node.args))
        if found in self.accepted:
            return None
        return f"takes ({', '.join(found)})"


@dataclass(frozen=True)
class Builder:
    """A module that builds the policy loss by calling NeMo-RL's class.

    Attributes:
        module: the module.
        optional: not every tested version has the module.
    """

    module: str
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.module} builds {LOSS_CLASS}(cfg)"

    def problem(self, tree: ast.Module) -> str | None:
        """What differs in the source, or None."""
        names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_LOSS_PACKAGE)
            for alias in node.names
            if alias.name == LOSS_CLASS
        }
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        ]
        if not calls:
            return f"does not call {LOSS_CLASS} from {_LOSS_PACKAGE}"
        known = {"cfg", "use_fused_linear_logprobs"}
        for call in calls:
            keywords = {keyword.arg for keyword in call.keywords}
            starred = any(isinstance(argument, ast.Starred) for argument in call.args)
            if starred or not keywords <= known or not 1 <= len(call.args) + len(keywords) <= 2:
                return f"calls {ast.unparse(call)}"
        return None


@dataclass(frozen=True)
class Uses:
    """Functions that single settings need: of a class, or of a module.

    Attributes:
        module: where they are defined.
        owner: the class; empty for functions of the module.
        methods: what is wrapped, with the parameters relied on.
        settings: what needs it.
        calls: what else is called.
        optional: not every tested version has ``methods``; it has all of them or none.
        last: parameters that the methods end with, which are told by their place.
    """

    module: str
    owner: str
    methods: Mapping[str, tuple[str, ...]]
    settings: str
    calls: tuple[str, ...] = ()
    optional: bool = False
    last: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Dotted name of the class or the module."""
        return f"{self.module}.{self.owner}".rstrip(".")

    def __str__(self) -> str:
        return f"{self.place}: {', '.join(self.names)} (for {self.settings} only)"

    @property
    def names(self) -> tuple[str, ...]:
        """Of all functions."""
        return (*self.methods, *self.calls)

    def present(self, found: Mapping[str, tuple[str, ...]]) -> bool:
        """Whether this version has what is optional; ``found``: parameters of those of ``names`` that it defines."""
        return not self.optional or any(name in found for name in self.methods)

    def difference(self, found: Mapping[str, tuple[str, ...]]) -> str | None:
        """What differs in functions with these parameters, by name; or None."""
        if not self.present(found):
            return None
        for name in self.names:
            if name not in found:
                return f"{self.place}.{name} is not defined"
            missing = [parameter for parameter in self.methods.get(name, ()) if parameter not in found[name]]
            if missing:
                return f"{self.place}.{name} takes ({', '.join(found[name])}), without {', '.join(missing)}"
            if name in self.methods and self.last != found[name][len(found[name]) - len(self.last) :]:
                return f"{self.place}.{name} takes ({', '.join(found[name])}), not {', '.join(self.last)} at the end"
        return None

    def in_source(self, tree: ast.Module) -> dict[str, tuple[str, ...]]:
        """Parameters of those of ``names`` that the source defines."""
        owners = [node for node in tree.body if getattr(node, "name", None) == self.owner] if self.owner else [tree]
        nodes = [node for owner in owners for node in _body(owner)]
        return {
            node.name: tuple(_parameters(node.args))
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in self.names
        }

    def require(self, found: Mapping[str, tuple[str, ...]], *, otherwise: str) -> None:
        """Stop unless functions with these parameters are as known.

        Raises:
            SeamError: what differs, and what to set instead (``otherwise``).
        """
        difference = self.difference(found)
        if difference:
            raise SeamError(
                f"NeMo-RL {version()} is not as nemo_geomask knows it (tested: {TESTED}): {difference}. {otherwise}, "
                "or use a tested NeMo-RL"
            )

    def require_of(self, home: Any, *, otherwise: str) -> None:
        """As :meth:`require`, of :attr:`module`, imported."""
        target = getattr(home, self.owner, None) if self.owner else home
        self.require(self.in_memory(target), otherwise=otherwise)

    def in_memory(self, target: Any) -> dict[str, tuple[str, ...]]:
        """Parameters of those of ``names`` that the class or module defines."""
        members = {} if target is None else vars(target)
        return {name: tuple(inspect.signature(members[name]).parameters) for name in self.names if name in members}


@dataclass(frozen=True)
class SeamState:
    """One seam in the installed NeMo-RL.

    Attributes:
        seam: the seam, in words.
        problem: what differs, None where nothing does.
        absent: this NeMo-RL has no such module, and needs none.
    """

    seam: str
    problem: str | None = None
    absent: bool = False


def targets(needed: Iterable[Uses], *, otherwise: str) -> Iterator[tuple[Uses, Any]]:
    """The classes and modules, imported, of those that this version has.

    Raises:
        SeamError: one is not as known; ``otherwise`` says what to set instead.
    """
    for uses in needed:
        try:
            target = importlib.import_module(uses.module)
            target = getattr(target, uses.owner) if uses.owner else target
        except (ImportError, AttributeError):
            # The data plane has requirements of its own.
            if uses.optional:
                continue
            raise
        found = uses.in_memory(target)
        if uses.present(found):
            uses.require(found, otherwise=otherwise)
            yield uses, target


def version() -> str:
    """``nemo_rl.__version__``, or ``of unknown version``; with the commit where that is known.

    Between releases, NeMo-RL's main calls itself by the last release's number.
    """
    module = importlib.import_module("nemo_rl")
    number = str(getattr(module, "__version__", "of unknown version"))
    place = getattr(module, "__file__", None)
    commit = commit_of(Path(place).parent.parent) if place else None
    return f"{number} (commit {commit[:9]})" if commit else number


def root() -> Path:
    """The installed package's folder.

    Raises:
        MissingDependencyError: there is no NeMo-RL.
    """
    spec = importlib.util.find_spec("nemo_rl")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        # PyPI's nemo_rl is an empty placeholder.
        if (Path(location) / "algorithms").is_dir():
            return Path(location)
    raise MissingDependencyError(
        "NeMo-RL is not importable here; run this in NeMo-RL's own environment (uv run … in its checkout), or put the "
        "checkout on PYTHONPATH. See docs/nemo_rl.md"
    )


def compared(seam: Signature | Builder | Uses, package: Path) -> SeamState:
    """A seam in the source of the package at this folder."""
    parts = seam.module.split(".")[1:]
    path = package.joinpath(*parts).with_suffix(".py")
    if not path.is_file():
        optional = not isinstance(seam, Signature) and seam.optional
        return SeamState(str(seam), absent=True) if optional else SeamState(str(seam), "there is no such module")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if isinstance(seam, Uses):
        found = seam.in_source(tree)
        return SeamState(str(seam), seam.difference(found), absent=not seam.present(found))
    return SeamState(str(seam), seam.problem(tree))


def _body(node: ast.AST | None) -> list[ast.stmt]:
    return node.body if isinstance(node, ast.Module | ast.ClassDef) else []


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    yield from (argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
    if arguments.vararg:
        yield f"*{arguments.vararg.arg}"
    yield from (argument.arg for argument in arguments.kwonlyargs)
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"
