"""GM004, GM005 and GM006: keys outside ``loss_fn`` that NeMo-RL does not have, and so ignores."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nemo_geomask.config.strict import nearest
from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe import Origin
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, Rule
from nemo_geomask.tools.check.setting_author import nemo_rl_files, user_keys

__all__ = ["RULES", "known_keys"]

_LOSS = "loss_fn"
_SOURCE = "the example configs of the NeMo-RL checkout"

KeysBySection = dict[str, set[str]]
"""Names of keys by the dotted section that they are in; top-level keys are in section ``""``."""


class UnknownKey(NamedTuple):
    """Key that the user wrote and that no example config has in that section.

    Attributes:
        key: dotted key.
        origin: file and line, or override.
        known_names: keys that the examples have in the same section.
    """

    key: str
    origin: Origin
    known_names: Collection[str]


@functools.cache
def known_keys(checkout: Path) -> Mapping[str, Collection[str]]:
    """Return the keys in NeMo-RL's ``examples/configs``, without its recipes, by dotted section (``""`` at the top).

    Raises:
        ConfigError: one of the files is not valid YAML.
    """
    keys: KeysBySection = {}
    examples = checkout / "examples" / "configs"
    for path in sorted({*examples.glob("*.yaml"), *examples.glob("evals/*.yaml")}):
        _collect_keys(_parse_yaml(path, path.read_text(encoding="utf-8")), "", keys)
    return keys


def _parse_yaml(path: Path | str, text: str) -> Any:
    import yaml  # a dependency of omegaconf

    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def _collect_keys(value: Any, section: str, keys: KeysBySection) -> None:
    if isinstance(value, Mapping):
        keys.setdefault(section, set()).update(map(str, value))
        for name, inner in value.items():
            _collect_keys(inner, f"{section}.{name}" if section else str(name), keys)
    elif isinstance(value, list):
        for inner in value:
            _collect_keys(inner, f"{section}[]", keys)


def _unknown_keys(facts: RecipeFacts) -> Iterator[UnknownKey]:
    assert facts.nemo_rl is not None
    example_keys = known_keys(facts.nemo_rl)
    if not example_keys or "lab" in facts.recipe.data:
        return
    inherited: KeysBySection = {"": {"defaults", _LOSS}}
    for path, text in nemo_rl_files(facts).items():
        _collect_keys(_parse_yaml(path, text), "", inherited)
    for key, origin in user_keys(facts):
        section, _, name = re.sub(r"\[\d+\]", "[]", key).rpartition(".")
        names = {*example_keys.get(section, ()), *inherited.get(section, ())}
        # A key that begins with an underscore is an instruction to the YAML loader.
        if names and name not in names and not name.endswith("]") and not name.startswith("_"):
            yield UnknownKey(key, origin, names)


def _misspelled_loss_section(facts: RecipeFacts) -> Iterator[Hit]:
    for key, origin, known_names in _unknown_keys(facts):
        if "." not in key and nearest(key, known_names) == _LOSS:
            yield Hit(
                key,
                f"NeMo-RL has no section {key} and ignores it, so another loss trains than the one written there; did "
                f"you mean {_LOSS}?",
                origin,
            )


def _unknown_section(facts: RecipeFacts) -> Iterator[Hit]:
    for key, origin, known_names in _unknown_keys(facts):
        guess = nearest(key, known_names)
        if "." not in key and guess != _LOSS and not _is_referenced(key, facts):
            sections = ", ".join(sorted(set(known_names) - {"defaults"}))
            hint = f"did you mean {guess}?" if guess else f"its sections are {sections}"
            yield Hit(key, f"NeMo-RL has no section {key} and ignores it; {hint}", origin)


def _is_referenced(section: str, facts: RecipeFacts) -> bool:
    """Return True if another value refers to the section, as in ``${section.key}``."""
    reference = re.compile(rf"\$\{{\s*{re.escape(section)}\s*[.}}]")
    return any(reference.search(text) for _, text in facts.recipe.files)


def _misspelled_key(facts: RecipeFacts) -> Iterator[Hit]:
    for key, origin, known_names in _unknown_keys(facts):
        section, _, name = key.rpartition(".")
        guess = _correct_spelling(name, known_names)
        # The schema of loss_fn reports unknown keys itself.
        if section and guess and section.partition(".")[0] != _LOSS:
            yield Hit(
                key,
                f"no example config of NeMo-RL has {name} in {section}, so it may be ignored; did you mean {guess}?",
                origin,
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


RULES = (
    Rule(
        "GM004",
        "error",
        "misspelled `loss_fn` section, so that another loss trains",
        _SOURCE,
        _misspelled_loss_section,
        needs=("nemo_rl",),
        needs_loss=False,
    ),
    Rule(
        "GM005",
        "warning",
        "section that NeMo-RL does not have",
        _SOURCE,
        _unknown_section,
        needs=("nemo_rl",),
        needs_loss=False,
    ),
    Rule(
        "GM006",
        "warning",
        "key that looks like a misspelled key of NeMo-RL",
        _SOURCE,
        _misspelled_key,
        needs=("nemo_rl",),
        needs_loss=False,
    ),
)
