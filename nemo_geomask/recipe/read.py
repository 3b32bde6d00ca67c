"""Recipe files: YAML with ``defaults:`` inheritance and Hydra's overrides, as NeMo-RL reads them."""

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
"""Environment variable with the path of a NeMo-RL checkout, for ``defaults:`` that lie in its ``examples/configs``."""

_EXAMPLES = Path("examples", "configs")
# Where NeMo-RL's container has its checkout.
_CONTAINER = "/opt/nemo-rl"


@dataclass(frozen=True)
class Recipe:
    """A recipe with all that it inherits.

    Attributes:
        path: the file that was asked for.
        data: plain dict, references resolved.
        origins: where each setting was written.
        files: every file read with its text, parents first.
        unresolved: keys left as they are written, and why.
    """

    path: Path
    data: Mapping[str, Any]
    origins: Origins
    files: tuple[tuple[Path, str], ...]
    unresolved: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def nemo_rl(self) -> Path | None:
        """The NeMo-RL checkout that the recipe inherits from; without one, :func:`nemo_rl_root`."""
        roots = (parent for path, _ in self.files for parent in path.parents)
        return next((root for root in roots if _is_checkout(root)), None) or nemo_rl_root()


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, new_keys: bool | None = None) -> dict[str, Any]:
    """The settings of a recipe, see :func:`read_recipe`."""
    return dict(read_recipe(path, overrides, new_keys=new_keys).data)


def read_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    new_keys: bool | None = None,
    leave: Collection[str] = (),
) -> Recipe:
    """Read a recipe.

    ``defaults:`` names one parent file or a list of them, relative to the file that names them; of several the last
    wins, and the file itself wins over all. Mappings merge key by key, lists and values replace; a mapping with
    ``_override_: true`` replaces its parent's too. ``${other.key}`` refers to another key, ``${oc.env:NAME}`` to the
    environment, ``???`` marks a value that a child or an override has to give. Where ``NEMO_RL_ROOT`` is not set, it
    reads as :func:`nemo_rl_root`.

    Args:
        path: the recipe.
        overrides: applied last and in order, by Hydra as NeMo-RL does it: ``key.path=value`` changes a key that is
            there (``grpo.seed=7``, ``loss_fn.masks=[]``), ``+key=value`` adds one, ``++key=value`` does either,
            ``~key`` deletes. A mapping is merged into the one that is there; lists and values replace.
        new_keys: whether ``key.path=value`` adds a key that is not there, where NeMo-RL refuses it. None: it does in a
            recipe with a ``lab`` section, all of whose keys are checked later.
        leave: sections in which a value may be left as written where this environment can't resolve it.

    Returns: the settings, references resolved, and where each was written.
    Raises:
        ConfigError: a file is missing, no mapping, no valid YAML or inherits from itself; NeMo-RL would refuse an
            override; a value is still ``???``. The message names the file or override and the key.
        MissingDependencyError: omegaconf is not installed; or hydra-core, where there are overrides.
    """
    omegaconf = _omegaconf()
    files: dict[Path, str] = {}
    with _root_in_environment():
        config, origins = _load(Path(path), (), files)
        open_ended = "lab" in config if new_keys is None else new_keys
        for override in overrides:
            config, origins = apply_override(config, origins, override, new_keys=open_ended)
        unresolved: dict[str, str] = {}
        while True:
            try:
                plain = omegaconf.OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
                break
            except omegaconf.errors.OmegaConfBaseException as error:
                bad = str(getattr(error, "full_key", None) or "")
                section = bad.partition(".")[0]
                # A reference to a key that is not there is of a subclass, and a mistake anywhere.
                failed = type(error) is omegaconf.errors.InterpolationResolutionError
                if not failed or bad in unresolved or section not in leave:
                    at = origins.at(bad) if bad else None
                    place = f"{bad}: {first_line(error)}" if bad else first_line(error)
                    raise ConfigError(f"{path}: {place}{f' (at {at})' if at else ''}") from None
                unresolved[bad] = first_line(error)
                _write_literally(config, bad)
    data = {str(key): value for key, value in plain.items()}
    return Recipe(Path(path), data, origins, tuple(files.items()), unresolved)


def _write_literally(config: Any, key: str) -> None:
    """Make a reference the text that it is written as."""
    conf = _omegaconf().OmegaConf
    place, _, name = key.replace("[", ".").replace("]", "").rpartition(".")
    parent = conf.select(config, place)
    raw = conf.to_container(parent, resolve=False)
    index: Any = int(name) if isinstance(raw, list) else name
    parent[index] = str(raw[index]).replace("${", "\\${")


def nemo_rl_root() -> Path | None:
    """The NeMo-RL checkout: ``NEMO_RL_ROOT``, or the one that ``import nemo_rl`` would find; None without either."""
    if given := os.environ.get(ROOT_VARIABLE):
        return Path(given)
    spec = importlib.util.find_spec("nemo_rl")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return next((root for root in (Path(place).parent for place in places) if _is_checkout(root)), None)


def _is_checkout(root: Path) -> bool:
    return (root / "nemo_rl").is_dir() and (root / _EXAMPLES).is_dir()


