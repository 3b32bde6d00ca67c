"""Recipe files: YAML with ``defaults:`` inheritance and ``key.path=value`` overrides, as NeMo-RL reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, MissingDependencyError

__all__ = ["load_recipe"]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe.

    ``defaults:`` names one parent file or a list of them, relative to the file that names them; of several the last
    wins, and the file itself wins over all. Mappings merge key by key, lists and values replace; a mapping with
    ``_override_: true`` replaces its parent's too. ``${other.key}`` refers to another key, ``???`` marks a value
    that a child or an override has to give.

    Args:
        path: the recipe.
        overrides: ``key.path=value``, applied last, with the value in YAML (``grpo.seed=7``, ``loss_fn.masks=[]``).
            A leading ``+`` or ``++``, as Hydra has it, is accepted and means the same.

    Returns:
        A plain dict, references resolved.

    Raises:
        ConfigError: a file is missing, no mapping, no valid YAML or inherits from itself; an override is no
            ``key=value``; a value is still ``???``. The message names the file and the key.
        MissingDependencyError: omegaconf is not installed.
    """
    omegaconf = _omegaconf()
    config = _load(Path(path), ())
    for override in overrides:
        config = _apply(config, override)
    try:
        plain = omegaconf.OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"{path}: {f'{key}: ' if key else ''}{_first_line(error)}") from None
    return {str(key): value for key, value in plain.items()}


def _omegaconf() -> Any:
    try:
        import omegaconf
    except ImportError as error:
        raise MissingDependencyError(
            f'reading a recipe needs omegaconf ({error}); pip install "nemo-geomask[demo]"'
        ) from error
    conf = omegaconf.OmegaConf
    # omegaconf 2.4 renamed the function, and warns about the old name.
    register = conf.register_resolver if hasattr(conf, "register_resolver") else conf.register_new_resolver
    for name, resolver in _RESOLVERS.items():
        if not conf.has_resolver(name):
            register(name, resolver)
    return omegaconf


def _load(path: Path, children: tuple[Path, ...]) -> Any:
    import yaml  # Comes with omegaconf.

    omegaconf = _omegaconf()
    inherited = f" (named by defaults: in {children[-1]})" if children else ""
    path = path.resolve()
    if path in children:
        chain = " -> ".join(str(child) for child in (*children, path))
        raise ConfigError(f"defaults: {path} inherits from itself: {chain}; remove one of these defaults")
    try:
        config = omegaconf.OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(f"{path}: the recipe can't be read{inherited}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, omegaconf.errors.OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: no valid YAML{inherited}: {' '.join(str(error).split())}") from None
    if not isinstance(config, omegaconf.DictConfig):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, but this file holds a list{inherited}")
    if "defaults" not in config:
        return config
    merged = omegaconf.OmegaConf.create({})
    for parent in _parents(config.pop("defaults"), path):
        merged = _merge(merged, _load(path.parent / parent, (*children, path)))
    return _merge(merged, config)


def _parents(defaults: Any, path: Path) -> list[str]:
    omegaconf = _omegaconf()
    parents = list(defaults) if isinstance(defaults, omegaconf.ListConfig) else [defaults]
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


def _apply(config: Any, override: str) -> Any:
    import yaml

    omegaconf = _omegaconf()
    key, equals, text = override.lstrip("+").partition("=")
    key = key.strip()
    if not equals or not key or any(not part for part in key.split(".")):
        raise ConfigError(f"override '{override}' is no key.path=value; write for example grpo.max_num_steps=20")
    try:
        value = yaml.safe_load(text)
        # YAML 1.1 reads 1e-3 as a string; recipes, through omegaconf, read it as a number.
        if "${" in text:
            value = text
        elif isinstance(value, str):
            value = omegaconf.OmegaConf.create(f"value: {text}")["value"]
        omegaconf.OmegaConf.update(config, key, value, merge=False, force_add=True)
    except (yaml.YAMLError, omegaconf.errors.OmegaConfBaseException) as error:
        raise ConfigError(f"override '{override}': {' '.join(str(error).split())}") from None
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


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
