"""What is changed in a recipe, read back by the loader that reads recipes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe import read_recipe
from nemo_geomask.tools.check import Layout, RecipeFacts, layout_of
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


def test_the_recipes_loss_and_optimiser_stay(planned):
    _, shrunk = planned()
    assert shrunk.get("loss_fn.ratio_clip_max") == 4e-4
    assert shrunk.get("policy.optimizer.kwargs.lr") == 1e-6
    assert shrunk.get("policy.precision") == "bfloat16"
    assert shrunk.get("grpo.seed") == 42


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


def test_experts_that_v1_cannot_send_need_automodel(planned):
    for name in ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "zai-org/GLM-4.7-Flash"):
        mixture = f"policy.model_name={name}", "++policy.dtensor_cfg._v2=true"
        assert planned(*mixture, has_automodel=True)[0].uses_automodel
        with pytest.raises(ConfigError, match="Automodel on PYTHONPATH"):
            planned(*mixture, has_automodel=False)
    assert planned("policy.model_name=nvidia/NVIDIA-Nemotron-Nano-12B-v2", has_automodel=False)[0].model.settings


def test_several_optimiser_steps_stay_several(planned):
    assert planned()[1].steps_per_rollout == 2
    assert planned("policy.train_global_batch_size=1024")[1].steps_per_rollout == 1


def test_the_layout_goes_with_the_ranks(planned):
    made, shrunk = planned(ranks=2, gpus=True)
    assert made.full_layout == Layout(tp=2, cp=2, dp=8)
    assert made.layout == layout_of(shrunk) == Layout(tp=2)
    assert shrunk.get("policy.generation.vllm_cfg.tensor_parallel_size") == 1
    assert any("TP 2, CP 1, EP 1, PP 1, DP 1 in place of TP 2, CP 2" in line for line in made.unrehearsed)


def test_samplers_on_cards_of_their_own_get_one(planned):
    made, shrunk = planned("policy.generation.colocated.enabled=false", ranks=2)
    assert made.gpu_count == shrunk.get("cluster.gpus_per_node") == 3
    assert shrunk.get("policy.generation.colocated.resources.gpus_per_node") == 1


def test_one_node_has_no_segments(planned):
    made, shrunk = planned("++cluster.segment_size=2")
    assert shrunk.get("cluster.segment_size") is None
    assert any(change.key == "cluster.segment_size" and change.was == 2 for change in made.changes)


def test_on_cpus_what_they_have_not_is_left_out_and_said(planned):
    made, shrunk = planned("++policy.generation.vllm_cfg.precision=fp8")
    assert shrunk.get("policy.sequence_packing.enabled") is False
    assert shrunk.get("policy.generation.vllm_cfg.precision") == "bfloat16"
    for key in ("policy.sequence_packing.enabled", "policy.generation.vllm_cfg.precision"):
        assert any(line.startswith(f"{key}: ") for line in made.unrehearsed)


def test_an_fp8_cache_stays_where_the_processor_has_kernels_for_it(planned):
    section = "policy.generation.vllm_cfg"
    overrides = (f"++{section}.precision=fp8", f"++{section}.kv_cache_dtype=fp8")
    made, shrunk = planned(*overrides, has_fp8_cache=True)
    assert (shrunk.get(f"{section}.precision"), shrunk.get(f"{section}.kv_cache_dtype")) == ("fp8", "fp8")
    assert shrunk.get(f"{section}.quantization_ignored_layer_kws") == [""]
    assert any(line.startswith(f"{section}.precision: fp8, here for the KV cache") for line in made.unrehearsed)
    made, shrunk = planned(*overrides)
    assert (shrunk.get(f"{section}.precision"), shrunk.get(f"{section}.kv_cache_dtype")) == ("bfloat16", "auto")
    assert any(line.startswith(f"{section}.kv_cache_dtype: fp8, here auto") for line in made.unrehearsed)
    # Without a cache of fp8, there is nothing to keep.
    _, shrunk = planned(overrides[0], has_fp8_cache=True)
    assert shrunk.get(f"{section}.precision") == "bfloat16"
    # NeMo-RL reads the dtype of the cache with fp8 weights alone.
    _, shrunk = planned(overrides[1], has_fp8_cache=True)
    assert shrunk.get(f"{section}.kv_cache_dtype") == "auto"


def test_on_gpus_nothing_is_left_out(planned):
    made, shrunk = planned(ranks=8, gpus=True)
    assert shrunk.get("policy.sequence_packing.enabled") is True
    assert shrunk.get("policy.generation.vllm_cfg.enforce_eager") is False
    assert not any("kernels" in line for line in made.unrehearsed)


def test_megatron_without_its_kernels(planned):
    own = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
    made, shrunk = planned(*own, ranks=2)
    assert made.layout.tp == shrunk.get("policy.megatron_cfg.tensor_model_parallel_size") == 2
    assert shrunk.get("policy.megatron_cfg.transformer_impl") == "local"
    # Trained in another precision, but sampled in the recipe's, which refers to the trainer's.
    assert shrunk.get("policy.precision") == "float32"
    assert shrunk.get("policy.generation.vllm_cfg.precision") == "bfloat16"
    assert planned(*own, ranks=2, gpus=True)[1].get("policy.megatron_cfg.transformer_impl") is None


def test_prompts_and_reward_are_built_in_unless_asked(planned):
    _, shrunk = planned()
    assert shrunk.get("data.train.dataset_name") == "ResponseDataset"
    assert shrunk.get("data.train.env_name") in shrunk.get("env")
    # Of the recipe's own data, nothing is merged into it.
    assert shrunk.get("data.train.output_key") == "output"
    _, own = planned(own_environment=True)
    assert own.get("data.train.dataset_name") == "OpenMathInstruct-2"


def test_only_the_built_in_environment_is_left(planned):
    gym = ("++env.should_use_nemo_gym=true", "++env.nemo_gym={uv_venv_dir: '${oc.env:NO_SUCH_VARIABLE,x}'}")
    made, shrunk = planned(*gym, "++policy.generation.vllm_cfg.expose_http_server=true")
    assert list(shrunk.get("env")) == [shrunk.get("data.default.env_name")] == [shrunk.get("data.train.env_name")]
    assert shrunk.get("policy.generation.vllm_cfg.expose_http_server") is False
    assert any(line.startswith("env: ") and "NeMo-Gym" in line for line in made.unrehearsed)
    assert list(planned(*gym, own_environment=True)[1].get("env")) == ["math", "should_use_nemo_gym", "nemo_gym"]


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        (["policy.generation.backend=sglang"], True, "policy.generation.backend: sglang samples .*backend=vllm"),
        (["policy.model_name=Qwen/Qwen2.5-VL-3B-Instruct"], True, "is a model of images"),
        (["+data.default.processor=vlm_hf_data_processor"], True, "data.default.processor: .* reads images"),
        (["+on_policy_distillation={enabled: true}"], True, "non_colocated_teachers.enabled: not true"),
        (["policy.model_name=zai-org/GLM-5.1"], False, "GLM-5.1 .glm_moe_dsa. has sparse attention"),
    ],
)
def test_what_a_rehearsal_would_not_show_is_refused(planned, overrides, gpus, message):
    with pytest.raises(ConfigError, match=message):
        planned(*overrides, gpus=gpus)


def test_errors_about_replaced_settings_do_not_count():
    rule = SimpleNamespace(severity="error", id="GM008")
    keys = ["data.train.data_path", "data.training", "env", "policy.model_name", "grpo.seed"]
    report = SimpleNamespace(findings=[SimpleNamespace(rule=rule, key=key) for key in keys])
    assert [error.key for error in errors_of(report, {})] == ["data.training", "grpo.seed"]
    own = [error.key for error in errors_of(report, {}, own_environment=True)]
    assert own == ["data.train.data_path", "data.training", "env", "grpo.seed"]


def test_gpus_run_what_cpus_can_not(planned):
    assert planned("policy.model_name=zai-org/GLM-5.1", gpus=True)[0].model.model_type == "glm_moe_dsa"
    assert planned("policy.model_name=openai/gpt-oss-20b")[0].model.model_type == "gpt_oss"


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


def test_kernels_of_cudas_are_replaced_and_said(planned):
    automodel = "policy.dtensor_cfg.automodel_kwargs.backend"
    overrides = [
        "policy.optimizer.name=transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
        "+policy.optimizer.kwargs.master_weights=true",
        f"++{automodel}={{attn: te, linear: te, rms_norm: torch_fp32, dispatcher: deepep}}",
        "++policy.generation.vllm_kwargs={moe_backend: triton, speculative_config: {model: x}}",
        "++data_plane={enabled: true, backend: mooncake_cpu}",
    ]
    made, shrunk = planned(*overrides)
    assert shrunk.get("policy.optimizer") == {"name": "torch.optim.AdamW", "kwargs": {"lr": 1.0e-6}}
    backend = {"attn": "sdpa", "linear": "torch", "rms_norm": "torch_fp32", "dispatcher": "torch"}
    assert shrunk.get(automodel) == backend
    assert shrunk.get("policy.generation.vllm_kwargs") == {"moe_backend": "auto", "speculative_config": None}
    assert shrunk.get("data_plane.backend") == "simple"
    for key in ("policy.optimizer", "policy.generation.vllm_kwargs.moe_backend", "data_plane.backend"):
        assert any(line.startswith(f"{key}: ") for line in made.unrehearsed)
    assert planned(*overrides, gpus=True)[1].get("policy.generation.vllm_kwargs.moe_backend") == "triton"


def test_flex_dispatch_on_gpus_needs_several_ranks_for_experts(planned):
    flex = ("++policy.megatron_cfg.moe_token_dispatcher_type=flex", "++policy.megatron_cfg.moe_enable_deepep=true")
    experts = "++policy.megatron_cfg.expert_model_parallel_size=2"
    sizes = "policy.megatron_cfg.tensor_model_parallel_size=1"
    for ranks, dispatcher, deepep in ((1, "alltoall", False), (2, "flex", True)):
        _, shrunk = planned(*MEGATRON, *flex, experts, sizes, ranks=ranks, gpus=True)
        assert shrunk.get("policy.megatron_cfg.moe_token_dispatcher_type") == dispatcher
        assert shrunk.get("policy.megatron_cfg.moe_enable_deepep") == deepep


def test_an_engine_beside_the_trainer_has_one_gpu(planned):
    beside = "policy.generation.colocated.enabled=false"
    for overrides, size in (((), 4), ((beside,), 1)):
        _, shrunk = planned(*MEGATRON, *overrides, ranks=4, gpus=True)
        assert shrunk.get("policy.generation.vllm_cfg.tensor_parallel_size") == size


def test_megatron_without_flex_dispatch_and_further_tokens(planned):
    flex = "++policy.megatron_cfg.moe_token_dispatcher_type=flex"
    _, shrunk = planned(*MEGATRON, flex, "++policy.megatron_cfg.mtp_num_layers=5")
    assert shrunk.get("policy.megatron_cfg.moe_token_dispatcher_type") == "alltoall"
    assert shrunk.get("policy.megatron_cfg.mtp_num_layers") == 0


def test_nothing_leaves_the_folder(planned, tmp_path):
    _, shrunk = planned(steps=2)
    assert shrunk.get("logger.log_dir").startswith(str(tmp_path))
    assert shrunk.get("checkpointing.checkpoint_dir").startswith(str(tmp_path))
    assert shrunk.get("logger.wandb_enabled") is False
    assert shrunk.get("checkpointing.save_period") == shrunk.get("grpo.max_num_steps") == 2


def test_what_is_resumed_from_is_kept(planned):
    one = ("++checkpointing.keep_top_k=1", "++checkpointing.ft_keep_latest_k=1")
    made, shrunk = planned(*one, steps=3, resume=True)
    assert shrunk.get("checkpointing.save_period") == 2
    for key in ("checkpointing.keep_top_k", "checkpointing.ft_keep_latest_k"):
        assert shrunk.get(key) == 3
        assert any(line.startswith(f"{key}: 1, here 3") for line in made.unrehearsed)
    assert planned(*one)[1].get("checkpointing.keep_top_k") == 1
    assert all("keep" not in change.key for change in planned(resume=True)[0].changes)


def test_a_folder_with_a_quote_in_its_name(tmp_path):
    change = Change("logger.log_dir", str(tmp_path / "it's {new}, a=b"))
    path = tmp_path / "recipe.yaml"
    path.write_text("logger: {log_dir: x}", encoding="utf-8")
    assert read_recipe(path, change.overrides).data["logger"]["log_dir"] == change.value


def test_adapters_of_triton_kernels_run_in_torch(planned):
    lora = "policy.dtensor_cfg.lora_cfg"
    v2 = "policy.dtensor_cfg._v2=true"
    made, shrunk = planned(v2, f"++{lora}={{enabled: true, use_triton: true}}")
    assert shrunk.get(f"{lora}.use_triton") is False
    assert any(f"{lora}.use_triton" in line for line in made.unrehearsed)
    _, off = planned(v2, f"++{lora}={{enabled: false, use_triton: true}}")
    assert off.get(f"{lora}.use_triton") is True


@pytest.mark.parametrize(
    ("overrides", "automodel", "takes"),
    [
        (["policy.dtensor_cfg._v2=true"], True, True),
        (["policy.dtensor_cfg._v2=true"], False, False),
        ([], True, False),
        (
            ["policy.dtensor_cfg._v2=true", "policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"],
            True,
            False,
        ),
    ],
)
def test_dtensor_v2_where_its_workers_have_automodel(planned, overrides, automodel, takes):
    made, shrunk = planned(*overrides, has_automodel=automodel)
    assert made.uses_automodel == takes
    if overrides and not automodel:
        assert not shrunk.is_true("policy.dtensor_cfg._v2")
        assert any("3rdparty" in words for words in made.unrehearsed)


def test_vllm_takes_the_place_of_a_sampler_for_gpus_and_the_report_says_so(planned):
    made, shrunk = planned("policy.generation.backend=trtllm")
    assert shrunk.get("policy.generation.backend") == "vllm"
    assert any("policy.generation.backend: trtllm, here vllm" in line for line in made.unrehearsed)
    made, shrunk = planned("policy.generation.backend=megatron", "++grpo.async_grpo.enabled=true")
    # Megatron samples asynchronously beside the trainer; vLLM needs a GPU of its own.
    assert shrunk.get("policy.generation.vllm_cfg.async_engine") is True
    assert shrunk.get("policy.generation.colocated.enabled") is False
    assert shrunk.get("policy.generation.colocated.resources.gpus_per_node") == 1
    assert made.gpu_count == made.layout.ranks + 1 == shrunk.get("cluster.gpus_per_node")
    assert any(line.startswith("policy.generation.colocated.enabled: true, here false") for line in made.unrehearsed)


def test_a_draft_that_only_the_script_for_nemo_gym_does_without(planned):
    assert planned()[1].get("policy.draft") == {"enabled": False}
    assert planned("++policy.draft={enabled: false, other: 1}")[1].get("policy.draft.other") == 1


def test_penalties_that_nemo_rl_refuses_without_nemo_gym_are_left_out(planned):
    penalties = ["++grpo.invalid_tool_call_advantage=-5.0", "++reward_penalties={invalid_tool_call: true}"]
    made, shrunk = planned("++env.should_use_nemo_gym=true", *penalties)
    assert shrunk.get("grpo.invalid_tool_call_advantage") is None
    assert shrunk.get("reward_penalties.invalid_tool_call") is False
    assert any(line.startswith("grpo.invalid_tool_call_advantage: -5.0, here null") for line in made.unrehearsed)
    assert planned(*penalties)[1].get("grpo.invalid_tool_call_advantage") == -5.0


@pytest.mark.parametrize(
    ("model", "caching"), [("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", False), ("Qwen/Qwen3-0.6B", None)]
)
def test_recurrent_layers_cache_no_prefixes_on_cpus(planned, model, caching):
    _, shrunk = planned(f"policy.model_name={model}", "++policy.dtensor_cfg._v2=true")
    assert shrunk.get("policy.generation.vllm_cfg.enable_prefix_caching") is caching
    _, shrunk = planned(f"policy.model_name={model}", gpus=True)
    assert shrunk.get("policy.generation.vllm_cfg.enable_prefix_caching") is None


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