@contextmanager
def _root_in_environment() -> Iterator[None]:
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
    omegaconf = require("omegaconf", "reading a recipe needs", "recipes")
    conf = omegaconf.OmegaConf
    # omegaconf 2.4 renamed the function and warns about the old name; before, the new name was another function's.
    renamed = tuple(map(int, omegaconf.__version__.split(".")[:2])) >= (2, 4)
    register = conf.register_resolver if renamed else conf.register_new_resolver
    for name, resolver in _RESOLVERS.items():
        if not conf.has_resolver(name):
            register(name, resolver)
    return omegaconf


def _load(path: Path, children: tuple[Path, ...], files: dict[Path, str]) -> tuple[Any, Origins]:
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
        hint = _where_else(path) if children else ""
        raise ConfigError(f"{path}: the recipe can't be read{inherited}: {error.strerror or error}{hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError, omegaconf.errors.OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: no valid YAML{inherited}: {' '.join(str(error).split())}") from None
    if not isinstance(config, omegaconf.DictConfig):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, but this file holds a list{inherited}")
    merged, origins = omegaconf.OmegaConf.create({}), Origins()
    parents = _parents(config, path)
    for parent in parents:
        inherits, theirs = _load(path.parent / parent, (*children, path), files)
        try:
            merged, origins = _merge(merged, inherits), theirs.over(origins)
        except omegaconf.errors.ConfigTypeError:
            raise _unmergeable(merged, inherits, origins, theirs) from None
    files[path] = text
    own = Origins.of_file(path, text)
    if not parents:
        return config, own
    try:
        return _merge(merged, config), own.over(origins)
    except omegaconf.errors.ConfigTypeError:
        raise _unmergeable(merged, config, origins, own) from None


def _where_else(parent: Path) -> str:
    """Why a file that ``defaults:`` names may not be there, and what to write instead."""
    root = nemo_rl_root()
    if root is None:
        return f"; set {ROOT_VARIABLE} if it is a NeMo-RL checkout's"
    hint = ""
    if not root.is_absolute():
        hint = f"; {ROOT_VARIABLE} is {root}, and must be an absolute path"
    elif parent.is_relative_to(root.resolve()):
        hint = f"; {ROOT_VARIABLE} reads as {root}" + ("" if _is_checkout(root) else ", which is no NeMo-RL checkout")
    files = (root / _EXAMPLES).rglob("*.yaml")
    found = min((file for file in files if file.name == parent.name), key=_depth, default=None)
    if found is not None:
        written = f"${{oc.env:{ROOT_VARIABLE},{_CONTAINER}}}/{found.relative_to(root).as_posix()}"
        hint += f"; NeMo-RL has one of that name: write defaults: {written}"
    return hint


def _depth(path: Path) -> tuple[int, Path]:
    return len(path.parts), path


def _parents(config: Any, path: Path) -> list[str]:
    """Takes ``defaults`` out of ``config``; its paths, ``${…}`` in them resolved."""
    if "defaults" not in config:
        return []
    omegaconf = _omegaconf()
    try:
        defaults = config.pop("defaults")
        parents = list(defaults) if isinstance(defaults, omegaconf.ListConfig) else [defaults]
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ConfigError(f"{path}: defaults: {first_line(error)}") from None
    wrong = [parent for parent in parents if not isinstance(parent, str)]
    if wrong:
        raise ConfigError(
            f"{path}: defaults: must be a path or a list of paths relative to this file (found {wrong[0]!r})"
        )
    return parents


def _merge(parent: Any, child: Any) -> Any:
    omegaconf = _omegaconf()
    for key in list(child):
        if omegaconf.OmegaConf.is_missing(child, key) or omegaconf.OmegaConf.is_interpolation(child, key):
            continue
        section = child[key]
        if isinstance(section, omegaconf.DictConfig) and section.pop("_override_", False):
            parent.pop(key, None)
    return omegaconf.OmegaConf.merge(parent, child)


def _unmergeable(parent: Any, child: Any, theirs: Origins, own: Origins) -> ConfigError:
    """What to say where one file has a mapping and the other a list."""
    plain = _omegaconf().OmegaConf.to_container
    problems = []
    for key, above, here in _of_two_kinds(plain(parent, resolve=False), plain(child, resolve=False), ""):
        inherited, written = theirs.at(key), own.at(key)
        message = (
            f"{key} is a {here} here, and a {above} in what this file inherits (at {inherited}): NeMo-RL can't put one "
            f"over the other; write a {above}"
        )
        problems.append(Problem((), message, where=str(written) if written else ""))
    return ConfigError(*problems)


def _of_two_kinds(parent: Any, child: Any, key: str) -> Iterator[tuple[str, str, str]]:
    """Keys at which one has a mapping and the other a list, and what each has."""
    if isinstance(parent, dict) and isinstance(child, dict):
        for name in child:
            if name in parent:
                yield from _of_two_kinds(parent[name], child[name], f"{key}.{name}" if key else str(name))
    elif {type(parent), type(child)} == {dict, list}:
        kinds = ("mapping", "list") if isinstance(parent, dict) else ("list", "mapping")
        yield (key, *kinds)


# What NeMo-RL's recipes compute with: ${mul:${policy.max_total_sequence_length}, 4}. Annotated, since omegaconf 2.4
# warns about resolvers that are not.
def _add(left: Any, right: Any) -> Any:
    return left + right


def _mul(left: Any, right: Any) -> Any:
    return left * right


def _div(left: Any, right: Any) -> Any:
    return left / right


def _max(left: Any, right: Any) -> Any:
    return max(left, right)


_RESOLVERS = {"add": _add, "mul": _mul, "div": _div, "max": _max}
