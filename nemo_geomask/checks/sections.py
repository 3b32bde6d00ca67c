"""GM0, second part: keys outside ``loss_fn`` that NeMo-RL has under another name, and so ignores."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.checks.rule import Hit, Rule
from nemo_geomask.checks.written import own_keys, theirs
from nemo_geomask.config.strict import nearest
from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe import Origin

__all__ = ["RULES", "known_keys"]

_LOSS = "loss_fn"
_SOURCE = "the example configs of the NeMo-RL at hand"


Names = dict[str, set[str]]
"""By the dotted place that they stand at; top-level ones at ``""``."""


@functools.cache
def known_keys(checkout: Path) -> Mapping[str, Collection[str]]:
    """Names by the dotted place that they stand at, in all of ``examples/configs`` but its recipes; top-level ones at
    ``""``.

    Raises:
        ConfigError: one of the files is no valid YAML.
    """
    found: Names = {}
    examples = checkout / "examples" / "configs"
    for path in sorted({*examples.glob("*.yaml"), *examples.glob("evals/*.yaml")}):
        _collect(_read(path, path.read_text(encoding="utf-8")), "", found)
    return found


def _read(path: Path | str, text: str) -> Any:
    import yaml  # Comes with omegaconf.

    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: no valid YAML: {' '.join(str(error).split())}") from None


def _collect(value: Any, place: str, found: Names) -> None:
    if isinstance(value, Mapping):
        found.setdefault(place, set()).update(map(str, value))
        for name, inner in value.items():
            _collect(inner, f"{place}.{name}" if place else str(name), found)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, f"{place}[]", found)


def _unknown(facts: RecipeFacts) -> Iterator[tuple[str, Origin, Collection[str]]]:
    """Keys of the user's that no example has at that place, with the names that they have there."""
    assert facts.nemo_rl is not None
    known = known_keys(facts.nemo_rl)
    if not known or "lab" in facts.recipe.data:
        return
    inherited: Names = {"": {"defaults", _LOSS}}
    for where, text in theirs(facts).items():
        _collect(_read(where, text), "", inherited)
    for key, origin in own_keys(facts):
        place, _, name = re.sub(r"\[\d+\]", "[]", key).rpartition(".")
        names = {*known.get(place, ()), *inherited.get(place, ())}
        # What begins with an underscore speaks to a loader.
        if names and name not in names and not name.endswith("]") and not name.startswith("_"):
            yield key, origin, names


def _other_loss(facts: RecipeFacts) -> Iterator[Hit]:
    for key, origin, names in _unknown(facts):
        if "." not in key and nearest(key, names) == _LOSS:
            yield Hit(
                key,
                f"NeMo-RL has no section {key} and ignores it, so that another loss trains than is written there; did "
                f"you mean {_LOSS}?",
                origin,
            )


def _unknown_section(facts: RecipeFacts) -> Iterator[Hit]:
    for key, origin, names in _unknown(facts):
        guess = nearest(key, names)
        if "." not in key and guess != _LOSS and not _referred_to(key, facts):
            hint = f"did you mean {guess}?" if guess else "its own are " + ", ".join(sorted(set(names) - {"defaults"}))
            yield Hit(key, f"NeMo-RL has no section {key} and ignores it; {hint}", origin)


def _referred_to(section: str, facts: RecipeFacts) -> bool:
    reference = re.compile(rf"\$\{{\s*{re.escape(section)}\s*[.}}]")
    return any(reference.search(text) for _, text in facts.recipe.files)


def _misspelt(facts: RecipeFacts) -> Iterator[Hit]:
    for key, origin, names in _unknown(facts):
        place, _, name = key.rpartition(".")
        guess = _slip(name, names)
        # loss_fn itself is validated strictly.
        if place and guess and place.partition(".")[0] != _LOSS:
            yield Hit(
                key,
                f"no example of NeMo-RL's has {name} in {place}, so that it may be ignored; did you mean {guess}?",
                origin,
            )


def _slip(name: str, known: Collection[str]) -> str | None:
    """The known name that ``name`` differs from by a slip of the pen. NeMo-RL has keys in no example, so to be like
    one is not enough: at most two letters, of which a whole word more or less is none."""
    for guess in difflib.get_close_matches(name, known, n=1, cutoff=0.85):
        blocks = difflib.SequenceMatcher(None, name, guess).get_matching_blocks()
        if max(len(name), len(guess)) - sum(block.size for block in blocks) <= 2:
            return guess
    return None


RULES = (
    Rule(
        "GM004",
        "error",
        "an unknown section close to `loss_fn`: another loss trains",
        _SOURCE,
        _other_loss,
        needs=("nemo_rl",),
        needs_loss=False,
    ),
    Rule(
        "GM005",
        "warning",
        "an unknown section",
        _SOURCE,
        _unknown_section,
        needs=("nemo_rl",),
        needs_loss=False,
    ),
    Rule(
        "GM006",
        "warning",
        "an unknown key close to a known one",
        _SOURCE,
        _misspelt,
        needs=("nemo_rl",),
        needs_loss=False,
    ),
)
