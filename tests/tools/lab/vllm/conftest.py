"""One engine for all tests: it takes longer to start than they take to run."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

# What the lab sets, before a test module imports vLLM.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

RECIPE: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_num_steps": 2, "seed": 3},
    "policy": {
        "model": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2},
        "generation": {"backend": "vllm", "precision": "float32"},
        "train_global_batch_size": 16,
        "train_micro_batch_size": 16,
    },
    # Room for prompts that fill blocks of the prefix cache, of 128 tokens on a CPU.
    "env": {"modulus": 7, "min_terms": 4, "max_terms": 300},
    "loss_fn": {"name": "gspo", "reference_policy_kl_penalty": 0},
    "lab": {"num_threads": 1},
}


@pytest.fixture(scope="session")
def recipe():
    from nemo_geomask.tools.lab.lab_recipe import LabRecipe

    return LabRecipe.read(RECIPE, source="test")


@pytest.fixture(scope="session")
def task():
    from nemo_geomask.tools.lab.tasks import Progressions

    return Progressions(modulus=7, min_terms=4, max_terms=16)


@pytest.fixture(scope="session")
def sampler(recipe):
    from nemo_geomask.tools.lab.samplers import VllmSampler
    from nemo_geomask.tools.lab.tasks import Progressions

    torch.set_num_threads(1)
    return VllmSampler(recipe, Progressions.of(recipe.env))


@pytest.fixture
def policy(recipe):
    from nemo_geomask.tools.lab.policy_model import build_policy
    from nemo_geomask.tools.lab.tasks import Progressions

    return build_policy(recipe.policy.model, Progressions.of(recipe.env), seed=0)
