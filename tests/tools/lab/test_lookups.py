from __future__ import annotations

import pytest
import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.lab_recipe import EnvConfig
from nemo_geomask.tools.lab.tasks import Lookups

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
def test_a_reward_is_the_share_of_repeated_numbers(response, terms, reward):
    assert TASK.reward(PROMPT, response, terms) == pytest.approx(reward)


def test_replies_repeat_and_are_spread_over_the_numbers():
    replies = [TASK.reply([key, TASK.colon_id], [*range(count), ASK], 0.5) for key in range(7) for count in range(300)]
    assert replies[:300] == [TASK.reply([0, TASK.colon_id], [*range(count), ASK], 0.5) for count in range(300)]
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
