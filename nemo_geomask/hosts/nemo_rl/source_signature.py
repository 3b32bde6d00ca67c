"""Descriptions of NeMo-RL APIs that this package relies on, and their comparison with the installed source.

The source is parsed and not imported. A version number would not do, because NeMo-RL's main calls itself 0.6.0.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_geomask.hosts.nemo_rl.facts import LOSS_CLASS, TESTED_VERSIONS
from nemo_geomask.hosts.nemo_rl.host_errors import HostAPIError
from nemo_geomask.hosts.nemo_rl.installed_version import describe_version

__all__ = ["APIState", "Builder", "Signature", "Uses", "compare", "import_targets"]

_LOSS_PACKAGE = "nemo_rl.algorithms.loss"
Parameters = Mapping[str, tuple[str, ...]]  # parameter names of functions, by the function's name


@dataclass(frozen=True)
class Signature:
    """A method that every run relies on, with its exact parameters.

    Attributes:
        module: the module that defines it.
        path: dotted path in the module, ``Class.method``.
        accepted: the known parameter lists; names of ``*args`` and ``**kwargs`` carry their stars.
    """

    module: str
    path: str
    accepted: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.path}({', '.join(self.accepted[-1])})"

    def difference(self, tree: ast.Module) -> str | None:
        """Describe how the parsed module differs; None if it does not."""
        node: ast.AST | None = tree
        for name in self.path.split("."):
            node = next((child for child in _body(node) if getattr(child, "name", None) == name), None)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return "is not defined there"
        parameters = tuple(_parameter_names(node.args))
        return None if parameters in self.accepted else f"takes ({', '.join(parameters)})"


@dataclass(frozen=True)
class Builder:
    """A module that builds the policy loss by calling NeMo-RL's loss class.

    Attributes:
        module: dotted name.
        optional: True if some tested versions do not have the module.
    """

    module: str
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.module} builds {LOSS_CLASS}(cfg)"

    def difference(self, tree: ast.Module) -> str | None:
        """Describe how the parsed module differs; None if it does not."""
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
        for call in calls:
            keywords = {keyword.arg for keyword in call.keywords}
            has_star = any(isinstance(argument, ast.Starred) for argument in call.args)
            accepted = keywords <= {"cfg", "use_fused_linear_logprobs"} and 1 <= len(call.args) + len(keywords) <= 2
            if has_star or not accepted:
                return f"calls {ast.unparse(call)}"
        return None


@dataclass(frozen=True)
class Uses:
    """Functions that only some settings rely on, of one class or one module.

    Attributes:
        module: the module that defines them.
        owner: the class; empty for functions of the module.
        methods: the functions that are wrapped, with the parameters that the wrappers rely on.
        settings: the settings that need them, for messages.
        calls: further functions that are called.
        optional: True if some tested versions have none of ``methods``; a version has all of them or none.
        last: the last parameters of each of ``methods``, where the wrapper tells arguments by position.
    """

    module: str
    owner: str
    methods: Mapping[str, tuple[str, ...]]
    settings: str
    calls: tuple[str, ...] = ()
    optional: bool = False
    last: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.target_name}: {', '.join(self.names)} (for {self.settings} only)"

    @property
    def target_name(self) -> str:
        """Dotted name of the class or module."""
        return f"{self.module}.{self.owner}".rstrip(".")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all functions, wrapped or called."""
        return (*self.methods, *self.calls)

    def is_present(self, defined: Parameters) -> bool:
        """Return True unless the functions are optional and this version, which defines those, has none of them."""
        return not self.optional or any(name in defined for name in self.methods)

    def difference(self, defined: Parameters) -> str | None:
        """Describe how the functions that this version defines differ; None if they do not."""
        if not self.is_present(defined):
            return None
        for name in self.names:
            function = f"{self.target_name}.{name}"
            if name not in defined:
                return f"{function} is not defined"
            parameters = defined[name]
            missing = [parameter for parameter in self.methods.get(name, ()) if parameter not in parameters]
            if missing:
                return f"{function} takes ({', '.join(parameters)}), without {', '.join(missing)}"
            if name in self.methods and self.last != parameters[len(parameters) - len(self.last) :]:
                return f"{function} takes ({', '.join(parameters)}), not {', '.join(self.last)} at the end"
        return None

    def defined_in_source(self, tree: ast.Module) -> Parameters:
        """Parameters of those of ``names`` that a parsed module defines."""
        owners = [node for node in tree.body if getattr(node, "name", None) == self.owner] if self.owner else [tree]
        return {
            node.name: tuple(_parameter_names(node.args))
            for owner in owners
            for node in _body(owner)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in self.names
        }

    def defined_in(self, target: Any) -> Parameters:
        """Parameters of those of ``names`` that an imported class or module defines."""
        members = {} if target is None else vars(target)
        return {name: tuple(inspect.signature(members[name]).parameters) for name in self.names if name in members}

    def require(self, module: Any, *, otherwise: str) -> None:
        """Check the functions in the imported :attr:`module`.

        Args:
            module: the module.
            otherwise: the setting that does without them, as a sentence.

        Raises:
            HostAPIError: a function differs.
        """
        self._require(getattr(module, self.owner, None) if self.owner else module, otherwise)

    def _require(self, target: Any, otherwise: str) -> None:
        difference = self.difference(self.defined_in(target))
        if difference:
            raise HostAPIError(
                f"NeMo-RL {describe_version()} differs from the versions that nemo_geomask knows (tested: "
                f"{TESTED_VERSIONS}): {difference}. {otherwise}, or use a tested NeMo-RL"
            )


def import_targets(uses: Iterable[Uses], *, otherwise: str) -> Iterator[tuple[Uses, Any]]:
    """Import, check and yield the classes and modules that this version has.

    Args:
        uses: descriptions of the functions.
        otherwise: the setting that does without them, as a sentence.

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
            use._require(target, otherwise)
            yield use, target


@dataclass(frozen=True)
class APIState:
    """Result of comparing one API with the installed NeMo-RL.

    Attributes:
        api: the API, described in words.
        difference: how the installed source differs; None if it does not.
        is_absent: True if this version does not have the API and does not need it.
    """

    api: str
    difference: str | None = None
    is_absent: bool = False


def compare(api: Signature | Builder | Uses, package: Path) -> APIState:
    """Compare an API with the source in the package folder ``package``."""
    path = package.joinpath(*api.module.split(".")[1:]).with_suffix(".py")
    if not path.is_file():
        if not isinstance(api, Signature) and api.optional:
            return APIState(str(api), is_absent=True)
        return APIState(str(api), "there is no such module")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if isinstance(api, Uses):
        defined = api.defined_in_source(tree)
        return APIState(str(api), api.difference(defined), is_absent=not api.is_present(defined))
    return APIState(str(api), api.difference(tree))


def _body(node: ast.AST | None) -> list[ast.stmt]:
    return node.body if isinstance(node, ast.Module | ast.ClassDef) else []


def _parameter_names(arguments: ast.arguments) -> Iterator[str]:
    yield from (argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
    if arguments.vararg:
        yield f"*{arguments.vararg.arg}"
    yield from (argument.arg for argument in arguments.kwonlyargs)
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"
