"""Descriptions of NeMo-RL APIs that this package relies on, and their comparison with the installed source.

The source is parsed and not imported. It is compared itself, and not its version number, because NeMo-RL's main carries
the number of the last release.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any

from nemo_geomask.errors import HostAPIError
from nemo_geomask.hosts.nemo_rl.accepted_apis import APIDifference, not_accepted, warn_of_accepted, way_out
from nemo_geomask.hosts.nemo_rl.facts import TESTED_VERSIONS
from nemo_geomask.hosts.nemo_rl.installed_version import describe_version
from nemo_geomask.recipe.input_limits import parse_python, read_source

Parameters = tuple[Parameter, ...]
_STARS: Mapping[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


@dataclass(frozen=True)
class Uses:
    """Functions of one class or module of NeMo-RL, with those of their parameters that this package relies on.

    Other parameters, and the order of all, are free where the functions are wrapped. Where functions of this package
    take their place, the parameters must come first, in their order, and all others must have defaults.

    Attributes:
        module: the module that defines them.
        owner: the class; empty for functions of the module.
        methods: the functions, with the parameters that this package relies on.
        purpose: what needs them, as a noun phrase for messages: settings, or every run.
        calls: further functions that are called.
        optional: True if some tested versions have none of ``methods``; a version has all of them or none.
        is_replaced: True if functions of this package take the place of ``methods``.
    """

    module: str
    owner: str
    methods: Mapping[str, tuple[str, ...]]
    purpose: str
    calls: tuple[str, ...] = ()
    optional: bool = False
    is_replaced: bool = False

    def __str__(self) -> str:
        return f"{self.target_name}: {', '.join(self.names)} (for {self.purpose})"

    @property
    def target_name(self) -> str:
        """Dotted name of the class or module."""
        return f"{self.module}.{self.owner}".rstrip(".")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all functions, wrapped or called."""
        return (*self.methods, *self.calls)

    def is_present(self, defined: Mapping[str, Parameters]) -> bool:
        """Return True unless the functions are optional and this version, which defines those, has none of them."""
        return not self.optional or any(name in defined for name in self.methods)

    def differences(self, defined: Mapping[str, Parameters]) -> list[APIDifference]:
        """Return how the functions that this version defines differ.

        Args:
            defined: parameters of the functions, by name.
        """
        return list(self._differences(defined)) if self.is_present(defined) else []

    def _differences(self, defined: Mapping[str, Parameters]) -> Iterator[APIDifference]:
        for name in self.names:
            function = f"{self.target_name}.{name}"
            if name not in defined:
                yield APIDifference(function, f"{function} is not defined", is_missing=True)
                continue
            known = self.methods.get(name, ())
            names = [parameter.name for parameter in defined[name]]
            missing = [parameter for parameter in known if parameter not in names]
            required = [item.name for item in defined[name] if item.name not in known and _is_required(item)]
            reason = f", without {', '.join(missing)}" if missing else ""
            if self.is_replaced and not missing:
                reason = f", where {', '.join(required)} has no default" if required else ""
            if missing or (self.is_replaced and (required or names[: len(known)] != list(known))):
                yield APIDifference(function, f"{function} takes ({_join(defined[name])}){reason}")

    def defined_in_source(self, tree: ast.Module) -> dict[str, Parameters]:
        """Parameters of those of ``names`` that a parsed module defines."""
        owners = [node for node in tree.body if getattr(node, "name", None) == self.owner] if self.owner else [tree]
        return {
            node.name: _parameters(node.args)
            for owner in owners
            for node in getattr(owner, "body", ())
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in self.names
        }

    def defined_in(self, target: Any) -> dict[str, Parameters]:
        """Parameters of those of ``names`` that an imported class or module defines."""
        members = {} if target is None else vars(target)
        return {
            name: tuple(inspect.signature(members[name]).parameters.values()) for name in self.names if name in members
        }

    def require(self, target: Any, *, remedy: str) -> None:
        """Check the functions in the imported class or module, or in None, which lacks all.

        Args:
            target: the class or module.
            remedy: the setting that does without them, as an imperative sentence without full stop.

        Raises:
            HostAPIError: a function differs.
        """
        all_differences = self.differences(self.defined_in(target))
        warn_of_accepted(all_differences)
        differences = not_accepted(all_differences)
        if differences:
            raise HostAPIError(
                f"NeMo-RL {describe_version()} differs from the versions that nemo_geomask knows (tested: "
                f"{TESTED_VERSIONS}): {'; '.join(difference.message for difference in differences)}. {remedy}, or "
                f"use a tested NeMo-RL{way_out(differences)}"
            )


