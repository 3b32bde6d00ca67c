"""Datasets whose class ignores or lacks a key, data to validate on, and rewards that an environment does not give."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_geomask.hosts.nemo_rl.source_words import is_in_source, words_in_source
from nemo_geomask.recipe.input_limits import read_text
from nemo_geomask.tools.check.config_classes import dataset_arguments, environment_text
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule
from nemo_geomask.tools.check.setting_author import user_keys
from nemo_geomask.yaml_text import as_yaml

_REGISTRY = "NeMo-RL `DATASET_REGISTRY` (data/datasets/response_datasets), `load_response_dataset`"
_SIZE = "split_validation_size"


def _entries(facts: RecipeFacts, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each dataset of a split, and its settings with those of ``data.default``."""
    value, default = facts.get(f"data.{split}"), facts.get("data.default", {})
    for index, entry in enumerate(value if isinstance(value, list) else [value]):
        if isinstance(entry, Mapping) and isinstance(default, Mapping):
            yield f"data.{split}[{index}]" if isinstance(value, list) else f"data.{split}", {**default, **entry}


def _all_entries(facts: RecipeFacts) -> list[tuple[str, Mapping[str, Any]]]:
    return [*_entries(facts, "train"), *_entries(facts, "validation")]


def _arguments(entry: Mapping[str, Any], facts: RecipeFacts) -> Mapping[str, Any] | None:
    """Return the arguments of the class of a dataset; None if they can't be told."""
    return dataset_arguments(facts.nemo_rl).get(str(entry.get("dataset_name"))) if facts.nemo_rl else None


@rule("GM228", "warning", _REGISTRY, needs=("nemo_rl",), needs_loss=False, applies_to_lab=False)
def _ignored_key_of_dataset(facts: RecipeFacts) -> Iterator[Hit]:
    """Key of a dataset that its class ignores."""
    assert facts.nemo_rl is not None
    written = {key for key, _ in user_keys(facts)}
    classes = [arguments for arguments in dataset_arguments(facts.nemo_rl).values() if arguments is not None]
    for place, entry in _all_entries(facts):
        arguments = _arguments(entry, facts)
        for name, value in entry.items():
            is_ignored = arguments is not None and name not in arguments and any(name in others for others in classes)
            if not is_ignored or not value or f"{place}.{name}" not in written:
                continue
            # What NeMo-RL reads of every dataset is an argument of some classes as well.
            if not is_in_source(facts.nemo_rl, f'config.get("{name}"'):
                yield Hit(
                    f"{place}.{name}",
                    f"{as_yaml(value)}: the dataset {entry['dataset_name']} ignores it; remove it, or name another "
                    f"dataset, such as ResponseDataset, which reads files and data sets of Hugging Face",
                    fix={f"{place}.{name}": 0} if name == _SIZE else {},
                )


@rule("GM348", "error", _REGISTRY, needs=("nemo_rl",), needs_loss=False, applies_to_lab=False)
def _dataset_without_required_key(facts: RecipeFacts) -> Iterator[Hit]:
    """Dataset without a key that its class requires."""
    for place, entry in _all_entries(facts):
        for name, default in (_arguments(entry, facts) or {}).items():
            if default is ... and name not in entry:
                yield Hit(f"{place}.{name}", f"the dataset {entry['dataset_name']} needs it, but it is not set")


