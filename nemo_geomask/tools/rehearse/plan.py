"""Plan of a rehearsal: the recipe's settings that it changes, each with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.tools.check import Layout, RecipeFacts, layout_keys, layout_of, trained_sections
from nemo_geomask.tools.rehearse.batch_sizes import batch_sizes, learning_rate, rollouts_of, sequence_length
from nemo_geomask.tools.rehearse.refusals import model_refusals, recipe_refusals
from nemo_geomask.tools.rehearse.setting_changes import GENERATION_PRECISION, Change, cpu_changes, is_colocated
from nemo_geomask.tools.rehearse.tiny_models import PROMPT_FORMAT, TinyModel, tiny_model
from nemo_geomask.yaml_text import inline_yaml

TEACHER = Path("teacher", "model")
"""Folder of the teacher's weights in a rehearsal of on-policy distillation, in the rehearsal's folder."""
RECORDS = "records"
"""Name of the folder of records, in a rehearsal's folder."""

ENVIRONMENT = "nemo_geomask_rehearsal"
"""Name under which the built-in environment is registered with NeMo-RL."""


@dataclass(frozen=True)
class PlanOptions:
    """What is asked of a rehearsal, and what this machine has."""

    checkout: Path = Path()  # of NeMo-RL
    steps: int = 3  # rollout batches to train on
    ranks: int = 1  # largest number of processes that train
    own_environment: bool = False  # use the recipe's own data and environment
    gpus: bool = False  # there are GPUs; without them, settings that a CPU does not support are changed and reported
    has_automodel: bool = True  # Automodel can be imported for DTensor v2's workers; without it, DTensor v1's train
    has_fp8_cache: bool = False  # vLLM has kernels for an fp8 KV cache on this machine's processor
    resume: bool = False  # save and keep a checkpoint of the step before the last
    validate: bool = False  # validate after every step
    record: bool = False  # record every step, so that the run can be diagnosed
    control: bool = False  # the run is compared with NeMo-RL's own loss: weights move enough for clip and KL to act


@dataclass(frozen=True)
class Plan:
    """A rehearsal of one recipe."""

    facts: RecipeFacts  # the recipe
    arguments: tuple[str, ...]  # the user's overrides of it
    folder: Path  # folder of model, prompts, log and checkpoints
    options: PlanOptions
    changes: tuple[Change, ...]  # changes to the recipe
    layout: Layout  # parallel layout of the rehearsal
    full_layout: Layout  # parallel layout of the recipe
    model: TinyModel  # the tiny model
    rollouts: int  # sequences of a rollout batch
    script: str  # NeMo-RL's script, relative to its checkout
    gpu_count: int  # number of GPUs that Ray has, or claims to have
    uses_automodel: bool  # True if DTensor v2's workers train, which are Automodel's
    has_teacher: bool  # True for on-policy distillation, which needs a second tiny model
    unrehearsed: tuple[str, ...]  # parts of the recipe that the rehearsal says nothing about

    @property
    def keeps_fp8_cache(self) -> bool:
        """True if a CPU's engine has the recipe's fp8 KV cache, beside weights that are not quantised."""
        return not self.options.gpus and self.value(GENERATION_PRECISION) == "fp8"

    @property
    def overrides(self) -> tuple[str, ...]:
        """All changes as overrides, in order."""
        return tuple(override for change in self.changes for override in change.overrides)

    def value(self, key: str) -> Any:
        """Return the value that a setting has in the rehearsal; None if it has none."""
        return next((change.value for change in self.changes if change.key == key), self.facts.get(key))


