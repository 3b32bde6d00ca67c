r"""When a mismatch does harm: the theory of docs/background/mismatch.md on a policy that is a table, by enumeration.

A tool finds something with probability 1/2. Then a response of T tokens follows, each right or wrong in the same way,
and earns its share of right tokens if the tool found something. The engine samples
:math:`\mu = (1 - \varepsilon)\,\pi + \varepsilon\,u`, with u uniform over the tokens. All responses are enumerated and
weighted by their probability, so the gradient of the package's loss is the expected one.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from nemo_geomask import build_loss

TOKENS = 3  # token 0 is right
TRUNCATED = {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0}


def weight(level, **changes):
    return {"use_importance_sampling_correction": True, "is_correction_level": level, **changes}


def additive(policy, noise):
    return (1 - noise) * policy + noise / TOKENS


def multiplicative(policy, error):
    """A sampler whose logits of the wrong tokens are too large by ``error``."""
    return (policy.log() + error * (torch.arange(TOKENS) > 0)).softmax(dim=0)


def expected_step(error, noise, length, settings, *, engine_of=additive, luck=True, reply_baseline=False, group=None):
    """Step of the loss on the right token's logit after a lucky call, where the policy errs with ``error``.

    With a ``group``, advantages are normalised over so many responses; their expectation is over the others.
    """
    wrong = error / (TOKENS - 1)
    policy = torch.tensor([1 - error] + [wrong] * (TOKENS - 1), dtype=torch.float64)
    engine = engine_of(policy, noise)
    logits = policy.log().repeat(2, 1).requires_grad_()  # after a call that found nothing (0) and something (1)
    rows = [(found, tokens) for found in (0, 1) for tokens in itertools.product(range(TOKENS), repeat=length)]
    ids = torch.tensor([tokens for _, tokens in rows])
    found = torch.tensor([reply for reply, _ in rows])
    rewards = (ids == 0).double().mean(dim=1) * (found if luck else 1)
    probability = engine[ids].prod(dim=1) / 2
    advantages = rewards - (probability * rewards).sum()
    if reply_baseline:
        by_reply = torch.stack([(probability * rewards * (found == reply)).sum() * 2 for reply in (0, 1)])
        advantages = rewards - by_reply[found]
    if group is not None:
        values, which = rewards.unique(return_inverse=True)
        others = torch.cartesian_prod(*[torch.arange(len(values))] * (group - 1))
        chance = torch.stack([probability[which == index].sum() for index in range(len(values))])[others].prod(dim=1)
        own = values[:, None, None].expand(-1, len(others), 1)
        members = torch.cat([own, values[others].expand(len(values), -1, -1)], dim=2)
        normalised = (own[..., 0] - members.mean(dim=2)) / members.std(dim=2).clamp(min=1e-9)
        advantages = (normalised * chance).sum(dim=1)[which]
    curr = logits.log_softmax(dim=-1)[found[:, None], ids]
    first = torch.zeros(len(rows), 1, dtype=torch.float64)
    data = {
        "advantages": torch.cat([first, (advantages * probability)[:, None].expand_as(curr)], dim=1),
        "prev_logprobs": torch.cat([first, curr.detach()], dim=1),
        "generation_logprobs": torch.cat([first, engine.log()[ids]], dim=1),
        "token_mask": torch.cat([first, torch.ones_like(curr)], dim=1),
        "sample_mask": torch.ones(len(rows)),
    }
    defaults = {"name": "reinforce", "reference_policy_kl_penalty": 0, "use_importance_sampling_correction": False}
    loss = build_loss({**defaults, **settings})
    value, _ = loss(
        next_token_logprobs=curr,
        data=data,
        global_valid_seqs=torch.tensor(len(rows)),
        global_valid_toks=torch.tensor(1.0),
    )
    (gradient,) = torch.autograd.grad(value, logits)
    return -float(gradient[1, 0])


def step_by_hand(error, noise, length):
    r"""The same without a correction, from the two terms of the theory, in plain floats."""
    policy = [1 - error] + [error / (TOKENS - 1)] * (TOKENS - 1)
    engine = [(1 - noise) * p + noise / TOKENS for p in policy]
    share = engine[0]
    value = share - share / 2  # of a lucky response, minus the mean over both
    gains = [(1 - share) / length] + [-share / length] * (TOKENS - 1)
    learning = engine[0] * gains[0]
    pull = (engine[0] - policy[0]) * value
    return length * (learning + pull) / 2  # T tokens in half of the responses


def resting_error(step):
    """Error at which a step changes its sign, by bisection; 0 if it never pulls away from the right token."""
    errors = [0.001 * 1.3**n for n in range(26) if 0.001 * 1.3**n < 0.66]
    steps = [step(error) for error in errors]
    if all(value > 0 for value in steps):
        return 0.0
    index = max(i for i, value in enumerate(steps) if value < 0)
    low, high = errors[index], errors[index + 1] if index + 1 < len(errors) else 2 / 3
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if step(middle) < 0 else (low, middle)
    return low


def predicted_error(noise, length):
    """The page's formula, x = n ε (T − 2) / (2 + ε (T − 2)), with the share n of the engine's noise that is wrong."""
    wrong_share, product = (TOKENS - 1) / TOKENS, noise * (length - 2)
    return wrong_share * product / (2 + product)


@pytest.mark.parametrize(("error", "noise"), [(0.02, 0.1), (0.3, 0.25), (0.5, 0.01)])
def test_the_losss_expected_step_is_learning_plus_a_pull_towards_the_engine(error, noise):
    assert expected_step(error, noise, 4, {}) == pytest.approx(step_by_hand(error, noise, 4), rel=1e-5)


@pytest.mark.parametrize(("noise", "length"), [(0.05, 4), (0.25, 4), (0.25, 6)])
def test_uncorrected_training_rests_where_the_formula_says(noise, length):
    found = resting_error(lambda error: expected_step(error, noise, length, {}))
    assert found == pytest.approx(predicted_error(noise, length), rel=1e-3)


def test_a_multiplicative_error_does_harm_from_a_threshold_on():
    """At small errors, training learns if and only if exp(−η) > 1 − 2/T."""
    threshold = -math.log(1 - 2 / 6)
    steps = [expected_step(1e-4, factor * threshold, 6, {}, engine_of=multiplicative) for factor in (0.99, 1.01)]
    assert steps[0] > 0 > steps[1]
    found = resting_error(lambda error: expected_step(error, 0.5, 6, {}, engine_of=multiplicative))
    assert found == pytest.approx(0.15284, rel=1e-3)


def test_groups_that_are_normalised_rest_at_a_larger_error():
    found = resting_error(lambda error: expected_step(error, 0.25, 4, {}, group=4))
    assert found == pytest.approx(0.18193, rel=1e-3)  # the formula has 0.13333


@pytest.mark.parametrize(
    ("settings", "case"),
    [
        (weight("token"), {}),
        (weight("token", **TRUNCATED), {}),
        (weight("sequence"), {}),
        ({}, {"reply_baseline": True}),
        ({}, {"luck": False}),
    ],
    ids=["token", "token, truncated", "sequence", "a baseline that knows the reply", "no luck"],
)
def test_what_removes_the_pull_lets_the_policy_learn(settings, case):
    assert resting_error(lambda error: expected_step(error, 0.25, 4, settings, **case)) == 0.0


def test_equal_engines_have_no_pull():
    assert resting_error(lambda error: expected_step(error, 0.0, 4, {})) == 0.0


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        (weight("sequence_mean"), 4),
        ({"masks": [{"preset": "geometric", "min": 0.8, "max": 1.25}]}, 4),
        ({"masks": [{"preset": "opsm", "delta": 0.5}]}, 4),
        ({"masks": [{"preset": "dppo_tv", "delta": 0.45}]}, 4),
        # The policy rests where the wrong tokens' weight is 1 − 2/T, which is outside IcePop's bounds only for short T.
        ({"masks": [{"preset": "icepop", "min": 0.5, "max": 5.0}]}, 6),
    ],
    ids=["sequence_mean", "geometric", "OPSM", "DPPO", "IcePop"],
)
def test_what_leaves_the_pull_rests_about_where_uncorrected_training_does(settings, length):
    found = resting_error(lambda error: expected_step(error, 0.25, length, settings))
    assert 0.7 * predicted_error(0.25, length) < found < 1.5 * predicted_error(0.25, length)


def test_the_weight_of_a_wrong_token_at_rest_is_1_minus_2_over_the_length():
    length, noise = 6, 0.25
    error = resting_error(lambda error: expected_step(error, noise, length, {}))
    engine = (1 - noise) * error / (TOKENS - 1) + noise / TOKENS
    assert error / (TOKENS - 1) / engine == pytest.approx(1 - 2 / length, rel=1e-3)
    icepop = {"masks": [{"preset": "icepop", "min": 0.7, "max": 5.0}]}
    assert resting_error(lambda error: expected_step(error, noise, length, icepop)) == 0.0
