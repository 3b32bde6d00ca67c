"""Reader of recipe files: YAML with ``defaults:`` inheritance and Hydra's overrides, as NeMo-RL reads them."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.optional import require
from nemo_geomask.recipe.origins import Origins
from nemo_geomask.recipe.overrides import apply_override, first_line

__all__ = ["ROOT_VARIABLE", "Recipe", "load_recipe", "nemo_rl_root", "read_recipe"]

ROOT_VARIABLE = "NEMO_RL_ROOT"
"""Environment variable with the path of a NeMo-RL checkout, for ``defaults:`` in its ``examples/configs``."""

_EXAMPLES = Path("examples", "configs")
# The checkout in NeMo-RL's container.
_CONTAINER_ROOT = "/opt/nemo-rl"


@dataclass(frozen=True)
class Recipe:
    """A recipe with everything that it inherits.

    Attributes:
        path: the recipe's own file.
        data: the settings as plain dicts and lists, references resolved.
        origins: origin of each setting.
        files: every file that was read, with its text, parents first.
        unresolved: keys whose references could not be resolved and stand in ``data`` as written, with the reason.
    """

    path: Path
    data: Mapping[str, Any]
    origins: Origins
    files: tuple[tuple[Path, str], ...]
    unresolved: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def nemo_rl(self) -> Path | None:
        """The NeMo-RL checkout that the recipe inherits from, or else :func:`nemo_rl_root`."""
        roots = (parent for path, _ in self.files for parent in path.parents)
        return next((root for root in roots if _is_checkout(root)), None) or nemo_rl_root()


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, new_keys: bool | None = None) -> dict[str, Any]:
    """Return the settings of a recipe; see :func:`read_recipe`."""
    return dict(read_recipe(path, overrides, new_keys=new_keys).data)


def read_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    new_keys: bool | None = None,
    leave: Collection[str] = (),
) -> Recipe:
    """Read a recipe with its parents and overrides.

    ``defaults:`` names one parent file or a list of them, relative to the file that names them. The last of several
    parents wins, and the file itself wins over all. Mappings merge key by key, lists and values replace; a mapping with
    ``_override_: true`` replaces its parent's, too. ``${other.key}`` refers to another key, ``${oc.env:NAME}`` to the
    environment, ``???`` marks a value that a child or an override has to set. If the environment has no
    ``NEMO_RL_ROOT``, references to it resolve to :func:`nemo_rl_root`.

    Args:
        path: the recipe.
        overrides: applied last and in order, by Hydra as NeMo-RL does it: ``key.path=value`` changes an existing key
            (``grpo.seed=7``, ``loss_fn.masks=[]``), ``+key=value`` adds one, ``++key=value`` does either, ``~key``
            deletes. A mapping is merged into the existing one; lists and values replace.
        new_keys: True if ``key.path=value`` may add a key, which NeMo-RL refuses. None: only in a recipe with a ``lab``
            section, all of whose keys are checked later.
        leave: sections in which a value stays as written if this environment can't resolve it.

    Returns: the settings, references resolved, with the origin of each.
    Raises:
        ConfigError: a file is missing, not a mapping, not valid YAML or inherits from itself; NeMo-RL would refuse an
            override; a value is still ``???``. The message names the file or override and the key.
        MissingDependencyError: omegaconf is not installed, or, with overrides, hydra-core.
    """
    omegaconf = _omegaconf()
    files: dict[Path, str] = {}
    with _root_in_environment():
        config, origins = _load(Path(path), (), files)
        may_add_keys = "lab" in config if new_keys is None else new_keys
        for override in overrides:
            config, origins = apply_override(config, origins, override, new_keys=may_add_keys)
        unresolved: dict[str, str] = {}
        while True:
            try:
                plain = omegaconf.OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
                break
            except omegaconf.errors.OmegaConfBaseException as error:
                key = str(getattr(error, "full_key", None) or "")
                section = key.partition(".")[0]
                # A reference to a missing key raises a subclass; that is a mistake in any section.
                is_unresolvable = type(error) is omegaconf.errors.InterpolationResolutionError
                if not is_unresolvable or key in unresolved or section not in leave:
                    origin = origins.at(key) if key else None
                    message = f"{key}: {first_line(error)}" if key else first_line(error)
                    raise ConfigError(f"{path}: {message}{f' (at {origin})' if origin else ''}") from None
                unresolved[key] = first_line(error)
                _escape_reference(config, key)
    data = {str(key): value for key, value in plain.items()}
    return Recipe(Path(path), data, origins, tuple(files.items()), unresolved)


def _escape_reference(config: Any, key: str) -> None:
    """Escape the reference at ``key``, so that it resolves to its own text."""
    conf = _omegaconf().OmegaConf
    place, _, name = key.replace("[", ".").replace("]", "").rpartition(".")
    parent = conf.select(config, place)
    raw = conf.to_container(parent, resolve=False)
    index: Any = int(name) if isinstance(raw, list) else name
    parent[index] = str(raw[index]).replace("${", "\\${")


def nemo_rl_root() -> Path | None:
    """Return the NeMo-RL checkout: ``NEMO_RL_ROOT``, or the one that ``import nemo_rl`` would find, or None."""
    if root := os.environ.get(ROOT_VARIABLE):
        return Path(root)
    spec = importlib.util.find_spec("nemo_rl")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((root for root in (Path(folder).parent for folder in folders) if _is_checkout(root)), None)


def _is_checkout(root: Path) -> bool:
    return (root / "nemo_rl").is_dir() and (root / _EXAMPLES).is_dir()


@contextmanager
def _root_in_environment() -> Iterator[None]:
    """Set ``NEMO_RL_ROOT`` within the context, if it is not set and a checkout is known."""
    root = None if ROOT_VARIABLE in os.environ else nemo_rl_root()
    if root is None:
        yield
        return
    os.environ[ROOT_VARIABLE] = str(root)
    try:
        yield
    finally:
        del os.environ[ROOT_VARIABLE]


def _omegaconf() -> Any:
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


def _load(path: Path, children: tuple[Path, ...], files: dict[Path, str]) -> tuple[Any, Origins]:
    """Load a file and its parents; return the merged config and its origins.

    Args:
        path: the file.
        children: the files that led to it through ``defaults:``, the recipe itself first.
        files: receives every file that is read, with its text.
    """
    import yaml  # Comes with omegaconf.

    omegaconf = _omegaconf()
    inherited = f" (named by defaults: in {children[-1]})" if children else ""
    path = path.resolve()
    if path in children:
        chain = " -> ".join(str(child) for child in (*children, path))
        raise ConfigError(f"defaults: {path} inherits from itself: {chain}; remove one of these defaults")
    try:
        text = path.read_text(encoding="utf-8")
        config = omegaconf.OmegaConf.load(io.StringIO(text))
    except OSError as error:
        hint = _missing_parent_hint(path) if children else ""
        raise ConfigError(f"{path}: the recipe can't be read{inherited}: {error.strerror or error}{hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError, omegaconf.errors.OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not valid YAML{inherited}: {' '.join(str(error).split())}") from None
    if not isinstance(config, omegaconf.DictConfig):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, but this file holds a list{inherited}")
    merged, origins = omegaconf.OmegaConf.create({}), Origins()
    parents = _parents(config, path)
    for parent in parents:
        parent_config, parent_origins = _load(path.parent / parent, (*children, path), files)
        try:
            merged, origins = _merge(merged, parent_config), parent_origins.over(origins)
        except omegaconf.errors.ConfigTypeError:
            raise _merge_error(merged, parent_config, origins, parent_origins) from None
    files[path] = text
    file_origins = Origins.of_file(path, text)
    if not parents:
        return config, file_origins
    try:
        return _merge(merged, config), file_origins.over(origins)
    except omegaconf.errors.ConfigTypeError:
        raise _merge_error(merged, config, origins, file_origins) from None


def _missing_parent_hint(parent: Path) -> str:
    """Return why a file that ``defaults:`` names may not exist, and what to write instead."""
    root = nemo_rl_root()
    if root is None:
        return f"; set {ROOT_VARIABLE} if it is a NeMo-RL checkout's"
    hint = ""
    if not root.is_absolute():
        hint = f"; {ROOT_VARIABLE} is {root}, and must be an absolute path"
    elif parent.is_relative_to(root.resolve()):
        hint = f"; {ROOT_VARIABLE} reads as {root}" + ("" if _is_checkout(root) else ", which is no NeMo-RL checkout")
    files = (root / _EXAMPLES).rglob("*.yaml")
    namesakes = [file for file in files if file.name == parent.name]
    if namesakes:
        namesake = min(namesakes, key=lambda file: (len(file.parts), file)).relative_to(root).as_posix()
        path = f"${{oc.env:{ROOT_VARIABLE},{_CONTAINER_ROOT}}}/{namesake}"
        hint += f"; NeMo-RL has one of that name: write defaults: {path}"
    return hint


def _parents(config: Any, path: Path) -> list[str]:
    """Remove ``defaults`` from ``config``; return its paths, ``${…}`` in them resolved."""
    if "defaults" not in config:
        return []
    omegaconf = _omegaconf()
    try:
        defaults = config.pop("defaults")
        parents = list(defaults) if isinstance(defaults, omegaconf.ListConfig) else [defaults]
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ConfigError(f"{path}: defaults: {first_line(error)}") from None
    for parent in parents:
        if not isinstance(parent, str):
            raise ConfigError(
                f"{path}: defaults: must be a path or a list of paths relative to this file (found {parent!r})"
            )
    return parents


def _merge(parent: Any, child: Any) -> Any:
    """Return ``child`` merged over ``parent``; a section with ``_override_: true`` replaces its parent's."""
    omegaconf = _omegaconf()
    for key in list(child):
        if omegaconf.OmegaConf.is_missing(child, key) or omegaconf.OmegaConf.is_interpolation(child, key):
            continue
        section = child[key]
        if isinstance(section, omegaconf.DictConfig) and section.pop("_override_", False):
            parent.pop(key, None)
    return omegaconf.OmegaConf.merge(parent, child)


