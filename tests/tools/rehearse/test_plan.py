"""What is changed in a recipe, read back by the loader that reads recipes."""

from __future__ import annotations

import importlib.util
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import yaml

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe import read_recipe
from nemo_geomask.tools.check import Layout, RecipeFacts, layout_of
from nemo_geomask.tools.rehearse.launch_environment import has_automodel
from nemo_geomask.tools.rehearse.plan import PlanOptions, plan
from nemo_geomask.tools.rehearse.refusals import errors_of
from nemo_geomask.tools.rehearse.setting_changes import Change
from tests.tools.rehearse.base_recipe import BASE

pytest.importorskip("hydra", reason="overrides are Hydra's")

MEGATRON = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"]


@pytest.fixture
def planned(tmp_path):
    """``planned(*overrides, **how)``: the plan, and the recipe that it makes."""
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE, encoding="utf-8")

    def make(*overrides, **how):
        facts = RecipeFacts.from_recipe(read_recipe(path, overrides))
        made = plan(facts, folder=tmp_path / "out", options=PlanOptions(**how))
        return made, RecipeFacts.from_recipe(read_recipe(path, [*overrides, *made.overrides]))

    return make


CASES = """
- gives: {loss_fn.ratio_clip_max: 4.0e-4, policy.optimizer.kwargs.lr: 1.0e-6, policy.precision: bfloat16, grpo.seed: 42}
# Several optimiser steps a batch stay two.
- {gives: {policy.train_global_batch_size: 8}, makes: {rollouts: 16}}
- {with: [policy.train_global_batch_size=1024], gives: {policy.train_global_batch_size: 16}, makes: {rollouts: 16}}
- {gives: {policy.draft: {enabled: false}}}  # run_grpo.py reads it
- {with: ["++policy.draft={enabled: false, other: 1}"], gives: {policy.draft.other: 1}}
- {with: [++cluster.segment_size=2], gives: {cluster.segment_size: null}, says: ["cluster.segment_size: 2, here null"]}
# What CPUs have not is left out and said, and stays on GPUs.
- {gives: {policy.sequence_packing.enabled: false}, says: ["policy.sequence_packing.enabled: "]}
- how: {ranks: 8, gpus: true}
  gives: {policy.sequence_packing.enabled: true, policy.generation.vllm_cfg.enforce_eager: false}
  never_says: kernels
- with: [++policy.generation.vllm_cfg.precision=fp8]
  gives: {policy.generation.vllm_cfg.precision: bfloat16}
  says: ["policy.generation.vllm_cfg.precision: fp8, here bfloat16"]
- with: &kernels
  - policy.optimizer.name=transformer_engine.pytorch.optimizers.fused_adam.FusedAdam
  - +policy.optimizer.kwargs.master_weights=true
  - "++policy.dtensor_cfg.automodel_kwargs.backend={attn: te, linear: te, rms_norm: torch_fp32, dispatcher: deepep}"
  - "++policy.generation.vllm_kwargs={moe_backend: triton, speculative_config: {model: x}}"
  - "++data_plane={enabled: true, backend: mooncake_cpu}"
  gives:
    policy.optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0e-6}}
    policy.dtensor_cfg.automodel_kwargs.backend: {attn: sdpa, linear: torch, rms_norm: torch_fp32, dispatcher: torch}
    policy.generation.vllm_kwargs: {moe_backend: auto, speculative_config: null}
    data_plane.backend: simple
  says: ["policy.optimizer: ", "policy.generation.vllm_kwargs.moe_backend: ", "data_plane.backend: "]
- {with: *kernels, how: {gpus: true}, gives: {policy.generation.vllm_kwargs.moe_backend: triton}}
- with: [policy.dtensor_cfg._v2=true, "++policy.dtensor_cfg.lora_cfg={enabled: true, use_triton: true}"]
  gives: {policy.dtensor_cfg.lora_cfg.use_triton: false}
  says: [policy.dtensor_cfg.lora_cfg.use_triton]
- with: [policy.dtensor_cfg._v2=true, "++policy.dtensor_cfg.lora_cfg={enabled: false, use_triton: true}"]
  gives: {policy.dtensor_cfg.lora_cfg.use_triton: true}
- {with: [policy.model_name=openai/gpt-oss-20b]}
- {with: [policy.model_name=zai-org/GLM-5.1], how: {gpus: true}}  # refused without GPUs
# Layers with a state cache no prefixes on CPUs.
- with: [policy.model_name=nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16, ++policy.dtensor_cfg._v2=true]
  gives: {policy.generation.vllm_cfg.enable_prefix_caching: false}
- with: [policy.model_name=nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16]
  how: {gpus: true}
  gives: {policy.generation.vllm_cfg.enable_prefix_caching: null}
- {with: [policy.model_name=Qwen/Qwen3-0.6B], gives: {policy.generation.vllm_cfg.enable_prefix_caching: null}}
# An fp8 cache stays where the processor has kernels for it; NeMo-RL reads its dtype with fp8 weights alone.
- with: &fp8 [++policy.generation.vllm_cfg.precision=fp8, ++policy.generation.vllm_cfg.kv_cache_dtype=fp8]
  how: {has_fp8_cache: true}
  gives:
    policy.generation.vllm_cfg.precision: fp8
    policy.generation.vllm_cfg.kv_cache_dtype: fp8
    policy.generation.vllm_cfg.quantization_ignored_layer_kws: [""]
  says: ["policy.generation.vllm_cfg.precision: fp8, here for the KV cache"]
- with: *fp8
  gives: {policy.generation.vllm_cfg.precision: bfloat16, policy.generation.vllm_cfg.kv_cache_dtype: auto}
  says: ["policy.generation.vllm_cfg.kv_cache_dtype: fp8, here auto"]
- with: [++policy.generation.vllm_cfg.precision=fp8]
  how: {has_fp8_cache: true}
  gives: {policy.generation.vllm_cfg.precision: bfloat16}
- with: [++policy.generation.vllm_cfg.kv_cache_dtype=fp8]
  how: {has_fp8_cache: true}
  gives: {policy.generation.vllm_cfg.kv_cache_dtype: auto}
# Megatron without its kernels: it trains in another precision, but samples in the recipe's, which refers to it.
- with: &megatron [policy.dtensor_cfg.enabled=false, policy.megatron_cfg.enabled=true]
  how: {ranks: 2}
  gives:
    policy.megatron_cfg.tensor_model_parallel_size: 2
    policy.megatron_cfg.transformer_impl: local
    policy.precision: float32
    policy.generation.vllm_cfg.precision: bfloat16
- {with: *megatron, how: {ranks: 2, gpus: true}, gives: {policy.megatron_cfg.transformer_impl: null}}
- with: [*megatron, ++policy.megatron_cfg.moe_token_dispatcher_type=flex, ++policy.megatron_cfg.mtp_num_layers=5]
  gives: {policy.megatron_cfg.moe_token_dispatcher_type: alltoall, policy.megatron_cfg.mtp_num_layers: 0}
- with: &flex
  - *megatron
  - ++policy.megatron_cfg.moe_token_dispatcher_type=flex
  - ++policy.megatron_cfg.moe_enable_deepep=true
  - ++policy.megatron_cfg.expert_model_parallel_size=2
  - policy.megatron_cfg.tensor_model_parallel_size=1
  how: {gpus: true}
  gives: {policy.megatron_cfg.moe_token_dispatcher_type: alltoall, policy.megatron_cfg.moe_enable_deepep: false}
- with: *flex
  how: {ranks: 2, gpus: true}
  gives: {policy.megatron_cfg.moe_token_dispatcher_type: flex, policy.megatron_cfg.moe_enable_deepep: true}
# Engines, beside the trainer or not, and in place of others.
- {with: *megatron, how: {ranks: 4, gpus: true}, gives: {policy.generation.vllm_cfg.tensor_parallel_size: 4}}
- with: [*megatron, policy.generation.colocated.enabled=false]
  how: {ranks: 4, gpus: true}
  gives: {policy.generation.vllm_cfg.tensor_parallel_size: 1}
- with: [policy.generation.colocated.enabled=false]
  how: {ranks: 2}
  gives: {cluster.gpus_per_node: 3, policy.generation.colocated.resources.gpus_per_node: 1}
  makes: {gpu_count: 3}
- with: [policy.generation.backend=trtllm]
  gives: {policy.generation.backend: vllm}
  says: ["policy.generation.backend: trtllm, here vllm"]
- with: [policy.generation.backend=megatron, ++grpo.async_grpo.enabled=true]
  gives:
    policy.generation.vllm_cfg.async_engine: true
    policy.generation.colocated.enabled: false  # beside the trainer, vLLM can't sample asynchronously
    policy.generation.colocated.resources.gpus_per_node: 1
    cluster.gpus_per_node: 2
  makes: {gpu_count: 2}
  says: ["policy.generation.colocated.enabled: true, here false"]
# DTensor v2 where its workers have Automodel.
- {with: [policy.dtensor_cfg._v2=true], makes: {uses_automodel: true}}
- with: [policy.dtensor_cfg._v2=true]
  how: {has_automodel: false}
  gives: {policy.dtensor_cfg._v2: false}
  makes: {uses_automodel: false}
  says: ["policy.dtensor_cfg._v2: true, here false (nemo_automodel can be imported neither here nor from"]
- {makes: {uses_automodel: false}}
- {with: [*megatron, policy.dtensor_cfg._v2=true], makes: {uses_automodel: false}}
# The built-in prompts: nothing of the recipe's own data is merged into them.
- gives: {data.train.dataset_name: ResponseDataset, data.train.output_key: output, env: {nemo_geomask_rehearsal: {}}}
- {how: {own_environment: true}, gives: {data.train.dataset_name: OpenMathInstruct-2}}
- with: &penalties [++grpo.invalid_tool_call_advantage=-5.0, "++reward_penalties={invalid_tool_call: true}"]
  gives: {grpo.invalid_tool_call_advantage: -5.0}
- with: [++env.should_use_nemo_gym=true, *penalties]
  gives: {grpo.invalid_tool_call_advantage: null, reward_penalties.invalid_tool_call: false}
  says: ["grpo.invalid_tool_call_advantage: -5.0, here null"]
# The checkpoint that is resumed from is kept.
- with: &keep [++checkpointing.keep_top_k=1, ++checkpointing.ft_keep_latest_k=1]
  how: {steps: 3, resume: true}
  gives: {checkpointing.save_period: 2, checkpointing.keep_top_k: 3, checkpointing.ft_keep_latest_k: 3}
  says: ["checkpointing.keep_top_k: 1, here 3", "checkpointing.ft_keep_latest_k: 1, here 3"]
- {with: *keep, gives: {checkpointing.keep_top_k: 1}}
- {how: {resume: true}, gives: {checkpointing.keep_top_k: null}}
# What a rehearsal would not show, or DTensor v1 can't send.
- {with: [policy.generation.backend=sglang], how: {gpus: true}, refused: "backend: sglang samples .*backend=vllm"}
- {with: [policy.model_name=Qwen/Qwen2.5-VL-3B-Instruct], how: {gpus: true}, refused: is a model of images}
- with: [+data.default.processor=vlm_hf_data_processor]
  how: {gpus: true}
  refused: "data.default.processor: .* reads images"
- with: ["+on_policy_distillation={enabled: true}"]
  how: {gpus: true}
  refused: "non_colocated_teachers.enabled: not true"
- {with: [policy.model_name=zai-org/GLM-5.1], refused: "GLM-5.1 .glm_moe_dsa. has sparse attention"}
- {with: &nano [policy.model_name=nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, ++policy.dtensor_cfg._v2=true]}
- {with: *nano, how: {has_automodel: false}, refused: Automodel on PYTHONPATH}
- {with: &flash [policy.model_name=zai-org/GLM-4.7-Flash, ++policy.dtensor_cfg._v2=true]}
- {with: *flash, how: {has_automodel: false}, refused: Automodel on PYTHONPATH}
- {with: [policy.model_name=nvidia/NVIDIA-Nemotron-Nano-12B-v2], how: {has_automodel: false}}
"""
"""Overrides and options, and what they lead to: settings, parts of the plan, what is not rehearsed, or a refusal."""


