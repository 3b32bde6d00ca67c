"""Plan of a rehearsal: the recipe's settings that it changes, each with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.tools.check import Layout, RecipeFacts, layout_keys, layout_of, trained_sections
from nemo_geomask.tools.rehearse.batch_sizes import batch_sizes, learning_rate, rollouts_of, sequence_length
from nemo_geomask.tools.rehearse.refusals import model_refusals, recipe_refusals
from nemo_geomask.tools.rehearse.setting_changes import (
    Change,
    as_override,
    cpu_changes,
    is_colocated,
    wants_fp8_cache,
)
from nemo_geomask.tools.rehearse.tiny_models import TinyModel, tiny_model

TEACHER = Path("teacher", "model")
"""Folder of the teacher's weights in a rehearsal of on-policy distillation, in the rehearsal's folder."""
RECORDS = "records"
"""Name of the folder of records, in a rehearsal's folder."""

_ENVIRONMENT = "nemo_geomask_rehearsal"


@dataclass(frozen=True)
class Plan:
    """A rehearsal of one recipe."""

    changes: tuple[Change, ...]  # changes to the recipe
    layout: Layout  # parallel layout of the rehearsal
    full_layout: Layout  # parallel layout of the recipe
    model: TinyModel  # the tiny model
    steps: int  # rollout batches to train on
    rollouts: int  # sequences of a rollout batch
    script: str  # NeMo-RL's script, relative to its checkout
    gpu_count: int  # number of GPUs that Ray has, or claims to have
    uses_automodel: bool  # True if DTensor v2's workers train, which are Automodel's
    has_teacher: bool  # True for on-policy distillation, which needs a second tiny model
    unrehearsed: tuple[str, ...]  # parts of the recipe that the rehearsal says nothing about
    keeps_fp8_cache: bool  # True if a CPU's engine has the recipe's fp8 KV cache, beside weights that are not quantised

    @property
    def overrides(self) -> tuple[str, ...]:
        """All changes as overrides, in order."""
        return tuple(override for change in self.changes for override in change.overrides)


def plan(
    facts: RecipeFacts,
    *,
    folder: Path,
    steps: int = 3,
    ranks: int = 1,
    own_environment: bool = False,
    gpus: bool = False,
    has_automodel: bool = True,
    has_fp8_cache: bool = False,
    resume: bool = False,
    validate: bool = False,
    record: bool = False,
    control: bool = False,
) -> Plan:
    """Plan the rehearsal of a recipe.

    Args:
        ranks: largest number of processes that train.
        own_environment: use the recipe's own data and environment.
        gpus: this machine has GPUs; without them, settings that a CPU does not support are changed and reported.
        has_automodel: Automodel can be imported for DTensor v2's workers; without it, DTensor v1's train.
        has_fp8_cache: vLLM has kernels for an fp8 KV cache on this machine's processor.
        resume: save and keep a checkpoint of the step before the last.
        record: record every step, so that the run can be diagnosed.
        control: the run is compared with NeMo-RL's own loss: weights move enough for clip and KL to act.

    Raises:
        ConfigError: the recipe can't be rehearsed, or its model's architecture is not known.
    """
    if problems := tuple(recipe_refusals(facts, has_gpus=gpus)):
        raise ConfigError(*problems)
    full = layout_of(facts)
    # Without GPUs, only Megatron has a shim for context-parallel attention.
    layout = full.fit_to(ranks, cp=gpus or facts.uses_megatron)
    model = tiny_model(str(facts.get("policy.model_name", "")), layout, recipe=facts.recipe.path)
    if not gpus and (problems := tuple(model_refusals(facts, model.model_type))):
        raise ConfigError(*problems)
    length = sequence_length(facts, layout, own_environment)
    changes = [
        *_model_and_data(facts, folder, own_environment, validate),
        *_shorten_training(facts, steps, resume, validate),
        *batch_sizes(facts, layout, length, is_control=control),
        *(learning_rate(facts) if control else ()),
        *_parallel_sizes(facts, layout, full, gpus),
        *_teacher(facts, folder),
        *_redirect_output(facts, folder),
        *_record(facts, folder, record),
    ]
    keeps_fp8_cache = not gpus and has_fp8_cache and wants_fp8_cache(facts)
    if not gpus:
        changes += cpu_changes(
            facts, has_automodel=has_automodel, is_recurrent=model.is_recurrent, keeps_fp8_cache=keeps_fp8_cache
        )
    algorithm = "grpo_single_controller" if facts.uses_single_controller else facts.algorithm
    has_teacher = _has_teacher(facts)
    gpu_count = layout.ranks + (not is_colocated(facts)) + has_teacher
    effective = [change for change in changes if change.was != change.value or change.delete or change.pinned]
    unrehearsed = tuple(_unrehearsed(facts, layout, full, effective, gpus, validate))
    if keeps_fp8_cache:
        only_cache = "fp8, here for the KV cache alone (vLLM's CPU kernels have no fp8 weights)"
        unrehearsed += (f"policy.generation.vllm_cfg.precision: {only_cache}",)
    v2 = "policy.dtensor_cfg._v2"
    uses_automodel = not facts.uses_megatron and facts.is_true(v2) and all(change.key != v2 for change in effective)
    if not (gpus or facts.uses_megatron or uses_automodel) and model.stacks_experts:
        message = (
            f"DTensor v1's workers send the experts of a tiny {model.model_type} under names that vLLM does not load; "
            f"put Automodel on PYTHONPATH (or fetch NeMo-RL's submodules), and set {v2}: true"
        )
        raise ConfigError(Problem(("policy.model_name",), message))
    script = f"examples/run_{algorithm}.py"
    return Plan(
        tuple(effective),
        layout,
        full,
        model,
        steps,
        rollouts_of(facts, layout, is_control=control),
        script,
        gpu_count,
        uses_automodel,
        has_teacher,
        unrehearsed,
        keeps_fp8_cache,
    )