def plan(
    facts: RecipeFacts, arguments: Sequence[str] = (), *, folder: Path, options: PlanOptions = PlanOptions()
) -> Plan:
    """Plan the rehearsal of a recipe, which was read with the arguments.

    Raises:
        ConfigError: the recipe can't be rehearsed, or its model's architecture is not known.
    """
    gpus = options.gpus
    if problems := tuple(recipe_refusals(facts, has_gpus=gpus)):
        raise ConfigError(*problems)
    full = layout_of(facts)
    # Without GPUs, only Megatron has a shim for context-parallel attention.
    layout = full.fit_to(options.ranks, cp=gpus or facts.uses_megatron)
    model = tiny_model(str(facts.get("policy.model_name", "")), layout, recipe=facts.recipe.path)
    if not gpus and (problems := tuple(model_refusals(facts, model.model_type))):
        raise ConfigError(*problems)
    length = sequence_length(facts, layout, options.own_environment)
    changes = [
        *_model_and_data(facts, folder, options),
        *_shorten_training(facts, options),
        *batch_sizes(facts, layout, length, is_control=options.control),
        *(learning_rate(facts) if options.control else ()),
        *_parallel_sizes(facts, layout, full, gpus),
        *_teacher(facts, folder),
        *_redirect_output(facts, folder),
        *_record(facts, folder, options.record),
    ]
    if not gpus:
        has = {"has_automodel": options.has_automodel, "has_fp8_cache": options.has_fp8_cache}
        changes += cpu_changes(facts, is_recurrent=model.is_recurrent, **has)
    changes = [replace(change, was=facts.get(change.key)) for change in changes]
    changes = [change for change in changes if change.is_effective]
    algorithm = "grpo_single_controller" if facts.uses_single_controller else facts.algorithm
    has_teacher = _has_teacher(facts)
    v2 = "policy.dtensor_cfg._v2"
    uses_automodel = not facts.uses_megatron and facts.is_true(v2) and all(change.key != v2 for change in changes)
    if not (gpus or facts.uses_megatron or uses_automodel) and model.stacks_experts:
        message = (
            f"DTensor v1's workers send the experts of a tiny {model.model_type} under names that vLLM does not load; "
            f"put Automodel on PYTHONPATH (or fetch NeMo-RL's submodules), and set {v2}: true"
        )
        raise ConfigError(Problem(("policy.model_name",), message))
    return Plan(
        facts=facts,
        arguments=tuple(arguments),
        folder=folder,
        options=options,
        changes=tuple(changes),
        layout=layout,
        full_layout=full,
        model=model,
        rollouts=rollouts_of(facts, layout, is_control=options.control),
        script=f"examples/run_{algorithm}.py",
        gpu_count=layout.ranks + (not is_colocated(facts)) + has_teacher,
        uses_automodel=uses_automodel,
        has_teacher=has_teacher,
        unrehearsed=tuple(_unrehearsed(facts, layout, full, changes, options)),
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
            {ENVIRONMENT: str(folder / TEACHER)},
            "one tiny teacher for all prompts",
        ),
        f"{section}.default_teacher_alias": (ENVIRONMENT, ""),
        f"{section}.strict_agent_name_match": (False, ""),
        f"{workers}.default_teacher_cfg": (one_process, "ranks"),
        f"{workers}.teacher_overrides": ({}, "ranks"),
    }
    for key, (value, why) in values.items():
        if value or facts.get(key) is not None:
            yield Change(key, value, why)


def _model_and_data(facts: RecipeFacts, folder: Path, options: PlanOptions) -> Iterator[Change]:
    for section in trained_sections(facts):
        yield Change(f"{section}.model_name", str(folder / "model"))
        yield Change(f"{section}.tokenizer.name", str(folder / "tokenizer"))
        yield Change(f"{section}.tokenizer.chat_template", "default")
        if facts.get(f"{section}.hf_config_overrides"):
            yield Change(f"{section}.hf_config_overrides", {})
    if options.own_environment:
        return
    train = {
        **PROMPT_FORMAT,
        "data_path": str(folder / "prompts.jsonl"),
        "prompt_file": None,
        "system_prompt_file": None,
        "processor": "math_hf_data_processor",
        "env_name": ENVIRONMENT,
        "split_validation_size": 0,
        "seed": 42,
    }
    yield Change("data.train", train)
    validation = {key: value for key, value in train.items() if key != "split_validation_size"}
    yield Change("data.validation", validation if options.validate else None)
    # NeMo-RL starts every environment that is named anywhere in `data`.
    if facts.get("data.default.env_name") is not None:
        yield Change("data.default.env_name", ENVIRONMENT)
    if facts.is_true("data.use_multiple_dataloader"):
        yield Change("data.use_multiple_dataloader", False, "the built-in prompts are one set")
    yield Change("data.num_workers", 0)
    # All of the recipe's environments are replaced. They may refer to variables that are not set on this machine, and
    # under NeMo-Gym the agents would call the sampler in place of NeMo-RL's rollout.
    why = "NeMo-Gym's agents and their rewards" if facts.is_true("env.should_use_nemo_gym") else ""
    yield Change("env", {ENVIRONMENT: {}}, why)
    if why:
        # NeMo-RL refuses these without NeMo-Gym.
        for key in ("grpo.invalid_tool_call_advantage", "grpo.malformed_thinking_advantage"):
            if facts.get(key) is not None:
                yield Change(key, None, "only NeMo-Gym reports such responses")
        for name, is_on in (facts.get("reward_penalties") or {}).items():
            if is_on is True:
                yield Change(f"reward_penalties.{name}", False, "only NeMo-Gym reports such responses")
    if facts.algorithm == "grpo" and facts.get("policy.draft") is None:
        why = "run_grpo.py reads it, unlike run_grpo_nemo_gym.py, for which the recipe is written"
        yield Change("policy.draft", {"enabled": False}, why)
    http = "policy.generation.vllm_cfg.expose_http_server"
    if facts.is_true(http):
        yield Change(http, False, "only NeMo-Gym's agents call it")