def flat(words):
    return [part for word in words for part in (word if isinstance(word, list) else [word])]


@pytest.mark.parametrize("case", yaml.safe_load(CASES))
def test_what_becomes_of_a_recipe(planned, case):
    with pytest.raises(ConfigError, match=case["refused"]) if "refused" in case else nullcontext():
        made, shrunk = planned(*flat(case.get("with", [])), **case.get("how", {}))
    if "refused" in case:
        return
    gives, makes = case.get("gives", {}), case.get("makes", {})
    assert {key: shrunk.get(key) for key in gives} == gives
    assert {name: getattr(made, name) for name in makes} == makes
    for start in case.get("says", []):
        assert any(line.startswith(start) for line in made.unrehearsed), made.unrehearsed
    assert "never_says" not in case or not any(case["never_says"] in line for line in made.unrehearsed)


def test_batches_and_lengths_are_small_and_divide(planned):
    for ranks in (1, 2, 3, 4, 8):
        made, shrunk = planned(ranks=ranks, gpus=True)
        batch, micro = shrunk.get("policy.train_global_batch_size"), shrunk.get("policy.train_micro_batch_size")
        assert shrunk.rollout_size <= 64
        assert shrunk.rollout_size % batch == 0
        assert batch % (micro * made.layout.dp) == 0
        assert shrunk.get("policy.max_total_sequence_length") % (2 * made.layout.cp * made.layout.tp) == 0
        assert shrunk.get("policy.max_total_sequence_length") <= 64
        assert shrunk.get("policy.generation.max_new_tokens") < shrunk.get("policy.max_total_sequence_length")
        # Literal in this recipe, so that no reference follows the length.
        assert shrunk.get("policy.sequence_packing.train_mb_tokens") <= 64 * max(micro, 3)
        assert shrunk.get("data.max_input_seq_length") <= 64


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("override", ["policy.train_micro_batch_size=1", "policy.train_global_batch_size=1024"])
def test_a_packed_row_holds_three_sequences(planned, ranks, override):
    layout = ["++policy.megatron_cfg.tensor_model_parallel_size=1", "cluster.num_nodes=1"]
    made, shrunk = planned(*MEGATRON, *layout, override, ranks=ranks)
    longest, tokens = (
        shrunk.get(f"policy.{key}") for key in ("max_total_sequence_length", "sequence_packing.train_mb_tokens")
    )
    assert shrunk.get("policy.sequence_packing.logprob_mb_tokens") == tokens >= 3 * longest
    assert shrunk.get("policy.train_global_batch_size") >= 3 * made.layout.dp
    assert shrunk.rollout_size == made.rollouts


