"""Variants through the entry-point group: found, refused, and a distribution of somebody else's."""

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from pydantic import Field

from nemo_geomask import build_loss
from nemo_geomask import functional as F
from nemo_geomask.config import MaskPreset, MaskRule, plugins
from nemo_geomask.errors import ConfigError, PluginError
from nemo_geomask.losses import Variant, available, registry

ROOT = Path(__file__).parents[2]


def mean_loss(inputs, means):
    return F.Surrogate(-inputs.advantages * inputs.curr, inputs.curr, inputs.curr)


MINE = Variant(surrogate=mean_loss)
BROKEN = Variant(surrogate=lambda inputs, means: 1 / 0)
NOT_A_VARIANT = mean_loss


class Half(MaskPreset):
    """Keep sequences whose geometric-mean mismatch ratio is within a factor."""

    factor: float = Field(gt=1)

    def rule(self):
        bound = math.log(self.factor)
        return MaskRule(self.label or "half", "mismatch", "sequence_mean", "ratio", -bound, bound, "always")


class Named(MaskPreset):
    """Called in metrics as its preset is."""

    def rule(self):
        return MaskRule("half_max", "mismatch", "token", "ratio", -1.0, 1.0, "always")


class Distribution:
    def __init__(self, name):
        self.name = name


@pytest.fixture
def register(monkeypatch):
    """Pretend that distributions registered entry points beside the installed ones."""

    def install(*points, group=registry.GROUP):
        found = [EntryPoint(name, value, group)._for(Distribution(owner)) for owner, name, value in points]
        monkeypatch.setattr(plugins, "entry_points", lambda group: [point for point in found if point.group == group])

    return install


def test_built_in_table_is_the_entry_points_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][registry.GROUP]
    assert declared == registry.BUILT_IN


def test_built_ins_are_found_without_metadata(register):
    register()
    assert list(available()) == sorted(registry.BUILT_IN)
    assert build_loss({"name": "gspo"}).variant is registry.load("gspo")


def test_only_the_selected_name_is_imported(register):
    register(("somebody", "theirs", "a_module_that_does_not_exist:LOSS"))
    build_loss({"name": "gspo"})
    assert "theirs" in available()


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(PluginError, match="no loss named 'gsop'.*did you mean 'gspo'"):
        build_loss({"name": "gsop"})


@pytest.mark.parametrize(
    ("name", "guess"), [("GSPO", "gspo"), ("gspo-token", "gspo_token"), ("GRPO", "clipped_pg"), ("ppo", "clipped_pg")]
)
def test_unknown_name_suggests_what_is_meant(name, guess):
    with pytest.raises(PluginError, match=f"did you mean '{guess}'"):
        build_loss({"name": name})


def test_name_claimed_twice_names_both_distributions(register):
    register(("first-dist", "mine", "one:A"), ("second-dist", "mine", "two:B"))
    with pytest.raises(PluginError, match=r"first-dist \(one:A\) and second-dist \(two:B\)"):
        build_loss({"name": "mine"})


def test_built_in_name_can_not_be_taken_over(register):
    register(("somebody", "gspo", "theirs:GSPO"))
    with pytest.raises(PluginError, match="nemo-geomask .* and somebody"):
        build_loss({"name": "gspo"})


def test_failing_import_names_the_distribution_and_the_cause(register):
    register(("somebody", "theirs", "a_module_that_does_not_exist:LOSS"))
    with pytest.raises(PluginError, match="somebody.*ModuleNotFoundError"):
        build_loss({"name": "theirs"})


