"""Who wrote a setting: the user, on the command line or in a file, or NeMo-RL, in the files that come with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.recipe import Origin

__all__ = ["nearest_given", "own_keys", "theirs"]


def theirs(facts: RecipeFacts) -> dict[str, str]:
    """Path and text of the files in the chain that are NeMo-RL's own. The recipe itself is the user's, wherever."""
    if facts.nemo_rl is None:
        return {}
    checkout = facts.nemo_rl.resolve()
    return {str(path): text for path, text in facts.recipe.files[:-1] if path.is_relative_to(checkout)}


def own_keys(facts: RecipeFacts) -> Iterator[tuple[str, Origin]]:
    """Dotted keys that the user wrote and that are in force, each after the sections around it."""
    foreign = theirs(facts)
    seen: set[str] = set()
    for written, entry in facts.recipe.origins.entries.items():
        origin = entry.origin
        # An override may delete a key.
        if origin.where in foreign or (origin.line is None and not _present(written, facts)):
            continue
        for key in (*_around(written), written):
            if key not in seen:
                seen.add(key)
                yield key, origin


def _around(key: str) -> Iterator[str]:
    return (key[:index] for index, letter in enumerate(key) if letter == ".")


def _present(key: str, facts: RecipeFacts) -> bool:
    section, _, name = key.rpartition(".")
    inside = facts.get(section) if section else facts.recipe.data
    return isinstance(inside, Mapping) and name in inside


def nearest_given(keys: Sequence[str], facts: RecipeFacts) -> str:
    """Of several settings the one that was written nearest the user: as an override, in the recipe's own file, in its
    parents (the last first), in NeMo-RL's own files. Where none was written, the first."""
    files, foreign = [str(path) for path, _ in reversed(facts.recipe.files)], theirs(facts)

    def distance(key: str) -> tuple[bool, bool, int]:
        origin = facts.recipe.origins.at(key)
        if origin is None or not _present(key, facts):
            return (True, True, 0)
        if origin.line is None:
            return (False, False, -1)
        return (False, origin.where in foreign, files.index(origin.where))

    return min(keys, key=distance)
