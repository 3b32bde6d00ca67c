"""Sizes of a rehearsal's batches and sequences, and the learning rate of a control."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.tools.check import Layout, RecipeFacts, trained_sections
from nemo_geomask.tools.rehearse.setting_changes import Change

_PROMPTS = 4
_GENERATIONS = 4
_MICRO_BATCH = 2
_LENGTH = 32
_RESPONSE = 16
_PACKED = 3
"""Least number of sequences of a packed row: with one, nothing of packing would be rehearsed."""
_LEARNING_RATE = 3e-3
"""Learning rate of a control: Adam moves each weight by about as much, which moves log-probs by several percent."""


def sequence_length(facts: RecipeFacts, layout: Layout, own_environment: bool) -> int:
    """Return the longest sequence in tokens, divisible as the recipe requires."""
    multiple = math.lcm(int(facts.number("policy.make_sequence_length_divisible_by") or 1), 2 * layout.cp * layout.tp)
    # The recipe's own prompts are longer than the built-in three words.
    minimum = 512 if own_environment else _LENGTH
    return math.ceil(minimum / multiple) * multiple


def _responses(facts: RecipeFacts) -> int:
    """Return the number of responses to a prompt."""
    return int(min(facts.number(f"{facts.algorithm}.num_generations_per_prompt") or _GENERATIONS, _GENERATIONS))


def rollouts_of(facts: RecipeFacts, layout: Layout, *, is_control: bool = False) -> int:
    """Return the number of sequences of a rollout batch.

    Each rank needs a microbatch at each update, and a packed one :data:`_PACKED` sequences. In asynchronous GRPO a
    batch holds all responses to a prompt.
    """
    prompts = int(min(facts.number(f"{facts.algorithm}.num_prompts_per_step") or _PROMPTS, _PROMPTS))
    responses = _responses(facts)
    least = _PACKED * layout.dp * (1 + _has_several_updates(facts, is_control)) if _is_packed(facts) else 0
    while prompts * responses % layout.dp or prompts * responses < least:
        prompts += 1
    return prompts * responses


def _has_several_updates(facts: RecipeFacts, is_control: bool) -> bool:
    return not facts.uses_single_controller and (is_control or (facts.steps_per_rollout or 1) > 1)


def _is_packed(facts: RecipeFacts) -> bool:
    return facts.is_true("policy.sequence_packing.enabled")


def batch_sizes(facts: RecipeFacts, layout: Layout, length: int, *, is_control: bool = False) -> Iterator[Change]:
    """Yield the changes of batches and lengths."""
    section = facts.algorithm
    responses = _responses(facts)
    rollouts = rollouts_of(facts, layout, is_control=is_control)
    prompts = rollouts // responses
    # A recipe with several optimiser steps per rollout batch keeps two; a control has two, so that clip acts.
    updates = 2 if _has_several_updates(facts, is_control) and rollouts % (2 * layout.dp) == 0 else 1
    train = rollouts // updates
    micro = math.gcd(int(min(facts.number("policy.train_micro_batch_size") or 1, _MICRO_BATCH)), train // layout.dp)
    sizes: dict[str, int | None] = {
        f"{section}.num_prompts_per_step": prompts,
        f"{section}.num_generations_per_prompt": responses,
        "policy.logprob_batch_size": micro,
        "policy.generation.max_new_tokens": min(_RESPONSE, length // 2),
        "policy.generation.vllm_cfg.max_model_len": length + _RESPONSE,
        "data.max_input_seq_length": length,
        f"{section}.max_val_samples": prompts if facts.get(f"{section}.max_val_samples") else None,
        f"{section}.val_batch_size": prompts if facts.get(f"{section}.val_batch_size") else None,
    }
    for model in trained_sections(facts):
        sizes[f"{model}.train_global_batch_size"] = train
        sizes[f"{model}.train_micro_batch_size"] = micro
        sizes[f"{model}.max_total_sequence_length"] = length
        for name in ("dynamic_batching", "sequence_packing"):
            if facts.get(f"{model}.{name}.train_mb_tokens") is not None:
                tokens = length * (max(micro, _PACKED) if name == "sequence_packing" else micro)
                sizes[f"{model}.{name}.train_mb_tokens"] = tokens
                sizes[f"{model}.{name}.logprob_mb_tokens"] = tokens
                sizes[f"{model}.{name}.sequence_length_round"] = 8
    if facts.uses_single_controller:
        sizes["async_rl.min_groups_for_streaming_train"] = prompts
        sizes["async_rl.max_inflight_prompts"] = prompts
    if facts.get(f"{section}.reward_shaping.max_response_length") is not None:
        sizes[f"{section}.reward_shaping.max_response_length"] = min(_RESPONSE, length // 2)
        sizes[f"{section}.reward_shaping.overlong_buffer_length"] = 4
    for key, value in sizes.items():
        if value is not None:
            yield Change(key, value)


def learning_rate(facts: RecipeFacts) -> Iterator[Change]:
    """Yield the changes by which an update moves the policy enough for clip and KL to act on the next one."""
    why = "weights must move, or clip and KL would not act on what is compared"
    constant = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 1}}
    schedulers = [constant, {"milestones": []}]  # NeMo-RL refuses one without the list
    values: dict[str, object] = {"policy.optimizer.kwargs.lr": _LEARNING_RATE, "policy.scheduler": schedulers}
    if facts.uses_megatron:
        section = "policy.megatron_cfg"
        names = {"optimizer.lr": _LEARNING_RATE, "scheduler.lr_warmup_iters": 0, "scheduler.lr_warmup_init": 0.0}
        values = {f"{section}.{name}": value for name, value in names.items()}
    for key, value in values.items():
        if facts.get(key) is not None:
            yield Change(key, value, why)