@rule(
    "GM344",
    "error",
    "NeMo-RL `setup_response_data` (data/utils.py)",
    refusals=("def setup_response_data",),
    needs_loss=False,
)
def _unknown_environment(facts: RecipeFacts) -> Iterator[Hit]:
    """Data of an environment that the recipe does not have."""
    environments = facts.get("env")
    if not isinstance(environments, Mapping) or facts.is_true("env.should_use_nemo_gym"):
        return
    for place, entry in (("data.default", facts.get("data.default", {})), *_all_entries(facts)):
        name = entry.get("env_name") if isinstance(entry, Mapping) else None
        if isinstance(name, str) and name not in environments and isinstance(facts.get(f"{place}.env_name"), str):
            yield Hit(
                f"{place}.env_name",
                f"{name}: the section env has no such environment, but only {', '.join(map(str, environments))}; "
                f"add env.{name}, or name one of these",
            )
        # With images, NeMo-RL takes the environment vlm, whatever the section is called.
        elif isinstance(name, str) and facts.nemo_rl and not str(facts.get("data.default.processor")).startswith("vlm"):
            registered = words_in_source(facts.nemo_rl, "default", "env_name", facts.algorithm).registered
            if registered and name not in registered:
                yield Hit(
                    f"{place}.env_name",
                    f"{name}: NeMo-RL registers no such environment, only {', '.join(sorted(registered))}; name one of "
                    "these, unless your start script registers it",
                )


@rule("GM229", "warning", "NeMo-RL `combine_reward_functions`", needs_loss=False, applies_to_lab=False)
def _reward_without_weight(facts: RecipeFacts) -> Iterator[Hit]:
    """Reward that never counts."""
    for name, environment in (facts.get("env") or {}).items():
        functions = environment.get("reward_functions") if isinstance(environment, Mapping) else None
        if functions == []:
            yield Hit(f"env.{name}.reward_functions", "an empty list, and NeMo-RL does not start; name a reward")
        for index, function in enumerate(functions if isinstance(functions, list) else ()):
            key = f"env.{name}.reward_functions[{index}].weight"
            if isinstance(function, Mapping) and facts.number(key) == 0:
                yield Hit(key, f"0: the reward {function.get('name')} never counts; give it a weight, or remove it")


@rule("GM354", "error", "NeMo-RL `TaskDataSpec`", needs=("nemo_rl",), needs_loss=False, applies_to_lab=False)
def _missing_prompt_file(facts: RecipeFacts) -> Iterator[Hit]:
    """File of a prompt that does not exist, or lacks the place of the question."""
    assert facts.nemo_rl is not None
    for key, _ in user_keys(facts):
        value = facts.get(key)
        is_file = re.fullmatch(r"data\..*prompt_file", key) and isinstance(value, str) and value.startswith("examples/")
        found = [place / value for place in _places(facts) if is_file and (place / value).is_file()]
        if is_file and not found:
            yield Hit(key, f"{value}: neither this folder nor the NeMo-RL in {facts.nemo_rl} has this file")
        elif is_file and "system" not in key and "eval" not in facts.recipe.data and "{" not in read_text(found[0]):
            yield Hit(key, f"{value} has no {{}} for the question, so that every prompt is this text alone")


@rule("GM232", "warning", "NeMo-RL `setup_response_data`", needs_loss=False, applies_to_lab=False)
def _trained_validation(facts: RecipeFacts) -> Iterator[Hit]:
    """Validation on the data that are trained on."""
    trained = [_source(entry) for _, entry in _entries(facts, "train")]
    for key, entry in _entries(facts, "validation") if facts.validates else ():
        if _source(entry) in trained and not facts.number("data.train.split_validation_size"):
            yield Hit(
                key, f"{entry.get('dataset_name')}: training has the same data, so that no metric tells of others"
            )


def _source(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(name) for name in ("dataset_name", "data_path", "split", "subset"))


_ANSWERS = (
    ("Answer:", "dapo_math_verify", "english_multichoice", "multilingual_multichoice"),
    ("<answer>", "format", "exact_alnum", "math_expr", "bbox_giou"),
    ("\\boxed", "geo3k"),
)
"""Words before an answer, and the verifiers and rewards of NeMo-RL that look for them."""


