"""What NeMo-RL refuses when it starts, in its own words, from a run over its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import yaml

from nemo_geomask.hosts.nemo_rl.source_words import settings_in_recipes
from nemo_geomask.hosts.nemo_rl.start_run import StartRefusal
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule
from nemo_geomask.tools.check.setting_author import nearest_to_user, section_and_name
from nemo_geomask.yaml_text import as_yaml

_MAX_TRIED = 6  # ways out of one refusal; each takes a run over the source
_MAX_WORDS = 40  # of NeMo-RL's message
_MAX_OTHERS = 4  # settings that are named beside the one that a finding is about
_FIXED = ("cluster.", "env.")  # sections of what the run has, which no way out changes


@rule(
    "GM360",
    "error",
    "the source of the installed NeMo-RL, from its start script to the first step",
    needs=("nemo_rl",),
    needs_loss=False,
    applies_to_lab=False,
    gives_way=True,
)
def _refused_at_start(facts: RecipeFacts) -> Iterator[Hit]:
    """Settings with which NeMo-RL stops before the first step."""
    told: set[str] = set()
    for refusal in facts.start_refusals:
        keys = _by_nearness(refusal.keys, facts)
        if not any(key in facts.recipe.origins.entries for key in keys):  # it lacks what something else needs
            keys = [*_by_nearness(refusal.around, facts), *keys]
        # One mistake may meet several checks, of which the first ends the run.
        if keys and keys[0] not in told:
            told.add(keys[0])
            words = refusal.message.split()
            message = " ".join(words[:_MAX_WORDS]) + ("…" if len(words) > _MAX_WORDS else "")
            beside = ", ".join(f"{key}: {as_yaml(facts.get(key))}" for key in keys[1 : 1 + _MAX_OTHERS])
            yield Hit(
                keys[0],
                f"{as_yaml(facts.get(keys[0]))}{f', beside {beside}' if beside else ''}: NeMo-RL does "
                f"not start: {message.rstrip('.')} ({refusal.place})",
                fix=_way_out(refusal, keys, facts),
                others=(*keys[1:], *refusal.around),
            )


def _by_nearness(of: Collection[str], facts: RecipeFacts) -> list[str]:
    """Return keys, that which the user can change most easily first."""
    keys, ordered = sorted(of), list[str]()
    while keys:
        ordered.append(nearest_to_user(keys, facts))
        keys.remove(ordered[-1])
    return ordered


def _way_out(refusal: StartRefusal, keys: list[str], facts: RecipeFacts) -> dict[str, Any]:
    """Return a setting with which the run goes on, and meets no further refusal; empty if none of those tried does."""
    before = {each.place for each in facts.start_refusals}
    tried = [
        (key, value)
        for group in (keys, _by_nearness(refusal.around, facts))
        for values in (_other_values, _usual_values)
        for key in group
        if "[" not in key and not key.startswith(_FIXED)
        for value in values(key, keys, facts)
    ]
    for key, value in tried[:_MAX_TRIED]:
        after = {each.place for each in facts.with_setting(key, value).start_refusals}
        if after < before and refusal.place not in after:
            return {key: value}
    return {}


def _other_values(key: str, keys: list[str], facts: RecipeFacts) -> Iterator[Any]:
    """Yield the other truth value, or the numbers of the other keys."""
    value = facts.get(key)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (other for name in keys if type(other := facts.get(name)) is int and other != value)


def _usual_values(key: str, _keys: list[str], facts: RecipeFacts) -> Iterator[Any]:
    """Yield the words, nulls and ones that NeMo-RL's recipes have at a key; null if none of them has the key."""
    value = facts.get(key)
    recipes = settings_in_recipes(facts.nemo_rl) if facts.nemo_rl else {}
    for text, _ in Counter(recipes.get(section_and_name(key), ["null"])).most_common():
        other = yaml.safe_load(text)
        # Another number than the size or the fraction that leaves a thing out is the user's to choose.
        is_off = other is None or (isinstance(other, int | float) and other is not True and other == 1)
        if type(value) is not bool and other != value and (is_off or (isinstance(other, str) and text[0] != "$")):
            yield other
