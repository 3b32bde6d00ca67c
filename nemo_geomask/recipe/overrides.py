"""Overrides of a recipe's settings, parsed and applied by Hydra as NeMo-RL does it; the errors are ours."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from nemo_geomask.config.loss import LossConfig
from nemo_geomask.config.strict import nearest
from nemo_geomask.errors import ConfigError
from nemo_geomask.optional import require
from nemo_geomask.recipe.origins import Origin, Origins

__all__ = ["apply_override", "first_line"]

_ABSENT = object()

# Keys of ours that NeMo-RL's recipes need not have: to be added, not taken for a misspelt neighbour.
_KNOWN = {"loss_fn": tuple(LossConfig.model_fields)}


def apply_override(config: Any, origins: Origins, override: str, *, new_keys: bool) -> tuple[Any, Origins]:
    """A config with one override applied, and where its settings come from.

    Source: ``parse_hydra_overrides`` in nemo_rl/utils/config.py: Hydra's parser, then its
    ``ConfigLoaderImpl._apply_overrides_to_config`` on a struct config.

    Args:
        config: omegaconf's DictConfig; left as it is.
        origins: where its settings were written.
        override: ``key=value``, ``+key=value``, ``++key=value``, ``~key`` or ``~key=value`` in Hydra's grammar.
        new_keys: whether ``key=value`` may set a key that ``config`` lacks; to NeMo-RL it may not.

    Raises: ConfigError: NeMo-RL would refuse the override; the message has the key, the nearest known one and the fix.
    MissingDependencyError: hydra-core is not installed.
    """
    parser, loader = _hydra()
    from omegaconf import OmegaConf

    try:
        (parsed,) = parser.create().parse_overrides(overrides=[override])
    except Exception as error:
        raise ConfigError(f"override '{override}': {_unparsed(override, error)}") from None
    plain = OmegaConf.to_container(config, resolve=False)
    result = copy.deepcopy(config)
    OmegaConf.set_struct(result, not new_keys)
    try:
        loader._apply_overrides_to_config(overrides=[parsed], cfg=result)
    except Exception as error:
        # Besides its own errors, Hydra lets those of omegaconf and of Python's containers through.
        raise ConfigError(f"override '{override}': {_refused(plain, origins, parsed, error)}") from None
    if parsed.is_delete():
        section, _, name = parsed.key_or_group.rpartition(".")
        # Through a reference, ~ deletes what is referred to.
        deleted = (OmegaConf.select(result, section) if section else result)._get_full_key(name)
        return result, origins.override(deleted, None, Origin(override))
    place, below = _walk(plain, parsed.key_or_group)
    value = parsed.value()
    for name in reversed(below):
        # Sections that were not there are the override's, too.
        value = {name: value}
    return result, origins.override(place, value, Origin(override))


def first_line(error: BaseException) -> str:
    """The first line of an error's message; omegaconf's and Hydra's go on with details of their own."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _hydra() -> tuple[Any, Any]:
    who = "overriding a setting needs", "recipes"
    parser = require("hydra.core.override_parser.overrides_parser", *who).OverridesParser
    return parser, require("hydra._internal.config_loader_impl", *who).ConfigLoaderImpl


# --- where a key leads, in plain mappings and lists, references not followed


def _child(holder: Any, name: str) -> Any:
    if isinstance(holder, dict):
        return holder.get(name, _ABSENT)
    if isinstance(holder, list) and name.isdecimal() and int(name) < len(holder):
        return holder[int(name)]
    return _ABSENT


def _walk(plain: Any, key: str) -> tuple[str, list[str]]:
    """The key as far as there are mappings and lists to hold it, indices in brackets; and the names that follow."""
    place, node = "", plain
    names = key.split(".")
    while names:
        name = names.pop(0)
        place += f"[{name}]" if isinstance(node, list) else f".{name}" if place else name
        node = _child(node, name)
        if not isinstance(node, dict | list):
            break
    return place, names


def _at(plain: Any, key: str) -> Any:
    node = plain
    for name in key.split("."):
        node = _child(node, name)
    return node


