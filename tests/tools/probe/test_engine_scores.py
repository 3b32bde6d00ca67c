"""Requests to an engine: what is sent, and that another token than the given one is an error."""

from types import SimpleNamespace

import pytest

from nemo_geomask.errors import EngineError
from nemo_geomask.tools.probe.engine_scores import REPLAY, decode_scores, prefill_scores

SEQUENCES = [[1, 2, 10, 11], [3, 12], [4, 5, 13, 14, 15]]
LENGTHS = [2, 1, 2]


def entry(token):
    return {token: SimpleNamespace(logprob=-token / 100)}


class Engine:
    """Decodes the tokens that a request gives, as vLLM with the processor does."""

    def __init__(self, ignores=False):
        self.calls = []
        self.ignores = ignores

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, parameters, use_tqdm):
        self.calls.append((prompts, parameters))
        if not isinstance(parameters, list):
            return [
                SimpleNamespace(prompt_logprobs=[None, *map(entry, prompt["prompt_token_ids"][1:])])
                for prompt in prompts
            ]
        outputs = []
        for each in parameters:
            tokens = [7] * each.max_tokens if self.ignores else each.extra_args[REPLAY]
            outputs.append(
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=list(map(entry, tokens)))])
            )
        return outputs


class Actor:
    def __init__(self, **options):
        self.llm = Engine(**options)

    def SamplingParams(self, **fields):
        return SimpleNamespace(**fields)

    def _build_sampling_params(self, *, greedy, stop_strings, max_new_tokens):
        return SimpleNamespace(
            temperature=0.7, top_p=1.0, top_k=-1, max_tokens=max_new_tokens, stop_token_ids=[1], ignore_eos=False
        )


def test_the_engine_is_given_the_responses_and_gives_their_logprobs():
    actor = Actor()
    scores = decode_scores(actor, SEQUENCES, LENGTHS, {})["logprobs"]
    assert scores == [[-0.10, -0.11], [-0.12], [-0.13, -0.14, -0.15]]
    ((prompts, parameters),) = actor.llm.calls
    assert [prompt["prompt_token_ids"] for prompt in prompts] == [[1, 2], [3], [4, 5]]
    assert [each.temperature for each in parameters] == [0.7] * 3
    assert all(each.ignore_eos and not each.stop_token_ids for each in parameters)


def test_order_and_batch_change_the_calls_and_not_the_answer():
    actor = Actor()
    scores = decode_scores(actor, SEQUENCES, LENGTHS, {"reversed": True, "batch": 2, "temperature": 1.0})["logprobs"]
    assert scores == [[-0.10, -0.11], [-0.12], [-0.13, -0.14, -0.15]]
    assert [[prompt["prompt_token_ids"] for prompt in prompts] for prompts, _ in actor.llm.calls] == [
        [[4, 5], [3]],
        [[1, 2]],
    ]
    assert {each.temperature for _, parameters in actor.llm.calls for each in parameters} == {1.0}


def test_an_engine_that_decodes_other_tokens_is_an_error():
    with pytest.raises(EngineError, match="sequence 0: the engine was given 2 tokens to decode and decoded"):
        decode_scores(Actor(ignores=True), SEQUENCES, LENGTHS, {})


def test_prefill_gives_the_responses_alone():
    actor = Actor()
    assert prefill_scores(actor, SEQUENCES, LENGTHS)["logprobs"] == [[-0.10, -0.11], [-0.12], [-0.13, -0.14, -0.15]]
    _, parameters = actor.llm.calls[0]
    assert (parameters.temperature, parameters.prompt_logprobs) == (1.0, 0)


def test_an_engine_that_scores_other_tokens_is_an_error(monkeypatch):
    actor = Actor()
    outputs = [SimpleNamespace(prompt_logprobs=[None, *map(entry, range(90, 94))]) for _ in SEQUENCES]
    monkeypatch.setattr(actor.llm, "generate", lambda *arguments, **options: outputs)
    with pytest.raises(EngineError, match="the engine returned no log-prob of token 10, which it was given"):
        prefill_scores(actor, SEQUENCES, LENGTHS)
