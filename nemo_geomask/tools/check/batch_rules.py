"""GM305, GM306, GM307 and GM314: batch sizes and padding that NeMo-RL refuses when a run starts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, Rule

__all__ = ["RULES"]

_BATCH = "policy.train_global_batch_size"


def _several_steps_on_policy(facts: RecipeFacts) -> Iterator[Hit]:
    batch = facts.number(_BATCH)
    if facts.config.force_on_policy_ratio and facts.rollout_size and batch and facts.rollout_size != batch:
        yield Hit(
            "loss_fn.force_on_policy_ratio",
            f"true needs exactly one optimiser step per rollout batch, but {_BATCH}: {batch:g} is not "
            f"num_prompts_per_step x num_generations_per_prompt = {facts.rollout_size}; make them equal, or set false",
        )


def _indivisible_rollouts(facts: RecipeFacts) -> Iterator[Hit]:
    batch = facts.number(_BATCH)
    if facts.rollout_size and batch and facts.rollout_size % batch:
        yield Hit(
            _BATCH,
            f"{batch:g} does not divide the rollout batch of num_prompts_per_step x num_generations_per_prompt = "
            f"{facts.rollout_size}; set a divisor of it",
        )


def _scoring_batch_size(facts: RecipeFacts) -> Iterator[Hit]:
    training = facts.number("policy.train_micro_batch_size")
    scoring = facts.number("policy.logprob_batch_size")
    uses_one_size = training is None or scoring in (None, training)
    # Under force_on_policy_ratio, no prev_logprobs are compared with curr.
    if facts.tensor_parallel < 4 or uses_one_size or facts.config.force_on_policy_ratio:
        return
    is_refused = "force_on_policy_ratio" in facts.objective.refuses
    on_policy = ", or set force_on_policy_ratio: true in the loss if there is one optimiser step per rollout batch"
    yield Hit(
        "policy.logprob_batch_size",
        f"{scoring:g}, but train_micro_batch_size: {training:g}: NeMo-RL does not start such a run unless the "
        "environment variable NRL_IGNORE_TP_ACCURACY_CHECK=1 skips this check. With tensor parallelism "
        f"{facts.tensor_parallel}, the results of some kernels depend on the batch size, so curr and prev differ for "
        "the same weights. Make the two equal, or use a tensor parallelism of 1 or 2"
        f"{'' if is_refused else on_policy}",
    )


def _padding_of_packed_sequences(facts: RecipeFacts) -> Iterator[Hit]:
    key, megatron = "policy.make_sequence_length_divisible_by", "policy.megatron_cfg"
    padding = facts.number(key)
    is_packed = facts.is_true("policy.sequence_packing.enabled") and not facts.is_true(
        "policy.dynamic_batching.enabled"
    )
    if not facts.uses_megatron or not is_packed or padding is None:
        return
    cp, tp = int(facts.number(f"{megatron}.context_parallel_size") or 1), facts.tensor_parallel
    factors = {
        f"2 x context_parallel_size ({cp})": 2 * cp if cp > 1 else 1,
        f"tensor_model_parallel_size ({tp}, with sequence_parallel)": (
            tp if facts.is_true(f"{megatron}.sequence_parallel") else 1
        ),
    }
    required = math.prod(factors.values())
    if padding % required:
        product = " x ".join(name for name, factor in factors.items() if factor > 1)
        yield Hit(
            key,
            f"{padding:g} is not a multiple of {product} = {required}, into which packed sequences are split; set "
            f"{required}",
        )


RULES = (
    Rule(
        "GM305",
        "error",
        "`force_on_policy_ratio` with several optimiser steps per rollout batch",
        "NeMo-RL `grpo.setup`",
        _several_steps_on_policy,
    ),
    Rule(
        "GM306",
        "error",
        "rollout batch that is not a multiple of the training batch",
        "NeMo-RL `shard_by_batch_size`",
        _indivisible_rollouts,
    ),
    Rule(
        "GM307",
        "error",
        "tensor parallelism of 4 or more with different batch sizes for training and scoring",
        "NeMo-RL docs/guides/dtensor-tp-accuracy.md, `Policy.__init__`",
        _scoring_batch_size,
    ),
    Rule(
        "GM314",
        "error",
        "packed sequences padded to lengths that context and sequence parallelism can't split",
        "NeMo-RL `_get_pack_sequence_parameters_for_megatron` (megatron/data.py)",
        _padding_of_packed_sequences,
    ),
)