def _has_teacher(facts: RecipeFacts) -> bool:
    """Return True for on-policy distillation, whose advantages are a teacher's log-probs minus the policy's."""
    return facts.is_true("on_policy_distillation.enabled")


def _teacher(facts: RecipeFacts, folder: Path) -> Iterator[Change]:
    """Yield changes by which one tiny model on a virtual node teaches all prompts; none if there is no teacher."""
    if not _has_teacher(facts):
        return
    section = "on_policy_distillation"
    workers = f"{section}.non_colocated_teachers"
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    one_process = dict.fromkeys((*sizes, "expert_model_parallel_size", "num_nodes", "gpus_per_node"), 1)
    values: dict[str, tuple[Any, str]] = {
        f"{section}.teacher_model_by_agent_name": (
            {_ENVIRONMENT: str(folder / TEACHER)},
            "one tiny teacher for all prompts",
        ),
        f"{section}.default_teacher_alias": (_ENVIRONMENT, ""),
        f"{section}.strict_agent_name_match": (False, ""),
        f"{workers}.default_teacher_cfg": (one_process, "ranks"),
        f"{workers}.teacher_overrides": ({}, "ranks"),
    }
    for key, (value, why) in values.items():
        was = facts.get(key)
        if was is not None or value:
            yield Change(key, value, was, why, delete=isinstance(value, dict) and was is not None)


def _model_and_data(facts: RecipeFacts, folder: Path, own_environment: bool, validate: bool) -> Iterator[Change]:
    for section in trained_sections(facts):
        for key, value in (
            ("model_name", str(folder / "model")),
            ("tokenizer.name", str(folder / "tokenizer")),
            ("tokenizer.chat_template", "default"),
        ):
            yield Change(f"{section}.{key}", value, facts.get(f"{section}.{key}"))
        if overrides := facts.get(f"{section}.hf_config_overrides"):
            yield Change(f"{section}.hf_config_overrides", {}, overrides, delete=True)
    if own_environment:
        return
    train = {
        "dataset_name": "ResponseDataset",
        "data_path": str(folder / "prompts.jsonl"),
        "input_key": "input",
        "output_key": "output",
        "prompt_file": None,
        "system_prompt_file": None,
        "processor": "math_hf_data_processor",
        "env_name": _ENVIRONMENT,
        "split_validation_size": 0,
        "seed": 42,
    }
    yield Change("data.train", train, facts.get("data.train"), delete=facts.get("data.train") is not None)
    validation = {key: value for key, value in train.items() if key != "split_validation_size"} if validate else None
    was = facts.get("data.validation")
    yield Change("data.validation", validation, was, delete=validate and was is not None)
    # NeMo-RL starts every environment that is named anywhere in `data`.
    if facts.get("data.default.env_name") is not None:
        yield Change("data.default.env_name", _ENVIRONMENT, facts.get("data.default.env_name"))
    if facts.is_true("data.use_multiple_dataloader"):
        yield Change("data.use_multiple_dataloader", False, True, "the built-in prompts are one set")
    yield Change("data.num_workers", 0, facts.get("data.num_workers"))
    # All of the recipe's environments are replaced. They may refer to variables that are not set on this machine, and
    # under NeMo-Gym the agents would call the sampler in place of NeMo-RL's rollout.
    why = "NeMo-Gym's agents and their rewards" if facts.is_true("env.should_use_nemo_gym") else ""
    yield Change("env", {_ENVIRONMENT: {}}, facts.get("env"), why, delete=facts.get("env") is not None)
    if why:
        # NeMo-RL refuses these without NeMo-Gym.
        for key in ("grpo.invalid_tool_call_advantage", "grpo.malformed_thinking_advantage"):
            if (was := facts.get(key)) is not None:
                yield Change(key, None, was, "only NeMo-Gym reports such responses")
        for name, is_on in (facts.get("reward_penalties") or {}).items():
            if is_on is True:
                yield Change(f"reward_penalties.{name}", False, True, "only NeMo-Gym reports such responses")
    if facts.algorithm == "grpo" and facts.get("policy.draft") is None:
        why = "run_grpo.py reads it, unlike run_grpo_nemo_gym.py, for which the recipe is written"
        yield Change("policy.draft", {"enabled": False}, None, why)
    http = "policy.generation.vllm_cfg.expose_http_server"
    if facts.is_true(http):
        yield Change(http, False, True, "only NeMo-Gym's agents call it")


