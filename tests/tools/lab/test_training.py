from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")

from nemo_geomask import build_loss
from nemo_geomask.errors import BatchVetoError, ConfigError
from nemo_geomask.tools.lab import trainer as training
from nemo_geomask.tools.lab.trainer import Trainer, accumulate_gradients, merge_metrics

pytestmark = pytest.mark.slow

TIMINGS = {"generation_seconds", "step_seconds"}


def course(recipe):
    trainer = Trainer(recipe, build_loss(recipe.loss_fn))
    history = [{key: metrics[key] for key in metrics.keys() - TIMINGS} for metrics, _ in trainer.steps()]
    return history, [weight.detach().clone() for weight in trainer.policy.parameters()]


def test_the_seed_determines_the_course(tiny):
    torch.manual_seed(1)
    history, weights = course(tiny())
    torch.manual_seed(2)  # The global generator takes no part.
    again, same = course(tiny())
    assert history == again
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    other, _ = course(tiny(grpo={"seed": 4}))
    assert other != history


def test_variants_share_weights_and_prompts(tiny):
    trainers = [
        Trainer(tiny(), build_loss({"name": name, "reference_policy_kl_penalty": 0})) for name in ("gspo", "cispo")
    ]
    first, second = ([rollout.data for _, rollout in trainer.steps()] for trainer in trainers)
    for key in ("input_ids", "generation_logprobs", "prev_logprobs"):
        assert torch.equal(first[0][key], second[0][key])
    # Later on the policies differ, the prompts don't.
    assert torch.equal(first[1]["input_ids"][:, :4], second[1]["input_ids"][:, :4])
    assert not torch.equal(first[1]["prev_logprobs"], second[1]["prev_logprobs"])


@pytest.mark.parametrize(
    "loss_fn",
    [
        {"name": "clipped_pg", "reference_policy_kl_penalty": 0.1},
        {
            "name": "gspo",
            "reference_policy_kl_penalty": 0,
            "use_importance_sampling_correction": True,
            "is_correction_level": "sequence_mean",
            "masks": [{"preset": "geometric", "min": 0.99, "max": 1.01}],
        },
    ],
    ids=["clipped_pg", "gspo"],
)
def test_microbatches_add_up(tiny, loss_fn):
    recipe = tiny()
    loss = build_loss(loss_fn)
    trainer = Trainer(recipe, loss)
    assert (trainer.reference is None) == (loss.reference_policy_kl_penalty == 0)
    _, rollout = trainer.step()
    found = []
    for size in (1, 4, 16):
        trainer.policy.zero_grad()
        batches = [
            {key: value[start : start + size] for key, value in rollout.data.items()} for start in range(0, 16, size)
        ]
        tokens = int(rollout.data["token_mask"].sum())
        metrics = accumulate_gradients(trainer.engine, trainer.policy, loss, batches, 16, tokens)
        gradient = torch.cat([weight.grad.flatten() for weight in trainer.policy.parameters()])
        found.append((metrics, gradient))
    metrics, gradient = found[-1]
    assert gradient.abs().max() > 0
    for other_metrics, other in found[:-1]:
        torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-6)
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_the_learning_rate_rises_linearly_in_warm_up(tiny):
    recipe = tiny(policy={"warmup_steps": 4, "lr": 1e-3})
    rates = [metrics["lr"] for metrics, _ in Trainer(recipe, build_loss(recipe.loss_fn)).steps()]
    # Two optimiser steps on each batch: 1/4 and 2/4 of the rate, then 3/4 and all of it.
    assert rates == pytest.approx([0.375e-3, 0.875e-3])


def test_metrics_add_up_and_extremes_stay():
    merged = merge_metrics([{"a": 1.0, "r_min": 2.0, "r_max": 2.0}, {"a": 3.0, "r_min": 1.0, "r_max": 3.0}], 0.5)
    assert merged == {"a": 2.0, "r_min": 1.0, "r_max": 3.0}


@pytest.mark.long
def test_rewards_rise_above_chance(tiny):
    recipe = tiny(
        grpo={
            "num_prompts_per_step": 32,
            "num_generations_per_prompt": 8,
            "max_num_steps": 20,
            "use_leave_one_out_baseline": False,
        },
        policy={"train_global_batch_size": 64, "train_micro_batch_size": 64, "lr": 4e-3},
        loss_fn={"ratio_clip_min": 0.05, "ratio_clip_max": 0.05},
    )
    trainer = Trainer(recipe, build_loss(recipe.loss_fn))
    rewards = [metrics["reward"] for metrics, _ in trainer.steps()]
    assert rewards[0] < trainer.task.chance
    assert sum(rewards[-5:]) / 5 > 1.5 * trainer.task.chance


