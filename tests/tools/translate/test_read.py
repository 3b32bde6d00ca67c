"""Settings as read from shell scripts, Python programs and configuration files."""

import pytest

from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate import translate_files
from nemo_geomask.tools.translate.settings_reader import read_settings
from nemo_geomask.tools.translate.shell_reader import line_settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("LOW=0.99; run a.low=$LOW", 0.99),
        ("LOW=0.99; run a.low=${LOW}", 0.99),
        ("LOW=${LOW:-0.9}; run a.low=$LOW", 0.9),
        ("LOW=${LOW:-$OTHER}; run a.low=$LOW", "$LOW:-$OTHER"),
        ("OTHER=0.5 LOW=${LOW:-${OTHER:-1}}; run a.low=$LOW", 0.5),
        ("LOW=0.4; LOW=0.2 run a.low=$LOW", 0.4),  # a variable of a command is not one of the script
        ("LOW=0.2\nif x; then unset LOW; fi\nrun a.low=${LOW:-0.4}", "${LOW:-0.4}"),
        ("LOW=0.4; run a.low='$LOW'", "$LOW"),
        ("LOW=0.4; run a.low=\\$LOW", "$LOW"),
        ("export LOW=0.4 OTHER; run a.low=$LOW", 0.4),
        (': "${LOW:=0.7}"; run a.low=$LOW', 0.7),
        ("ON=false; run a.low=$ON", False),
        ("LOW=1e-4; run a.low=$LOW", 1e-4),
        ("run a.low=$LOW", "$LOW"),
        ("LOW=0.4\n(case $X in a) LOW=0.2;; esac)\nrun a.low=$LOW", "$LOW"),
        ("P=$P:x P=$P:y run a.low=2", 2),
        ("run a.low=${A[@]}", "${A[@]}"),
    ],
)
def test_variables_of_a_script_are_replaced(text, expected):
    settings = line_settings(text)["a.low"]
    if isinstance(expected, str):
        assert "$" in settings
    else:
        assert settings == expected
        assert type(settings) is type(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--clip 0.2 0.27 --on", {"clip": [0.2, 0.27], "on": True}),
        ("--clip 0.2 --on", {"clip": 0.2, "on": True}),
        ("--delta -0.5 -1 --on", {"delta": [-0.5, -1.0], "on": True}),
        ("--sizes 1 2 $(seq 4 4 12) --on", {"sizes": [1.0, 2.0, 4.0, 8.0, 12.0], "on": True}),
        ("--no_rho --on", {"rho": False, "on": True}),
        ("--no-rho", {"rho": False}),
        ("--no_rho true", {"no_rho": True}),
        ("ARGS=( --eps 0.2 --on ) run", {"eps": 0.2, "on": True}),
        ("--on ${ARGS[@]}", {"on": True}),
        ("--env '{\"a\": {' --eps 0.2", {"eps": 0.2}),
    ],
)
def test_options_have_values_lists_or_none(text, expected):
    settings = line_settings(text)
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('GRPOConfig(beta=0.1)\nadam = {"epsilon": 1e-8}\nother = dict(beta=0.3)', {"beta": 0.1}),
        ("cfg = dict(beta=0.1)\nGRPOConfig(**cfg, epsilon=0.2)", {"beta": 0.1, "epsilon": 0.2}),
        ("GRPOConfig(**{'beta': 0.1})", {"beta": 0.1}),
        ("cfg = {'beta': 0.1, 'inner': {'epsilon': 0.2}}", {"beta": 0.1, "epsilon": 0.2}),
        ("dict(beta=0.1, inner=dict(epsilon=0.2))", {"beta": 0.1, "epsilon": 0.2}),
        ("GRPOConfig(beta=0.1, model=dict(a={'b': 1}))", {"beta": 0.1, "model.a.b": 1}),
    ],
)
def test_a_python_file_gives_the_arguments_of_the_constructor(text, expected, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(text)
    assert read_settings(file, ("GRPOConfig",)) == expected


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        ("train.py", "GRPOConfig(beta=float(os.environ['BETA']))", "beta.*environ"),
        ("train.py", "GRPOConfig(beta=BETA)", "beta.*BETA"),
        ("run.sh", "trl grpo --loss_type dapo --beta $BETA", r"beta.*\$BETA"),
        ("run.yaml", "loss_type: dapo\nbeta: ${oc.env:BETA}\nepsilon: 0.2", "beta.*oc.env"),
    ],
)
def test_a_setting_of_the_loss_without_a_value_in_the_file_is_an_error(name, text, names, tmp_path):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=names):
        translate_files([file], "trl")


