from __future__ import annotations

import pytest
import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.lab_recipe import EnvConfig
from nemo_geomask.tools.lab.lookup_task import Lookups

TASK = Lookups(modulus=7, min_terms=7, max_terms=21)
PROMPT = [3, TASK.colon_id]
ASK, EOS = TASK.call_id, TASK.eos_id


@pytest.mark.parametrize(
    ("response", "terms", "reward"),
    [
        ([ASK, 5, 0, 2, 5, 0, 2], 7, 1.0),
        ([ASK, 5, 0, 2, 5, 1, 2], 7, 2 / 3),
        ([ASK, 5, 0, 2, 5, 0, 2], 14, 1 / 2),  # the second round is forfeited
        ([ASK, 5, 0, 2, 5, EOS, 2], 7, 1 / 3),  # nothing after EOS counts
        ([ASK, 5, 0, 2, 5, 0, 2, ASK, 1, 1, 1, 1, 1, 1], 14, 1.0),
        ([4, 4, ASK, 5, 0, 2, 5, 0, 2], 14, 1 / 2),
        ([ASK, 5, 5, 5, ASK, 5, 5, 5, 5], 14, 1 / 6),  # what the tool writes is no repetition
        ([ASK, EOS, 5, 5, 1, 5, 5], 7, 2 / 3),  # nor is an EOS of its
        ([5, 0, 2, 5, 0, 2], 7, 0.0),
        ([ASK, 5, 0, 2, 5, 0, 2, ASK, 1, 1, 1, 1, 1, 1], 13, 1.0),  # of a round that is cut off, no more than 1
        ([], 7, 0.0),
    ],
)
def test_reward(response, terms, reward):
    assert TASK.reward(PROMPT, response, terms) == pytest.approx(reward)


def test_replies_repeat_and_are_spread_over_the_numbers():
    replies = [TASK.reply([key, TASK.colon_id], [*range(count), ASK]) for key in range(7) for count in range(300)]
    assert replies[:300] == [TASK.reply([0, TASK.colon_id], [*range(count), ASK]) for count in range(300)]
    for place in range(3):
        counts = torch.bincount(torch.tensor(replies)[:, place], minlength=7) / len(replies)
        assert counts.shape == (7,)
        assert (counts - 1 / 7).abs().max() < 0.04


def test_a_response_has_room_for_a_round():
    with pytest.raises(
        ConfigError, match="env.min_terms: 6 is too small: a call, its reply and the repetition are 7 tokens"
    ):
        Lookups.of(EnvConfig(name="lookups", min_terms=6))
    assert Lookups.of(EnvConfig(name="lookups", modulus=5, min_terms=7)).modulus == 5


def test_text_and_prompts():
    assert TASK.text([*PROMPT, ASK, 5, EOS, TASK.pad_id]) == "3 : ? 5 <eos> <pad>"
    prompts = TASK.sample(500, torch.Generator().manual_seed(0))
    assert set(prompts.terms.tolist()) == set(range(7, 22))
    assert set(prompts.token_ids[:, 0].tolist()) == set(range(7))


def test_it_is_learned_from(tiny):
    pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")
    from nemo_geomask import build_loss
    from nemo_geomask.tools.lab.trainer import Trainer

    recipe = tiny(env={"name": "lookups", "min_terms": 7}, grpo={"num_prompts_per_step": 16})
    (_, _), (metrics, rollout) = Trainer(recipe, build_loss(recipe.loss_fn)).steps()
    data = rollout.data
    written = (data["input_lengths"] - 2) - data["token_mask"].sum(dim=1)
    calls = (data["input_ids"][:, 2:] == recipe.env.modulus).sum(dim=1)
    assert calls.sum() > 5
    assert (written <= 3 * calls).all()
    assert (written > 0).any()
    assert metrics["grad_norm"] > 0
