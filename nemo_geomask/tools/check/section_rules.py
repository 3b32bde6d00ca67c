"""Keys outside ``loss_fn`` that NeMo-RL does not have, and so ignores."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.config.strict import nearest
from nemo_geomask.hosts.nemo_rl.source_words import source_texts
from nemo_geomask.recipe import Origin
from nemo_geomask.recipe.input_limits import load_yaml, read_text
from nemo_geomask.tools.check.config_classes import (
    GENERATION_CLASSES,
    generation_section,
    master_section,
    master_sections,
)
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule
from nemo_geomask.tools.check.setting_author import nemo_rl_files, user_keys
from nemo_geomask.tools.check.value_types import AnyOf, ListOf, Section, ValueType
from nemo_geomask.tools.check.word_rules import accepted_arguments

_LOSS = "loss_fn"
_MAX_UNKNOWN_KEYS = 100
_SOURCE = "the example configs and the configuration classes of the NeMo-RL checkout"
# Names that other frameworks give to settings outside the loss, which translate does not read, and NeMo-RL's names.
_OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "actor_lr", "lr_rate"), "lr"),
    **dict.fromkeys(("group_size", "n_samples_per_prompt"), "num_generations_per_prompt"),
    **dict.fromkeys(("max_steps", "total_steps"), "max_num_steps"),
    **dict.fromkeys(("beta", "kl_coef", "kl_beta"), "reference_policy_kl_penalty"),
    **dict.fromkeys(("rank", "lora_rank"), "dim"),
    **dict.fromkeys(("max_response_length", "max_tokens", "response_length"), "max_new_tokens"),
}

# Sections that NeMo-RL passes on to Megatron, Automodel, vLLM or an environment, which read keys that NeMo-RL lacks.
_PASSED_ON = re.compile(
    r"env|policy\.dtensor_cfg\.automodel_kwargs|policy\.generation\.mcore_generation_config|"
    r"on_policy_distillation\.non_colocated_teachers|"
    r"(policy|value|teacher)\.megatron_cfg\.(optimizer|scheduler|distributed_data_parallel_config|checkpoint)"
)

KeysBySection = dict[str, set[str]]
"""Names of keys by the dotted section that they are in; top-level keys are in section ``""``."""


class UnknownKey(NamedTuple):
    """Key that the user wrote and that NeMo-RL has neither in an example config nor in a class of its section."""

    key: str  # dotted key
    origin: Origin  # file and line, or override
    known_names: Collection[str]  # keys that NeMo-RL has in the same section


@functools.cache
def known_keys(checkout: Path) -> Mapping[str, Collection[str]]:
    """Return the keys of NeMo-RL by dotted section (``""`` at the top).

    They are those in ``examples/configs``, without its recipes, and those that its configuration classes declare.

    Raises:
        ConfigError: one of the files is not valid YAML.
    """
    keys: KeysBySection = {}
    examples = checkout / "examples" / "configs"
    for path in sorted({*examples.glob("*.yaml"), *examples.glob("evals/*.yaml")}):
        _collect_keys(load_yaml(read_text(path), path), "", keys)
    for section, names in _declared_keys(checkout).items():
        keys.setdefault(section, set()).update(names)
    return keys


@functools.cache
def _declared_keys(checkout: Path) -> Mapping[str, Collection[str]]:
    """Return the keys that NeMo-RL's configuration classes declare, by dotted section."""
    keys: KeysBySection = {}
    for master in master_sections(checkout).values():
        _collect_declared_keys(master, "", keys)
    for backend in GENERATION_CLASSES:
        if (generation := generation_section(checkout, backend)) is not None:
            _collect_declared_keys(generation, "policy.generation", keys)
    return keys


def _collect_keys(value: Any, section: str, keys: KeysBySection) -> None:
    if isinstance(value, Mapping):
        keys.setdefault(section, set()).update(map(str, value))
        for name, inner in value.items():
            _collect_keys(inner, f"{section}.{name}" if section else str(name), keys)
    elif isinstance(value, list):
        for inner in value:
            _collect_keys(inner, f"{section}[]", keys)


def _collect_declared_keys(value_type: ValueType, section: str, keys: KeysBySection) -> None:
    if isinstance(value_type, AnyOf):
        for member in value_type.members:
            _collect_declared_keys(member, section, keys)
    elif isinstance(value_type, ListOf):
        _collect_declared_keys(value_type.item, f"{section}[]", keys)
    elif isinstance(value_type, Section):
        keys.setdefault(section, set()).update(value_type.fields)
        for name, field in value_type.fields.items():
            _collect_declared_keys(field, f"{section}.{name}" if section else name, keys)