@rule("GM231", "warning", "NeMo-RL nemo_rl/environments: dapo_math_verifier.py, rewards.py", needs_loss=False)
def _unasked_answer(facts: RecipeFacts) -> Iterator[Hit]:
    """Prompt that asks for another form of answer than the verifier looks for."""
    for _, entry in _entries(facts, "train"):
        env, files = f"env.{entry.get('env_name')}", [entry.get(f"{name}prompt_file") for name in ("", "system_")]
        paths = [place / str(file) for file in files if file for place in _places(facts)]
        prompt = "\n".join(read_text(path) for path in paths if path.is_file())
        rewards = [each for each in facts.get(f"{env}.reward_functions", []) if isinstance(each, Mapping)]
        looking = {f"{env}.reward_functions[{i}].name": each.get("name") for i, each in enumerate(rewards)}
        looking |= {f"{env}.{name}": facts.get(f"{env}.{name}") for name in ("math_verify_impl", "verifier_type")}
        # The questions of DAPO's data sets ask for an answer themselves, and other tags than NeMo-RL's are kwargs.
        is_known = prompt and "DAPO" not in str(entry.get("dataset_name")) and not any("kwargs" in e for e in rewards)
        for key, (form, *verifiers) in ((key, each) for key in looking for each in _ANSWERS if is_known):
            if looking[key] in verifiers and form.lower() not in prompt.lower():
                asks = f"which the prompt ({' and '.join(map(str, filter(None, files)))}) does not ask for"
                yield Hit(key, f"{looking[key]} looks for {form}, {asks}, and right answers count as wrong")


def _places(facts: RecipeFacts) -> list[Path]:
    """Return the folders from which the path of a prompt's file may start."""
    return [Path(), *([facts.nemo_rl] if facts.nemo_rl else []), facts.recipe.path.parent]


@rule(
    "GM349",
    "error",
    "NeMo-RL `grpo.setup`, `setup_response_data`",
    refusals=("Validation dataset is required",),
    needs_loss=False,
)
def _validation_without_data(facts: RecipeFacts) -> Iterator[Hit]:
    """Validation without data to validate on."""
    section, entries = facts.algorithm, [*_entries(facts, "train")]
    if not facts.validates or facts.uses_single_controller or facts.get("data.validation") or not entries:
        return
    if facts.algorithm in ("dpo", "rm"):  # which then don't validate
        return
    can_hold_out = False
    for _, entry in entries:
        arguments = _arguments(entry, facts)
        reads_size = arguments is None or _SIZE in arguments
        if reads_size and entry.get(_SIZE, (arguments or {}).get(_SIZE)) != 0:
            return
        can_hold_out = can_hold_out or reads_size
    switches = {f"{section}.val_period": 0, f"{section}.val_at_start": False, f"{section}.val_at_end": False}
    off = {key: value for key, value in switches.items() if facts.get(key)}
    place, entry = entries[0]
    yield Hit(
        next(iter(off)),
        f"there are no data to validate on: data.validation is not set, and nothing of {entry.get('dataset_name')} is "
        "held out; set data.validation, or {fix}",
        fix={f"{place}.{_SIZE}": 0.05} if can_hold_out else off,
    )


@rule("GM350", "error", "NeMo-RL `GDPOAdvantageEstimator`", refusals=("(reward/name1, reward/name2",))
def _one_reward_for_gdpo(facts: RecipeFacts) -> Iterator[Hit]:
    """GDPO with an environment that gives one reward."""
    key = "grpo.adv_estimator.name"
    if facts.get(key) != "gdpo" or facts.is_true("env.should_use_nemo_gym") or facts.nemo_rl is None:
        return
    for _, entry in _entries(facts, "train"):
        text = environment_text(facts.nemo_rl, str(entry.get("env_name")))
        if text and '"reward/' not in text:
            yield Hit(
                key,
                f"gdpo normalises several rewards of a response one by one, but the environment {entry['env_name']} "
                "gives one, and NeMo-RL stops at the first batch; {fix}, or an environment such as math_multi_reward",
                fix={key: "grpo"},
            )
            return
