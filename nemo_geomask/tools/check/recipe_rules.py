"""Rules on what is refused or ignored as a recipe is read: ``loss_fn``, types of values, missing keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.errors import Problem
from nemo_geomask.hosts.nemo_rl.facts import LOSS_FIELDS
from nemo_geomask.hosts.nemo_rl.source_words import is_read_without_default
from nemo_geomask.tools.check.config_classes import generation_section, master_section
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule
from nemo_geomask.tools.check.setting_author import nearest_to_user, nemo_rl_files, user_keys
from nemo_geomask.tools.check.value_types import RefusedValue, mismatches
from nemo_geomask.yaml_text import as_yaml


@rule("GM001", "error", "docs/reference/loss_reference.md", needs_loss=False, may_be_ignored=False)
def _invalid_loss(facts: RecipeFacts) -> Iterator[Hit]:
    """`loss_fn` that is invalid."""
    for problem in facts.problems:
        yield _hit(_named_by_others(problem, facts), facts)


def _named_by_others(problem: Problem, facts: RecipeFacts) -> Problem:
    """Return the problem of an unknown key with the key that is meant, if the key is another system's."""
    section, _, name = problem.keys[0].rpartition(".") if len(problem.keys) == 1 else ("", "", "")
    if section != "loss_fn" or name in LossConfig.model_fields:
        return problem
    from nemo_geomask.tools.translate import nemo_rl_keys  # takes a while, and few recipes need it

    meant = " and ".join(nemo_rl_keys(name, facts.get(problem.keys[0])))
    return replace(problem, template=f"unknown key; what other systems call so is {meant}") if meant else problem


@rule("GM002", "warning", "docs/reference/loss_reference.md")
def _doubtful_loss(facts: RecipeFacts) -> Iterator[Hit]:
    """`loss_fn` that is valid, but probably not what was meant."""
    nemo_rl, origins = nemo_rl_files(facts), facts.recipe.origins
    for warning in facts.warnings:
        written = [origin for key in warning.keys if (origin := origins.at(key))]
        # If all of the settings are from NeMo-RL's own files, the user made no mistake.
        if not written or any(origin.where not in nemo_rl for origin in written):
            yield _hit(warning, facts)


def _hit(problem: Problem, facts: RecipeFacts) -> Hit:
    """Return the hit of a problem."""
    return Hit(nearest_to_user(problem.keys, facts) if problem.keys else "loss_fn", problem.template, fix=problem.fix)


@rule("GM003", "error", "NeMo-RL `ClippedPGLossConfig`: extra keys are allowed and ignored")
def _settings_without_name(facts: RecipeFacts) -> Iterator[Hit]:
    """Settings of this package without `loss_fn.name`, which NeMo-RL ignores."""
    if not facts.trains_nemo_rl_loss:
        return
    for key, field in LossConfig.model_fields.items():
        value = facts.loss_block.get(key)
        if key not in LOSS_FIELDS and value is not None and value != field.default:
            yield Hit(
                f"loss_fn.{key}",
                "loss_fn has no name, so NeMo-RL's own loss trains, which ignores this key; {fix} or remove "
                "it, or set loss_fn.name to an objective of this package",
                fix={f"loss_fn.{key}": None},
            )


@rule("GM007", "note", "the recipe; NeMo-RL resolves it when it starts", needs_loss=False)
def _unresolved_value(facts: RecipeFacts) -> Iterator[Hit]:
    """Path that depends on an environment variable which is not set here."""
    for key, reason in facts.recipe.unresolved.items():
        yield Hit(key, f"its value is unknown on this machine, so it was not checked: {reason}")


_NUMBER = re.compile(r"[-+]?\d+\.?\d*(e[-+]?\d+)?", re.IGNORECASE)
_SOURCE = "NeMo-RL `MasterConfig` of the algorithm, which is validated from v0.7.0 on"


def _mismatches(facts: RecipeFacts) -> Iterator[RefusedValue]:
    """Yield what NeMo-RL's classes refuse, except in ``loss_fn``, which GM001 checks."""
    assert facts.nemo_rl is not None
    master = master_section(facts.nemo_rl, facts.recipe.data)
    # Until v0.6.0, NeMo-RL does not validate recipes.
    if master is None or not master.is_model:
        return
    reported_keys: set[str] = set()
    for mismatch in mismatches(master, facts.recipe.data, ""):
        if mismatch.key.partition(".")[0] != "loss_fn":
            reported_keys.add(mismatch.key)
            yield mismatch
    # NeMo-RL does not validate the backend's own settings. What is missing or null there matters only if it is read
    # without a default, and its recipes have numbers as values of environment variables.
    generation = facts.get("policy.generation")
    backend = generation_section(facts.nemo_rl, str(facts.get("policy.generation.backend")))
    if backend is not None and isinstance(generation, dict):
        for mismatch in mismatches(backend, generation, "policy.generation"):
            is_empty, name = facts.get(mismatch.key) is None, mismatch.key.rpartition(".")[2]
            is_wrong = is_read_without_default(facts.nemo_rl, name) if is_empty else "a text" not in mismatch.expected
            if is_wrong and mismatch.key not in reported_keys:
                yield mismatch


@rule("GM008", "error", _SOURCE, needs=("nemo_rl",), needs_loss=False, applies_to_lab=False)
def _wrong_type(facts: RecipeFacts) -> Iterator[Hit]:
    """Value of a type that NeMo-RL refuses."""
    empty: list[str] = []
    for mismatch in _mismatches(facts):
        key, expected = mismatch.key, mismatch.expected
        if mismatch.is_missing or key in facts.recipe.unresolved:
            continue
        if facts.get(key) is None:
            empty.append(key)
            continue
        value = facts.get(key)
        is_switch = isinstance(value, bool) and expected == "a section"
        shown = as_yaml(value)
        yield Hit(
            key,
            f"{shown if len(shown) < 60 else shown[:57] + '...'}: NeMo-RL takes {expected} at this place",
            fix={key: {"enabled": value}} if is_switch else {},
        )
    for key, _ in user_keys(facts):
        value = facts.get(key)
        if isinstance(value, str) and "kwargs." in key and _NUMBER.fullmatch(value):
            yield Hit(key, f"'{value}': a text, but a number is meant", fix={key: float(value)})
    if empty:
        further = f", and so are {', '.join(empty[1:])}" if empty[1:] else ""
        yield Hit(empty[0], f"null{further}: NeMo-RL takes a value here; set it, or start with overrides that do")


@rule("GM009", "error", _SOURCE, needs=("nemo_rl",), needs_loss=False, applies_to_lab=False)
def _missing_key(facts: RecipeFacts) -> Iterator[Hit]:
    """Key that NeMo-RL requires and the recipe lacks."""
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