def _unknown_keys(facts: RecipeFacts) -> Iterator[UnknownKey]:
    assert facts.nemo_rl is not None
    declared = _declared_keys(facts.nemo_rl)
    inherited: KeysBySection = {"": {"defaults", _LOSS}}
    for path, text in nemo_rl_files(facts).items():
        _collect_keys(load_yaml(text, path), "", inherited)
    recipe_section = master_section(facts.nemo_rl, facts.recipe.data)
    # Top-level sections of other algorithms only. A GRPO recipe with evaluation's `generation` at the top is reported,
    # since GRPO has that section under policy.
    foreign_sections = {name for master in master_sections(facts.nemo_rl).values() for name in master.fields}
    foreign_sections -= {*(recipe_section.fields if recipe_section else foreign_sections), *inherited[""]}
    for key, origin in user_keys(facts):
        section, _, name = re.sub(r"\[\d+\]", "[]", key).rpartition(".")
        # The schema of loss_fn reports its keys. An underscore begins an instruction to the YAML loader.
        if section.partition(".")[0] == _LOSS or name.startswith("_") or name.endswith("]"):
            continue
        foreign = set() if section else foreign_sections
        if name in {*declared.get(section, ()), *inherited.get(section, ())} - foreign:
            continue
        # Only now, since reading all example configs takes longer than all other rules together.
        nemo_rl_keys = known_keys(facts.nemo_rl)
        names = {*nemo_rl_keys.get(section, ()), *inherited.get(section, ())} - foreign
        if nemo_rl_keys and names and name not in names:
            yield UnknownKey(key, origin, names)


def _first_unknown_keys(facts: RecipeFacts) -> Iterator[UnknownKey]:
    """Yield the unknown keys that are judged: each takes milliseconds, and a hostile recipe has thousands."""
    return itertools.islice(_unknown_keys(facts), _MAX_UNKNOWN_KEYS)


@rule("GM004", "error", _SOURCE, needs=("nemo_rl",), needs_loss=False, applies_to_lab=False)
def _misspelled_loss_section(facts: RecipeFacts) -> Iterator[Hit]:
    """Misspelled `loss_fn` section, so that another loss trains."""
    for key, origin, known_names in _first_unknown_keys(facts):
        if "." not in key and nearest(key, known_names) == _LOSS:
            yield Hit(
                key,
                f"NeMo-RL has no section {key} and ignores it, so another loss trains than the one written there; did "
                f"you mean {_LOSS}?",
                origin,
                {_LOSS: facts.get(key)},
                is_misspelt=True,
            )


@rule("GM005", "warning", _SOURCE, needs=("nemo_rl",), needs_loss=False, applies_to_lab=False)
def _unknown_section(facts: RecipeFacts) -> Iterator[Hit]:
    """Section that NeMo-RL does not have."""
    for key, origin, known_names in _first_unknown_keys(facts):
        guess = nearest(key, known_names)
        if "." not in key and guess != _LOSS and not _is_referenced(key, facts):
            sections = ", ".join(sorted(set(known_names) - {"defaults"}))
            places = _places_of(key, key, facts)
            hint = f"did you mean {guess}?" if guess else f"its sections are {sections}"
            yield Hit(
                key,
                f"NeMo-RL has no section {key} and ignores it; {f'did you mean {places}?' if places else hint}",
                origin,
            )


def _is_referenced(section: str, facts: RecipeFacts) -> bool:
    """Return True if another value refers to the section, as in ``${section.key}``."""
    reference = re.compile(rf"\$\{{\s*{re.escape(section)}\s*[.}}]")
    return any(reference.search(text) for _, text in facts.recipe.files)


@rule("GM006", "warning", _SOURCE, needs=("nemo_rl",), needs_loss=False, applies_to_lab=False)
def _unknown_key(facts: RecipeFacts) -> Iterator[Hit]:
    """Key that NeMo-RL does not have at this place."""
    assert facts.nemo_rl is not None
    unknown_sections: list[str] = []
    unknown_keys = _unknown_keys(facts)
    for key, origin, known_names in itertools.islice(unknown_keys, _MAX_UNKNOWN_KEYS):
        section, _, name = key.rpartition(".")
        is_inside = any(key.startswith((f"{outer}.", f"{outer}[")) for outer in unknown_sections)
        # GM004 and GM005 report sections, and GM357 arguments.
        if not section or is_inside or accepted_arguments(key, facts):
            continue
        guess = _correct_spelling(name, known_names)
        # A section that no class declares, such as one of keyword arguments, may have any key.
        is_declared = re.sub(r"\[\d+\]", "[]", section) in _declared_keys(facts.nemo_rl)
        # Source that reads a section of this name may get it from another object than the recipe.
        is_read = not isinstance(facts.get(key), Mapping) and _reads(facts.nemo_rl, section, name)
        is_closed = is_declared and not is_read and not _PASSED_ON.match(section)
        places = ""
        if not guess and (is_closed or (name in _OTHER_NAMES and not is_read)):
            is_foreign = name in _OTHER_NAMES or not _is_in_source(facts.nemo_rl, name)
            places = _places_of((is_foreign and _name_in_nemo_rl(name, facts.get(key))) or name, key, facts)
        if guess or places:
            problem = f"NeMo-RL has no key {name} in {section}, so it may be ignored; did you mean {guess or places}?"
        elif is_closed and not _is_setting(facts.nemo_rl, name, section):
            other = nearest(name, known_names)
            problem = f"NeMo-RL has no key {name}: nothing in its source reads such a setting, so it is ignored; " + (
                f"did you mean {other}?" if other else f"the keys of {section} are {', '.join(sorted(known_names))}"
            )
        else:
            continue
        unknown_sections.append(key)
        correct = {f"{section}.{guess}": facts.get(key)} if guess else {}
        yield Hit(key, problem, origin, correct, is_misspelt=bool(guess))
    not_judged = list(unknown_keys)
    if not_judged:
        yield Hit(
            not_judged[0].key,
            f"NeMo-RL's files do not have this key and the {len(not_judged) - 1:,} unknown ones after it; they were "
            f"not looked at, since {_MAX_UNKNOWN_KEYS} others are unknown as well: correct or remove those first",
            not_judged[0].origin,
        )


