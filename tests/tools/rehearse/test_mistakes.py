"""Mistakes planted in one good recipe: each ends `check` with the setting's name, or, where only NeMo-RL sees it,
`rehearse` (tests/tools/rehearse/test_real.py has those)."""

from __future__ import annotations

import pytest

from nemo_geomask.cli import main
from nemo_geomask.recipe import recipe_file as recipes

pytest.importorskip("hydra", reason="overrides are Hydra's")

GOOD = """
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  skip_reference_policy_logprobs_calculation: true
  async_grpo: {enabled: false}
  adv_estimator: {name: grpo}
loss_fn:
  name: gspo
  token_level_loss: false
  ratio_clip_min: 3.0e-4
  ratio_clip_max: 4.0e-4
  reference_policy_kl_penalty: 0.0
  use_importance_sampling_correction: true
  is_correction_level: sequence_mean
  batch_veto: {estimator: k3, max: 0.1}
  masks:
    - {preset: geometric, min: 0.999, max: 1.002}
policy:
  model_name: Qwen/Qwen3-30B-A3B
  train_global_batch_size: 512
  train_micro_batch_size: 4
  logprob_batch_size: 4
  max_total_sequence_length: 4096
  make_sequence_length_divisible_by: 8
  precision: bfloat16
  dtensor_cfg: {enabled: false}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    context_parallel_size: 2
    expert_model_parallel_size: 8
    pipeline_model_parallel_size: 1
    sequence_parallel: true
    moe_router_dtype: fp32
  sequence_packing: {enabled: true}
  router_replay: {enabled: true}
  generation:
    backend: vllm
    max_new_tokens: 2048
    temperature: 1.0
    top_p: 1.0
    top_k: null
    colocated: {enabled: true}
    vllm_cfg:
      precision: bfloat16
      kv_cache_dtype: auto
      async_engine: false
      max_model_len: 4096
      tensor_parallel_size: 2
      logprobs_mode: processed_logprobs
    vllm_kwargs: {}
data:
  max_input_seq_length: 2048
  train: [{dataset_name: a}]
cluster: {gpus_per_node: 8, num_nodes: 4}
"""

MISTAKES = {
    # What is done to the recipe: a word of what is said, beside the setting.
    "a setting misspelt": (["++loss_fn.ratio_clip_mx=0.1"], "loss_fn.ratio_clip_mx", "ratio_clip_max"),
    "a typo behind an override": (["policy.generation.temprature=0.7"], "policy.generation.temprature", "temperature"),
    "no such objective": (["loss_fn.name=gpso"], "loss_fn.name", "gspo"),
    "a plugin that is not there": (["loss_fn.name=no_such_package.losses:mine"], "loss_fn.name", "no_such_package"),
    "a mask that removes everything": (["loss_fn.masks=[{preset:geometric,min:2.0,max:0.5}]"], "masks[0]", "swap"),
    "no such mask": (["loss_fn.masks=[{preset:geometry,min:0.5,max:2.0}]"], "masks[0]", "geometric"),
    "a veto that nothing passes": (["loss_fn.batch_veto.max=-1"], "loss_fn.batch_veto", "max"),
    "a value of the wrong type": (["loss_fn.ratio_clip_max=high"], "loss_fn.ratio_clip_max", "high"),
    "two back ends": (["policy.dtensor_cfg.enabled=true"], "policy.megatron_cfg.enabled", "both"),
    "no back end": (["policy.megatron_cfg.enabled=false"], "policy.megatron_cfg.enabled", "neither"),
    "async without its engine": (
        ["grpo.async_grpo.enabled=true", "policy.generation.colocated.enabled=false"],
        "policy.generation.vllm_cfg.async_engine",
        "set true",
    ),
    "async on the trainer's GPUs": (
        ["grpo.async_grpo.enabled=true", "policy.generation.vllm_cfg.async_engine=true"],
        "policy.generation.colocated.enabled",
        "set false",
    ),
    "async without the correction": (
        [
            "grpo.async_grpo.enabled=true",
            "policy.generation.vllm_cfg.async_engine=true",
            "policy.generation.colocated.enabled=false",
            "loss_fn.use_importance_sampling_correction=false",
            "~loss_fn.is_correction_level",
        ],
        "loss_fn.use_importance_sampling_correction",
        "stale",
    ),
    "an FP8 cache alone": (
        ["policy.generation.vllm_cfg.kv_cache_dtype=fp8"],
        "policy.generation.vllm_cfg.kv_cache_dtype",
        "auto",
    ),
    "a batch that does not divide": (["policy.train_global_batch_size=300"], "policy.train_global_batch_size", "512"),
    "on-policy ratios over several updates": (
        ["++loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=128", "~loss_fn.batch_veto"],
        "loss_fn.force_on_policy_ratio",
        "",
    ),
    "lengths that the layout can't share out": (
        ["policy.make_sequence_length_divisible_by=1"],
        "policy.make_sequence_length_divisible_by",
        "set",
    ),
    "context parallelism without packing": (
        ["policy.sequence_packing.enabled=false"],
        "policy.sequence_packing.enabled",
        "context",
    ),
    "a layout that the cluster has not": (
        ["policy.megatron_cfg.tensor_model_parallel_size=3"],
        "policy.megatron_cfg.tensor_model_parallel_size",
        "3",
    ),
    "a context too short": (["policy.generation.vllm_cfg.max_model_len=1024"], "max_model_len", "1024"),
    "a penalty without its reference": (
        ["loss_fn.reference_policy_kl_penalty=0.1"],
        "loss_fn.reference_policy_kl_penalty",
        "reference",
    ),
    "a mapping over a list": (["data.train={dataset_name:b}"], "data.train", ""),
    "router replay without Megatron": (
        ["policy.megatron_cfg.enabled=false", "policy.dtensor_cfg.enabled=true"],
        "policy.router_replay.enabled",
        "egatron",
    ),
    "Megatron's log-probs without Megatron": (
        [
            "policy.megatron_cfg.enabled=false",
            "policy.dtensor_cfg.enabled=true",
            "++loss_fn.logprob_backend=mcore",
            "policy.router_replay.enabled=false",
        ],
        "loss_fn.logprob_backend",
        "egatron",
    ),
}


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)
    monkeypatch.setattr(recipes, "nemo_rl_root", lambda: None)
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD, encoding="utf-8")

    def check(*overrides):
        status = main(["check", str(path), *overrides, "--strict", "--ignore", "GM402"])
        said = capsys.readouterr()
        return status, said.out + said.err

    return check


def test_the_recipe_is_good(checked):
    status, said = checked()
    assert status == 0, said


@pytest.mark.parametrize("name", MISTAKES)
def test_check_names_the_setting(name, checked):
    overrides, setting, word = MISTAKES[name]
    status, said = checked(*overrides)
    assert status != 0, said
    assert setting in said
    assert word in said
    assert "Traceback" not in said
