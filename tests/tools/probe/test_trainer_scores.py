"""Samples of a trainer: drawn from its own distribution, with the recipe's filters, up to a stop token."""

import functools
import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from nemo_geomask.tools.probe import trainer_scores

VOCABULARY, STOP = 5, 4


class Policy:
    """A trainer whose next token depends on the last one alone; logits have two columns of padding."""

    def __init__(self, table, workers=1):
        padding = torch.full((len(table), 2), 50.0)
        self.table = torch.cat([torch.as_tensor(table, dtype=torch.float32), padding], dim=1)
        self.worker_group = SimpleNamespace(workers=[None] * workers)
        self.batches = []

    def get_topk_logits(self, data, k):
        self.batches.append(data["input_ids"].shape)
        values, indices = self.table[data["input_ids"].clamp(max=VOCABULARY - 1)].topk(k, dim=-1)
        return {"topk_logits": values, "topk_indices": indices}


@pytest.fixture(autouse=True)
def nemo_rl(monkeypatch):
    """As much of NeMo-RL as sampling uses: its batches, and top-k alone of its filters."""
    batches = types.ModuleType("nemo_rl.distributed.batched_data_dict")
    batches.BatchedDataDict = dict
    filters = types.ModuleType("nemo_rl.algorithms.logits_sampling_utils")

    def apply_top_k_top_p(logits, top_k, top_p):
        if top_k is None:
            return logits, None
        lowest = logits.topk(top_k, dim=-1).values[..., -1:]
        return logits.masked_fill(logits < lowest, float("-inf")), None

    filters.apply_top_k_top_p = apply_top_k_top_p
    for name in ("nemo_rl", "nemo_rl.distributed", "nemo_rl.algorithms"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, batches.__name__, batches)
    monkeypatch.setitem(sys.modules, filters.__name__, filters)


class ScoringPolicy:
    """A trainer that scores −1, excludes token 3, and masks what it excludes with NeMo-RL's function."""

    def __init__(self, workers):
        actors = [
            SimpleNamespace(model=None, cfg={}, sampling_params=SimpleNamespace(top_p=0.9)) for _ in range(workers)
        ]
        for actor in actors:
            actor.__ray_call__ = SimpleNamespace(remote=functools.partial(_called, actor))
        self.worker_group = SimpleNamespace(workers=actors)
        self.rows = []

    def get_logprobs(self, data):
        self.rows.append(len(data["input_ids"]))
        excluded = torch.where(data["input_ids"] == 3, float("-inf"), -1.0)
        return {"logprobs": sys.modules["nemo_rl.algorithms.utils"].mask_out_neg_inf_logprobs(excluded, None, "")}


def _called(actor, function, *arguments):
    return function(actor, *arguments)


def test_a_token_that_the_trainer_excludes_has_no_probability(monkeypatch):
    utilities, ray = types.ModuleType("nemo_rl.algorithms.utils"), types.ModuleType("ray")
    utilities.mask_out_neg_inf_logprobs = lambda logprobs, mask, name: torch.where(logprobs.isinf(), 0.0, logprobs)
    masking = utilities.mask_out_neg_inf_logprobs
    ray.get = lambda value, timeout=None: value
    monkeypatch.setitem(sys.modules, utilities.__name__, utilities)
    monkeypatch.setitem(sys.modules, "ray", ray)
    policy = ScoringPolicy(workers=2)
    frozen = {"sequences": [[1, 2, 3], [1, 3, 2], [2, 2, 2]], "prompt_lengths": [1, 1, 1]}
    tokenizer = SimpleNamespace(pad_token_id=0)
    answer = trainer_scores.trainer_scores(policy, {"logprob_batch_size": 2}, tokenizer, frozen, {"top_p": 0.8})
    assert answer["logprobs"] == [[-1.0, -math.inf], [-math.inf, -1.0], [-1.0, -1.0]]
    # Two workers compute batches of two, and what was replaced is as before.
    assert policy.rows == [4]
    assert utilities.mask_out_neg_inf_logprobs is masking
    assert policy.worker_group.workers[0].sampling_params.top_p == 0.9
    assert "top_p=0.8" in answer["settings"]["trainer.sampling"]


def sample(policy, prompts, *, most=6, vocabulary=VOCABULARY, **generation):
    config = {"logprob_batch_size": 2, "generation": {"max_new_tokens": most, "stop_token_ids": [STOP], **generation}}
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=STOP)
    return trainer_scores.sample_by_trainer(policy, config, tokenizer, prompts, vocabulary=vocabulary)


def table_of(*rows):
    return [[0.0 if column == row else -1e4 for column in range(VOCABULARY)] for row in rows]


def test_each_response_follows_the_distribution_of_its_own_last_token_and_ends_at_a_stop_token():
    policy = Policy(table_of(1, 2, 3, STOP, 0), workers=2)
    sequences, logprobs = sample(policy, [[0], [3, 2], [STOP]])
    assert sequences == [[0, 1, 2, 3, STOP], [3, 2, 3, STOP], [STOP, 0, 1, 2, 3, STOP]]
    assert logprobs == [[0.0] * 4, [0.0] * 2, [0.0] * 5]
    # Each of two workers computes batches of two.
    assert {rows for rows, _ in policy.batches} == {4}


def test_a_response_without_a_stop_token_has_the_recipes_length():
    sequences, _ = sample(Policy(table_of(1, 0, 0, 0, 0)), [[0]], most=7)
    assert sequences == [[0, 1, 0, 1, 0, 1, 0, 1]]


def test_frequencies_and_log_probs_are_those_of_the_logits():
    share = [0.1, 0.2, 0.3, 0.4]
    row = [math.log(value) for value in share] + [-1e4]
    sequences, logprobs = sample(Policy([row] * VOCABULARY), [[0]] * 40, most=100)
    tokens = [token for sequence in sequences for token in sequence[1:]]
    for token, expected in enumerate(share):
        deviation = math.sqrt(expected * (1 - expected) / len(tokens))
        assert abs(tokens.count(token) / len(tokens) - expected) < 4 * deviation
    for sequence, values in zip(sequences, logprobs, strict=True):
        assert values == pytest.approx([math.log(share[token]) for token in sequence[1:]], abs=1e-6)


def test_the_recipes_filters_apply():
    row = [math.log(value) for value in (0.1, 0.2, 0.3, 0.4)] + [-1e4]
    sequences, logprobs = sample(Policy([row] * VOCABULARY), [[0]] * 4, most=50, top_k=2)
    assert {token for sequence in sequences for token in sequence[1:]} == {2, 3}
    assert min(min(values) for values in logprobs) == pytest.approx(math.log(0.3 / 0.7), abs=1e-6)


def test_padded_columns_of_the_vocabulary_are_never_sampled_and_displace_no_token():
    sequences, logprobs = sample(Policy([[0.0] * (VOCABULARY - 1) + [-1e4]] * VOCABULARY), [[0]] * 4, most=50)
    assert {token for sequence in sequences for token in sequence[1:]} == {0, 1, 2, 3}
    assert {round(value, 6) for values in logprobs for value in values} == {round(-math.log(4), 6)}
