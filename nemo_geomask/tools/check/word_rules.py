"""Words that NeMo-RL does not know, judged by the words in its source and in its recipes."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from nemo_geomask.hosts.nemo_rl.source_words import SourceWords, words_in_recipes, words_in_source
from nemo_geomask.recipe.input_limits import parse_python, read_source
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule
from nemo_geomask.tools.check.setting_author import is_switched_off, section_and_name, user_keys

_WORD = re.compile(r"[A-Za-z][\w.+-]{1,60}")
_IMPORT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_FREE_SECTION = re.compile(r"(^|\.)(logger|env_vars|\w*overrides|\w*_kwargs|non_colocated_teachers)\.|metric_name$")
"""Sections whose texts are free, that are checked elsewhere, or that NeMo-RL passes on to other libraries."""
_LETTERS_PER_ERROR = 4  # of a misspelt word; one error is allowed in a shorter word
# No source says what vLLM takes; with fp8, NeMo-RL loads its own quantised weights.
_VLLM_WORDS = {
    "policy.generation.vllm_cfg.precision": ("auto", "half", "float16", "bfloat16", "float", "float32", "fp8"),
}


def _user_words(facts: RecipeFacts) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of each word that the user wrote outside ``loss_fn`` and free text."""
    for key, _ in user_keys(facts):
        value = facts.get(key)
        is_theirs = not key.startswith("loss_fn.") or facts.trains_nemo_rl_loss or facts.other_algorithm
        if not isinstance(value, str) or not _WORD.fullmatch(value) or _FREE_SECTION.search(key) or not is_theirs:
            continue
        if any(key in problem.keys for problem in facts.problems):  # which GM001 reports
            continue
        if not is_switched_off(key, facts):
            yield key, value


def _words(key: str, facts: RecipeFacts) -> SourceWords:
    """Return the words that NeMo-RL knows at a key, those of its recipes among them."""
    assert facts.nemo_rl is not None
    section, name = section_and_name(key)
    words = words_in_source(facts.nemo_rl, section.removesuffix("_cfg"), name, facts.algorithm)
    compared = words.compared | words_in_recipes(facts.nemo_rl, section, name)
    return words._replace(compared=compared, accepted=_VLLM_WORDS.get(key) or words.accepted)


@rule(
    "GM324",
    "error",
    "the comparisons in NeMo-RL's source with an error for all other words; vLLM `dtype`",
    needs=("nemo_rl",),
    needs_loss=False,
    applies_to_lab=False,
)
def _refused_word(facts: RecipeFacts) -> Iterator[Hit]:
    """Word that NeMo-RL does not take."""
    for key, value in _user_words(facts):
        if misspelt := _misspelt_of_registered(key, value, facts):
            yield misspelt
            continue
        accepted = _words(key, facts).accepted
        # Evaluation has datasets of its own; a name with a dot is that of a class.
        if accepted and value not in accepted and not re.search("[.:]", value) and "eval" not in facts.recipe.data:
            nearest = nearest_word(value, accepted)
            allowed = ", ".join(sorted(accepted, key=str.casefold))
            yield Hit(key, f"{value}: NeMo-RL takes only {allowed}", fix={key: nearest[0]} if nearest else {})


@rule(
    "GM010",
    "warning",
    "the words that NeMo-RL's source compares the key with, and those of its recipes",
    needs=("nemo_rl",),
    needs_loss=False,
    applies_to_lab=False,
)
def _misspelt_word(facts: RecipeFacts) -> Iterator[Hit]:
    """Word that looks misspelt."""
    assert facts.nemo_rl is not None
    for key, value in _user_words(facts):
        candidates, accepted, _ = _words(key, facts)
        is_refused = accepted and value not in accepted
        if value in candidates or is_refused or _misspelt_of_registered(key, value, facts):
            continue
        if _IMPORT.fullmatch(value):
            lacks_name, nearest = _lacks_name(value, facts.nemo_rl), _nearest_path(value, candidates)
            if lacks_name or (lacks_name is None and nearest):
                yield Hit(key, _no_such_name(value), fix={key: nearest[0]} if nearest else {})
        elif candidates and all(map(_IMPORT.fullmatch, candidates)):
            ends = [path for path in sorted(candidates) if path.endswith(f".{value}")]
            yield Hit(
                key, f"{value}: NeMo-RL imports what this key names; give its path", fix={key: ends[0]} if ends else {}
            )
        elif nearest := nearest_word(value, candidates):
            yield Hit(key, f"{value}: neither NeMo-RL's source nor its recipes have this word", fix={key: nearest[0]})


def _misspelt_of_registered(key: str, value: str, facts: RecipeFacts) -> Hit | None:
    """Return the hit of a word close to one of a registry that lacks it, or of a path close to one that is there."""
    assert facts.nemo_rl is not None
    words = _words(key, facts)
    if _IMPORT.fullmatch(value):
        # A newer package than the one installed here may have a name that resembles none.
        near = _nearest_path(value, words.compared) if _lacks_name(value, facts.nemo_rl) else []
        return Hit(key, _no_such_name(value), fix={key: near[0]}) if near else None
    near = nearest_word(value, words.registered) if value not in words.compared else []
    message = f"{value}: NeMo-RL has no such word, and only what a start script registers would add it"
    return Hit(key, message, fix={key: near[0]}) if near and not words.accepted else None


