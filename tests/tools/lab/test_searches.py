"""A tool call that finds something by luck: the task, an advantage that knows the reply, and validations under both."""

from __future__ import annotations

import statistics

import pytest
import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.generation_engine import generate
from nemo_geomask.tools.lab.lab_recipe import EnvConfig, GrpoConfig, LabRecipe
from nemo_geomask.tools.lab.policy_model import build_policy, token_logprobs
from nemo_geomask.tools.lab.rollout import mean_measures, token_advantages
from nemo_geomask.tools.lab.samplers import build_sampler, trainer_sampler
from nemo_geomask.tools.lab.tasks import Searches, load_task

TASK = Searches(modulus=7, min_terms=6, max_terms=6, luck=0.5)
ASK, FOUND, NOTHING, EOS = TASK.call_id, TASK.found_id, TASK.nothing_id, TASK.eos_id
PROMPT = [3, 0, 6, TASK.colon_id]


@pytest.mark.parametrize(
    ("response", "reward", "measures"),
    [
        ([ASK, FOUND, 4, 5, 6, 0], 1.0, {"correct_after_found": 1.0}),
        ([ASK, FOUND, 4, 4, 5, 6], 3 / 4, {"correct_after_found": 3 / 4}),  # a term follows from the one before it
        ([ASK, NOTHING, 4, 5, 6, 0], 0.0, {"correct_after_nothing": 1.0}),
        ([ASK, FOUND, 4, 5], 1 / 2, {"correct_after_found": 1.0}),  # missing terms are wrong
        ([ASK, FOUND, EOS, 4, 5, 6], 1 / 2, {"correct_after_found": 1 / 2}),  # a sign has no successor
        ([4, 5, 6, 0, 1, 2], 0.0, {}),  # no call
        ([4, ASK, FOUND, 4, 5, 6], 0.0, {}),  # too late
        ([ASK, FOUND], 0.0, {}),
        ([], 0.0, {}),
    ],
)
def test_a_reward_is_the_share_of_correct_terms_if_the_tool_found_something(response, reward, measures):
    assert TASK.reward(PROMPT, response, 6) == pytest.approx(reward)
    assert TASK.measures(PROMPT, response) == pytest.approx(measures)


def test_the_reply_depends_on_luck_alone_and_there_is_one():
    assert [TASK.reply(PROMPT, [ASK], luck) for luck in (0.0, 0.49, 0.5, 0.99)] == [[FOUND]] * 2 + [[NOTHING]] * 2
    assert TASK.reply(PROMPT, [ASK, FOUND, ASK], 0.0) == []
    assert TASK.text([*PROMPT, ASK, FOUND, 4, NOTHING]) == "3 0 6 : ? ! 4 x"


def test_a_response_has_room_for_an_answer():
    with pytest.raises(ConfigError, match="env.min_terms: 2 is too small: a call and its reply are 2 tokens"):
        load_task(EnvConfig(name="searches", min_terms=2))