def test_a_control_moves_the_policy_before_its_second_update(planned):
    for overrides, key in (
        ([], "policy.optimizer.kwargs.lr"),
        ([*MEGATRON, "++policy.megatron_cfg.optimizer.lr=1e-6"], "policy.megatron_cfg.optimizer.lr"),
    ):
        _, shrunk = planned(*overrides, "policy.train_global_batch_size=1024", control=True)
        assert (shrunk.get(key), shrunk.steps_per_rollout) == (3e-3, 2)
        assert planned(*overrides)[1].get(key) == 1e-6
    warmup = "++policy.scheduler=[{name:torch.optim.lr_scheduler.LinearLR,kwargs:{total_iters:50}},{milestones:[]}]"
    schedulers, milestones = planned(warmup, control=True)[1].get("policy.scheduler")  # the form that NeMo-RL accepts
    assert schedulers["name"].endswith(".ConstantLR")
    assert milestones == {"milestones": []}


def test_the_layout_goes_with_the_ranks(planned):
    made, shrunk = planned(ranks=2, gpus=True)
    assert made.full_layout == Layout(tp=2, cp=2, dp=8)
    assert made.layout == layout_of(shrunk) == Layout(tp=2)
    assert shrunk.get("policy.generation.vllm_cfg.tensor_parallel_size") == 1
    assert any("TP 2, CP 1, EP 1, PP 1, DP 1 in place of TP 2, CP 2" in line for line in made.unrehearsed)


