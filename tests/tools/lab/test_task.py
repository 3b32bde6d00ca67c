from __future__ import annotations

import math

import pytest
import torch

from nemo_geomask import LossConfig
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.lab_recipe import GrpoConfig
from nemo_geomask.tools.lab.rollout import group_advantages, reward_kl_coefficient, token_advantages
from nemo_geomask.tools.lab.tasks import Progressions, Prompts, draw_prompts

TASK = Progressions(modulus=7, min_terms=3, max_terms=9)
PROMPT = [3, TASK.sign_id, 4, TASK.colon_id]
EOS, PLUS = TASK.eos_id, TASK.sign_id


@pytest.mark.parametrize(
    ("response", "terms", "reward"),
    [
        ([0, 4, 1, 5], 4, 1.0),  # 3+4, 7+4, … mod 7
        ([0, 4, 1, 5, EOS], 4, 1.0),
        ([0, 4, EOS], 4, 0.5),  # the terms left out are forfeited
        ([EOS, 0, 4, 1], 4, 0.0),  # nothing after EOS counts
        ([0, 2, 6, 3], 4, 0.75),  # one slip costs one term: 6 follows 2, 3 follows 6
        ([0, PLUS, 4, 1], 4, 0.5),  # a sign has no successor: 4 is wrong too, 1 follows 4
        ([0, 4, 1, 5, 2, 6], 4, 1.0),  # terms beyond those asked for don't count
        ([3, 3, 3, 3], 4, 0.0),
        ([], 4, 0.0),
    ],
)
def test_a_term_is_right_if_it_follows_the_term_before(response, terms, reward):
    assert TASK.reward(PROMPT, response, terms) == reward


def test_chance_is_what_random_numbers_earn():
    generator = torch.Generator().manual_seed(0)
    responses = torch.randint(0, TASK.modulus, (4000, 9), generator=generator).tolist()
    mean = sum(TASK.reward(PROMPT, response, 9) for response in responses) / len(responses)
    assert mean == pytest.approx(TASK.chance, abs=0.005)


def test_prompts_cover_the_task_and_repeat_with_the_seed():
    prompts = TASK.sample(2000, torch.Generator().manual_seed(1))
    start, plus, step, colon = prompts.token_ids.unbind(1)
    assert set(start.tolist()) == set(range(7))
    assert set(step.tolist()) == set(range(1, 7))
    assert set(prompts.terms.tolist()) == set(range(3, 10))
    assert set(plus.tolist()) == {TASK.sign_id}
    assert set(colon.tolist()) == {TASK.colon_id}
    again = TASK.sample(2000, torch.Generator().manual_seed(1))
    torch.testing.assert_close(again.token_ids, prompts.token_ids)


def test_group_baseline_by_hand():
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, 0.2, 0.2, 0.2, 0.2])
    mean = group_advantages(rewards, _grpo(normalize=False, leave_one_out=False))
    torch.testing.assert_close(mean, torch.tensor([-0.5, 0.5, 0, 0, 0, 0, 0, 0]))
    without = group_advantages(rewards, _grpo(normalize=False, leave_one_out=True))
    torch.testing.assert_close(without, torch.tensor([-2 / 3, 2 / 3, 0, 0, 0, 0, 0, 0]))


def test_normalised_advantages_by_hand():
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5])
    std = (0.5 / 3) ** 0.5
    found = group_advantages(rewards, _grpo(normalize=True, leave_one_out=False))
    torch.testing.assert_close(found, torch.tensor([-0.5, 0.5, 0, 0]) / std, rtol=1e-5, atol=1e-6)
    # Leave-one-out: the others of response 0 are 1, 0.5, 0.5, with unbiased variance 1/12.
    found = group_advantages(rewards, _grpo(normalize=True, leave_one_out=True))
    torch.testing.assert_close(found[0], torch.tensor(-2 / 3) * 12**0.5, rtol=1e-4, atol=0)


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_rounding_among_equal_rewards_is_no_spread(leave_one_out):
    # One response differs from others that are all alike: under leave-one-out their deviation is exactly 0, and the
    # advantage stays unnormalised instead of being divided by a rounding error.
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7])
    found = group_advantages(rewards, _grpo(normalize=True, leave_one_out=leave_one_out))
    assert found.abs().max() < 4
    if leave_one_out:
        assert found[3] == pytest.approx(0.6)


def test_advantages_are_clipped():
    config = GrpoConfig(num_generations_per_prompt=2, advantage_clip_low=-0.1, advantage_clip_high=0.2)
    found = group_advantages(torch.tensor([0.0, 1.0]), config)
    torch.testing.assert_close(found, torch.tensor([-0.1, 0.2]))


def _grpo(*, normalize: bool, leave_one_out: bool) -> GrpoConfig:
    return GrpoConfig(
        num_generations_per_prompt=4, normalize_rewards=normalize, use_leave_one_out_baseline=leave_one_out
    )


PLUS_PLUS = {"name": "reinforce_plus_plus"}


def _batch(seed=0):
    draw = torch.Generator().manual_seed(seed)
    prev = -3 * torch.rand(6, 5, generator=draw)
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 0, 0, 0]] * 2, dtype=torch.float32)
    reference = prev + torch.randn(6, 5, generator=draw)
    reference[0, 1], reference[1, 2] = prev[0, 1] + 50.0, prev[1, 2] - 50.0  # beyond the clamps
    reference[mask == 0] = math.nan
    rewards = torch.rand(6, generator=draw)
    return {"token_mask": mask, "rewards": rewards, "prev_logprobs": prev, "reference_policy_logprobs": reference}