def small(**changes):
    settings = {
        "policy": {
            "model": {"num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1, "hidden_size": 16},
            "generation": {"precision": "float32", "ignore_eos": True, **changes.pop("generation", {})},
        },
        "env": {"name": "searches", "modulus": 7, "min_terms": 6, "max_terms": 6, **changes.pop("env", {})},
        "grpo": {"num_prompts_per_step": 4, **changes},
    }
    return LabRecipe.read(settings, source="test")


def test_the_environments_luck_is_drawn_for_each_call_and_repeats_with_the_seed():
    recipe = small(env={"luck": 0.25})
    task = load_task(recipe.env)
    policy = build_policy(recipe.policy.model, task, 0)
    prompts = task.sample(4000, torch.Generator().manual_seed(0))
    first, again = (
        generate([policy], prompts, task, recipe.policy.generation, torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert torch.equal(first.input_ids, again.input_ids)
    replies = first.input_ids[:, 1:][(first.input_ids[:, :-1] == task.call_id) & (first.token_mask[:, 1:] == 0)]
    replies = replies[replies >= task.found_id]
    assert len(replies) > 300
    share = float((replies == task.found_id).float().mean())
    assert share == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / len(replies)) ** 0.5)
    measures = mean_measures(task, first)
    assert set(measures) == {"correct_after_found", "correct_after_nothing"}


def advantages_by_loops(rewards, replies, positions, *, leave_one_out):
    """Advantages of each token of one group, by plain loops in float64: those with the same replies so far."""
    table = []
    for own, reply in enumerate(replies):
        row = []
        for position in positions:
            shown = sum(place <= position for place, _ in reply)
            head = [token for _, token in reply][:shown]
            same = [
                other
                for other, their in enumerate(replies)
                if [token for _, token in their][:shown] == head and (other != own or not leave_one_out)
            ]
            if not same:
                row.append(0.0)
                continue
            baseline = statistics.fmean(rewards[other] for other in same)
            squares = sum((rewards[other] - baseline) ** 2 for other in same)
            deviation = (squares / max(1, len(same) - 1)) ** 0.5
            gain = rewards[own] - baseline
            row.append(gain / (deviation + 1e-6) if deviation > 1e-6 else gain)
        table.append(row)
    return table


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_an_advantage_that_knows_the_reply_compares_with_equal_replies(leave_one_out):
    # Prompt of 2, response of 5. Tokens of the environment: one reply, another place, two replies, none.
    replies = [[(3, 9)], [(3, 9)], [(4, 9)], [(3, 8)], [(3, 8)], [(3, 9), (5, 8)], [], [(3, 7)]]
    rewards = [0.3, 0.9, 0.2, 0.0, 0.1, 1.0, 0.4, 0.7]
    ids, mask = torch.zeros(8, 8, dtype=torch.long), torch.zeros(8, 8)
    mask[:, 2:7] = 1
    for row, reply in enumerate(replies):
        for place, token in reply:
            ids[row, place], mask[row, place] = token, 0
    data = {
        "input_ids": torch.cat([ids, ids]),
        "input_lengths": torch.full((16,), 7),
        "token_mask": torch.cat([mask, mask]),
        "rewards": torch.tensor(rewards * 2),
    }
    settings = {"num_generations_per_prompt": 8, "use_leave_one_out_baseline": leave_one_out}
    found = token_advantages(data, GrpoConfig(**settings, adv_estimator={"reply_baseline": True}), None)
    expected = torch.tensor(
        advantages_by_loops(data["rewards"][:8].tolist(), replies, range(2, 7), leave_one_out=leave_one_out)
    )
    for half in (found[:8], found[8:]):
        trained = mask[:, 2:7].bool()
        torch.testing.assert_close(half[:, 2:7][trained], expected[trained], rtol=1e-5, atol=1e-6)
    assert (found[7, 4:] == 0).all()  # nothing to compare with
    plain = token_advantages(data, GrpoConfig(**settings), None)
    assert torch.equal(plain[:, 2], found[:, 2])
    assert not torch.equal(plain[:, 6], found[:, 6])


def test_an_unknown_temperature_is_in_the_engines_log_probs_and_not_in_the_trainers_sampler():
    recipe = small(generation={"unknown_temperature": 2.0})
    task = load_task(recipe.env)
    policy = build_policy(recipe.policy.model, task, 0)
    prompts = task.sample(64, torch.Generator().manual_seed(0))
    samples = [
        sampler.sample((policy,), prompts, torch.Generator().manual_seed(1))
        for sampler in (build_sampler(recipe), trainer_sampler(recipe))
    ]
    for sampled, temperature in zip(samples, (2.0, 1.0), strict=True):
        ids, mask = sampled.input_ids, sampled.token_mask.bool()
        with torch.no_grad():
            logits = policy(input_ids=ids[:, :-1]).logits.double() / temperature
        expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        chosen = mask[:, 1:]
        torch.testing.assert_close(sampled.logprobs[:, 1:][chosen].double(), expected[chosen], rtol=0, atol=1e-4)
    exact = token_logprobs(policy, samples[1].input_ids).detach()
    gap = (samples[1].logprobs[:, 1:] - exact)[samples[1].token_mask[:, 1:].bool()].abs()
    assert float(gap.max()) < 1e-4
