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

from nemo_geomask.hosts.nemo_rl.accepted_apis import APIDifference, not_accepted, warn_of_accepted, way_out
from nemo_geomask.hosts.nemo_rl.facts import TESTED_VERSIONS
from nemo_geomask.hosts.nemo_rl.host_errors import HostAPIError
from nemo_geomask.hosts.nemo_rl.installed_version import describe_version
from nemo_geomask.recipe.input_limits import parse_python, read_source

__all__ = ["APIState", "Signature", "Uses", "compare", "parse_module", "require_targets"]

Parameters = tuple[Parameter, ...]
_STARS: Mapping[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


@dataclass(frozen=True)
class Signature:
    """A function or method of NeMo-RL whose complete parameter list must be a known one.

    A version may add parameters behind the known ones if they have defaults.

    Attributes:
        module: the module that defines it.
        path: dotted path in the module, ``Class.method``.
        forms: the known parameter lists; names of ``*args`` and ``**kwargs`` carry their stars.
        optional: True if some tested versions do not have the module.
    """

    module: str
    path: str
    forms: tuple[tuple[str, ...], ...]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.forms[-1])})"

    @property
    def name(self) -> str:
        """Dotted name, as ``--accept`` takes it."""
        return f"{self.module}.{self.path}"

    def differences(self, tree: ast.Module) -> list[APIDifference]:
        """Return how the parsed module differs."""
        node: ast.AST | None = tree
        for name in self.path.split("."):
            node = next((child for child in _body(node) if getattr(child, "name", None) == name), None)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return [APIDifference(self.name, "is not defined there", is_missing=True)]
        parameters = _parameters(node.args)
        if any(_fits(form, parameters) for form in self.forms):
            return []
        names = [name.lstrip("*") for form in self.forms for name in form]
        required = [item.name for item in parameters if item.name not in names and _is_required(item)]
        reason = f", where {', '.join(required)} has no default" if required else ""
        return [APIDifference(self.name, f"takes ({_join(parameters)}){reason}")]


@dataclass(frozen=True)
class Uses:
    """Functions of one class or module of NeMo-RL, with those of their parameters that this package relies on.

    Other parameters, and the order of all, are free.

    Attributes:
        module: the module that defines them.
        owner: the class; empty for functions of the module.
        methods: the functions that are wrapped, with the parameters that the wrappers rely on.
        purpose: what needs them, as a noun phrase for messages: settings, or every run.
        calls: further functions that are called.
        optional: True if some tested versions have none of ``methods``; a version has all of them or none.
    """

    module: str
    owner: str
    methods: Mapping[str, tuple[str, ...]]
    purpose: str
    calls: tuple[str, ...] = ()
    optional: bool = False

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
            parameters = {parameter.name for parameter in defined[name]}
            missing = [parameter for parameter in self.methods.get(name, ()) if parameter not in parameters]
            if missing:
                message = f"{function} takes ({_join(defined[name])}), without {', '.join(missing)}"
                yield APIDifference(function, message)

    def defined_in_source(self, tree: ast.Module) -> dict[str, Parameters]:
        """Parameters of those of ``names`` that a parsed module defines."""
        owners = [node for node in tree.body if getattr(node, "name", None) == self.owner] if self.owner else [tree]
        return {
            node.name: _parameters(node.args)
            for owner in owners
            for node in _body(owner)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in self.names
        }

    def defined_in(self, target: Any) -> dict[str, Parameters]:
        """Parameters of those of ``names`` that an imported class or module defines."""
        members = {} if target is None else vars(target)
        return {
            name: tuple(inspect.signature(members[name]).parameters.values()) for name in self.names if name in members
        }

    def require(self, module: Any, *, remedy: str) -> None:
        """Check the functions in the imported :attr:`module`.

        Args:
            module: the module.
            remedy: the setting that does without them, as an imperative sentence without full stop.

        Raises:
            HostAPIError: a function differs.
        """
        self._require(getattr(module, self.owner, None) if self.owner else module, remedy)

    def _require(self, target: Any, remedy: str) -> None:
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
            use._require(target, remedy)


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


def compare(api: Signature | Uses, package: Path) -> APIState:
    """Compare an API with the source in the package folder ``package``."""
    tree = parse_module(api.module, package)
    if tree is None:
        if api.optional:
            return APIState(str(api), is_absent=True)
        names = [f"{api.target_name}.{name}" for name in api.names] if isinstance(api, Uses) else [api.name]
        return APIState(str(api), (APIDifference(names[0], "there is no such module", is_missing=True),))
    if isinstance(api, Uses):
        defined = api.defined_in_source(tree)
        return APIState(str(api), tuple(api.differences(defined)), is_absent=not api.is_present(defined))
    return APIState(str(api), tuple(api.differences(tree)))


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


def _body(node: ast.AST | None) -> list[ast.stmt]:
    return node.body if isinstance(node, ast.Module | ast.ClassDef) else []


def _parameters(arguments: ast.arguments) -> Parameters:
    """Return the parameters of a parsed function; the default of one that has any is ``...``."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [
        Parameter(
            argument.arg,
            Parameter.POSITIONAL_ONLY if index < len(arguments.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if index < required else ...,
        )
        for index, argument in enumerate(positional)
    ]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default_value = Parameter.empty if default is None else ...
        parameters.append(Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=default_value))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return tuple(parameters)


def _fits(form: tuple[str, ...], parameters: Parameters) -> bool:
    """Return True if callers that know ``form`` can call a function with ``parameters``.

    The known parameters come first and in their order. Behind them, any number of parameters with defaults may follow.
    """
    keyword_only = {parameter.name for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY}
    known_names = [name for name in form if not name.startswith("*")]
    known_positional = [name for name in known_names if name not in keyword_only]
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if [parameter.name for parameter in positional[: len(known_positional)]] != known_positional:
        return False
    if any(_is_required(parameter) for parameter in parameters if parameter.name not in known_names):
        return False
    kinds = {parameter.kind for parameter in parameters}
    if any(name.startswith("**") for name in form) and Parameter.VAR_KEYWORD not in kinds:
        return False
    if not any(name.startswith("*") and not name.startswith("**") for name in form):
        return True
    # A further positional parameter would take an argument that is meant for *args.
    return Parameter.VAR_POSITIONAL in kinds and len(positional) == len(known_positional)


def _is_required(parameter: Parameter) -> bool:
    return parameter.kind not in _STARS and parameter.default is Parameter.empty


def _join(parameters: Parameters) -> str:
    return ", ".join(_STARS.get(parameter.kind, "") + parameter.name for parameter in parameters)
