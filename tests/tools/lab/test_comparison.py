"""Which runs a comparison plans: losses with options of their own, beside losses without."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml", reason="recipes are YAML (demo extra)")
pytest.importorskip("omegaconf", reason="recipes are read with OmegaConf (demo extra)")

import yaml

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.compare_specs import parse_compare
from nemo_geomask.tools.lab.lab_recipe import LabConfig
from nemo_geomask.tools.lab.train_recipe import plan_runs
from tests.tools.lab.tiny_recipe import TINY, merged


def plan(tmp_path, compare, *, vary=(), **loss_fn):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(merged(TINY, {"loss_fn": loss_fn})), encoding="utf-8")
    return plan_runs(recipe, [], compare=compare, vary=vary, seeds=None, loss_from=None, out=tmp_path)


def test_each_loss_gets_the_options_that_it_has(tmp_path):
    options = {"tau_pos": 2.0, "k_pos": 1.5}
    runs = plan(tmp_path, "gspo:none,sapo:none,vespo:none", name="sapo", options=options)
    assert {run.label: run.recipe.loss_fn["options"] for run in runs} == {
        "gspo:none": {},
        "sapo:none": {"tau_pos": 2.0},
        "vespo:none": {"k_pos": 1.5},
    }
    for run in runs:
        build_loss(run.recipe.loss_fn)


@pytest.mark.parametrize("specs", ["gspo,sapo", "gspo"])
def test_an_option_that_no_compared_loss_has_is_an_error(specs):
    losses = parse_compare(specs, {"options": {"tau_poss": 2.0}, "reference_policy_kl_penalty": 0}, LabConfig())
    for loss in losses:
        with pytest.raises(ConfigError, match="options.tau_poss: unknown key"):
            build_loss(loss.loss_fn)


@pytest.mark.parametrize("vary", ["loss_fn.options.tau_pos=1.0,2.0", "loss_fn.options={tau_pos: 1.0},{tau_pos: 2.0}"])
def test_a_loss_without_the_varied_option_is_trained_once(tmp_path, vary):
    runs = plan(tmp_path, "gspo:none,sapo:none", vary=[vary])
    key = vary.partition("=")[0]
    labels = [run.label for run in runs]
    assert labels[:2] == ["gspo:none", f"sapo:none {key}=" + ("1.0" if key.endswith("tau_pos") else "{tau_pos:1.0}")]
    assert [run.recipe.loss_fn.get("options") for run in runs] == [{}, {"tau_pos": 1.0}, {"tau_pos": 2.0}]
    assert [run.position for run in runs] == [0, 1, 2]


def test_a_recipe_names_what_is_varied_unless_the_command_line_does(tmp_path):
    lab = {"vary": ["policy.lr=1e-3,2e-3"]}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(merged(TINY, {"lab": lab})), encoding="utf-8")

    def rates(vary, *overrides):
        runs = plan_runs(
            recipe, overrides, compare="gspo:none", vary=vary, seeds=None, loss_from=None, out=tmp_path / "out"
        )
        assert all("vary" not in run.settings["lab"] for run in runs)
        return {run.label: run.recipe.policy.lr for run in runs}

    assert rates(()) == {"gspo:none policy.lr=0.001": 1e-3, "gspo:none policy.lr=0.002": 2e-3}
    assert rates(["policy.lr=5e-4,1e-4"]).keys() == {"gspo:none policy.lr=0.0005", "gspo:none policy.lr=0.0001"}
    assert list(rates((), "lab.vary=[]", "policy.lr=0.5").values()) == [0.5]
    with pytest.raises(ConfigError, match=r"lab\.vary: 'policy.lr=1': it has only one value"):
        rates((), "lab.vary=['policy.lr=1']")
