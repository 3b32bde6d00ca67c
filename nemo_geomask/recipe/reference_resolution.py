"""References of a recipe, ``${other.key}`` and ``${mul:${a},2}``, resolved by omegaconf within the limits of input.

omegaconf resolves a reference anew at each place that uses it. Thirty lines of ``a1: ${a0}${a0}`` thus cost 2^30
evaluations, and a string of as many characters. Therefore :func:`limited_references`
counts what is parsed and returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, InputLimitError
from nemo_geomask.optional import require
from nemo_geomask.recipe.input_limits import check_limit, check_values
from nemo_geomask.recipe.origins import Origins
from nemo_geomask.recipe.overrides import first_line


def load_omegaconf() -> Any:
    """Return omegaconf with the resolvers of NeMo-RL's recipes registered."""
    omegaconf = require("omegaconf", "reading a recipe needs", "recipes")
    conf = omegaconf.OmegaConf
    # omegaconf 2.4 renamed register_new_resolver to register_resolver and warns about the old name. Before 2.4,
    # register_resolver was a different function.
    is_renamed = tuple(map(int, omegaconf.__version__.split(".")[:2])) >= (2, 4)
    register = conf.register_resolver if is_renamed else conf.register_new_resolver
    for name, resolver in _RESOLVERS.items():
        if not conf.has_resolver(name):
            register(name, resolver)
    return omegaconf


class _ReferenceBudget:
    """Count of what the references of a recipe cost, held to the limits.

    Args:
        source: the recipe, for errors.
    """

    def __init__(self, source: object) -> None:
        self.source = source
        self._references = 0
        self._parsed_characters = 0
        self._characters = 0
        self._nodes = 0

    def charge_text(self, text: str) -> None:
        """Count a text with references before it is parsed, which takes about 50 µs a character."""
        self._parsed_characters += len(text)
        check_limit("reference_characters", self._parsed_characters, self.source)

    def charge_result(self, value: Any) -> None:
        """Count the value of a reference: a node of omegaconf, or what a resolver returned."""
        self._references += 1
        check_limit("references", self._references, self.source)
        pending = [value]
        while pending:
            item = pending.pop()
            # A node's own value, in which references stand as they are written.
            content = item._value() if hasattr(item, "_metadata") else item
            self._nodes += 1
            check_limit("nodes", self._nodes, self.source)
            if isinstance(content, dict | list | tuple):
                pending.extend(content.values() if isinstance(content, dict) else content)
                continue
            check_values(content, self.source)
            self._characters += len(content) if isinstance(content, str | bytes) else 0
            check_limit("total_characters", self._characters, self.source)


_lock = threading.RLock()


@contextmanager
def limited_references(source: object) -> Iterator[None]:
    """Hold omegaconf to the limits within the context; one thread at a time.

    Raises: InputLimitError: a limit was exceeded within the context, whatever omegaconf made of the error.
    """
    grammar = require("omegaconf.grammar_parser", "reading a recipe needs", "recipes")
    container = require("omegaconf.base", "reading a recipe needs", "recipes").Container
    budget = _ReferenceBudget(source)
    first_error: list[InputLimitError] = []  # omegaconf wraps or drops what is raised while it resolves a reference

    @contextmanager
    def keep_error() -> Iterator[None]:
        try:
            yield
        except InputLimitError as error:
            is_named = str(error).startswith(str(source))  # a resolver does not know the file
            first_error.append(error if is_named else InputLimitError(f"{source}: {error}"))
            raise

    def charge_results(method: Callable[..., Any]) -> Callable[..., Any]:
        def charged_method(*args: Any, **kwargs: Any) -> Any:
            with keep_error():
                value = method(*args, **kwargs)
                budget.charge_result(value)
                return value

        return charged_method

    def charge_texts(stream: Callable[[str], Any]) -> Callable[[str], Any]:
        def charged_stream(text: str) -> Any:
            with keep_error():
                budget.charge_text(text)
            return stream(text)

        return charged_stream

    with (
        _lock,
        _wrapped(grammar, "InputStream", charge_texts),  # every parse of a text begins with it
        _wrapped(container, "_resolve_node_interpolation", charge_results),
        _wrapped(container, "_evaluate_custom_resolver", charge_results),
    ):
        try:
            yield
        except Exception:
            if not first_error:
                raise
    if first_error:
        raise first_error[0]