def _keys(node: Any, key: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            below = f"{key}.{name}" if key else str(name)
            yield below
            yield from _keys(value, below)


def _missing(plain: Any, key: str, value: Any) -> Iterator[str]:
    """Keys that an override sets and that are not there: its own, or those of its mapping."""
    there = _at(plain, key)
    if there is _ABSENT:
        yield key
    elif isinstance(there, dict) and isinstance(value, dict):
        for name, inner in value.items():
            yield from _missing(plain, f"{key}.{name}", inner)


def _guess(plain: Any, key: str) -> str | None:
    """The known key that is most likely meant, name by name; or the one of this name in another section."""
    path: list[str] = []
    node = plain
    for name in re.split("[./]", key):
        known = [*map(str, node if isinstance(node, dict) else ()), *_KNOWN.get(".".join(path), ())]
        near = name if name in known else nearest(name, known)
        if near is None:
            last = key.rpartition(".")[2]
            others = [other for other in _keys(plain) if other.rpartition(".")[2] == last]
            return others[0] if len(others) == 1 else nearest(key, others)
        path.append(near)
        node = _child(node, near)
    found = ".".join(path)
    return None if found == key else found


# --- what to say


def _unparsed(override: str, error: Exception) -> str:
    key, equals, value = override.partition("=")
    if not equals and not key.startswith("~"):
        return "it is no key.path=value; write for example grpo.max_num_steps=20, or ~key.path to delete a key"
    dots = re.sub(r"\[(\d+)\]", r".\1", key)
    if dots != key:
        return f"a list's item is addressed with a dot; write {dots}{equals}{value}"
    return (
        "it is no key.path=value in Hydra's grammar; quote a value that has special characters, inside what the shell "
        f"takes off: \"key.path='text'\" (Hydra says: {' '.join(str(error).split())})"
    )


def _refused(plain: Any, origins: Origins, parsed: Any, error: Exception) -> str:
    key, value = parsed.key_or_group, parsed.value()
    there = _at(plain, key)
    text = str(parsed.input_line).partition("=")[2]
    if not key:
        return _unparsed(parsed.input_line, error)
    if parsed.is_sweep_override():
        return f"NeMo-RL makes no sweeps, which Hydra takes this for; write a list as {key}=[…], a text as {key}='…'"
    if parsed.package is not None:
        return f"{key}@{parsed.package} is a config group of Hydra's, which recipes don't have; write a dotted key"
    place, _ = _walk(plain, key)
    if place.endswith("]"):
        listed, _, _ = place.rpartition("[")
        return (
            f"{listed} is a list: an override changes keys of its items ({listed}.0.<key>=…) or replaces it whole "
            f"({listed}=[…]), but neither adds nor deletes an item"
        )
    if parsed.is_delete():
        return _undeletable(plain, key, there, value)
    if parsed.is_add() and there is not _ABSENT and there is not None:
        origin = origins.at(key)
        where = f" (at {origin})" if origin else ""
        return f"+ adds a key, but {key} is there{where}; write ++{key}={text} to replace it"
    if not parsed.is_add() and not parsed.is_force_add():
        for missing in _missing(plain, key, value):
            return _unknown(plain, missing, key, text)
    if isinstance(there, dict | list) and isinstance(value, dict | list) and type(there) is not type(value):
        kind = "mapping" if isinstance(there, dict) else "list"
        return f"{key} is a {kind}, which this value can't replace; delete it first: ~{key} ++{key}={text}"
    return f"{key}: {first_line(error.__cause__ or error)}"


def _undeletable(plain: Any, key: str, there: Any, value: Any) -> str:
    if there is _ABSENT:
        guess = _guess(plain, key)
        hint = f"did you mean ~{guess}?" if guess and _at(plain, guess) is not _ABSENT else "leave the override out"
        return f"there is no {key} to delete; {hint}"
    if there is None or there == "???":
        return f"{key} has no value, and Hydra deletes none such; leave the override out"
    return f"{key} is {there!r}, not {value!r}; write ~{key} to delete it whatever it is"


def _unknown(plain: Any, missing: str, key: str, text: str) -> str:
    guess = _guess(plain, missing)
    hint = ""
    if guess:
        plus = "++" if _at(plain, guess) is _ABSENT else ""
        hint = f" did you mean {plus}{guess}{f'={text}' if missing == key else ''}?"
    return f"the recipe has no key {missing};{hint} {'To' if hint else 'to'} add it, write ++{key}={text}"