def test_only_the_built_in_environment_is_left(planned):
    gym = ("++env.should_use_nemo_gym=true", "++env.nemo_gym={uv_venv_dir: '${oc.env:NO_SUCH_VARIABLE,x}'}")
    made, shrunk = planned(*gym, "++policy.generation.vllm_cfg.expose_http_server=true")
    assert list(shrunk.get("env")) == [shrunk.get("data.default.env_name")] == [shrunk.get("data.train.env_name")]
    assert shrunk.get("policy.generation.vllm_cfg.expose_http_server") is False
    assert any(line.startswith("env: ") and "NeMo-Gym" in line for line in made.unrehearsed)
    assert list(planned(*gym, own_environment=True)[1].get("env")) == ["math", "should_use_nemo_gym", "nemo_gym"]


def test_errors_about_replaced_settings_do_not_count():
    rule = SimpleNamespace(severity="error", id="GM008")
    keys = ["data.train.data_path", "data.training", "env", "policy.model_name", "grpo.seed"]
    report = SimpleNamespace(findings=[SimpleNamespace(rule=rule, key=key) for key in keys])
    assert [error.key for error in errors_of(report, {})] == ["data.training", "grpo.seed"]
    own = [error.key for error in errors_of(report, {}, own_environment=True)]
    assert own == ["data.train.data_path", "data.training", "env", "grpo.seed"]