@contextmanager
def _wrapped(owner: Any, name: str, wrap: Callable[..., Any]) -> Iterator[None]:
    """Replace an attribute by ``wrap`` of it within the context."""
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def resolve_config(
    config: Any, origins: Origins, path: str | Path, leave: Collection[str], unresolved: dict[str, str]
) -> dict[Any, Any]:
    """Return the config as plain values; escape references in the sections ``leave`` that can't be resolved.

    ``unresolved`` receives their keys, each with the reason.
    """
    omegaconf = load_omegaconf()
    escaped_sections: set[str] = set()
    while True:
        try:
            plain: dict[Any, Any] = omegaconf.OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
            return plain
        except omegaconf.errors.OmegaConfBaseException as error:
            if str(error).startswith("RecursionError"):  # a chain of references
                raise RecursionError from None
            key = str(getattr(error, "full_key", None) or "")
            section = key.partition(".")[0].partition("[")[0]
            # A reference to a missing key raises a subclass; that is a mistake in any section.
            is_unresolvable = type(error) is omegaconf.errors.InterpolationResolutionError
            if not is_unresolvable or section not in leave or section in escaped_sections:
                origin = origins.at(key) if key else None
                message = f"{key}: {first_line(error)}" if key else first_line(error)
                raise ConfigError(f"{path}: {message}{f' (at {origin})' if origin else ''}") from None
            escaped_sections.add(section)
            _escape_unresolvable(config, section, section, unresolved)


def _escape_unresolvable(container: Any, name: Any, key: str, unresolved: dict[str, str]) -> None:
    """Escape references at or below ``container[name]`` that can't be resolved, so that they stand for their own text.

    Args:
        container: omegaconf's mapping or list.
        name: name or index in it.
        key: its dotted key.
        unresolved: receives the key of each such reference, with the reason.
    """
    omegaconf = load_omegaconf()
    conf = omegaconf.OmegaConf
    if conf.is_missing(container, name):
        return
    if conf.is_interpolation(container, name):
        try:
            container[name]
        except omegaconf.errors.InterpolationResolutionError as error:
            if type(error) is omegaconf.errors.InterpolationResolutionError:
                container[name] = str(container._get_node(name)._value()).replace("${", "\\${")
                unresolved[key] = first_line(error)
        return
    child = container[name]
    if isinstance(child, omegaconf.DictConfig):
        for inner in child:
            _escape_unresolvable(child, inner, f"{key}.{inner}", unresolved)
    elif isinstance(child, omegaconf.ListConfig):
        for index in range(len(child)):
            _escape_unresolvable(child, index, f"{key}[{index}]", unresolved)


# Resolvers for the arithmetic in NeMo-RL's recipes: ${mul:${policy.max_total_sequence_length}, 4}. They are annotated
# functions, since omegaconf 2.4 warns about resolvers without annotations.
def _add(a: Any, b: Any) -> Any:
    return a + b


def _mul(a: Any, b: Any) -> Any:
    for count, repeated in ((a, b), (b, a)):
        if isinstance(count, int) and isinstance(repeated, Sized):
            check_limit("string_characters", len(repeated) * count, "${mul:…}")
    return a * b


def _div(a: Any, b: Any) -> Any:
    return a / b


def _max(a: Any, b: Any) -> Any:
    return max(a, b)


_RESOLVERS = {"add": _add, "mul": _mul, "div": _div, "max": _max}
