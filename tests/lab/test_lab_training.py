from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")

from nemo_geomask import build_loss
from nemo_geomask.lab.trainer import Trainer, accumulate_gradients, merge_metrics

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
        metrics = accumulate_gradients(trainer.policy, loss, rollout.data, size)
        gradient = torch.cat([weight.grad.flatten() for weight in trainer.policy.parameters()])
        found.append((metrics, gradient))
    metrics, gradient = found[-1]
    assert gradient.abs().max() > 0
    for other_metrics, other in found[:-1]:
        torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-6)
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_staleness_and_mismatch_are_real(tiny):
    (metrics, _), *_ = Trainer(tiny(policy={"lr": 1e-2}), build_loss(tiny().loss_fn)).steps()
    assert metrics["geomask/mismatch_abs"] > 1e-4
    assert metrics["probs_ratio_max"] > 1.001
    assert metrics["geomask/policy_abs"] > 1e-4


def test_warm_up(tiny):
    recipe = tiny(policy={"warmup_steps": 4, "lr": 1e-3})
    rates = [metrics["lr"] for metrics, _ in Trainer(recipe, build_loss(recipe.loss_fn)).steps()]
    # Two optimiser steps on each batch: 1/4 and 2/4 of the rate, then 3/4 and all of it.
    assert rates == pytest.approx([0.375e-3, 0.875e-3])


def test_metrics_merge():
    merged = merge_metrics([{"a": 1.0, "r_min": 2.0, "r_max": 2.0}, {"a": 3.0, "r_min": 1.0, "r_max": 3.0}], 0.5)
    assert merged == {"a": 2.0, "r_min": 1.0, "r_max": 3.0}


def test_it_learns(tiny):
    recipe = tiny(
        grpo={
            "num_prompts_per_step": 32,
            "num_generations_per_prompt": 8,
            "max_num_steps": 40,
            "use_leave_one_out_baseline": False,
        },
        policy={"train_global_batch_size": 64, "train_micro_batch_size": 64, "lr": 4e-3},
        loss_fn={"ratio_clip_min": 0.05, "ratio_clip_max": 0.05},
    )
    trainer = Trainer(recipe, build_loss(recipe.loss_fn))
    rewards = [metrics["reward"] for metrics, _ in trainer.steps()]
    assert rewards[0] < trainer.task.chance
    assert sum(rewards[-5:]) / 5 > 1.5 * trainer.task.chance