def _nearest_path(path: str, candidates: Collection[str]) -> list[str]:
    module, _, name = path.rpartition(".")
    names = [word.removeprefix(f"{module}.") for word in candidates if word.startswith(f"{module}.")]
    return [f"{module}.{each}" for each in nearest_word(name, names)]


def _no_such_name(path: str) -> str:
    return f"{path}: {path.partition('.')[0]} has no such name; give the path of one that can be imported"


@rule(
    "GM357",
    "error",
    "NeMo-RL `get_optimizer`, which calls the class with `kwargs`; the class itself",
    needs_loss=False,
    applies_to_lab=False,
)
def _refused_argument(facts: RecipeFacts) -> Iterator[Hit]:
    """Argument that the class of an optimiser or scheduler does not take."""
    for key, origin in user_keys(facts):
        accepted, (section, _, name) = accepted_arguments(key, facts), key.rpartition(".")
        if accepted and name.isidentifier() and name not in accepted:
            nearest = nearest_word(name, accepted)
            yield Hit(
                key,
                f"{facts.get(section.removesuffix('kwargs') + 'name')} takes no {name}; "
                + (f"did you mean {nearest[0]}?" if nearest else f"its arguments are {', '.join(accepted)}"),
                origin,
                {f"{section}.{nearest[0]}": facts.get(key)} if nearest else {},
                is_misspelt=bool(nearest),
            )


def accepted_arguments(key: str, facts: RecipeFacts) -> tuple[str, ...]:
    """Return the arguments that the class beside a section ``kwargs`` takes; empty if it is unknown, or takes any."""
    section = key.rpartition(".")[0]
    path = facts.get(f"{section.removesuffix('kwargs')}name") if section.endswith(".kwargs") else None
    return _arguments(path) if isinstance(path, str) and _IMPORT.fullmatch(path) else ()


@functools.cache
def _arguments(path: str) -> tuple[str, ...]:
    module, _, name = path.rpartition(".")
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    folder = Path(next(iter((spec.submodule_search_locations if spec else None) or [""])), *inner)
    files = [folder.with_suffix(".py"), *sorted(folder.glob("*.py"))] if spec else []
    for text in (read_source(file) for file in files if file.is_file()):
        if f"class {name}(" not in text:
            continue
        for node in (each for each in parse_python(text).body if isinstance(each, ast.ClassDef) and each.name == name):
            starts = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            if starts and starts[0].args.kwarg is None:
                # The first two are the instance, and the parameters or the optimizer, which NeMo-RL passes.
                return tuple(each.arg for each in (*starts[0].args.args[2:], *starts[0].args.kwonlyargs))
    return ()


def nearest_word(value: str, words: Collection[str]) -> list[str]:
    """Return the word of which a value may be a misspelling, in whatever case, or else an abbreviation; [] if none."""
    # A word with all parts of a value, as a_c_b has those of a_b, is meant if it is the only one.
    parts = set(re.split(r"[_-]", value.lower()))
    whole = [word for word in sorted(words) if len(parts) > 1 and parts <= set(re.split(r"[_-]", word.lower()))]
    distances = {word: _edit_distances(value.lower(), word.lower()) for word in sorted(words)}
    fewest = min((each[-1] for each in distances.values()), default=0)
    nearest = [word for word, each in distances.items() if each[-1] == fewest]
    starts = [word for word, each in distances.items() if len(value) > 2 and min(each) <= len(value) // 5]
    if not whole and fewest <= max(1, len(value) // _LETTERS_PER_ERROR):
        return nearest[:1] if len({word.lower() for word in nearest}) == 1 else []
    return whole if len(whole) == 1 else [] if whole else starts[:1]


def _edit_distances(first: str, second: str) -> list[int]:
    """Return the letters to insert, delete, replace or swap that make a text the beginnings of another, by length."""
    rows = [list(range(len(second) + 1))]
    for i, letter in enumerate(first, 1):
        row = [i]
        for j, other in enumerate(second, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other)))
            if i > 1 and j > 1 and first[i - 2 : i] == second[j - 1] + second[j - 2]:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1]


def _lacks_name(path: str, checkout: Path) -> bool | None:
    """Return True if NeMo-RL or an installed package does not have an import path, None if its package is not there."""
    package, *modules, name = path.split(".")
    spec = None if (checkout / package).is_dir() else importlib.util.find_spec(package)
    place = Path(next(iter(spec.submodule_search_locations or [""]), "")) if spec else None
    place = checkout / package if (checkout / package).is_dir() else place
    if place is None:
        return None
    for module in modules:
        place /= module
    file = next((each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file()), None)
    return file is None or not re.search(rf"\b{name}\b", read_source(file))
