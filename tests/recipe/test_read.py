"""Recipes as files: inheritance, references, overrides, and errors that name the file and the key."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nemo_geomask.errors import ConfigError, MissingDependencyError
from nemo_geomask.recipe import load_recipe

pytest.importorskip("omegaconf", reason="recipes are read through omegaconf (recipes extra)")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_inherited_and_the_child_wins(tmp_path):
    write(tmp_path, "base/grand.yaml", "grpo: {seed: 1, max_num_steps: 9}\nmasks: [1, 2]\nx: {a: 1, b: 2}\n")
    write(tmp_path, "base/parent.yaml", "defaults: grand.yaml\ngrpo: {seed: 2}\n")
    write(tmp_path, "other.yaml", "grpo: {num: 5, seed: 3}\n")
    child = write(
        tmp_path,
        "child.yaml",
        "defaults: [base/parent.yaml, other.yaml]\nmasks: [3]\nx: {_override_: true, c: 3}\nagain: ${grpo.num}\n",
    )
    assert load_recipe(child) == {
        "grpo": {"seed": 3, "max_num_steps": 9, "num": 5},
        "masks": [3],
        "x": {"c": 3},
        "again": 5,
    }


def test_overrides_change_values_before_references_are_resolved(tmp_path):
    path = write(tmp_path, "r.yaml", "grpo: {seed: 1}\npolicy:\n  lr: ???\ncopy: ${grpo.seed}\n")
    overrides = ["grpo.seed=7", "policy.lr=1e-3", "+new.key=text", "off=null", "masks=[{preset: opsm, delta: 0.5}]"]
    loaded = load_recipe(path, overrides, new_keys=True)
    assert loaded == {
        "grpo": {"seed": 7},
        "policy": {"lr": 1e-3},
        "copy": 7,
        "new": {"key": "text"},
        "off": None,
        "masks": [{"preset": "opsm", "delta": 0.5}],
    }


def test_a_recipe_with_a_lab_section_needs_no_plus(tmp_path):
    path = write(tmp_path, "r.yaml", "lab: {tp: 1}\n")
    assert load_recipe(path, ["grpo.seed=7"]) == {"lab": {"tp": 1}, "grpo": {"seed": 7}}
    with pytest.raises(ConfigError, match="no key grpo.seed"):
        load_recipe(path, ["grpo.seed=7"], new_keys=False)


def test_nemo_rls_resolvers(tmp_path):
    text = "a: 6\nadd: ${add:${a},1}\nmul: ${mul:${a},2}\ndiv: ${div:${a},4}\nmax: ${max:${a},9}\n"
    assert load_recipe(write(tmp_path, "r.yaml", text)) == {"a": 6, "add": 7, "mul": 12, "div": 1.5, "max": 9}


@pytest.mark.parametrize(
    ("text", "overrides", "needle"),
    [
        ("- 1\n", [], "list"),
        ("a: [1\n", [], "not valid YAML"),
        ("defaults: gone.yaml\n", [], r"gone\.yaml.*named by defaults: in .*r\.yaml"),
        ("defaults: r.yaml\n", [], "inherits from itself"),
        ("defaults: {a: 1}\n", [], "defaults: must be a path"),
        ("a: ???\n", [], "r.yaml: a: "),
        ("a: ${nowhere}\n", [], "r.yaml: a: .*nowhere"),
        ("a: 1\n", ["a"], "key.path=value"),
        ("a: 1\n", ["a..b=1"], "override 'a..b=1': it is not key.path=value"),
    ],
)
def test_recipe_errors_name_file_and_key(tmp_path, text, overrides, needle):
    path = write(tmp_path, "r.yaml", text)
    with pytest.raises(ConfigError, match=needle):
        load_recipe(path, overrides)


def test_a_missing_recipe(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml: the recipe can't be read"):
        load_recipe(tmp_path / "nothing.yaml")


def test_a_missing_omegaconf_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    with pytest.raises(MissingDependencyError, match=r"nemo-geomask\[recipes\]"):
        load_recipe(tmp_path / "r.yaml")


def test_override_may_refer_to_another_key(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: {b: 3}\nc: 0\n")
    assert load_recipe(path, ["c=${a.b}"])["c"] == 3