def test_an_unknown_value_of_another_setting_is_no_error(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("GRPOConfig(beta=0.1, learning_rate=args.lr, seed=int(s))")
    assert translate_files([file], "trl").loss_fn["reference_policy_kl_penalty"] == 0.1


def test_a_switch_that_is_turned_off_is_off(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("trl grpo --use_vllm --no_vllm_importance_sampling_correction")
    settings = translate_files([file], "trl").loss_fn
    assert not settings.get("use_importance_sampling_correction", False)


def test_skyrls_script_with_variables_keeps_its_mask(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(
        "METRIC=geometric\nHIGH=1.01\nLOW=0.99\nKL=false\n"
        "python -m skyrl_train trainer.algorithm.off_policy_correction.sequence_mask_metric=$METRIC "
        "trainer.algorithm.off_policy_correction.geo_mask_high=$HIGH "
        "trainer.algorithm.off_policy_correction.geo_mask_low=$LOW trainer.algorithm.use_kl_loss=$KL"
    )
    settings = translate_files([file], "skyrl").loss_fn
    (mask,) = settings["masks"]
    assert (mask["min"], mask["max"]) == (0.99, 1.01)
    assert settings["reference_policy_kl_penalty"] == 0


def test_openrlhfs_two_bounds_and_its_entropy_bonus(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("train_ppo_ray --actor.eps_clip_low_high 0.2 0.27 --algo.kl.init_coef 0 --actor.entropy_coef 0.01")
    settings = translate_files([file], "openrlhf")
    assert (settings.loss_fn["ratio_clip_min"], settings.loss_fn["ratio_clip_max"]) == (0.2, 0.27)
    assert any("entropy_coef" in text for text in settings.not_expressed)
    file.write_text("train_ppo_ray --actor.eps_clip_low_high 0.2")
    with pytest.raises(ConfigError, match="eps_clip_low_high must be two numbers"):
        translate_files([file], "openrlhf")


def test_nemo_rls_mappings_stay_whole_and_bad_masks_are_named(tmp_path):
    file = tmp_path / "recipe.yaml"
    block = (
        "{name: dppo, ratio_clip_min: 3e-4, options: {delta: 0.2}, batch_veto: {max: 0.1}, masks: [{preset: geometric"
    )
    block += ", max: 1.02}]}"
    file.write_text(f"loss_fn: {block}")
    settings = translate_files([file], "nemo_rl")
    assert settings.not_read == ()
    assert settings.loss_fn["options"] == {"delta": 0.2}
    assert settings.loss_fn["batch_veto"] == {"max": 0.1}
    assert settings.loss_fn["ratio_clip_min"] == 3e-4
    for masks in ("null", "{preset: geometric, max: 1.01}"):
        file.write_text(f"loss_fn: {{sapo_enabled: true, masks: {masks}}}")
        with pytest.raises(ConfigError, match="loss_fn.masks"):
            translate_files([file], "nemo_rl")


def test_a_nemo_rl_recipe_inherits(tmp_path, capsys):
    (tmp_path / "base.yaml").write_text("loss_fn: {ratio_clip_min: 0.1, sapo_enabled: true}")
    (tmp_path / "child.yaml").write_text("defaults: base.yaml\nloss_fn: {ratio_clip_max: 0.3}")
    assert main(["translate", "--from", "nemo_rl", str(tmp_path / "child.yaml")]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("name: sapo", "ratio_clip_min: 0.1", "ratio_clip_max: 0.3"))


def test_verls_whole_configuration_has_nothing_unknown():
    section = {"_target_": "PolicyLossConfig", "loss_mode": "vanilla", "clip_cov_ratio": 0.0002, "ppo_kl_coef": 0.1}
    from nemo_geomask.tools.translate import translate

    settings = translate({"actor_rollout_ref": {"actor": {"policy_loss": section}}}, "verl")
    assert settings.not_expressed == ()
    assert "actor_rollout_ref.actor.policy_loss.clip_cov_ratio" in settings.without_effect
