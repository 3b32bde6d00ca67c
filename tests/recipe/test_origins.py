"""Where each setting of a recipe comes from: file and line, override, NeMo-RL's checkout."""

import os
import sys

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe import load_recipe, nemo_rl_root, read_recipe
from nemo_geomask.recipe import recipe_file as recipes

BASE = """\
policy:
  megatron_cfg: {enabled: true}
  model_name: some/dense-8B
loss_fn:
  reference_policy_kl_penalty: 0.01
  ratio_clip_min: 0.2
  masks:
    - {preset: veto, max: 9.0}
    - preset: icepop
      max: 5.0
"""
CHILD = """\
defaults: base.yaml
loss_fn:
  name: clipped_pg
  ratio_clip_max: 0.3
"""


@pytest.fixture(autouse=True)
def without_nemo_rl(monkeypatch, tmp_path):
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)
    monkeypatch.setattr(recipes, "nemo_rl_root", lambda: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path):
    def write(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        return tmp_path / f"{name}.yaml"

    return write


class TestPlaces:
    def test_a_key_is_found_in_the_file_that_gave_it(self, write):
        origins = read_recipe(write(base=BASE, child=CHILD)).origins
        for key, place in {
            "loss_fn.ratio_clip_max": "child.yaml:4",
            "loss_fn.ratio_clip_min": "base.yaml:6",
            "loss_fn.masks[0].max": "base.yaml:8",
            "loss_fn.masks[1].max": "base.yaml:10",
            "loss_fn": "child.yaml:2",
            # Not written anywhere: the section around it.
            "loss_fn.ratio_clip_c": "child.yaml:2",
            "policy.megatron_cfg.context_parallel_size": "base.yaml:2",
            "policy.router_replay.enabled": "base.yaml:1",
        }.items():
            assert str(origins.at(key)) == place, key
        assert origins.at("grpo.seed") is None

    def test_a_list_replaces_and_a_mapping_merges(self, write):
        child = CHILD + "  masks: [{preset: geometric, max: 1.01}]\n"
        origins = read_recipe(write(base=BASE, child=child)).origins
        assert str(origins.at("loss_fn.masks[1].max")) == "child.yaml:5"
        assert str(origins.at("loss_fn.ratio_clip_min")) == "base.yaml:6"

    @pytest.mark.parametrize(
        ("parent", "child", "message"),
        [
            ("[{preset: opsm}]", "{preset: opsm}", r"child.yaml:3: loss_fn.masks is a mapping here, but a list in"),
            ("{a: 1}", "[1]", r"child.yaml:3: loss_fn.masks is a list here, but a mapping in"),
        ],
    )
    @pytest.mark.parametrize("defaults", ["base.yaml", "[base.yaml]"])
    def test_a_mapping_over_a_list_names_file_and_key(self, write, parent, child, message, defaults):
        base = f"loss_fn:\n  name: gspo\n  masks: {parent}\n"
        path = write(base=base, child=f"defaults: {defaults}\nloss_fn:\n  masks: {child}\n")
        with pytest.raises(ConfigError, match=message) as caught:
            load_recipe(path)
        assert "base.yaml:3" in str(caught.value)

    def test_two_parents_that_disagree_name_the_second(self, write):
        path = write(one="a: {b: [1]}\n", two="# two\na:\n  b: {c: 1}\n", child="defaults: [one.yaml, two.yaml]\n")
        with pytest.raises(ConfigError, match=r"two.yaml:3: a.b is a mapping here, but a list in .*one.yaml:1"):
            load_recipe(path)

    def test_override_marker_and_null_forget_the_inherited(self, write):
        path = write(base=BASE, child="defaults: base.yaml\nloss_fn:\n  _override_: true\n  name: sapo\npolicy: null\n")
        recipe = read_recipe(path)
        assert recipe.data["loss_fn"] == {"name": "sapo"}
        assert str(recipe.origins.at("loss_fn.ratio_clip_min")) == "child.yaml:2"
        assert str(recipe.origins.at("policy.megatron_cfg.enabled")) == "child.yaml:5"

    def test_the_last_of_several_parents_wins(self, write):
        path = write(
            one="a: {x: 1, y: 1}\n", two="# two\na: {x: 2}\n", child="defaults: [one.yaml, two.yaml]\nb: ${a.x}\n"
        )
        recipe = read_recipe(path)
        assert recipe.data["b"] == 2
        assert [str(recipe.origins.at(key)) for key in ("a.x", "a.y", "b")] == [
            "two.yaml:2",
            "one.yaml:1",
            "child.yaml:2",
        ]
        assert [file.name for file, _ in recipe.files] == ["one.yaml", "two.yaml", "child.yaml"]

    def test_merge_keys_count_where_the_anchor_is(self, write):
        path = write(child="x: &defaults\n  max: 5.0\nloss_fn:\n  <<: *defaults\n  name: sapo\n")
        assert str(read_recipe(path).origins.at("loss_fn.max")) == "child.yaml:2"

    def test_an_override_is_its_own_place(self, write):
        recipe = read_recipe(write(base=BASE, child=CHILD), ["++loss_fn.masks=[{preset: geometrc}]"])
        assert str(recipe.origins.at("loss_fn.masks[0].preset")) == "override '++loss_fn.masks=[{preset: geometrc}]'"
        assert str(recipe.origins.at("loss_fn.masks[1].max")) == "override '++loss_fn.masks=[{preset: geometrc}]'"

    def test_a_missing_value_says_where(self, write):
        with pytest.raises(ConfigError, match=r"loss_fn.ratio_clip_c: .*\(at base.yaml:11\)"):
            read_recipe(write(base=BASE + "  ratio_clip_c: ???\n", child=CHILD))


class TestNemoRlRoot:
    @pytest.fixture
    def checkout(self, tmp_path):
        configs = tmp_path / "RL" / "examples" / "configs"
        configs.mkdir(parents=True)
        (configs / "grpo.yaml").write_text("loss_fn: {ratio_clip_min: 0.2}\n")
        (tmp_path / "RL" / "nemo_rl").mkdir()
        (tmp_path / "RL" / "nemo_rl" / "__init__.py").touch()
        return tmp_path / "RL"

    CHILD = "defaults: ${oc.env:NEMO_RL_ROOT,/nowhere/RL}/examples/configs/grpo.yaml\nroot: ${oc.env:NEMO_RL_ROOT}\n"

    def test_from_the_environment(self, checkout, write, monkeypatch):
        monkeypatch.setenv("NEMO_RL_ROOT", str(checkout))
        recipe = read_recipe(write(child=self.CHILD))
        assert recipe.data == {"loss_fn": {"ratio_clip_min": 0.2}, "root": str(checkout)}
        assert recipe.nemo_rl == checkout

    def test_from_what_is_importable(self, checkout, write, monkeypatch):
        monkeypatch.undo()
        monkeypatch.delenv("NEMO_RL_ROOT", raising=False)
        monkeypatch.delitem(sys.modules, "nemo_rl", raising=False)
        monkeypatch.syspath_prepend(str(checkout))
        assert nemo_rl_root() == checkout
        assert load_recipe(write(child=self.CHILD))["root"] == str(checkout)

    def test_the_environment_is_left_as_it_was(self, checkout, write, monkeypatch):
        monkeypatch.setattr(recipes, "nemo_rl_root", lambda: checkout)
        load_recipe(write(child=self.CHILD))
        assert "NEMO_RL_ROOT" not in os.environ

    def test_without_one_the_message_says_what_to_set(self, write):
        with pytest.raises(ConfigError, match="/nowhere/RL/examples.*can't be read.*set NEMO_RL_ROOT"):
            load_recipe(write(child=self.CHILD))

    def test_a_variable_that_leads_nowhere_is_named(self, write, monkeypatch):
        monkeypatch.setattr(recipes, "nemo_rl_root", nemo_rl_root)
        monkeypatch.setenv("NEMO_RL_ROOT", "/nonexistent")
        with pytest.raises(ConfigError, match="NEMO_RL_ROOT reads as /nonexistent, which is no NeMo-RL checkout$"):
            load_recipe(write(child=self.CHILD))
        monkeypatch.setenv("NEMO_RL_ROOT", "RL")
        with pytest.raises(ConfigError, match="NEMO_RL_ROOT is RL, and must be an absolute path$"):
            load_recipe(write(child=self.CHILD))

    def test_a_parent_that_only_nemo_rl_has_comes_with_the_line_to_write(self, checkout, write, monkeypatch):
        monkeypatch.setattr(recipes, "nemo_rl_root", lambda: checkout)
        with pytest.raises(ConfigError, match=r"grpo\.yaml: the recipe can't be read") as caught:
            load_recipe(write(child="defaults: grpo.yaml\n"))
        line = str(caught.value).rpartition("; NeMo-RL has one of that name: write ")[2]
        assert line == "defaults: ${oc.env:NEMO_RL_ROOT,/opt/nemo-rl}/examples/configs/grpo.yaml"
        assert load_recipe(write(child=line)) == {"loss_fn": {"ratio_clip_min": 0.2}}
        with pytest.raises(ConfigError, match="No such file or directory$"):
            load_recipe(write(child="defaults: nowhere.yaml\n"))

    def test_an_unset_variable_without_a_default_is_an_error(self, write):
        with pytest.raises(ConfigError, match=r"child.yaml: defaults: .*NEMO_RL_ROOT"):
            load_recipe(write(child="defaults: ${oc.env:NEMO_RL_ROOT}/examples/configs/grpo.yaml\n"))
