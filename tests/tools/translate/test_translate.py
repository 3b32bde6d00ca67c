"""Translation of other systems' settings: any file format, no setting dropped silently, always a valid block."""

import math

import pytest
import yaml

from nemo_geomask import LossConfig, build_loss
from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.losses.build import build_with_warnings
from nemo_geomask.tools.translate import PEERS, translate, translate_files
from nemo_geomask.tools.translate.setting_values import nested

RC = "algorithm.rollout_correction"


def parsed_block(translation):
    """Return the block, parsed from the YAML output, without what it only keeps off."""
    block = yaml.safe_load(translation.yaml())["loss_fn"]
    assert block == {**translation.loss_fn, **translation.switched_off}
    LossConfig(**block)
    return {key: value for key, value in block.items() if key not in translation.switched_off}


@pytest.mark.parametrize("peer", PEERS)
def test_defaults_are_a_valid_block(peer):
    translation = translate({}, peer)
    assert parsed_block(translation) == dict(translation.loss_fn)
    LossConfig(**parsed_block(translation))
    # NeMo-RL's own default is a KL of 0.01.
    assert "reference_policy_kl_penalty" in translation.loss_fn or peer == "nemo_rl"


@pytest.mark.parametrize("preset", PEERS["verl"].presets)
def test_every_preset_of_verl_is_a_valid_block(preset):
    translation = translate({"preset": preset})
    assert translation.peer.name == "verl"
    build_with_warnings(parsed_block(translation))