def _shorten_training(facts: RecipeFacts, steps: int, resume: bool, validate: bool) -> Iterator[Change]:
    section = facts.algorithm
    yield Change(f"{section}.max_num_steps", steps, facts.get(f"{section}.max_num_steps"))
    if (facts.number("ppo.ppo_epochs") or 1) > 2:
        yield Change("ppo.ppo_epochs", 2, facts.get("ppo.ppo_epochs"))
    if (facts.number("ppo.policy_training_start_step") or 0) > 1:
        yield Change("ppo.policy_training_start_step", 1, facts.get("ppo.policy_training_start_step"))
    if validate:
        yield Change(f"{section}.val_period", 1, facts.get(f"{section}.val_period"))
        if (facts.number(f"{section}.val_start_at") or 0) > 1:
            yield Change(f"{section}.val_start_at", 1, facts.get(f"{section}.val_start_at"))
    else:
        for key, value in (("val_period", 0), ("val_at_start", False), ("val_at_end", False)):
            if facts.get(f"{section}.{key}") is not None:
                yield Change(f"{section}.{key}", value, facts.get(f"{section}.{key}"))
    if facts.is_true("checkpointing.enabled"):
        # NeMo-RL saves the last step whatever the period.
        saved = steps - 1 if resume else steps
        yield Change("checkpointing.save_period", saved, facts.get("checkpointing.save_period"))
        for key in ("checkpointing.keep_top_k", "checkpointing.ft_keep_latest_k"):
            # Raised to a number and not removed: main's schema does not allow null for keep_top_k.
            if resume and (kept := facts.number(key)) is not None and kept < steps:
                yield Change(key, steps, facts.get(key), "the checkpoint before the last is resumed from")
        if facts.get("checkpointing.metric_name") is not None and not validate:
            yield Change(
                "checkpointing.metric_name", None, facts.get("checkpointing.metric_name"), "there is no validation"
            )


