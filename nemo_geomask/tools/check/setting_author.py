"""Author of each setting: the user, in a file or an override, or NeMo-RL, in the files of its checkout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nemo_geomask.recipe import Origin
from nemo_geomask.recipe.input_limits import load_yaml
from nemo_geomask.tools.check.recipe_facts import RecipeFacts


def nemo_rl_files(facts: RecipeFacts) -> dict[str, str]:
    """Return path and text of the inherited files that lie in the NeMo-RL checkout.

    The recipe itself counts as written by the user, even if it lies there.
    """
    if facts.nemo_rl is None:
        return {}
    checkout = facts.nemo_rl.resolve()
    return {str(path): text for path, text in facts.recipe.files[:-1] if path.is_relative_to(checkout)}


def user_keys(facts: RecipeFacts) -> Iterator[tuple[str, Origin]]:
    """Yield the dotted keys in force that the user wrote, each after its enclosing sections, with its origin."""
    nemo_rl = nemo_rl_files(facts)
    yielded: set[str] = set()
    for written_key, entry in facts.recipe.origins.entries.items():
        origin = entry.origin
        # An override without a value deletes its key.
        is_deleted = origin.line is None and not _is_present(written_key, facts)
        if origin.where in nemo_rl or is_deleted:
            continue
        # An override may set a whole section or list, whose settings have no origin of their own.
        inside = _settings_in(written_key, facts.get(written_key)) if origin.line is None else ()
        for key in (*enclosing_sections(written_key), written_key, *inside):
            if key not in yielded:
                yielded.add(key)
                yield key, origin


def changed_keys(patterns: Sequence[str], facts: RecipeFacts) -> Iterator[str]:
    """Yield the keys of certain patterns that the user set to another value than the other files of the recipe have."""
    own, checkout = str(facts.recipe.path.resolve()), facts.nemo_rl and facts.nemo_rl.resolve()
    nemo_rls = own if checkout and Path(own).is_relative_to(checkout) else ""  # which the user may override
    keys = [each for each in user_keys(facts) if any(fnmatchcase(each[0], pattern) for pattern in patterns)]
    files = {str(path): load_yaml(text, path) for path, text in facts.recipe.files} if keys else {}
    for key, origin in keys:
        others = [replace(facts.recipe, data=data or {}) for path, data in files.items() if path != origin.where]
        values = [value for each in others if (value := RecipeFacts(each, None).get(key)) is not None]
        value, before = facts.get(key), values[-1] if values else False
        is_changed = value not in (before, None) and not isinstance(value, Mapping) and not key.endswith(".enabled")
        # A file may well carry a section of the other backend that is nowhere else.
        if is_changed and origin.where != nemo_rls and (values or origin.line is None):
            yield key


def _settings_in(key: str, value: Any) -> Iterator[str]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        inner_key = f"{key}[{name}]" if isinstance(value, list) else f"{key}.{name}"
        yield inner_key
        yield from _settings_in(inner_key, inner)


def enclosing_sections(key: str) -> Iterator[str]:
    """Yield the dotted sections around a key, the outermost first."""
    return (key[:index] for index, letter in enumerate(key) if letter == ".")


def section_and_name(key: str) -> tuple[str, str]:
    """Return the name of the section that a dotted key is in, without those around it, and the key's own name."""
    *_, section, name = ["", *re.sub(r"\[\d+\]", "", key).split(".")]
    return section, name


def is_switched_off(key: str, facts: RecipeFacts) -> bool:
    """Return True if a section around a key has ``enabled: false``."""
    return any(facts.get(f"{section}.enabled") is False for section in enclosing_sections(key))


def _is_present(key: str, facts: RecipeFacts) -> bool:
    section_key, _, name = key.rpartition(".")
    section = facts.get(section_key) if section_key else facts.recipe.data
    return isinstance(section, Mapping) and name in section


def nearest_to_user(keys: Sequence[str], facts: RecipeFacts) -> str:
    """Return the one of several keys that the user can change most easily.

    Keys in overrides come first, then those in the recipe's own file, in its parents from the last to the first, and in
    NeMo-RL's files. If none of the keys is written anywhere, the first of them is returned.
    """
    files, nemo_rl = [str(path) for path, _ in reversed(facts.recipe.files)], nemo_rl_files(facts)

    def distance(key: str) -> tuple[bool, bool, int]:
        origin = facts.recipe.origins.at(key)
        if origin is None or not _is_present(key, facts):
            return (True, True, 0)
        if origin.line is None:
            return (False, False, -1)
        return (False, origin.where in nemo_rl, files.index(origin.where))

    return min(keys, key=distance)
