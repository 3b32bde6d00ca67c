"""Recognition of a system, and settings that are reported instead of being dropped."""

import math

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.losses.build import build_with_warnings
from nemo_geomask.losses.prestep import valid_counts
from nemo_geomask.tools.translate import PEERS, translate, translate_files
from tests.tools.translate.peers.batches import random_batch

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


SWIFT = "swift rlhf --rlhf_type grpo --loss_type grpo --epsilon 0.2 --rollout_importance_sampling_mode sequence_mask"


@pytest.mark.parametrize(
    ("name", "text", "system"),
    [
        ("run.sh", f"NPROC_PER_NODE=8 {SWIFT}", "ms-swift"),
        ("run.yaml", "rlhf_type: grpo\nnum_generations: 8", "ms-swift"),
        ("run.yaml", "adv_estimator: grpo\nactor_train: {strategy_args: {strategy_name: megatron_train}}", "ROLL"),
        ("run.yaml", "rollout_batch_size: 16\nstudent_train: {model_args: {dtype: bf16}}", "ROLL"),
        ("run.sh", "ray job submit -- python3 -m molt.cli.train_rl_ray --algo.kl.init_coef 0.1", "labs-molt"),
    ],
)
def test_a_system_that_shares_names_with_another_is_not_taken_for_it(name, text, system, tmp_path):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"settings of {system} .* not among the systems that are translated"):
        translate_files([file])


def test_a_known_program_decides(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("python3 -m openrlhf.cli.train_ppo_ray --kl_estimator k3 --use_kl_loss --init_kl_coef 1e-3 "
                    "--enable_vllm_is_correction --vllm_is_truncated_threshold 0.25 4.0 --use_icepop")  # fmt: skip
    translation = translate_files([file])
    assert (translation.peer.name, translation.not_expressed) == ("openrlhf", ())
    block = translation.loss_fn
    assert (block["reference_policy_kl_type"], block["reference_policy_kl_penalty"]) == ("k3", 1e-3)
    assert block["truncated_importance_sampling_type"] == "icepop"
    assert block["truncated_importance_sampling_ratio_min"] == 0.25


@pytest.mark.parametrize(
    ("peer", "settings", "expected"),
    [
        ("verl", {"actor_rollout_ref.actor.tis_imp_ratio_cap": 3.0}, 3.0),
        ("skyrl", {"trainer.algorithm.use_tis": True, "trainer.algorithm.tis_imp_ratio_cap": 3.0}, 3.0),
        ("open_instruct", {"truncated_importance_sampling_ratio_cap": 3.0}, 3.0),
    ],
)
def test_former_names_have_their_effect(peer, settings, expected):
    assert translate(settings, peer).loss_fn["truncated_importance_sampling_ratio"] == expected


def test_a_former_name_without_one_successor_is_answered_with_its_full_path():
    (message,) = translate({"algorithm.rollout_is_level": "sequence"}, "verl").not_expressed
    assert "algorithm.rollout_correction.rollout_is" in message


@pytest.mark.parametrize(
    ("peer", "settings"),
    [
        ("verl", {"distillation.enabled": False, "distillation.distillation_loss.loss_mode": "k3"}),
        ("verl", {"algorithm.use_pf_ppo": False, "algorithm.pf_ppo.weight_pow": 2.0}),
        ("verl", {"actor_rollout_ref.actor": {"use_kl_loss": True, "kl_loss_coef": 0.0, "kl_loss_type": "abs"}}),
        ("skyrl", {"trainer.algorithm.kl_loss_coef": 0.0}),
    ],
)
def test_what_is_turned_off_is_no_reason_to_fail(peer, settings):
    assert translate(settings, peer).not_expressed == ()
    switched_on = {key: True if value is False else value for key, value in settings.items()}
    assert peer != "verl" or len(settings) == 1 or translate(switched_on, peer).not_expressed


def test_verls_kl_beside_a_mean_over_sequences_is_not_expressed():
    actor = {"policy_loss": {"loss_mode": "geo_mean"}, "use_kl_loss": True, "loss_agg_mode": "token-mean"}
    (message,) = translate({"actor_rollout_ref.actor": actor}, "verl").not_expressed
    assert message.startswith("use_kl_loss: under geo_mean")
    assert not translate({"actor_rollout_ref.actor": actor | {"kl_loss_coef": 0}}, "verl").not_expressed


def test_verls_reward_shaping_points_to_nemo_rls():
    key = "reward.reward_kwargs.overlong_buffer_cfg.len"
    assert translate({key: 512}, "verl").outside_loss_fn == {key: "grpo.reward_shaping.overlong_buffer_length"}


@pytest.mark.parametrize("loss_type", ["ipo", "icepop", "ppo", "cispo"])
def test_prime_rls_losses_equal_their_formulas(loss_type):
    """The formulas of prime-rl's September versions, in plain loops; w = π/μ."""
    bounds = {"icepop": (0.2, 5.0), "ppo": (0.8, 1.2), "cispo": (0.0, 5.0), "ipo": (0.0, 0.0)}[loss_type]
    loss_fn, _ = build_with_warnings(translate({"trainer.loss.type": loss_type}, "prime_rl").loss_fn)
    batch = random_batch(3)
    curr = batch.curr.clone().requires_grad_()
    data = batch.nemo_rl_data()
    value, _ = loss_fn(curr, data, *valid_counts([data]))
    tensors = {name: tensor.detach() for name, tensor in batch.double().items()}
    total = count = 0.0
    for row in range(len(tensors["curr"])):
        for at in range(tensors["curr"].shape[1]):
            p, q, a, m = (float(tensors[name][row][at]) for name in ("curr", "gen", "advantages", "mask"))
            if not m:
                continue
            count += 1
            ratio = math.exp(p - q)
            if loss_type == "ipo":
                total -= ratio * a * (abs(math.exp(p) - math.exp(q)) <= 0.3)
            elif loss_type == "icepop":
                total -= ratio * a * (bounds[0] <= ratio <= bounds[1])
            elif loss_type == "ppo":
                total -= min(ratio * a, min(max(ratio, bounds[0]), bounds[1]) * a)
            else:
                total -= min(max(ratio, bounds[0]), bounds[1]) * a * p
    assert value.item() == pytest.approx(total / count, rel=1e-4)


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