def test_one_tiny_teacher_takes_the_place_of_all(planned, tmp_path):
    teachers = "{enabled: true, teacher_model_by_agent_name: {math: Qwen/A, code: Qwen/B}, non_colocated_teachers: "
    sizes = "{tensor_model_parallel_size: 8, num_nodes: 4, gpus_per_node: 8, precision: bf16}"
    made, shrunk = planned(
        *MEGATRON,
        f"+on_policy_distillation={teachers}{{enabled: true, default_teacher_cfg: {sizes}, "
        "teacher_overrides: {code: {num_nodes: 2}}}}",
        "policy.generation.colocated.enabled=false",
    )
    section = "on_policy_distillation"
    name = shrunk.get(f"{section}.default_teacher_alias")
    models = {name: str(tmp_path / "out" / "teacher" / "model")}
    assert shrunk.get(f"{section}.teacher_model_by_agent_name") == models
    workers = f"{section}.non_colocated_teachers"
    assert set(shrunk.get(f"{workers}.default_teacher_cfg").values()) == {1}
    assert shrunk.get(f"{workers}.teacher_overrides") == {}
    # One GPU for each of trainer, sampler and teacher; the teacher's is on a node of its own.
    assert (shrunk.get("cluster.num_nodes"), shrunk.get("cluster.gpus_per_node"), made.gpu_count) == (2, 2, 3)
    assert made.has_teacher
    assert any("one tiny teacher" in line for line in made.unrehearsed)
    assert not planned()[0].has_teacher


def test_another_algorithm_has_nothing_to_rehearse(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(BASE.replace("grpo:", "sft:").replace("loss_fn:", "other:"), encoding="utf-8")
    with pytest.raises(ConfigError, match="supervised fine-tuning, which has no policy loss"):
        plan(RecipeFacts.from_recipe(read_recipe(path)), folder=tmp_path)


def test_nothing_leaves_the_folder(planned, tmp_path):
    _, shrunk = planned(steps=2)
    assert shrunk.get("logger.log_dir").startswith(str(tmp_path))
    assert shrunk.get("checkpointing.checkpoint_dir").startswith(str(tmp_path))
    assert shrunk.get("logger.wandb_enabled") is False
    assert shrunk.get("checkpointing.save_period") == shrunk.get("grpo.max_num_steps") == 2


def test_a_folder_with_a_quote_in_its_name(tmp_path):
    change = Change("logger.log_dir", str(tmp_path / "it's {new}, a=b"))
    path = tmp_path / "recipe.yaml"
    path.write_text("logger: {log_dir: x}", encoding="utf-8")
    assert read_recipe(path, change.overrides).data["logger"]["log_dir"] == change.value


@pytest.mark.parametrize(
    ("config", "caching"),
    [
        ({"model_type": "falcon_h1", "mamba_d_state": 16}, False),
        ({"model_type": "qwen3_5", "text_config": {"linear_num_value_heads": 32}}, False),
        ({"model_type": "qwen3"}, None),
    ],
)
def test_a_config_json_says_whether_layers_are_recurrent(planned, tmp_path, config, caching):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _, shrunk = planned(f"policy.model_name={tmp_path / 'model'}")
    assert shrunk.get("policy.generation.vllm_cfg.enable_prefix_caching") is caching


def test_automodel_is_there_if_it_is_installed_or_fetched_into_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "nemo_automodel" else None)
    assert has_automodel(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not has_automodel(tmp_path)
    place = tmp_path / "3rdparty" / "Automodel-workspace" / "Automodel"
    place.mkdir(parents=True)
    assert not has_automodel(tmp_path)  # a submodule that was not fetched
    (place / "nemo_automodel").mkdir()
    assert has_automodel(tmp_path)
