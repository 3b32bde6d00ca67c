"""Which runs a comparison plans."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml", reason="recipes are YAML (demo extra)")
pytest.importorskip("omegaconf", reason="recipes are read with OmegaConf (demo extra)")

import yaml

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.train_recipe import plan_runs
from tests.tools.lab.tiny_recipe import TINY, merged


def plan(tmp_path, compare, *, vary=(), **loss_fn):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(merged(TINY, {"loss_fn": loss_fn})), encoding="utf-8")
    return plan_runs(recipe, [], compare=compare, vary=vary, seeds=None, loss_from=None, out=tmp_path)


@pytest.mark.parametrize("vary", ["loss_fn.options.tau_pos=1.0,2.0", "++loss_fn.options={tau_pos: 1.0},{tau_pos: 2.0}"])
def test_options_are_of_the_recipes_own_loss_and_others_are_trained_once(tmp_path, vary):
    runs = plan(tmp_path, "gspo:none,sapo:none", vary=[vary], name="sapo", options={"tau_pos": 3.0})
    assert [run.label.partition(" ")[0] for run in runs] == ["gspo:none", "sapo:none", "sapo:none"]
    assert [run.recipe.loss_fn.get("options") for run in runs] == [None, {"tau_pos": 1.0}, {"tau_pos": 2.0}]
    assert [run.position for run in runs] == [0, 1, 2]
    for run in runs:
        build_loss(run.recipe.loss_fn)


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