@pytest.mark.parametrize(
    ("size", "micro", "expected"),
    [
        # 16 responses; the last step takes what is left.
        ({"docs_per_step": 6}, 3, [[3, 3], [3, 3], [3, 1]]),
        ({"docs_per_step": 7}, 3, [[3, 3, 3], [3, 3, 1]]),
        ({"docs_per_step": 10}, 4, [[4, 4, 4], [4]]),
        ({"docs_per_step": 16}, 5, [[5, 5, 5, 1]]),
        ({"docs_per_step": 1}, 16, [[16]]),
        ({"train_global_batch_size": 8}, 4, [[4, 4], [4, 4]]),
    ],
)
def test_steps_of_a_number_of_documents(tiny, monkeypatch, size, micro, expected):
    policy = {"train_global_batch_size": None, "train_micro_batch_size": micro, **size}
    recipe = tiny(policy=policy, grpo={"max_num_steps": 1})
    seen = []

    def spy(engine, policy, loss, microbatches, documents, tokens):
        microbatches = list(microbatches)
        seen.append((microbatches, documents, tokens))
        return accumulate_gradients(engine, policy, loss, microbatches, documents, tokens)

    monkeypatch.setattr(training, "accumulate_gradients", spy)
    ((metrics, rollout),) = Trainer(recipe, build_loss(recipe.loss_fn)).steps()
    assert [[len(part["rewards"]) for part in parts] for parts, _, _ in seen] == expected
    # One denominator for all microbatches of a step: its own count, of the smaller last step too.
    assert [documents for _, documents, _ in seen] == [sum(step) for step in expected]
    for parts, _, tokens in seen:
        assert tokens == sum(int(part["token_mask"].sum()) for part in parts)
    # Every response trains once.
    trained = torch.cat([torch.nn.functional.pad(part["generation_logprobs"], (0, 0)) for s in seen for part in s[0]])
    assert sorted(trained.sum(dim=1).tolist()) == sorted(rollout.data["generation_logprobs"].sum(dim=1).tolist())
    assert metrics["num_valid_samples"] == pytest.approx(16 / len(expected))


@pytest.mark.quick
def test_vetoed_batch_leaves_policy_and_optimiser_as_they_are(tiny):
    veto = {"batch_veto": {"max": 1e-12, "max_in_a_row": 2}}
    trainer = Trainer(tiny(), build_loss({**tiny().loss_fn, **veto}))
    before = [parameter.detach().clone() for parameter in trainer.policy.parameters()]
    metrics, _ = trainer.step()
    assert metrics["geomask/batch_vetoed"] == 1
    assert metrics["geomask/batch_kl"] == pytest.approx(metrics["geomask/mismatch_k3"], rel=1e-4)
    assert metrics["skipped_update"] == 1
    assert metrics["grad_norm"] == metrics["loss"] == 0
    assert all(torch.equal(mine, old) for mine, old in zip(trainer.policy.parameters(), before, strict=True))
    assert not trainer.optimizer.state
    trainer.step()
    with pytest.raises(BatchVetoError, match="3 batches in a row"):
        trainer.step()


def test_kept_counts_what_the_masks_keep(tiny):
    geometric = {"masks": [{"preset": "geometric", "min": 0.999, "max": 1.001}]}
    loss = build_loss({**tiny().loss_fn, **geometric, "denominator": "kept"})
    metrics, rollout = Trainer(tiny(), loss).step()
    removed = metrics["geomask/mask/geometric/removed"]
    assert 0 < removed < 1
    # Of what is counted, nothing is removed; under the original denominator the same share would be missing.
    assert metrics["geomask/kept_tokens"] == pytest.approx(1)
    assert bool(rollout.data["sample_mask"].all())
    other, _ = Trainer(tiny(), build_loss({**tiny().loss_fn, **geometric})).step()
    assert other["geomask/kept_tokens"] < 1


def test_the_reward_can_have_the_kl(tiny):
    loss = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k1"}
    recipe = tiny(grpo={"adv_estimator": {"name": "reinforce_plus_plus"}, "max_num_steps": 2})
    with pytest.raises(ConfigError, match="use_kl_in_reward"):
        Trainer(tiny(), build_loss(loss))
    trainer = Trainer(recipe, build_loss(loss))
    assert trainer.reference is not None
    (_, first), (metrics, second) = trainer.steps()
    for rollout in (first, second):
        assert {"reference_policy_logprobs", "prev_logprobs"} <= set(rollout.data)
    assert metrics["geomask/reference_k3"] > 0
    of_token = second.data["advantages"] * second.data["token_mask"]
    # After a step the policy has left the reference, at some tokens more than at others.
    assert len(of_token[0][second.data["token_mask"][0] != 0].unique()) > 1
