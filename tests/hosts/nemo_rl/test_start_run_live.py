"""Refusals that the run over NeMo-RL's source finds, against NeMo-RL itself on the same recipe."""

import importlib.util
import json
import subprocess
import sys

import pytest

from nemo_geomask.hosts.nemo_rl.start_run import start_refusals
from nemo_geomask.recipe import nemo_rl_root, read_recipe

SINGLE = "grpo_math_1B_megatron_single_controller.yaml"
MULTITEACHER = "xtoken_multiteacher_off_policy_distillation.yaml"
ASYNC_PPO = "recipes/llm/ppo-qwen2.5-1.5b-gsm8k-2n8g-megatron-valuetp2sp-dynbatch-noncolocated-async.yaml"
CONTROLLER = "from nemo_rl.algorithms.single_controller_utils import config as c\n"
LOSS = "from nemo_rl.algorithms.loss.loss_functions import CrossTokenizerDistillationLossFn as Loss\n"
REWARDS = "from nemo_rl.environments.reward_model_environment import RewardModelEnvironment as Environment\n"
PPO = "from nemo_rl.algorithms.ppo import MasterConfig\n"
VALIDATED = CONTROLLER + "c.validate_single_controller_config(c.MasterConfig(**data))"
MADE = "Environment.__ray_metadata__.modified_class(data['env']['reward_model'])"
CASES = [
    (SINGLE, ["async_rl.rollout_failure.native.generation_timeout_s=900.0"], "grpo", VALIDATED),
    (SINGLE, ["++async_rl.rollout_failure.max_skipped_prompts=4", "async_rl.sampler.name=windowed"], "grpo", VALIDATED),
    (SINGLE, ["grpo.num_generations_per_prompt=7"], "grpo", VALIDATED),
    (MULTITEACHER, ["loss_fn.xtoken_loss=true"], "distillation", LOSS + "Loss(data['loss_fn'])"),
    (ASYNC_PPO, ["ppo.async_ppo.warmup_generation_lead_steps=2"], "ppo", PPO + "MasterConfig(**data)"),
    ("grpo_rm_1B.yaml", ["env.reward_model.max_grad_norm=1.0"], "grpo", REWARDS + MADE),
]
RUN = """
import json, sys, typing, typing_extensions
typing.TypedDict = typing_extensions.TypedDict  # which pydantic asks for below Python 3.12
data = json.load(sys.stdin)
try:
    exec(sys.argv[1])
except Exception as error:
    print("REFUSED", " ".join(str(error).split()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "overrides", "algorithm", "host"), CASES)
def test_nemo_rl_itself_refuses_in_the_same_words(recipe, overrides, algorithm, host):
    root = nemo_rl_root()
    if root is None or any(importlib.util.find_spec(name) is None for name in ("nemo_rl", "ray", "torchdata")):
        pytest.skip("needs an importable NeMo-RL, and its checkout: NEMO_RL_ROOT")
    path = root / "examples" / "configs" / recipe
    if not path.is_file():
        pytest.skip(f"this NeMo-RL has no {recipe}")
    data = read_recipe(path, overrides, leave=("data", "logger")).data
    found = [each.message for each in start_refusals(root, data, algorithm)]
    command = [sys.executable, "-c", RUN, host]
    done = subprocess.run(command, input=json.dumps(data), capture_output=True, text=True, timeout=300)
    said = done.stdout.rpartition("REFUSED ")[2]
    assert said, done.stdout + done.stderr
    assert len(found) == 1
    # What the run does not know is … in its words.
    assert [part for part in found[0].split("…") if part.strip() not in said] == []