def _shorten_training(facts: RecipeFacts, options: PlanOptions) -> Iterator[Change]:
    section, steps = facts.algorithm, options.steps
    yield Change(f"{section}.max_num_steps", steps)
    limits = {"ppo.ppo_epochs": 2, "ppo.policy_training_start_step": 1}
    if options.validate:
        yield Change(f"{section}.val_period", 1)
        limits[f"{section}.val_start_at"] = 1
    else:
        for key, value in (("val_period", 0), ("val_at_start", False), ("val_at_end", False)):
            if facts.get(f"{section}.{key}") is not None:
                yield Change(f"{section}.{key}", value)
    for key, limit in limits.items():
        if (facts.number(key) or 0) > limit:
            yield Change(key, limit)
    if facts.is_true("checkpointing.enabled"):
        # NeMo-RL saves the last step whatever the period.
        yield Change("checkpointing.save_period", steps - 1 if options.resume else steps)
        for key in ("checkpointing.keep_top_k", "checkpointing.ft_keep_latest_k"):
            # Raised to a number and not removed: main's schema does not allow null for keep_top_k.
            if options.resume and (kept := facts.number(key)) is not None and kept < steps:
                yield Change(key, steps, "the checkpoint before the last is resumed from")
        if not options.validate:
            yield Change("checkpointing.metric_name", None, "there is no validation")


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
            yield Change(key, now, "ranks" if gpus else "one process samples on CPUs")
    yield Change("cluster.num_nodes", 1 + _has_teacher(facts))
    gpu_count = layout.ranks
    if not is_colocated(facts):
        gpu_count += 1
        resources = "policy.generation.colocated.resources"
        yield Change(f"{resources}.gpus_per_node", 1)
        yield Change(f"{resources}.num_nodes", None)
    yield Change("cluster.gpus_per_node", gpu_count)
    yield Change("cluster.segment_size", None, "one node has no segments")


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
            yield Change(key, now, "context parallelism needs CUDA kernels" if needs_kernels else "ranks")
    if not is_megatron:
        return
    for end in ("first", "last"):
        yield Change(f"{megatron}.num_layers_in_{end}_pipeline_stage", None, "a tiny model's layers divide evenly")
    tp = int(facts.number(f"{megatron}.expert_tensor_parallel_size") or 1)
    if tp > layout.tp:
        yield Change(f"{megatron}.expert_tensor_parallel_size", layout.tp, "ranks")
    dispatcher = f"{megatron}.moe_token_dispatcher_type"
    if gpus and facts.get(dispatcher) == "flex" and layout.tp * layout.ep == 1:
        yield Change(dispatcher, "alltoall", "flex needs several ranks for experts")
        yield Change(f"{megatron}.moe_enable_deepep", False)
    if facts.is_true(f"{megatron}.sequence_parallel") and layout.tp == 1:
        yield Change(f"{megatron}.sequence_parallel", False, "needs TP above 1")


def _redirect_output(facts: RecipeFacts, folder: Path) -> Iterator[Change]:
    """Yield changes that keep all output in the folder."""
    yield Change("logger.log_dir", str(folder / "logs"))
    yield Change("checkpointing.checkpoint_dir", str(folder / "checkpoints"))
    for name in ("wandb", "swanlab", "mlflow"):  # TensorBoard writes to logger.log_dir
        if facts.is_true(f"logger.{name}_enabled"):
            yield Change(f"logger.{name}_enabled", False)


def _record(facts: RecipeFacts, folder: Path, record: bool) -> Iterator[Change]:
    """Yield changes that keep the records in the folder, and that record every step if ``record``."""
    if facts.trains_nemo_rl_loss:
        return
    directory = str(folder / RECORDS)
    if facts.get("loss_fn.record") is None:
        if record:
            yield Change("loss_fn.record", {"dir": directory})
        return
    yield Change("loss_fn.record.dir", directory)
    if facts.get("loss_fn.record.every") is not None:
        yield Change("loss_fn.record.every", 1)


def _unrehearsed(
    facts: RecipeFacts, layout: Layout, full: Layout, changes: list[Change], options: PlanOptions
) -> Iterator[str]:
    yield "memory: the model, its batches and its sequences are tiny"
    yield "network: everything runs on one machine"
    if layout != full:
        yield f"layout: {layout} in place of {full}"
    if not options.gpus:
        yield "kernels: everything runs on CPUs"
        yield "speed: times on CPUs say nothing about GPUs"
    yield from (
        f"{change.key}: {inline_yaml(change.was)}, here {inline_yaml(change.value)} ({change.why})"
        for change in changes
        if change.why not in ("", "ranks") and change.was is not None and change.was != change.value
    )
    if not options.gpus and all(change.key != GENERATION_PRECISION for change in changes):
        yield f"{GENERATION_PRECISION}: fp8, here for the KV cache alone (vLLM's CPU kernels have no fp8 weights)"
    if facts.get(f"{facts.algorithm}.val_period") and not options.validate:
        yield "validation: none of the recipe's (--validate rehearses it)"