def _parallel_sizes(facts: RecipeFacts, layout: Layout, full: Layout, gpus: bool) -> Iterator[Change]:
    for model in trained_sections(facts):
        # The critic trains on the same ranks as the policy.
        yield from _model_parallel_sizes(
            facts, model, *((full, layout) if model == "policy" else _critic_layouts(facts, layout, gpus)), gpus
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        key = f"policy.generation.vllm_cfg.{name}"
        before = int(facts.number(key) or 1)
        # An engine beside the trainer has one GPU here.
        now = before if gpus and is_colocated(facts) and layout.ranks % before == 0 else 1
        if before != now:
            yield Change(key, now, before, "ranks" if gpus else "one process samples on CPUs")
    yield Change("cluster.num_nodes", 1 + _has_teacher(facts), facts.get("cluster.num_nodes"))
    gpu_count = layout.ranks
    if not is_colocated(facts):
        gpu_count += 1
        resources = "policy.generation.colocated.resources"
        yield Change(f"{resources}.gpus_per_node", 1, facts.get(f"{resources}.gpus_per_node"))
        yield Change(f"{resources}.num_nodes", None, facts.get(f"{resources}.num_nodes"))
    yield Change("cluster.gpus_per_node", gpu_count, facts.get("cluster.gpus_per_node"))
    segment = facts.get("cluster.segment_size")
    if segment is not None:
        yield Change("cluster.segment_size", None, segment, "one node has no segments")


def _critic_layouts(facts: RecipeFacts, layout: Layout, gpus: bool) -> tuple[Layout, Layout]:
    full = layout_of(facts, "value")
    return full, full.fit_to(layout.ranks, cp=gpus or facts.is_true("value.megatron_cfg.enabled"))


def _model_parallel_sizes(facts: RecipeFacts, model: str, full: Layout, layout: Layout, gpus: bool) -> Iterator[Change]:
    megatron = f"{model}.megatron_cfg"
    is_megatron = facts.is_true(f"{megatron}.enabled")
    for name, key in layout_keys(facts, model).items():
        before, now = getattr(full, name), getattr(layout, name)
        if before != now:
            needs_kernels = name == "cp" and not gpus and not is_megatron
            yield Change(key, now, before, "context parallelism needs CUDA kernels" if needs_kernels else "ranks")
    if not is_megatron:
        return
    for end in ("first", "last"):
        key = f"{megatron}.num_layers_in_{end}_pipeline_stage"
        if facts.get(key) is not None:
            yield Change(key, None, facts.get(key), "a tiny model's layers divide evenly")
    tp = int(facts.number(f"{megatron}.expert_tensor_parallel_size") or 1)
    if tp > layout.tp:
        yield Change(f"{megatron}.expert_tensor_parallel_size", layout.tp, tp, "ranks")
    dispatcher = f"{megatron}.moe_token_dispatcher_type"
    if gpus and facts.get(dispatcher) == "flex" and layout.tp * layout.ep == 1:
        yield Change(dispatcher, "alltoall", "flex", "flex needs several ranks for experts")
        yield Change(f"{megatron}.moe_enable_deepep", False, facts.get(f"{megatron}.moe_enable_deepep"))
    if facts.is_true(f"{megatron}.sequence_parallel") and layout.tp == 1:
        yield Change(f"{megatron}.sequence_parallel", False, True, "needs TP above 1")


def _redirect_output(facts: RecipeFacts, folder: Path) -> Iterator[Change]:
    """Yield changes that keep all output in the folder."""
    yield Change("logger.log_dir", str(folder / "logs"), facts.get("logger.log_dir"))
    yield Change("checkpointing.checkpoint_dir", str(folder / "checkpoints"), facts.get("checkpointing.checkpoint_dir"))
    for name in ("wandb", "swanlab", "mlflow"):  # TensorBoard writes to logger.log_dir
        if facts.is_true(f"logger.{name}_enabled"):
            yield Change(f"logger.{name}_enabled", False, True)


def _record(facts: RecipeFacts, folder: Path, record: bool) -> Iterator[Change]:
    """Yield changes that keep the records in the folder, and that record every step if ``record``."""
    if facts.trains_nemo_rl_loss:
        return
    directory = str(folder / RECORDS)
    if facts.get("loss_fn.record") is None:
        if record:
            yield Change("loss_fn.record", {"dir": directory}, None)
        return
    yield Change("loss_fn.record.dir", directory, facts.get("loss_fn.record.dir"))
    if facts.get("loss_fn.record.every") not in (None, 1):
        yield Change("loss_fn.record.every", 1, facts.get("loss_fn.record.every"))


def _unrehearsed(
    facts: RecipeFacts, layout: Layout, full: Layout, changes: list[Change], gpus: bool, validate: bool
) -> Iterator[str]:
    yield "memory: the model, its batches and its sequences are tiny"
    yield "network: everything runs on one machine"
    if layout != full:
        yield f"layout: {layout} in place of {full}"
    if not gpus:
        yield "kernels: everything runs on CPUs"
        yield "speed: times on CPUs say nothing about GPUs"
    yield from (
        f"{change.key}: {as_override(change.was)}, here {as_override(change.value)} ({change.why})"
        for change in changes
        if change.why and change.why != "ranks" and change.was is not None and change.was != change.value
    )
    if facts.get(f"{facts.algorithm}.val_period") and not validate:
        yield "validation: none of the recipe's (--validate rehearses it)"
