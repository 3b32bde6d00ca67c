"""Reader of recipe files: YAML with ``defaults:`` inheritance and Hydra's overrides, as NeMo-RL reads them."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, GeomaskError, InputLimitError, Problem
from nemo_geomask.recipe.input_limits import (
    InputLimits,
    check_limit,
    check_values,
    check_yaml,
    current_limits,
    limit_error,
    read_text,
)
from nemo_geomask.recipe.origins import Origins
from nemo_geomask.recipe.overrides import apply_override, first_line
from nemo_geomask.recipe.reference_resolution import limited_references, load_omegaconf, resolve_config

ROOT_VARIABLE = "NEMO_RL_ROOT"
"""Environment variable with the path of a NeMo-RL checkout, for ``defaults:`` in its ``examples/configs``."""

_EXAMPLES = Path("examples", "configs")
# The checkout in NeMo-RL's container.
_CONTAINER_ROOT = "/opt/nemo-rl"
# What omegaconf raises beside its own errors for settings that it is not made for, such as a date as a key.
_OTHER_OMEGACONF_ERRORS = (AssertionError, AttributeError, LookupError, TypeError, ValueError)


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
        """The NeMo-RL checkout that the recipe inherits from, or else :func:`nemo_rl_root`; None without its source.

        A folder that holds only NeMo-RL's recipes tells nothing about what its version reads.
        """
        roots = (parent for path, _ in self.files for parent in path.parents)
        inherited = next((root for root in roots if _is_checkout(root)), None)
        root = inherited or nemo_rl_root()
        return root if root is not None and (root / "nemo_rl").is_dir() else None


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
        InputLimitError: a file is no regular file, or a limit is exceeded; the message names the limit.
        MissingDependencyError: omegaconf is not installed, or, with overrides, hydra-core.
    """
    omegaconf = load_omegaconf()
    reading = _RecipeReading()
    unresolved: dict[str, str] = {}
    with _root_in_environment(), _recursion_to(current_limits().nesting), limited_references(path):
        try:
            config, origins = _load(Path(path), (), reading)
            may_add_keys = "lab" in config if new_keys is None else new_keys
            for override in overrides:
                reading.count_merge(f"override '{override}'", origins)
                config, origins = apply_override(config, origins, override, new_keys=may_add_keys)
            plain = resolve_config(config, origins, path, leave, unresolved)
        except GeomaskError:
            raise
        except RecursionError:
            raise limit_error("nesting", path) from None
        except (omegaconf.errors.OmegaConfBaseException, *_OTHER_OMEGACONF_ERRORS) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(f"{path}: the recipe can't be read: {reason}") from None
    check_values(plain, path)
    data = {str(key): value for key, value in plain.items()}
    return Recipe(Path(path), data, origins, tuple(reading.files.items()), unresolved)


@contextmanager
def _recursion_to(nesting: int) -> Iterator[None]:
    """Let Python recurse into values that are nested deeper than its own limit allows, if ``nesting`` was raised."""
    limit = sys.getrecursionlimit()
    if nesting > InputLimits().nesting:
        sys.setrecursionlimit(max(limit, 1000 + 30 * min(nesting, 1000)))  # omegaconf takes up to 10 frames a level
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@dataclass
class _RecipeReading:
    """Files that a recipe consists of, and what they cost.

    Attributes:
        files: every file that was read, with its text.
        loads: number of times that a file was loaded.
        nodes: number of nodes of all loads.
        merged: number of settings of all merges. Each merge copies what was merged before.
    """

    files: dict[Path, str] = field(default_factory=dict)
    loads: int = 0
    nodes: int = 0
    merged: int = 0

    def count_merge(self, source: object, *origins: Origins) -> None:
        """Count the settings that a merge copies; raise InputLimitError if all merges copy too many."""
        self.merged += sum(len(each.entries) for each in origins)
        check_limit("merged_settings", self.merged, source)


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


def _load(path: Path, children: tuple[Path, ...], reading: _RecipeReading) -> tuple[Any, Origins]:
    """Load a file and its parents; return the merged config and its origins.

    Args:
        path: the file.
        children: the files that led to it through ``defaults:``, the recipe itself first.
        reading: receives every file that is read, with its text.
    """
    omegaconf = load_omegaconf()
    inherited = f" (named by defaults: in {children[-1]})" if children else ""
    reading.loads += 1
    check_limit("files", reading.loads, path)
    try:
        path = path.resolve()
        text = "" if path in children else read_text(path)
    except (OSError, ValueError, RuntimeError) as error:  # a null character, a loop of links
        if isinstance(error, InputLimitError):
            raise
        hint = _missing_parent_hint(path) if children else ""
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: the recipe can't be read{inherited}: {reason}{hint}") from None
    if path in children:
        chain = " -> ".join(str(child) for child in (*children, path))
        raise ConfigError(f"defaults: {path} inherits from itself: {chain}; remove one of these defaults")
    try:
        reading.nodes = check_yaml(text, path, nodes=reading.nodes)
        config = omegaconf.OmegaConf.load(io.StringIO(text))
    except (InputLimitError, RecursionError):
        raise
    except Exception as error:  # PyYAML lets errors of int(), datetime and dict through
        reason = " ".join(str(error).split())
        hint = "; merge it into the existing block" if "duplicate key" in reason else ""
        raise ConfigError(f"{path}: not valid YAML{inherited}: {reason}{hint}") from None
    if not isinstance(config, omegaconf.DictConfig):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, but this file holds a list{inherited}")
    merged, origins = omegaconf.OmegaConf.create({}), Origins()
    parents = _parents(config, path)
    for parent in parents:
        parent_config, parent_origins = _load(path.parent / parent, (*children, path), reading)
        reading.count_merge(path, origins, parent_origins)
        try:
            merged, origins = _merge(merged, parent_config), parent_origins.over(origins)
        except omegaconf.errors.ConfigTypeError:
            raise _merge_error(merged, parent_config, origins, parent_origins) from None
    reading.files[path] = text
    file_origins = Origins.of_file(path, text)
    if not parents:
        return config, file_origins
    reading.count_merge(path, origins, file_origins)
    try:
        return _merge(merged, config), file_origins.over(origins)
    except omegaconf.errors.ConfigTypeError:
        raise _merge_error(merged, config, origins, file_origins) from None


def _missing_parent_hint(parent: Path) -> str:
    """Return why a file that ``defaults:`` names may not exist, and what to write instead."""
    root = nemo_rl_root()
    if root is None:
        path = f"${{oc.env:{ROOT_VARIABLE},{_CONTAINER_ROOT}}}/{_EXAMPLES}/…/{parent.name}"
        return (
            "; a relative path in defaults: begins at the folder of the file that names it. For a file of NeMo-RL's, "
            f"set {ROOT_VARIABLE} to its checkout and write defaults: {path}"
        )
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
    omegaconf = load_omegaconf()
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
    omegaconf = load_omegaconf()
    for key in list(child):
        if omegaconf.OmegaConf.is_missing(child, key) or omegaconf.OmegaConf.is_interpolation(child, key):
            continue
        section = child[key]
        if isinstance(section, omegaconf.DictConfig) and section.pop("_override_", False):
            parent.pop(key, None)
    return omegaconf.OmegaConf.merge(parent, child)


def _merge_error(parent: Any, child: Any, parent_origins: Origins, child_origins: Origins) -> ConfigError:
    """Return the error of a child that has a list where its parent has a mapping, or the reverse."""
    to_plain = functools.partial(load_omegaconf().OmegaConf.to_container, resolve=False)
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