def test_import_that_fails_in_several_lines_is_one_problem_about_the_name(tmp_path, monkeypatch):
    (tmp_path / "noisy_loss.py").write_text(
        "raise ImportError('first\\nloss_fn.ratio_clip_min: greater than 0\\nlast')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError) as error:
        build_loss({"name": "noisy_loss:LOSS"})
    assert [problem.keys for problem in error.value.problems] == [("loss_fn.name",)]
    # Whatever else is wrong is said beside it.
    with pytest.raises(ConfigError) as error:
        build_loss({"name": "noisy_loss:LOSS", "nonfinite": "drop"})
    assert [problem.keys for problem in error.value.problems] == [("loss_fn.nonfinite",), ("loss_fn.name",)]
    assert str(error.value).count("\n") == 1


def test_wrong_type_says_what_was_found():
    with pytest.raises(PluginError, match="is a builtins.function; it must be a nemo_geomask.losses.Variant"):
        build_loss({"name": f"{__name__}:NOT_A_VARIANT"})


def test_missing_attribute_is_an_error():
    with pytest.raises(PluginError, match="AttributeError"):
        build_loss({"name": f"{__name__}:NOWHERE"})


def test_variant_that_can_not_run_fails_when_built():
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        build_loss({"name": f"{__name__}:BROKEN"})


def test_variant_that_speaks_of_unknown_settings_is_refused(monkeypatch):
    monkeypatch.setitem(globals(), "ODD", Variant(surrogate=mean_loss, defaults={"no_such": 1}))
    with pytest.raises(PluginError, match="no_such"):
        build_loss({"name": f"{__name__}:ODD"})


@pytest.mark.parametrize("where", ["defaults", "forces"])
def test_variant_with_a_wrong_setting_of_its_own_is_not_the_recipes_fault(where, monkeypatch):
    monkeypatch.setitem(globals(), "ODD", Variant(surrogate=mean_loss, **{where: {"ratio_clip_min": True}}))
    with pytest.raises(PluginError, match=r"^loss_fn.name: the variant .* gives ratio_clip_min: must be a number"):
        build_loss({"name": f"{__name__}:ODD"})


PRESET_GROUP = "nemo_geomask.mask_presets"


@pytest.mark.parametrize("name", ["half", f"{__name__}:Half"])
def test_preset_of_another_distribution_is_a_rule_like_any(name, register):
    register(("somebody", "half", f"{__name__}:Half"), group=PRESET_GROUP)
    geometric = {"preset": "geometric", "min": 0.8, "max": 1.25, "label": "half"}
    loss, same = (build_loss({"masks": [mask]}) for mask in ({"preset": name, "factor": 1.25}, geometric))
    rule, other = loss.config.mask_rules[0], same.config.mask_rules[0]
    assert (rule.label, rule.level, rule.high) == (other.label, other.level, other.high)
    assert rule.low == pytest.approx(other.low)
    assert "geomask/mask/half/removed" in loss.metric_normalizations
    again = pickle.loads(pickle.dumps(loss))
    assert again.config.mask_rules == loss.config.mask_rules
    assert build_loss(loss.config).config.mask_rules == loss.config.mask_rules
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "1.25" in repr(loss)


@pytest.mark.parametrize(
    ("points", "mask", "message"),
    [
        (
            [("a-dist", "half", "one:A"), ("b-dist", "half", "two:B")],
            {"preset": "half"},
            r"a-dist \(one:A\) and b-dist",
        ),
        ([("somebody", "half", "no_such_module:A")], {"preset": "half"}, "somebody.*ModuleNotFoundError"),
        ([("somebody", "half", f"{__name__}:MINE")], {"preset": "half"}, "somebody.*must be a class derived from"),
        ([], {"preset": f"{__name__}:Half", "factor": 0.5}, r"masks\[0\].factor: .*greater than 1"),
        ([], {"preset": f"{__name__}:Half", "factr": 2.0}, r"masks\[0\].factr: unknown key; did you mean 'factor'"),
        ([], {"preset": "half"}, r"masks\[0\].preset: unknown preset"),
        # A name of ours is not for another to take, silently or otherwise.
        ([("a-dist", "veto", f"{__name__}:Half")], {"preset": "veto", "max": 9.0}, "nemo-geomask .* and a-dist"),
        ([("a-dist", "half_max", f"{__name__}:Named")], {"preset": "half_max"}, r"masks\[0\].label: .*'half_max'"),
    ],
)
def test_preset_that_can_not_be_had_says_whose_it_is(points, mask, message, register):
    register(*points, group=PRESET_GROUP)
    with pytest.raises(ConfigError, match=message):
        build_loss({"masks": [mask]})


def test_module_attribute_works_and_travels():
    loss = pickle.loads(pickle.dumps(build_loss({"name": f"{__name__}:MINE", "reference_policy_kl_penalty": 0.0})))
    data = {name: torch.zeros(1, 3) for name in ("prev_logprobs", "generation_logprobs")}
    data |= {"token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1), "advantages": torch.full((1, 3), 2.0)}
    curr = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    value, _ = loss(curr, data, torch.tensor(1.0), torch.tensor(2.0))
    value.backward()
    assert value.item() == pytest.approx(3.0)  # -(2·-1 + 2·-2) / 2
    assert curr.grad.tolist() == [[-1.0, -1.0]]


@pytest.fixture(scope="module")
def third_party(tmp_path_factory):
    """The example distribution, installed where only a path entry finds it."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "plugin_example"
    shutil.copytree(Path(__file__).parents[1] / "plugin_example", source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, timeout=500)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])}


def run(environment, *command):
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.mark.slow
def test_third_party_distribution_is_found_by_its_entry_point(third_party):
    code = (
        "from nemo_geomask import build_loss\nfrom nemo_geomask.losses import available\n"
        "print(available()['topr'][0].distribution)\n"
        "loss = build_loss({'name': 'topr', 'options': {'cap': 2.0}})\n"
        "print(loss.options.cap, loss.reference_policy_kl_penalty)\n"
    )
    done = run(third_party, "-c", code)
    assert done.stdout.split() == ["topr-loss", "2.0", "0.0"], done.stderr


@pytest.mark.slow
def test_third_party_options_are_strict(third_party):
    done = run(
        third_party, "-c", "from nemo_geomask import build_loss; build_loss({'name': 'topr', 'options': {'cp': 2}})"
    )
    assert "loss_fn.options.cp" in done.stderr
    assert "did you mean 'cap'" in done.stderr


@pytest.mark.slow
def test_third_party_loss_trains_in_the_lab(third_party, tmp_path):
    pytest.importorskip("transformers", reason="the lab needs the extra 'demo'")
    small = [
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=8",
        "env.min_terms=4",
        "env.max_terms=8",
    ]
    recipe = ROOT / "recipes" / "lab" / "demo.yaml"
    done = run(
        third_party,
        *("-m", "nemo_geomask.cli", "lab", str(recipe), *small),
        *("--compare", "topr:none,topr:sequence_mean", "--steps", "2", "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {(line["variant"], line["step"]) for line in lines} == {
        (variant, step) for variant in ("topr:none", "topr:sequence_mean") for step in (1, 2)
    }
    # Two optimiser steps a batch: from the second on, the capped ratio acts.
    assert all(line["geomask/clip_fraction_high"] > 0 for line in lines if line["step"] == 2)
