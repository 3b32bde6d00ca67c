"""Overrides of a recipe's settings, parsed and applied by Hydra as in NeMo-RL, with error messages of our own."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.optional import require
from nemo_geomask.recipe.origins import Origin, Origins

_ABSENT = object()
_VLLM_KEYS = ("enable_prefix_caching", "kv_cache_dtype", "logprobs_mode")
"""Keys of ``vllm_cfg`` that NeMo-RL reads, most of its recipes lack, and rules of ``check`` set."""


def apply_override(config: Any, origins: Origins, override: str, *, new_keys: bool) -> tuple[Any, Origins]:
    """Apply one override; return the new config and the origins of its settings.

    Source: ``parse_hydra_overrides`` in nemo_rl/utils/config.py: Hydra's parser, then its
    ``ConfigLoaderImpl._apply_overrides_to_config`` on a struct config.

    Args:
        config: omegaconf's DictConfig; it is not changed.
        origins: origins of its settings.
        override: ``key=value``, ``+key=value``, ``++key=value``, ``~key`` or ``~key=value`` in Hydra's grammar.
        new_keys: True if ``key=value`` may set a key that ``config`` lacks; in NeMo-RL it may not.

    Raises: ConfigError: NeMo-RL would refuse the override; the message has the key, the nearest known one and the fix.
    MissingDependencyError: hydra-core is not installed.
    """
    parser, loader = _hydra()
    from omegaconf import OmegaConf

    try:
        (parsed,) = parser.create().parse_overrides(overrides=[override])
    except Exception as error:
        raise ConfigError(f"override '{override}': {_parse_failure(override, error)}") from None
    plain = OmegaConf.to_container(config, resolve=False)
    result = copy.deepcopy(config)
    OmegaConf.set_struct(result, not new_keys)
    try:
        loader._apply_overrides_to_config(overrides=[parsed], cfg=result)
    except Exception as error:
        # Besides its own errors, Hydra lets those of omegaconf and of Python's containers through.
        raise ConfigError(f"override '{override}': {_refusal(plain, origins, parsed, error)}") from None
    if parsed.is_delete():
        section, _, name = parsed.key_or_group.rpartition(".")
        # If the section is a reference, ~ deletes the key from the section that it refers to.
        deleted = (OmegaConf.select(result, section) if section else result)._get_full_key(name)
        return result, origins.override(deleted, None, Origin(override))
    place, new_names = _existing_part(plain, parsed.key_or_group)
    value = parsed.value()
    for name in reversed(new_names):
        value = {name: value}  # the override also creates the sections around its key
    return result, origins.override(place, value, Origin(override))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; omegaconf and Hydra append details of their own."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _hydra() -> tuple[Any, Any]:
    """Return Hydra's parser of overrides and the class that applies them."""
    purpose_and_extra = "overriding a setting needs", "recipes"
    parser = require("hydra.core.override_parser.overrides_parser", *purpose_and_extra).OverridesParser
    return parser, require("hydra._internal.config_loader_impl", *purpose_and_extra).ConfigLoaderImpl


# --- look-up of keys in plain mappings and lists; references are not followed


def _child(parent: Any, name: str) -> Any:
    if isinstance(parent, dict):
        return parent.get(name, _ABSENT)
    if isinstance(parent, list) and name.isdecimal() and int(name) < len(parent):
        return parent[int(name)]
    return _ABSENT


def _existing_part(plain: Any, key: str) -> tuple[str, list[str]]:
    """Split a dotted key after the first name whose value is missing or no mapping or list.

    Returns: the key up to that name, with list indices in brackets, and the remaining names.
    """
    place, node = "", plain
    names = key.split(".")
    while names:
        name = names.pop(0)
        place += f"[{name}]" if isinstance(node, list) else f".{name}" if place else name
        node = _child(node, name)
        if not isinstance(node, dict | list):
            break
    return place, names


def _value_at(plain: Any, key: str) -> Any:
    """Return the value at a dotted key, or ``_ABSENT``."""
    node = plain
    for name in key.split("."):
        node = _child(node, name)
    return node