def _correct_spelling(name: str, known_names: Collection[str]) -> str | None:
    """Return the known name from which ``name`` differs by a typing error of at most two letters, or None.

    NeMo-RL has keys that no example contains, so a name that is merely similar, such as one with another word in it, is
    no evidence of an error.
    """
    for guess in difflib.get_close_matches(name, known_names, n=1, cutoff=0.85):
        blocks = difflib.SequenceMatcher(None, name, guess).get_matching_blocks()
        if max(len(name), len(guess)) - sum(block.size for block in blocks) <= 2:
            return guess
    return None


def _name_in_nemo_rl(name: str, value: Any) -> str:
    """Return NeMo-RL's name for a setting of another framework; empty if there is none, or several."""
    from nemo_geomask.tools.translate import nemo_rl_keys  # takes a while, and few recipes need it

    keys = nemo_rl_keys(name, value)
    return _OTHER_NAMES.get(name) or (keys[0].rpartition(".")[2] if len(keys) == 1 else "")


def _places_of(name: str, key: str, facts: RecipeFacts) -> str:
    """Return up to two places where a misplaced key may belong, joined by "or"; empty if there is none.

    A place is a section of NeMo-RL, or ``loss_fn``, that has a key of this name and that the recipe contains. Sections
    that share the most outer sections with ``key`` come first.
    """
    assert facts.nemo_rl is not None
    sections = [
        section for section, names in known_keys(facts.nemo_rl).items() if name in names and "[]" not in section
    ]
    sections += [_LOSS] if name in LossConfig.model_fields else []
    present = {section for section in sections if not section or facts.get(section) is not None}
    written_in = key.split(".")[:-1]

    def distance(section: str) -> tuple[int, int, str]:
        parts = section.split(".") if section else []
        shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(parts, written_in, strict=False))
        return (-len(list(shared)), len(parts), section)

    nearest_sections = sorted(present, key=distance)[:2]
    return " or ".join(f"{section}.{name}" if section else name for section in nearest_sections)


@functools.cache
def _reads(checkout: Path, section: str, name: str) -> bool:
    """Return True if NeMo-RL's source reads the name from the section, although no class of the section declares it."""
    last = re.escape(re.split(r"[.\[]", section.rstrip("]"))[-1])
    quoted = rf"""["']{re.escape(name)}["']"""
    read = re.compile(rf"""{last}\w*["'\])]*\s*(\.get\(\s*|\[){quoted}|{quoted} (not )?in [^\n]*{last}""")
    return any(read.search(text) for text in source_texts(checkout).values() if name in text)


@functools.cache
def _is_setting(checkout: Path, name: str, section: str) -> bool:
    """Return True if NeMo-RL's source reads the name from any mapping; those of datasets are parameters."""
    if section.startswith("data."):
        return _is_in_source(checkout, name)
    quoted = rf"""["']{re.escape(name)}["']"""
    read = re.compile(
        rf"""\[{quoted}\]|\.(get|pop)\(\s*{quoted}|{quoted} (not )?in |(cfg|config|self)\w*\.{re.escape(name)}\b"""
    )
    return any(name in text and read.search(text) for text in source_texts(checkout).values())


@functools.cache
def _is_in_source(checkout: Path, name: str) -> bool:
    """Return True if NeMo-RL's source has the name in quotes or as an attribute, by which it could read a key."""
    mention = re.compile(rf"""["']{re.escape(name)}["']|\.{re.escape(name)}\b|\b{re.escape(name)}\s*[:=]""")
    return any(name in text and mention.search(text) for text in source_texts(checkout).values())