def require_targets(uses: Iterable[Uses], *, remedy: str) -> None:
    """Import the classes and modules that this version has, and check their functions.

    Args:
        uses: descriptions of the functions.
        remedy: the setting that does without them, as an imperative sentence without full stop.

    Raises:
        HostAPIError: a function differs.
    """
    for use in uses:
        try:
            target = importlib.import_module(use.module)
            target = getattr(target, use.owner) if use.owner else target
        except (ImportError, AttributeError):
            # The data plane has requirements of its own.
            if use.optional:
                continue
            raise
        if use.is_present(use.defined_in(target)):
            use.require(target, remedy=remedy)


@dataclass(frozen=True)
class APIState:
    """Result of comparing one API with the installed NeMo-RL.

    Attributes:
        api: the API, described in words.
        differences: how the installed source differs.
        is_absent: True if this version does not have the API and does not need it.
        is_new: True if no tested version has the API.
    """

    api: str
    differences: tuple[APIDifference, ...] = ()
    is_absent: bool = False
    is_new: bool = False

    @property
    def difference(self) -> str:
        """The differences in words; empty if there are none."""
        return "; ".join(difference.message for difference in self.differences)


def compare(api: Uses, package: Path) -> APIState:
    """Compare an API with the source in the package folder ``package``."""
    tree = parse_module(api.module, package)
    if tree is None and not api.optional:
        name = f"{api.target_name}.{api.names[0]}"
        return APIState(str(api), (APIDifference(name, "there is no such module", is_missing=True),))
    defined = {} if tree is None else api.defined_in_source(tree)
    return APIState(str(api), tuple(api.differences(defined)), is_absent=not api.is_present(defined))


def parse_module(module: str, package: Path) -> ast.Module | None:
    """Parse a module of the package in the folder ``package``; None if there is no such module.

    Args:
        module: dotted name, which begins with the package's.
        package: folder of the package.

    Raises: SyntaxError: Python can't parse it. InputLimitError: it is too large.
    """
    path = package.joinpath(*module.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            tree: ast.Module = parse_python(read_source(file))
            return tree
    return None


def _parameters(arguments: ast.arguments) -> Parameters:
    """Return the parameters of a parsed function; the default of one that has any is ``...``."""

    def named(names: list[ast.arg], defaults: list[ast.expr | None], kind: Any) -> list[Parameter]:
        return [
            Parameter(name.arg, kind, default=Parameter.empty if default is None else ...)
            for name, default in zip(names, defaults, strict=True)
        ]

    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    return (
        *named(positional, defaults, Parameter.POSITIONAL_OR_KEYWORD),
        *(Parameter(name.arg, Parameter.VAR_POSITIONAL) for name in (arguments.vararg,) if name),
        *named(arguments.kwonlyargs, arguments.kw_defaults, Parameter.KEYWORD_ONLY),
        *(Parameter(name.arg, Parameter.VAR_KEYWORD) for name in (arguments.kwarg,) if name),
    )


def _is_required(parameter: Parameter) -> bool:
    return parameter.kind not in _STARS and parameter.default is Parameter.empty


def _join(parameters: Parameters) -> str:
    return ", ".join(_STARS.get(parameter.kind, "") + parameter.name for parameter in parameters)
