"""A lab recipe that takes a fraction of a second a step; in a module of its own, so that spawned processes find it."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 2, "seed": 3},
    "policy": {
        "model": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "initializer_range": 0.2,
        },
        "train_global_batch_size": 8,
        "train_micro_batch_size": 4,
    },
    "env": {"modulus": 5, "min_terms": 4, "max_terms": 12},
    "loss_fn": {"name": "gspo", "reference_policy_kl_penalty": 0},
    "lab": {"num_threads": 1},
}


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result
