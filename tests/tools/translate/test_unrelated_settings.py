"""Settings that are left out without a word, because they do not reach the loss."""

import re

import pytest

from nemo_geomask.cli import main
from nemo_geomask.tools.translate import PEERS, translate
from nemo_geomask.tools.translate.peer_table import LOSS_WORDS
from tests.tools.translate.peers.corpus import EXAMPLES, checkout_of

PATTERNS = [(peer.name, pattern) for peer in PEERS.values() for pattern in peer.unrelated if "*" in pattern]


@pytest.mark.parametrize(("name", "pattern"), PATTERNS, ids=[f"{name} {pattern}" for name, pattern in PATTERNS])
def test_a_pattern_covers_no_setting_whose_name_speaks_of_a_loss(name, pattern):
    peer, literal = PEERS[name], pattern.rstrip("*")
    assert "*" not in literal, "a pattern ends in its asterisks"
    assert peer.is_unrelated(f"{literal}num_workers")
    for word in ("loss_scale", "kl_coef", "clip_high", "logprobs_mode", "token_mask", "importance_sampling"):
        assert peer.is_unrelated(literal + word) == pattern.endswith("**")


@pytest.mark.parametrize("word", ["generation", "micro_batch_size", "num_gpus", "klingon", "lr", "seed", "path"])
def test_ordinary_names_speak_of_no_loss(word):
    assert LOSS_WORDS.search(word) is None


SECTIONS = {
    "verl": ("trainer", "data", "algorithm", "async_training", "actor_rollout_ref", "actor_rollout_ref.rollout",
             "actor_rollout_ref.model", "actor_rollout_ref.actor"),
    "skyrl": ("trainer", "generator", "data", "environment"),
    "prime_rl": ("trainer", "orchestrator", "orchestrator.train"),
    "openrlhf": ("train", "rollout", "data", "ds", "vllm", "actor", "ref", "ckpt", "algo"),
    "areal": ("actor", "rollout", "gconfig"),
    "fast_llm": ("model", "batch")
}  # fmt: skip


@pytest.mark.parametrize(("name", "section"), [(name, section) for name in SECTIONS for section in SECTIONS[name]])
def test_an_unknown_setting_of_a_section_is_reported(name, section, tmp_path, capsys):
    peer = PEERS[name]
    known = next(key for key, value in peer.defaults.items() if isinstance(value, float))
    file = tmp_path / "run.yaml"
    file.write_text(f"{known}: {peer.defaults[known]}\n{section}.something_new: 1")
    assert main(["translate", "--from", name, str(file)]) == 1
    assert f"NOT EXPRESSED: {section}.something_new" in capsys.readouterr().out


MEGATRON = "actor_rollout_ref.actor.megatron.override_transformer_config."


@pytest.mark.parametrize(
    ("peer", "key", "value", "harmless"),
    [
        ("verl", MEGATRON + "moe_aux_loss_coeff", 0.01, 0),
        ("verl", MEGATRON + "moe_z_loss_coeff", 0.001, None),
        ("verl", MEGATRON + "dsa_indexer_loss_coeff", 0.1, 0.0),
        ("verl", "actor_rollout_ref.rollout.logprobs_mode", "raw_logprobs", "processed_logprobs"),
        ("skyrl", "trainer.policy.megatron_config.moe_aux_loss_coeff", 0.01, 0.0),
        ("skyrl", "trainer.override_entrypoint", "integrations.arctic_rl.entrypoint", None),
        ("skyrl", "trainer.update_ref_every_epoch", True, False),
        ("slime", "moe_aux_loss_coeff", 0.001, 0),
        ("areal", "actor.megatron.moe_z_loss_coeff", 0.001, None),
        ("trl", "use_liger_kernel", True, False),
    ],
)
def test_a_setting_that_adds_to_the_loss_or_replaces_it_is_not_expressed(peer, key, value, harmless):
    not_expressed, before = (translate({key: item}, peer).not_expressed for item in (value, harmless))
    (message,) = set(not_expressed) - set(before)
    assert message.startswith(f"{key}: ")
    assert not any(key in text for text in before)


@pytest.mark.parametrize(
    ("peer", "key"),
    [
        ("verl", "actor_rollout_ref.model.mtp.enable_train"),
        ("verl", "async_training.staleness_threshold"),
        ("skyrl", "trainer.mtp.enabled"),
        ("skyrl", "trainer.update_epochs_per_batch"),
        ("openrlhf", "train.max_epochs"),
        ("openrlhf", "rollout.temperature"),
        ("areal", "rollout.max_head_offpolicyness"),
        ("prime_rl", "orchestrator.train.filter_zero_advantages"),
        ("trl", "max_staleness"),
    ],
)
def test_a_setting_of_nemo_rls_other_sections_is_listed_with_its_place(peer, key):
    translation = translate({key: 1}, peer)
    assert key in translation.outside_loss_fn
    assert key not in translation.not_read


# Of transformers, whose TrainingArguments TRL's configuration extends.
TRAINING_ARGUMENTS = {
    "tf32",
    "save_only_model",
    "save_safetensors",
    "logging_dir",
    "logging_first_step",
    "hub_strategy",
    "adam_epsilon",
    "optim_target_modules",
    "ddp_timeout",
    "ddp_find_unused_parameters",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_names_are_those_of_the_peers_source_or_examples(name):
    folder = checkout_of(name)
    words = set(TRAINING_ARGUMENTS if name == "trl" else ())
    for path in folder.rglob("*"):
        if path.suffix in (".py", ".sh", ".yaml", ".toml", ".ipynb", ".md") and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace").replace("-", "_")
            words.update(word.strip("_").removeprefix("no_") for word in re.findall(r"\w+", text))
    exact = [key for key in PEERS[name].unrelated if "*" not in key]
    assert [key for key in exact if key.rpartition(".")[2].strip("_") not in words] == []
