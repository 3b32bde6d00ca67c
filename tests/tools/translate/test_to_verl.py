"""Translation of a loss_fn block into verl's settings, and back."""

import pytest
import torch
import yaml

from nemo_geomask import PrestepPass, build_loss
from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate import PEERS, to_verl, translate
from tests.helpers.batches import evaluate, rollouts
from tests.tools.translate.peers.of_verl import CASES, PRESETS

# Cases of verl that are fully expressed in this package.
EXPRESSED = {
    name: settings for name, settings in {**PRESETS, **CASES}.items() if not translate(settings, "verl").not_expressed
}


def loss_and_gradient(block, seed):
    loss, batch = build_loss(block), rollouts(seed=seed)
    batch.data.update(PrestepPass(loss.config)(batch.data).changes)
    found = evaluate(loss, batch)
    return found.loss.detach(), found.grad


@pytest.mark.parametrize("name", EXPRESSED)
def test_both_directions_give_the_same_loss(name):
    block = translate(EXPRESSED[name], "verl").loss_fn
    back = to_verl(block)
    assert back.not_expressed == ()
    again = translate(yaml.safe_load(back.yaml()) or {"clip_ratio": 0.2}, "verl").loss_fn
    for one, other in zip(loss_and_gradient(block, 1), loss_and_gradient(again, 1), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_all_presets_are_expressed():
    assert {f"preset {name}" for name in PEERS["verl"].presets} <= EXPRESSED.keys()
    assert len(CASES) - len(EXPRESSED) + len(PRESETS) == 5


@pytest.mark.parametrize(
    ("block", "settings", "lost"),
    [
        ({"ratio_clip_c": 3.0, "reference_policy_kl_penalty": 0.0}, {}, []),
        ({"name": "dppo", "options": {"delta": 0.2, "delta_low": 0.1, "cap": 5.0}, "reference_policy_kl_penalty": 0.0},
         {"loss_mode": "dppo_tv", "bypass_mode": True, "clip_ratio_low": 0.1, "clip_ratio_c": 5.0}, []),
        ({"name": "gspo", "reference_policy_kl_penalty": 0.0}, {"loss_mode": "gspo", "clip_ratio_high": 4e-4}, []),
        ({"reference_policy_kl_penalty": 0.0}, {"clip_ratio_c": 1e9}, []),  # none, which verl has not
        ({}, {"use_kl_loss": True}, ["reference_policy_kl_gradient: null"]),
        ({"name": "vespo"}, {}, ["name: vespo"]),
        ({"name": "sapo", "options": {"tau_neg": 2.0}, "token_level_loss": True}, {"tau_neg": 2.0},
         ["reference_policy_kl_gradient", "normalization: tokens"]),
        ({"masks": [{"preset": "kpop", "max": 0.1}, {"preset": "icepop", "min": 0.5, "max": 5.0}]},
         {"rollout_rs_threshold": "0.2_2"}, ["loss_fn.masks[0]", "kl_tokens: trained"]),
        ({"masks": [{"preset": "m2po"}]}, {}, ["loss_fn.masks[0]"]),
        ({"batch_veto": {"max": 0.1}}, {}, ["batch_veto"]),
        ({"use_importance_sampling_correction": True, "is_correction_level": "sequence_mean"}, {},
         ["applies_weight: true", "correction_level: sequence_mean"]),
        ({"use_importance_sampling_correction": True}, {"rollout_is_threshold": 1e9}, ["kl_gradient"])
    ]
)  # fmt: skip
def test_setting_that_verl_lacks_is_listed(block, settings, lost):
    back = to_verl(block)
    found = {key.rpartition(".")[2]: value for key, value in back.settings.items()}
    assert {key: found.get(key) for key in settings} == pytest.approx(settings)
    for text in lost:
        assert any(text in line for line in back.not_expressed), back.not_expressed
    if not lost:
        assert back.not_expressed == ()
    assert back.yaml().count("# NOT EXPRESSED: ") == len(back.not_expressed)


def test_the_command_writes_verls_settings(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("loss_fn: {name: cispo, reference_policy_kl_penalty: 0.0}\n")
    assert main(["translate", "--to", "verl", str(recipe)]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["actor_rollout_ref"]["actor"]["policy_loss"] == {"loss_mode": "cispo"}
    recipe.write_text("loss_fn: {name: vespo}\n")
    assert main(["translate", "--to", "verl", str(recipe), "--out", str(tmp_path / "verl.yaml")]) == 1
    assert "NOT EXPRESSED: name: vespo" in (tmp_path / "verl.yaml").read_text()
    recipe.write_text("grpo: {}\n")
    assert main(["translate", "--to", "verl", str(recipe)]) == 2
    assert "has no loss_fn block" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        to_verl({"ratio_clip_mim": 1})


@pytest.mark.parametrize(
    "block",
    [
        {"name": "gmpo", "ratio_clip_min": 1.0, "ratio_clip_max": 5.0},
        {"name": "clipped_pg", "masks": [{"log_ratio": "mismatch", "level": "token", "statistic": "k3", "min": 0.1}]},
        {"name": "clipped_pg", "ratio_clip_c": 3.0, "force_on_policy_ratio": True},
    ],
)
def test_bounds_without_counterpart_in_verl_are_listed(block):
    translation = to_verl(block)
    assert translation.not_expressed
    assert "NOT EXPRESSED" in translation.yaml()