def test_bounds_of_k1_are_inverted_and_say_so():
    settings = {RC: {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_4.0"}}
    translation = translate(settings)
    assert translation.loss_fn["masks"] == [{"preset": "geometric", "min": 0.25, "max": 2.0}]
    assert "of 1/ρ" in translation.notes["masks[0]"]
    # The divisor of a token mean counts rejected tokens in verl's v1 trainer, not in the one before.
    assert "denominator" not in translation.loss_fn
    assert translate({**settings, "trainer.use_v1": False}).loss_fn["denominator"] == "kept"
    text = translation.yaml()
    assert text.index("of 1/ρ") < text.index("preset: geometric")


def test_one_bound_of_k1_is_its_own_inverse():
    translation = translate({"rollout_rs": "token_k1", "rollout_rs_threshold": 1.25})
    (mask,) = translation.loss_fn["masks"]
    assert mask == {"preset": "icepop", "min": 0.8, "max": 1.25}


def test_a_section_or_a_leaf_is_enough():
    whole = {"algorithm": {"rollout_correction": {"rollout_is": "token"}}}
    for settings in (whole, whole["algorithm"], {"rollout_is": "token"}, {"config": whole}):
        assert translate(settings).loss_fn["is_correction_level"] == "token"


def test_unknown_setting_of_a_section_is_not_dropped():
    (message,) = translate({RC: {"rollout_is": "token", "rollout_rs_treshold": 3}}).not_expressed
    assert "rollout_rs_treshold" in message
    assert "did you mean 'rollout_rs_threshold'" in message


def test_settings_outside_the_loss_are_listed():
    settings = {"rollout_is": "token", "trainer": {"nnodes": 2}, "critic": {str(n): n for n in range(20)}}
    text = translate(settings).yaml()
    assert "concern the loss: trainer.nnodes, critic.* (20)" in text


def test_setting_without_effect_in_the_peer_is_listed():
    assert translate({RC: {"loss_type": "reinforce"}}).without_effect == (f"{RC}.loss_type",)


def test_setting_without_counterpart_is_listed():
    translation = translate({"actor_rollout_ref": {"actor": {"entropy_coeff": 0.01, "loss_agg_mode": "token-sum"}}})
    assert len(translation.not_expressed) == 2
    assert all(f"NOT EXPRESSED: {message.split(':')[0]}" in translation.yaml() for message in translation.not_expressed)


def test_trl_corrects_by_sequence_by_default():
    translation = translate({"use_vllm": True, "num_generations": 8})
    assert translation.peer.name == "trl"
    loss_fn = translation.loss_fn
    assert loss_fn["is_correction_level"] == "sequence"
    assert loss_fn["truncated_importance_sampling_type"] == "icepop"
    assert (loss_fn["truncated_importance_sampling_ratio_min"], loss_fn["truncated_importance_sampling_ratio"]) == (
        0,
        3,
    )
    assert translation.outside_loss_fn == {"num_generations": "grpo.num_generations_per_prompt"}
    assert "use_importance_sampling_correction" not in translate({"use_vllm": False}, "trl").loss_fn


def test_trls_cispo_bound_is_on_the_ratio_itself():
    loss_fn = translate({"loss_type": "cispo", "epsilon_high": 5.0}, "trl").loss_fn
    assert (loss_fn["name"], loss_fn["ratio_clip_min"], loss_fn["ratio_clip_max"]) == ("cispo", 1.0, 4.0)
    assert translate({"loss_type": "cispo"}, "trl").not_expressed


@pytest.mark.parametrize(
    ("function", "kind"), [("slime.loss.icepop_function", "icepop"), ("slime.loss.vanilla_tis_function", "tis")]
)
def test_slimes_own_corrections_are_known(function, kind):
    translation = translate({"use_tis": True, "tis_clip_low": 0.5, "custom_tis_function_path": function}, "slime")
    assert translation.loss_fn["truncated_importance_sampling_type"] == kind
    assert translation.loss_fn["truncated_importance_sampling_ratio_min"] == 0.5
    assert translate({"use_tis": True, "custom_tis_function_path": "my.own"}, "slime").not_expressed


def test_gmpo_bounds_of_verl_are_on_the_log_ratio():
    settings = {"policy_loss": {"loss_mode": "geo_mean"}, "clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    loss_fn = translate(settings, "verl").loss_fn
    assert 1 - loss_fn["ratio_clip_min"] == pytest.approx(math.exp(-0.4))
    assert 1 + loss_fn["ratio_clip_max"] == pytest.approx(math.exp(0.4))


FILES = {
    "run.yaml": "algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 3.0}}",
    "run.json": '{"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 3.0}}',
    "run.toml": '[algorithm.rollout_correction]\nrollout_is = "token"\nrollout_is_threshold = 3.0',
    "run.py": "config = verl.RolloutCorrectionConfig.decoupled_token_is(threshold=3.0)",
    "keys.py": "RolloutCorrectionConfig(rollout_is='token', rollout_is_threshold=3.0)",
    "run.sh": "#!/bin/bash\npython3 -m verl \\\n  algorithm.rollout_correction.rollout_is=token \\\n"
    "  +algorithm.rollout_correction.rollout_is_threshold=3.0 # TIS\n",
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_format_gives_the_same_block(name, tmp_path):
    (tmp_path / name).write_text(FILES[name])
    loss_fn = translate_files([tmp_path / name]).loss_fn
    assert loss_fn["is_correction_level"] == "token"
    assert loss_fn["truncated_importance_sampling_ratio"] == 3.0


def test_command_line_flags_and_a_second_file(tmp_path):
    (tmp_path / "run.sh").write_text(
        "SLIME_ARGS=(\n  --eps-clip 4e-4\n  --eps-clip-high 5e-4 --use-tis\n"
        "  --custom-tis-function-path examples.mis.compute_mis_weights_with_cp\n  --advantage-estimator gspo\n)\n"
    )
    (tmp_path / "mis.yaml").write_text(
        "use_rs: true\ntis_level: geometric\nrs_level: sequence\nrs_veto_threshold: 1.0e-4\n"
    )
    translation = translate_files([tmp_path / "run.sh", tmp_path / "mis.yaml"])
    assert translation.peer.name == "slime"
    loss_fn = translation.loss_fn
    assert (loss_fn["name"], loss_fn["ratio_clip_min"], loss_fn["is_correction_level"]) == (
        "gspo",
        4e-4,
        "sequence_mean",
    )
    assert [mask["preset"] for mask in loss_fn["masks"]] == ["product", "veto"]
    assert parsed_block(translation) == dict(loss_fn)


@pytest.mark.parametrize(
    ("settings", "peer", "expected"),
    [
        (
            {
                "actor": {
                    "use_decoupled_loss": True,
                    "rejection_sampling": {"metric": "kl_k1", "upper": 0.5, "lower": -0.2},
                }
            },
            "areal",
            {"masks": [{"preset": "raw"}]},
        ),
        (
            {"actor": {"eps_clip": 0.3, "recompute_logprob": False}},
            "areal",
            {"ratio_anchor": "gen", "ratio_clip_min": 0.3},
        ),
        ({"trainer": {"algorithm": {"policy_loss_type": "dual_clip"}}}, "skyrl", {"ratio_clip_c": 3.0}),
        ({"trainer.algorithm.cispo.cispo_anchor": "rollout"}, "skyrl", {"ratio_clip_max": 0.2}),
        ({"trainer": {"loss": {"type": "ipo", "eps": 0.3, "kl_tau": 0.0}}}, "prime_rl", {"name": "ipo"}),
        ({"algo.advantage.is_correction_enable": True}, "openrlhf", {"truncated_importance_sampling_ratio_min": 0.5}),
        (
            {"actor.policy_loss_type": "gspo", "algo.advantage.is_correction_enable": True},
            "openrlhf",
            {"name": "gspo", "ratio_anchor": "gen"},
        ),
        ({"rho_clamp_upper_bound": 3.0, "kl_estimator": 1}, "open_instruct", {"reference_policy_kl_type": "k2"}),
        ({"rho_mask_upper_bound": 3.0, "rho_mask_tv_divergence": True}, "open_instruct", {"ratio_clip_max": 0.272}),
        ({"type": "gspo", "epsilon_low": 3e-4, "normalize_by_documents": True}, "fast_llm", {"name": "gspo"}),
    ],
)
def test_each_system_is_recognised(settings, peer, expected):
    translation = translate(settings)
    assert translation.peer.name == peer
    if "masks" in expected:
        (mask,) = translation.loss_fn["masks"]
        assert (mask["min"], mask["max"]) == pytest.approx((math.exp(-0.2), math.exp(0.5)))
    else:
        assert expected.items() <= translation.loss_fn.items()
    assert parsed_block(translation) == dict(translation.loss_fn)
    build_with_warnings(parsed_block(translation))


def test_small_numbers_stay_numbers_in_yaml():
    loss_fn = parsed_block(translate({"use_tis": True, "tis_clip_low": 1e-07, "eps_clip": 1e-06}, "slime"))
    assert loss_fn["truncated_importance_sampling_ratio_min"] == 1e-07
    assert loss_fn["ratio_clip_min"] == 1e-06


@pytest.mark.parametrize(
    ("settings", "peer", "message"),
    [
        ({"nothing": 1}, None, "belong to none of the known systems: verl, trl, slime, areal"),
        ({"loss_type": "grpo"}, None, "may belong to .* name the system with --from"),
        ({"rollout_is": 1}, "ver", "did you mean 'verl'"),
        ({"preset": "decoupled_toke_is"}, "verl", "has no preset"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "a_b"}, "verl", "must be a number"),
        ({"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "1,2"}, "verl", "but has 2"),
        ({"clip_ratio_c": "${oc.env:C}"}, "verl", "clip_ratio_c: the file does not contain the value of"),
        ({"eps_clip": [1]}, "slime", "eps_clip must be a number"),
        ({"eps_clip": True}, "slime", "eps_clip must be a number, but it is True"),
    ],
)
def test_settings_that_can_not_be_read_are_errors(settings, peer, message):
    with pytest.raises(ConfigError, match=message):
        translate(settings, peer)


def test_a_value_holds_no_settings():
    assert nested({"a.b": 1, "a.c.d": 2}) == {"a": {"b": 1, "c": {"d": 2}}}
    with pytest.raises(ConfigError, match=r"^a\.b: a is a value elsewhere and can't hold settings"):
        nested({"a": 1, "a.b": 2})


def test_command_writes_the_block_and_its_status_tells_whether_it_is_complete(tmp_path, capsys):
    file, out = tmp_path / "run.yaml", tmp_path / "out.yaml"
    file.write_text("rollout_correction: {rollout_is: token}")
    assert main(["translate", str(file)]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["loss_fn"]["is_correction_level"] == "token"
    file.write_text("policy_loss: {loss_mode: clip_cov}")
    assert main(["translate", str(file), "--from", "verl", "--out", str(out)]) == 1
    assert "NOT EXPRESSED: policy_loss.loss_mode: clip_cov" in out.read_text()
    (link := tmp_path / "link.yaml").symlink_to(file)
    assert main(["translate", str(file), "--out", str(link)]) == 2
    assert "link.yaml is a link" in capsys.readouterr().err
    assert "clip_cov" in file.read_text()
    assert main(["translate", str(file), "--from", "vrl"]) == 2
    assert "did you mean 'verl'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("actor@actor_rollout_ref.actor: dp_actor", ""),  # verl's own, whose values are its defaults
        ("actor@actor_rollout_ref.actor: my_clip", "actor@actor_rollout_ref.actor: my_clip"),
        ("reward_manager@reward_manager", ""),  # a section that does not reach the loss
        ("critic@critic: my_critic", ""),
        ("override hydra/job_logging: disabled", ""),
        ("override model_engine: megatron", ""),
        ("my_clip@actor_rollout_ref.actor", "my_clip@actor_rollout_ref.actor"),
        ("_self_", ""),
    ],
)
def test_files_that_hydra_adds_are_named_unless_they_are_the_systems_own(entry, named, tmp_path, capsys):
    path = tmp_path / "ppo_trainer.yaml"
    path.write_text(f"defaults:\n  - {entry}\nactor_rollout_ref: {{actor: {{clip_ratio: 0.2}}}}\n", encoding="utf-8")
    assert main(["translate", str(path)]) == (1 if named else 0)
    printed = " ".join(capsys.readouterr().out.replace("\n# ", " ").split())
    assert (f"NOT EXPRESSED: defaults: {named} names a file with more settings; pass" in printed) == bool(named)


def test_settings_of_nemo_rls_open_pull_requests():
    settings = {"ratio_clip_max": 0.28, "sapo_enabled": True, "sapo_tau_neg": 1.2, "metrics_level": "minimal"}
    translation = translate({"loss_fn": {**settings, "enable_torch_compile": True}, "grpo": {"seed": 1}})
    assert translation.peer.name == "nemo_rl"
    assert translation.loss_fn == {
        "name": "sapo",
        "options": {"tau_pos": 1.0, "tau_neg": 1.2},
        "ratio_clip_max": 0.28,
        "compile": True,
        "metrics": "nemo_rl",
    }
    assert not translation.not_expressed
    (message,) = translate({"loss_fn": {"loss_mode": "dppo_binary_tv"}}).not_expressed
    assert "4069" in message
    (message,) = translate({"loss_fn": {"ratio_clip_mx": 1}}, "nemo_rl").not_expressed
    assert "did you mean 'ratio_clip_max'" in message


@pytest.mark.parametrize(
    ("key", "value"), [("clip_ratio_low", 0.3), ("bypass_mode", True), ("rollout_rs", "token_k1"), ("beta", 0.1)]
)
def test_foreign_setting_in_a_recipe_leads_to_this_command(key, value):
    with pytest.raises(ConfigError, match=rf"loss_fn.{key}: unknown key; .*\(nemo-geomask translate knows the names"):
        build_loss({key: value})


def test_verls_bypass_runs_any_loss_mode_on_the_rollouts_log_probs():
    settings = {
        RC: {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
        "actor_rollout_ref.actor.policy_loss.loss_mode": "dppo_tv",
        "actor_rollout_ref.actor.clip_ratio_low": 0.15,
        "actor_rollout_ref.actor.clip_ratio_high": 0.15,
        "actor_rollout_ref.actor.clip_ratio_c": 20.0,
    }
    translation = translate(settings, "verl")
    assert translation.loss_fn["name"] == "cispo"
    assert translation.loss_fn["ratio_anchor"] == "gen"
    (mask,) = translation.loss_fn["masks"]
    assert mask == {"preset": "dppo_tv", "delta": 0.15, "delta_low": 0.15, "log_ratio": "total"}
    assert "neither rollout_is nor rollout_rs" in " ".join(translation.yaml().replace("#", "").split())
    older = translate({**settings, "trainer.use_v1": False}, "verl").loss_fn
    assert older["name"] == "clipped_pg"
    assert [mask["log_ratio"] for mask in older["masks"]] == ["total"]
    assert older["masks"][0]["level"] == "token"


def test_skyrls_corrections_act_beside_a_ratio_to_the_rollout():
    prefix = "trainer.algorithm.off_policy_correction."
    settings = {
        "trainer.algorithm.policy_loss_type": "dppo",
        prefix + "outlier_token_is_threshold_low": 1e-4,
        prefix + "outlier_token_is_threshold_high": 100.0,
        prefix + "tis_ratio_type": "token",
    }
    translation = translate(settings, "skyrl")
    assert {"preset": "veto", "min": 1e-4, "max": 100.0} in translation.loss_fn["masks"]
    assert "NOT EXPRESSED" in translation.yaml()
    assert "use_importance_sampling_correction" not in translation.loss_fn
    # The anchor is CISPO's alone.
    regular = {"trainer.algorithm.cispo.cispo_anchor": "rollout", prefix + "tis_ratio_type": "token"}
    assert translate(regular, "skyrl").loss_fn["use_importance_sampling_correction"] is True


def test_a_bound_of_a_ratio_must_be_above_0():
    with pytest.raises(ConfigError, match="must be above 0, by '0_1.001'"):
        translate({RC: {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0_1.001"}})