def _merge_error(parent: Any, child: Any, parent_origins: Origins, child_origins: Origins) -> ConfigError:
    """Return the error of a child that has a list where its parent has a mapping, or the reverse."""
    to_plain = functools.partial(_omegaconf().OmegaConf.to_container, resolve=False)
    problems = []
    for key, parent_type, child_type in _type_clashes(to_plain(parent), to_plain(child), ""):
        parent_origin, child_origin = parent_origins.at(key), child_origins.at(key)
        message = (
            f"{key} is a {child_type} here, but a {parent_type} in what this file inherits (at {parent_origin}): "
            f"NeMo-RL can't merge the two; write a {parent_type}"
        )
        problems.append(Problem((), message, where=str(child_origin) if child_origin else ""))
    return ConfigError(*problems)


def _type_clashes(parent: Any, child: Any, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield the keys at which one side has a mapping and the other a list, with the parent's type and the child's."""
    if isinstance(parent, dict) and isinstance(child, dict):
        for name in child:
            if name in parent:
                yield from _type_clashes(parent[name], child[name], f"{key}.{name}" if key else str(name))
    elif {type(parent), type(child)} == {dict, list}:
        yield (key, "mapping", "list") if isinstance(parent, dict) else (key, "list", "mapping")


# Resolvers for the arithmetic in NeMo-RL's recipes: ${mul:${policy.max_total_sequence_length}, 4}. They are annotated
# functions, since omegaconf 2.4 warns about resolvers without annotations.
def _add(a: Any, b: Any) -> Any:
    return a + b


def _mul(a: Any, b: Any) -> Any:
    return a * b


def _div(a: Any, b: Any) -> Any:
    return a / b


def _max(a: Any, b: Any) -> Any:
    return max(a, b)


_RESOLVERS = {"add": _add, "mul": _mul, "div": _div, "max": _max}
