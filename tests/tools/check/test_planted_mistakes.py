"""Mistakes that users make, each planted in a recipe: ``check`` finds it, and names the key.

``planted/mistakes.yaml`` has the mistakes, and the other files of that folder the recipes. The NeMo-RL checkout is a
stand-in with the keys and types of those recipes and, where ``NEMO_RL_ROOT`` names one, a real checkout. A recipe with
keys that an older checkout lacks does not count there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_geomask.hosts.nemo_rl.facts import SETTING_READERS
from nemo_geomask.hosts.nemo_rl.source_words import is_in_source
from nemo_geomask.recipe import ROOT_VARIABLE, nemo_rl_root, read_recipe
from nemo_geomask.tools.check import Finding, RecipeFacts, check
from tests.tools.check.stand_in_source import write_source

PLANTED = Path(__file__).parent / "planted"
MISTAKES = yaml.safe_load((PLANTED / "mistakes.yaml").read_text(encoding="utf-8"))
RECIPES = sorted({mistake["recipe"] for mistake in MISTAKES})
# As many as the set has to have at least, and may miss.
NEEDED, MISSES = 80, 4

# Keys that NeMo-RL has in addition to those of the recipes.
OTHER_KEYS = {
    "policy.optimizer": {"name": "a", "kwargs": {"lr": 1.0}},
    "policy.router_replay": {"enabled": True},
    "policy.generation.vllm_cfg.enable_prefix_caching": True,
    "policy.draft": {"enabled": False},
}


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((PLANTED / f"{name}.yaml").read_text(encoding="utf-8"))


def put(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
    data[last] = value


def stand_in(root: Path) -> Path:
    """Write a checkout whose configuration classes declare the keys of the recipes with the types of their values."""
    keys = load("megatron")
    for key, value in OTHER_KEYS.items():
        put(keys, key, value)
    put(keys, "policy.dtensor_cfg", {**load("dtensor")["policy"]["dtensor_cfg"]})
    classes: list[str] = []
    declare(keys, "MasterConfig(BaseModel)", classes)
    module = root / "nemo_rl" / "algorithms" / "grpo.py"
    module.parent.mkdir(parents=True)
    module.write_text("\n\n".join(classes) + "\n", encoding="utf-8")
    for reader, word in SETTING_READERS.values():
        path = root / "nemo_rl" / reader
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{word}\n")
    write_source(root)
    examples = root / "examples" / "configs"
    examples.mkdir(parents=True)
    (examples / "grpo.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    return root


def declare(section: dict[str, Any], header: str, classes: list[str]) -> None:
    """Append the class of a section after those of the sections in it."""
    lines = []
    for name, value in section.items():
        if isinstance(value, dict) and value and name not in ("env", "vllm_kwargs", "kwargs"):
            inner = re.sub(r"\W", "_", f"{header.partition('(')[0]}_{name}")
            declare(value, f"{inner}(TypedDict)", classes)
            lines.append(f"    {name}: NotRequired[{inner}]")
        else:
            lines.append(f"    {name}: NotRequired[{type_of(value)}]")
    classes.append(f"class {header}:\n" + "\n".join(line for line in lines if line.isascii()))


def type_of(value: Any) -> str:
    if value is None:
        return "list[str] | int | None"
    return {bool: "bool", int: "int", float: "float", str: "Any", list: "list[Any]", dict: "dict[str, Any]"}[
        type(value)
    ]


@pytest.fixture(scope="module", params=["stand-in", "real"])
def findings(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    if request.param == "real" and nemo_rl_root() is None:
        pytest.skip("needs a NeMo-RL checkout: NEMO_RL_ROOT")
    root = nemo_rl_root() if request.param == "real" else stand_in(folder / "RL")
    patch = pytest.MonkeyPatch()
    patch.setenv(ROOT_VARIABLE, str(root))

    def find(recipe: str, settings: dict[str, Any]) -> list[Finding]:
        data = load(recipe)
        for key, value in settings.items():
            put(data, key, value)
        if "defaults" in data:
            data["defaults"] = str(PLANTED / data["defaults"])
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        facts = RecipeFacts.from_recipe(read_recipe(path, leave=("data", "env", "logger")))
        return [finding for finding in check(facts).findings if finding.rule.severity != "note"]

    find.root = root
    yield find
    patch.undo()


def keys_lacked(recipe: str, findings: Any) -> list[str]:
    """Return the keys of a recipe that an older NeMo-RL does not have: with them it is not right there."""
    reported = [finding.key for finding in findings(recipe, {}) if finding.rule.id in ("GM005", "GM006", "GM205")]
    return [key for key in dict.fromkeys(reported) if not is_in_source(findings.root, key.rpartition(".")[2])]


def test_there_are_as_many_as_promised():
    assert len(MISTAKES) == NEEDED
    assert len({mistake["mistake"] + mistake["recipe"] for mistake in MISTAKES}) == NEEDED


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_themselves_are_right(recipe, findings):
    if lacked := keys_lacked(recipe, findings):
        pytest.skip(f"this NeMo-RL lacks {', '.join(lacked)}")
    assert [(finding.rule.id, finding.key, finding.message) for finding in findings(recipe, {})] == []


@pytest.mark.slow
def test_mistakes_are_found_at_their_key(findings):
    missed = []
    lacked = {recipe: keys for recipe in RECIPES if (keys := keys_lacked(recipe, findings))}
    if len(lacked) == len(RECIPES):
        pytest.skip(f"this NeMo-RL lacks keys of every recipe: {lacked}")
    for mistake in (mistake for mistake in MISTAKES if mistake["recipe"] not in lacked):
        keys = mistake["key"] if isinstance(mistake["key"], list) else [mistake["key"]]
        found = findings(mistake["recipe"], mistake["set"])
        if not any(finding.key in keys for finding in found):
            missed.append((mistake["mistake"], keys, [(finding.rule.id, finding.key) for finding in found]))
    assert len(missed) <= MISSES, missed
