"""Which weights sampled which token, by what they say of it."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")

from nemo_geomask import build_loss
from nemo_geomask.tools.lab.generation_engine import generate
from nemo_geomask.tools.lab.policy_model import build_policy, token_logprobs
from nemo_geomask.tools.lab.tasks import load_task
from nemo_geomask.tools.lab.trainer import Trainer

FLOAT32 = {"generation": {"precision": "float32"}, "lr": 1e-2}


def asynchronous(age, **more):
    return {"async_grpo": {"enabled": True, "max_trajectory_age_steps": age, **more}, "max_num_steps": 4}


@pytest.mark.parametrize("recompute", [True, False])
def test_updates_land_at_equal_parts_of_the_longest_response(tiny, recompute):
    recipe = tiny()
    task = load_task(recipe.env)
    policies = [build_policy(recipe.policy.model, task, seed) for seed in range(3)]
    prompts = task.sample(64, torch.Generator().manual_seed(0))
    settings = recipe.policy.generation
    sampled, alone = (
        generate(engines, prompts, task, settings, torch.Generator().manual_seed(1), recompute_cache=recompute)
        for engines in (policies, policies[:1])
    )
    response = sampled.token_mask[:, task.prompt_width :].bool()
    places = torch.arange(response.shape[1]).expand_as(response)
    expected = places * 3 // int(prompts.terms.max())
    by = sampled.engine_index[:, task.prompt_width :]
    assert torch.equal(by[response], expected[response])
    assert set(by[response].tolist()) == {0, 1, 2}
    # Until the first update lands, it is the oldest weights' response.
    until = task.prompt_width + int((expected[0] == 0).sum())
    assert torch.equal(sampled.input_ids[:, :until], alone.input_ids[:, :until])
    with torch.no_grad():
        whole = torch.stack([token_logprobs(policy, sampled.input_ids) for policy in policies])
    found = sampled.logprobs[:, task.prompt_width :]
    says = whole[:, :, task.prompt_width - 1 :].gather(0, by[None])[0]
    gap = (found - says)[response].abs()
    later = by[response] > 0
    assert gap[~later].max() < 1e-5
    # With a cache of its own the engine says what its weights say; else the older keys and values are part of it.
    assert (gap[later].max() < 1e-5) == recompute


@pytest.mark.parametrize("age", [1, 2])
def test_the_engine_is_as_many_updates_behind_as_it_may_be(tiny, age):
    recipe = tiny(grpo=asynchronous(age), policy=FLOAT32)
    trainer = Trainer(recipe, build_loss(recipe.loss_fn))
    history = []
    for step in range(4):
        history.append(copy.deepcopy(trainer.policy))
        metrics, rollout = trainer.step()
        behind = min(step, age)
        assert metrics["avg_trajectory_age"] == metrics["avg_token_age"] == behind
        data, mask = rollout.data, rollout.data["token_mask"][:, 1:].bool()
        with torch.no_grad():
            of_version = [token_logprobs(policy, data["input_ids"]) for policy in history]
        gaps = [float((data["generation_logprobs"][:, 1:] - found)[mask].abs().max()) for found in of_version]
        assert [gap < 1e-5 for gap in gaps] == [version == step - behind for version in range(step + 1)]
        torch.testing.assert_close(data["prev_logprobs"][:, 1:][mask], of_version[-1][mask], rtol=0, atol=1e-5)


def test_in_flight_tokens_are_younger_than_their_response(tiny):
    recipe = tiny(grpo=asynchronous(2, in_flight_weight_updates=True), policy=FLOAT32)
    trainer = Trainer(recipe, build_loss(recipe.loss_fn))
    *_, (metrics, rollout) = trainer.steps()
    assert metrics["avg_trajectory_age"] == 2 > metrics["avg_token_age"] > 0
    assert set(rollout.data["weight_age"][rollout.data["token_mask"].bool()].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("in_flight", [False, True])
def test_the_control_has_the_trainers_log_probs_by_the_weights_that_sampled(tiny, in_flight):
    ages = {"enabled": True, "max_trajectory_age_steps": 2, "in_flight_weight_updates": in_flight}
    change = {
        "grpo": {"async_grpo": ages, "max_num_steps": 3},
        "policy": {"lr": 1e-2, "generation": {"precision": "float32"}},
    }
    control = {**change, "policy": {**change["policy"], "generation": {"precision": "float32", "logprobs": "trainer"}}}
    (*_, (_, engine)), (*_, (_, trainer)) = (
        list(Trainer(recipe, build_loss(recipe.loss_fn)).steps()) for recipe in (tiny(**change), tiny(**control))
    )
    # In float32 both engines say the same of the weights that sampled, unless the cache is of earlier ones.
    sampled = engine.data["token_mask"] != 0
    assert torch.equal(engine.data["input_ids"], trainer.data["input_ids"])
    assert engine.data["weight_age"].max() == 2
    gap = (engine.data["generation_logprobs"] - trainer.data["generation_logprobs"])[sampled].abs()
    stale = (trainer.data["prev_logprobs"] - trainer.data["generation_logprobs"])[sampled].abs().max()
    assert stale > 1e-2
    assert gap[engine.data["weight_age"][sampled] == 2].max() < 1e-4
    # Synchronous, the control is exactly without mismatch, also where the engine rounds.
    recipe = tiny(policy={"generation": {"logprobs": "trainer"}})
    for metrics, rollout in Trainer(recipe, build_loss(recipe.loss_fn)).steps():
        assert torch.equal(
            rollout.data["generation_logprobs"] * (rollout.data["token_mask"] != 0),
            rollout.data["prev_logprobs"] * (rollout.data["token_mask"] != 0),
        )
        assert metrics["geomask/mismatch_abs"] == 0


SURVIVORS = {
    "denominator": "kept_in_loss",
    "loss_normalization": "tokens",
    "masks": [{"log_ratio": "total", "level": "token", "statistic": "ratio_abs", "max": 1.5}],
}


@pytest.mark.parametrize("settings", [{"proximal_policy": "interpolated"}, {"max_token_lag": 1}, SURVIVORS], ids=str)
def test_settings_that_need_a_loop_of_ones_own(tiny, settings):
    recipe = tiny(grpo=asynchronous(2, in_flight_weight_updates=True), policy=FLOAT32, loss_fn=settings)
    *_, (metrics, rollout) = Trainer(recipe, build_loss(recipe.loss_fn)).steps()
    assert metrics["grad_norm"] > 0 == metrics["skipped_update"]
    lag = rollout.data["training_weight_version"].unsqueeze(1) - rollout.data["token_weight_versions"]
    assert torch.equal(lag, rollout.data["weight_age"])
    if "max_token_lag" in settings:
        trained = rollout.data["token_mask"] != 0
        assert metrics["geomask/stale_tokens"] == pytest.approx(float((lag > 1)[trained].float().mean()))
    if settings is SURVIVORS:
        assert 0 < metrics["geomask/kept_tokens"] < 1
