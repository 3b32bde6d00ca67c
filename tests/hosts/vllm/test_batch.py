"""From vLLM's objects to a rollout batch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make vllm")

import vllm
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import PoolingOutput, PoolingRequestOutput
from vllm.sampling_params import RequestOutputKind

from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.hosts.vllm import rollout_batch

PAD = 99
PARAMS = vllm.SamplingParams(logprobs=0)


def completion(tokens, *, index=0, finish="stop", logprobs="own"):
    if logprobs == "own":
        logprobs = [{token: Logprob(-0.5 - token / 100)} for token in tokens]
    return vllm.CompletionOutput(
        index=index, text="", token_ids=tokens, cumulative_logprob=None, logprobs=logprobs, finish_reason=finish
    )


def request(*completions, prompt=(1, 2, 3), finished=True, name="7"):
    prompt = None if prompt is None else list(prompt)
    return vllm.RequestOutput(name, None, prompt, None, list(completions), finished)


def batch(*outputs, params=PARAMS, mode="processed_logprobs", **settings):
    return rollout_batch(list(outputs), pad_token_id=PAD, sampling_params=params, logprobs_mode=mode, **settings)


def test_columns_speak_of_their_own_token():
    data = batch(
        request(completion([4, 5])),
        request(completion([6, 7, 8, 9], finish="length"), prompt=[3]),
        request(completion([5]), prompt=[1, 2]),
    )
    assert data["input_ids"].tolist() == [[1, 2, 3, 4, 5], [3, 6, 7, 8, 9], [1, 2, 5, PAD, PAD]]
    assert data["input_lengths"].tolist() == [5, 5, 3]
    assert data["token_mask"].tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 0, 0]]
    expected = [[0, 0, 0, -0.54, -0.55], [0, -0.56, -0.57, -0.58, -0.59], [0, 0, -0.55, 0, 0]]
    torch.testing.assert_close(data["generation_logprobs"], torch.tensor(expected))
    assert data["sample_mask"].tolist() == [1, 1, 1]
    assert data["truncated"].tolist() == [False, True, False]
    assert {key: value.dtype for key, value in data.items()} == {
        "input_ids": torch.long,
        "input_lengths": torch.long,
        "generation_logprobs": torch.float32,
        "token_mask": torch.float32,
        "sample_mask": torch.float32,
        "truncated": torch.bool,
    }


def test_the_default_device_plays_no_part():
    outputs = request(completion([4, 5])), request(completion([6], finish="length"), prompt=[3])
    expected = batch(*outputs)
    with torch.device("meta"):
        found = batch(*outputs)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_sampled_token_counts_not_the_likeliest():
    entry = {8: Logprob(-0.1, rank=1), 4: Logprob(-3.0, rank=5), 9: Logprob(-0.7, rank=2)}
    data = batch(request(completion([4], logprobs=[entry])))
    assert data["generation_logprobs"][0, 3].item() == -3.0


def test_flat_logprobs_are_read_as_the_others():
    flat = FlatLogprobs()
    for token in (4, 5):
        flat.append({8: Logprob(-9.0), token: Logprob(-0.5 - token / 100)})
    plain, flattened = batch(request(completion([4, 5]))), batch(request(completion([4, 5], logprobs=flat)))
    assert all(torch.equal(plain[key], flattened[key]) for key in plain)


def test_completions_stand_in_the_order_of_their_index():
    data = batch(
        request(completion([5], index=1), completion([4], index=0)),
        request(completion([6], index=0), completion([7], index=1)),
        params=vllm.SamplingParams(n=2, logprobs=0),
    )
    assert data["input_ids"][:, 3].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("finish", "trained", "filtered", "truncated"),
    [
        ("stop", 1, 1, False),
        ("length", 1, 0, True),
        ("repetition", 1, 0, True),
        ("abort", 0, 0, True),
        ("error", 0, 0, True),
    ],
)
def test_how_a_response_ended_says_whether_it_trains(finish, trained, filtered, truncated):
    output = request(completion([4, 5], finish=finish))
    data = batch(output)
    assert (data["sample_mask"].item(), data["truncated"].item()) == (trained, truncated)
    assert batch(output, overlong_filtering=True)["sample_mask"].item() == filtered


def test_a_request_aborted_before_its_first_token_is_a_row_that_does_not_train():
    data = batch(request(completion([], finish="abort", logprobs=None)), request(completion([4])))
    assert data["input_ids"].tolist() == [[1, 2, 3, PAD], [1, 2, 3, 4]]
    assert (data["sample_mask"].tolist(), data["input_lengths"].tolist()) == ([0, 1], [3, 4])
    assert data["token_mask"][0].sum() == 0


def test_a_logprob_that_is_not_finite_is_passed_on_for_the_loss_to_judge():
    data = batch(request(completion([4], logprobs=[{4: Logprob(float("nan"))}])))
    assert data["generation_logprobs"][0, 3].isnan()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (request(completion([4], logprobs=None)), "log-probs of 0 of its 1 tokens; set sampling_params.logprobs to 0"),
        (request(completion([4, 5], logprobs=[{4: Logprob(-1.0)}])), "log-probs of 1 of its 2 tokens"),
        (request(completion([4], logprobs=[{5: Logprob(-1.0)}])), "lacks the log-prob of token 4 at position 0"),
        (request(completion([4]), finished=False), "request 7 is not finished"),
        (request(completion([4], finish=None)), "finish_reason None; known: stop, length"),
        (request(completion([4], finish="bored")), "finish_reason 'bored'"),
        (request(completion([])), "completion 0 has no tokens, though it ended with 'stop'"),
        (request(), "holds 0 of 1 completions"),
        (request(completion([4]), completion([5], index=1)), "holds 2 of 1 completions"),
        (request(completion([4]), prompt=None), "no prompt_token_ids; give prompts as text or token ids"),
        (PoolingRequestOutput("7", PoolingOutput(torch.ones(2)), [1, 2], 0, True), "holds 0 of 1 completions"),
    ],
)
def test_outputs_that_are_no_samples_are_refused(output, message):
    with pytest.raises(DataError, match=message):
        batch(output)


def test_no_outputs_and_ill_matched_parameters_are_refused():
    with pytest.raises(DataError, match="outputs is empty"):
        batch()
    with pytest.raises(DataError, match="2 entries for 1 outputs"):
        batch(request(completion([4])), params=[PARAMS, PARAMS])


RESHAPED = [
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.2},
    {"min_tokens": 2},
    {"thinking_token_budget": 8},
    {"logit_bias": {4: 1.0}},
    {"allowed_token_ids": [4, 5]},
    {"bad_words": ["no"]},
]


@pytest.mark.parametrize("settings", RESHAPED, ids=lambda settings: next(iter(settings)))
def test_raw_logprobs_are_refused_only_where_the_sampled_distribution_is_another(settings):
    plain = vllm.SamplingParams(logprobs=3, temperature=1.0, top_k=-1, top_p=1.0, seed=4, max_tokens=9)
    assert batch(request(completion([4])), params=plain, mode="raw_logprobs")["sample_mask"].item() == 1
    params = vllm.SamplingParams(logprobs=0, **settings)
    name = next(iter(settings))
    with pytest.raises(
        ConfigError, match=rf"'raw_logprobs', which ignores .*{name}=.*logprobs_mode='processed_logprobs'"
    ):
        batch(request(completion([4])), params=params, mode="raw_logprobs")
    assert batch(request(completion([4])), params=params)["sample_mask"].item() == 1


def test_every_requests_parameters_are_looked_at():
    params = [PARAMS, vllm.SamplingParams(logprobs=0, temperature=0.5)]
    with pytest.raises(ConfigError, match="temperature=0.5"):
        batch(request(completion([4])), request(completion([4])), params=params, mode="raw_logprobs")


@pytest.mark.parametrize(
    ("settings", "mode", "message"),
    [
        ({"logprobs": 0}, "processed_logits", "'processed_logits', which gives no log-probs"),
        ({"logprobs": 0}, "raw_logits", "'raw_logits', which gives no log-probs"),
        ({}, "processed_logprobs", "logprobs is None.*set it to 0"),
        ({"logprobs": 0, "temperature": 0.0}, "processed_logprobs", "greedy decoding"),
        ({"logprobs": 0, "output_kind": RequestOutputKind.DELTA}, "processed_logprobs", "DELTA.*use FINAL_ONLY"),
    ],
)
def test_settings_without_a_sampled_distribution_are_refused(settings, mode, message):
    with pytest.raises(ConfigError, match=message):
        batch(request(completion([4])), params=vllm.SamplingParams(**settings), mode=mode)