def _dotted_keys(node: Any, key: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            child = f"{key}.{name}" if key else str(name)
            yield child
            yield from _dotted_keys(value, child)


def _missing_keys(plain: Any, key: str, value: Any) -> Iterator[str]:
    """Yield the keys that an override sets but the config lacks: its own, or those of its mapping."""
    present = _value_at(plain, key)
    if present is _ABSENT:
        yield key
    elif isinstance(present, dict) and isinstance(value, dict):
        for name, inner in value.items():
            yield from _missing_keys(plain, f"{key}.{name}", inner)


def _nearest_key(plain: Any, key: str) -> str | None:
    """Return the key that was probably meant, in the recipe or among those that may be added; None if there is none.

    Each name is replaced by the nearest one in its section. If a section has none, the result is the key of the same
    last name in another section.
    """
    # Imported here, since reading a recipe without a mistake needs no pydantic.
    from nemo_geomask.config.loss_config import LossConfig
    from nemo_geomask.config.strict import nearest

    # Valid keys that the recipe may lack. Without them, the suggestion for one would be a similar key that it has.
    addable_keys = {"loss_fn": tuple(LossConfig.model_fields), "policy.generation.vllm_cfg": _VLLM_KEYS}
    path: list[str] = []
    node = plain
    for name in re.split("[./]", key):
        candidates = [*map(str, node if isinstance(node, dict) else ()), *addable_keys.get(".".join(path), ())]
        guess = name if name in candidates else nearest(name, candidates)
        if guess is None:
            last_name = key.rpartition(".")[2]
            namesakes = [other for other in _dotted_keys(plain) if other.rpartition(".")[2] == last_name]
            return namesakes[0] if len(namesakes) == 1 else nearest(key, namesakes)
        path.append(guess)
        node = _child(node, guess)
    suggestion = ".".join(path)
    return None if suggestion == key else suggestion


# --- messages


def _parse_failure(override: str, error: Exception) -> str:
    key, equals, value = override.partition("=")
    if not equals and not key.startswith("~"):
        return "it is not of the form key.path=value; write for example grpo.max_num_steps=20, or ~key.path to delete"
    dotted_key = re.sub(r"\[(\d+)\]", r".\1", key)
    if dotted_key != key:
        return f"an item of a list is addressed with a dot; write {dotted_key}{equals}{value}"
    return (
        "it is not key.path=value in Hydra's grammar; quote a value with special characters, once for Hydra and once "
        f"for the shell: \"key.path='text'\" (Hydra says: {' '.join(str(error).split())})"
    )


def _refusal(plain: Any, origins: Origins, parsed: Any, error: Exception) -> str:
    """Return why an override that can be parsed is refused, and what to write instead.

    Args:
        plain: the config as dicts and lists.
        origins: origins of its settings.
        parsed: Hydra's override.
        error: the exception that Hydra raised.
    """
    key, value = parsed.key_or_group, parsed.value()
    present = _value_at(plain, key)
    text = str(parsed.input_line).partition("=")[2]
    if not key:
        return _parse_failure(parsed.input_line, error)
    if parsed.is_sweep_override():
        return f"Hydra reads this as a sweep, which NeMo-RL lacks; write a list as {key}=[…], a text as {key}='…'"
    if parsed.package is not None:
        return f"{key}@{parsed.package} is a config group of Hydra, which recipes don't have; write a dotted key"
    place, _ = _existing_part(plain, key)
    if place.endswith("]"):
        list_key, _, _ = place.rpartition("[")
        return (
            f"{list_key} is a list: an override can change keys of its items ({list_key}.0.<key>=…) or replace it as a "
            f"whole ({list_key}=[…]), but can't add or delete an item"
        )
    if parsed.is_delete():
        return _delete_refusal(plain, key, present, value)
    if parsed.is_add() and present is not _ABSENT and present is not None:
        origin = origins.at(key)
        where = f" (at {origin})" if origin else ""
        return f"+ adds a key, but {key} exists already{where}; write ++{key}={text} to replace it"
    if not parsed.is_add() and not parsed.is_force_add():
        missing = next(_missing_keys(plain, key, value), None)
        if missing is not None:
            return _unknown_key(plain, missing, key, text)
    if isinstance(present, dict | list) and isinstance(value, dict | list) and type(present) is not type(value):
        container = "mapping" if isinstance(present, dict) else "list"
        return f"{key} is a {container}, which this value can't replace; delete it first: ~{key} ++{key}={text}"
    return f"{key}: {first_line(error.__cause__ or error)}"


def _delete_refusal(plain: Any, key: str, present: Any, value: Any) -> str:
    if present is _ABSENT:
        guess = _nearest_key(plain, key)
        hint = f"did you mean ~{guess}?" if guess and _value_at(plain, guess) is not _ABSENT else "remove the override"
        return f"there is no {key} to delete; {hint}"
    if present is None or present == "???":
        return f"{key} has no value, and Hydra does not delete such keys; remove the override"
    return f"{key} is {present!r}, not {value!r}; write ~{key} to delete it whatever its value"


def _unknown_key(plain: Any, missing: str, key: str, text: str) -> str:
    guess = _nearest_key(plain, missing)
    hint = ""
    if guess:
        plus = "++" if _value_at(plain, guess) is _ABSENT else ""
        hint = f" did you mean {plus}{guess}{f'={text}' if missing == key else ''}?"
    return f"the recipe has no key {missing};{hint} {'To' if hint else 'to'} add it, write ++{key}={text}"