def _by_loops(data, *, beta, kind, baseline):
    rewards, mask = data["rewards"].tolist(), data["token_mask"].tolist()
    prev, reference = data["prev_logprobs"].tolist(), data["reference_policy_logprobs"].tolist()
    found = {}
    for i, row in enumerate(mask):
        group = rewards[i // 3 * 3 : i // 3 * 3 + 3]
        for t, trained in enumerate(row):
            if trained:
                x = min(max(prev[i][t] - reference[i][t], -20.0), 20.0)
                kl = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[kind]
                mean = sum(group) / 3 if baseline else 0.0
                found[i, t] = rewards[i] - mean - beta * min(max(kl, -10.0), 10.0)
    mean = sum(found.values()) / len(found)
    var = sum((value - mean) ** 2 for value in found.values()) / len(found)
    return {place: (value - mean) / math.sqrt(max(var, 1e-8)) for place, value in found.items()}


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("baseline", [True, False])
def test_kl_in_the_reward_is_each_tokens_own(kind, baseline):
    config = GrpoConfig(num_generations_per_prompt=3, adv_estimator={**PLUS_PLUS, "minus_baseline": baseline})
    loss = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.3, reference_policy_kl_type=kind)
    found = token_advantages(data := _batch(), config, loss)
    assert found.dtype == torch.float32
    for (i, t), value in _by_loops(data, beta=0.3, kind=kind, baseline=baseline).items():
        assert found[i, t].item() == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert not found[data["token_mask"] == 0].any()
    # Without the KL the reference is not read; clipped at the end.
    none = token_advantages(_batch(), config, LossConfig(reference_policy_kl_penalty=0.3))
    for (i, t), value in _by_loops(_batch(), beta=0.0, kind=kind, baseline=baseline).items():
        assert none[i, t].item() == pytest.approx(value, rel=1e-5, abs=1e-6)
    clipped = token_advantages(data, config.model_copy(update={"advantage_clip_high": 0.5}), loss)
    torch.testing.assert_close(clipped, found.clamp(max=0.5))


def test_nemo_rls_own_estimator_agrees():
    pytest.importorskip("nemo_rl.algorithms.advantage_estimator", reason="NeMo-RL is not importable")
    from types import SimpleNamespace

    from nemo_rl.algorithms.advantage_estimator import ReinforcePlusPlusAdvantageEstimator

    data = _batch(3)
    data["reference_policy_logprobs"].nan_to_num_(-1.0)
    settings = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.2, "reference_policy_kl_type": "k1"}
    try:
        theirs = ReinforcePlusPlusAdvantageEstimator(SimpleNamespace(minus_baseline=True), SimpleNamespace(**settings))
    except TypeError:  # v0.6.0's configurations are mappings
        theirs = ReinforcePlusPlusAdvantageEstimator({"minus_baseline": True}, settings)
    ours = token_advantages(
        data, GrpoConfig(num_generations_per_prompt=3, adv_estimator=PLUS_PLUS), LossConfig(**settings)
    )
    found = theirs.compute_advantage(
        torch.arange(6).div(3, rounding_mode="floor")[:, None],
        data["rewards"],
        data["token_mask"],
        logprobs_policy=data["prev_logprobs"],
        logprobs_reference=data["reference_policy_logprobs"],
    )
    trained = data["token_mask"] != 0
    torch.testing.assert_close(ours[trained], found[trained], rtol=1e-5, atol=1e-6)


def test_a_kl_that_no_reward_has_is_an_error():
    loss = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.1)
    with pytest.raises(ConfigError, match=r"loss_fn\.use_kl_in_reward.*set grpo\.adv_estimator\.name: reinforce_plus"):
        reward_kl_coefficient(loss, GrpoConfig())
    assert reward_kl_coefficient(loss, GrpoConfig(adv_estimator=PLUS_PLUS)) == 0.1
    assert reward_kl_coefficient(LossConfig(reference_policy_kl_penalty=0.1), GrpoConfig()) == 0.0


@pytest.mark.parametrize("held_out", [True, False])
def test_prompts_belong_to_one_split_whoever_asks(held_out):
    def drawn(seed, of):
        return draw_prompts(TASK, 64, torch.Generator().manual_seed(seed), held_out=of)

    prompts = drawn(0, held_out)
    assert prompts.token_ids.shape == (64, 4)
    assert len(prompts.terms) == 64
    mine = {tuple(ids) for ids in prompts.token_ids.tolist()}
    others = {tuple(ids) for seed in range(5) for ids in drawn(seed, not held_out).token_ids.tolist()}
    assert not mine & others
    assert min(len(mine), len(others)) > 4
    plain = TASK.sample(64, torch.Generator().manual_seed(0))
    assert torch.equal(drawn(0, None).token_ids, plain.token_ids)


@pytest.mark.parametrize("held_out", [True, False])
def test_a_task_of_one_prompt_has_no_two_splits(held_out):
    (one,) = draw_prompts(TASK, 1, torch.Generator().manual_seed(0), held_out=held_out).token_ids

    class Single(Progressions):
        def sample(self, count, generator):
            return Prompts(one.expand(count, -1), super().sample(count, generator).terms)

    task, generator = Single(7, 3, 9), torch.Generator()
    assert (draw_prompts(task, 4, generator, held_out=held_out).token_ids == one).all()
    with pytest.raises(ConfigError, match=r"grpo\.val_period: of 800 prompts that the task drew, 0 belong to the"):
        draw_prompts(task, 4, generator, held_out=not held_out)
