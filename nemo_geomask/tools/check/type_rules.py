"""GM008 and GM009: values and missing keys that NeMo-RL refuses when it reads a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.config.strict import as_yaml
from nemo_geomask.tools.check.config_classes import generation_section, master_section
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, Rule
from nemo_geomask.tools.check.value_types import RefusedValue

__all__ = ["RULES"]

_SOURCE = "NeMo-RL `MasterConfig` of the algorithm, which is validated from v0.7.0 on"


def _mismatches(facts: RecipeFacts) -> Iterator[RefusedValue]:
    """Yield what NeMo-RL's classes refuse, except in ``loss_fn``, which GM001 checks."""
    assert facts.nemo_rl is not None
    master = master_section(facts.nemo_rl, facts.recipe.data)
    # Until v0.6.0, NeMo-RL does not validate recipes.
    if master is None or not master.is_model:
        return
    reported_keys: set[str] = set()
    for mismatch in master.mismatches(facts.recipe.data, ""):
        if mismatch.key.partition(".")[0] != "loss_fn":
            reported_keys.add(mismatch.key)
            yield mismatch
    # NeMo-RL does not validate the backend's own settings. Its recipes have null there for a default, and numbers as
    # values of environment variables.
    generation = facts.get("policy.generation")
    backend = generation_section(facts.nemo_rl, str(facts.get("policy.generation.backend")))
    if backend is not None and isinstance(generation, dict):
        for mismatch in backend.mismatches(generation, "policy.generation"):
            is_harmless = _value(mismatch.key, facts) is None or "a text" in mismatch.expected
            if not mismatch.is_missing and not is_harmless and mismatch.key not in reported_keys:
                yield mismatch


def _wrong_type(facts: RecipeFacts) -> Iterator[Hit]:
    for mismatch in _mismatches(facts):
        key, expected = mismatch.key, mismatch.expected
        if mismatch.is_missing or key in facts.recipe.unresolved:
            continue
        value = _value(key, facts)
        name = key.rpartition(".")[2]
        is_switch = isinstance(value, bool) and expected == "a section"
        fix = f"write {name}: {{enabled: {as_yaml(value)}}}" if is_switch else f"write {expected}"
        shown = as_yaml(value)
        yield Hit(key, f"{shown if len(shown) < 60 else shown[:57] + '...'}: NeMo-RL takes {expected} here; {fix}")


def _missing_key(facts: RecipeFacts) -> Iterator[Hit]:
    missing: dict[str, list[str]] = {}
    for mismatch in _mismatches(facts):
        if mismatch.is_missing:
            section, _, name = mismatch.key.rpartition(".")
            missing.setdefault(section, []).append(name)
    for section, names in missing.items():
        yield Hit(
            f"{section}.{names[0]}" if section else names[0],
            f"{', '.join(names)}: NeMo-RL requires {'this key' if len(names) == 1 else 'these keys'} in "
            f"{section or 'every recipe'}; inherit from one of NeMo-RL's recipes by defaults:, or add what is missing",
        )


def _value(key: str, facts: RecipeFacts) -> object:
    """Return the value at a key such as ``a.b[0].c``; None if it is null or missing."""
    value: object = facts.recipe.data
    for part in key.replace("[", ".[").split("."):
        if isinstance(value, list) and part.startswith("["):
            value = value[int(part[1:-1])]
        elif isinstance(value, dict):
            value = value.get(part)
    return value


RULES = (
    Rule(
        "GM008",
        "error",
        "value of a type that NeMo-RL refuses",
        _SOURCE,
        _wrong_type,
        needs=("nemo_rl",),
        needs_loss=False,
        applies_to_lab=False,
    ),
    Rule(
        "GM009",
        "error",
        "key that NeMo-RL requires and the recipe lacks",
        _SOURCE,
        _missing_key,
        needs=("nemo_rl",),
        needs_loss=False,
        applies_to_lab=False,
    ),
)
