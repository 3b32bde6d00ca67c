"""Recognition of a system, and settings that are reported instead of being dropped."""

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate import PEERS, translate, translate_files

PRIME_RL = """
seq_len = 2048
[orchestrator]
batch_size = 128
[orchestrator.algo]
type = "%s"
[trainer.optim]
type = "muon"
lr = 1e-6
"""


def test_an_algorithm_of_prime_rl_is_no_loss_of_fast_llm(tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text(PRIME_RL % "grpo")
    translation = translate_files([file])
    assert translation.peer.name == "prime_rl"
    assert translation.loss_fn["name"] == "ipo"
    assert translation.not_expressed == ()
    assert "trainer.optim.type" in translation.not_read
    file.write_text(PRIME_RL % "opd")
    (message,) = translate_files([file]).not_expressed
    assert "opd" in message


@pytest.mark.parametrize("name", ["run.yaml", "run.sh"])
def test_fully_asynchronous_verl_trains_on_the_rollouts_log_probs(name, tmp_path):
    file = tmp_path / name
    texts = {
        "run.yaml": "actor_rollout_ref: {rollout: {n: 4}}\nasync_training: {use_rollout_log_probs: true}",
        "run.sh": "python -m verl.experimental.fully_async_policy.fully_async_main "
        "async_training.use_rollout_log_probs=True",
    }
    file.write_text(texts[name])
    translation = translate_files([file])
    assert translation.loss_fn["ratio_anchor"] == "gen"
    assert translation.not_expressed == ()


def test_program_of_verl_has_its_own_defaults(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("python -m verl.experimental.fully_async_policy.fully_async_main actor_rollout_ref.rollout.n=4")
    assert translate_files([file]).loss_fn["ratio_anchor"] == "gen"
    file.write_text("python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4")
    assert "ratio_anchor" not in translate_files([file]).loss_fn
    file.write_text("python -m my.main_ppo actor_rollout_ref.rollout.n=4")
    assert "my.main_ppo" in translate_files([file]).not_expressed[0]
    file.write_text("torchrun -m verl.trainer.sft_trainer optim.lr=1e-5")
    with pytest.raises(ConfigError, match="without a policy-gradient loss"):
        translate_files([file])


def test_asynchronous_grpo_of_trl_is_read(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("config = AsyncGRPOConfig(epsilon=0.1, epsilon_high=0.5)")
    for peer in ("trl", None):
        loss_fn = translate_files([file], peer).loss_fn
        assert (loss_fn["ratio_clip_min"], loss_fn["ratio_clip_max"], loss_fn["ratio_anchor"]) == (0.1, 0.5, "gen")
    file.write_text("config = AsyncGRPOConfig(epsilon=0.1, beta=0.5)")
    assert any("beta" in message for message in translate_files([file]).not_expressed)


SCRIPT = '''"""
accelerate launch train.py \\
    --epsilon 3e-4 --importance_sampling_level sequence
%s"""
script_args, training_args = TrlParser((ScriptArguments, GRPOConfig)).parse_args_and_config()
training_args.beta = 0.25
'''


def test_a_script_of_trl_has_the_settings_of_its_docstring(tmp_path):
    file, command = tmp_path / "train.py", tmp_path / "run.sh"
    file.write_text(SCRIPT % "")
    translation = translate_files([file])
    assert translation.loss_fn["ratio_clip_min"] == 3e-4
    assert translation.loss_fn["reference_policy_kl_penalty"] == 0.25
    assert any("docstring" in text for text in translation.differences)
    command.write_text("accelerate launch train.py --epsilon 0.3")
    assert translate_files([file, command]).loss_fn["ratio_clip_min"] == 0.3
    assert translate_files([file, command]).loss_fn["name"] == "clipped_pg"
    file.write_text(SCRIPT % "python train.py --beta 1\n")  # two commands
    assert any("command line" in text for text in translate_files([file]).not_expressed)


def test_arithmetic_of_a_script_is_computed(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(
        "PROMPT=512\nLENGTH=1024\npython -m skyrl.train.entrypoints.main_base "
        "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm "
        "trainer.algorithm.max_seq_len=$((PROMPT + 2 * $LENGTH))"
    )
    assert translate_files([file]).loss_fn["loss_normalization_constant"] == 512 + 2 * 1024


def test_a_value_that_depends_on_a_branch_is_not_guessed(tmp_path):
    file = tmp_path / "run.sh"
    run = "python -m verl.trainer.main_ppo actor_rollout_ref.actor.clip_ratio_high=$HIGH"
    file.write_text(f"if [ $1 = a ]; then HIGH=0.2; else HIGH=0.3; fi\n{run}")
    with pytest.raises(ConfigError, match="clip_ratio_high"):
        translate_files([file])
    file.write_text(f"HIGH=0.2\n{run}\nHIGH=0.3\n{run}")
    with pytest.raises(ConfigError, match=r"one of 0.2, 0.3"):
        translate_files([file])
    file.write_text("A=()\nif [ $1 = a ]; then A+=(actor_rollout_ref.actor.clip_ratio_high=0.3); fi\n"
                    'python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4 "${A[@]}"')  # fmt: skip
    assert any("only some branches" in message for message in translate_files([file]).not_expressed)
    file.write_text('python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4 $MORE --config-name="mine"')
    assert len(translate_files([file]).not_expressed) == 2


def test_two_candidates_are_an_error_that_names_both():
    settings = {"actor_rollout_ref.rollout.n": 8, "trainer.algorithm.eps_clip_low": 0.1}
    with pytest.raises(ConfigError, match=r"verl or skyrl.*rollout.n' belongs to verl.*eps_clip_low' belongs to skyrl"):
        translate(settings)


@pytest.mark.parametrize("name", PEERS)
def test_marks_belong_to_one_system(name):
    for other, peer in PEERS.items():
        if other != name:
            assert PEERS[name].marks_of([*peer.defaults, *peer.outside_loss_fn]) == []


def test_defaults_are_listed(tmp_path):
    text = translate({"actor_rollout_ref.actor.clip_ratio_high": 0.3}).yaml().replace("\n#", "")
    assert "so verl's default:" in text
    assert "clip_ratio_c: 3.0" in text


def test_a_file_without_a_loss_is_an_error(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {nnodes: 2}")
    with pytest.raises(ConfigError, match="no setting of verl's loss"):
        translate_files([file], "verl")
