"""A real engine: what it says of its samples, and whose weights it samples from."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make vllm")

import vllm

from nemo_geomask.errors import ConfigError, EngineError
from nemo_geomask.hosts.vllm import load_weights, rollout_batch
from nemo_geomask.tools.lab import samplers as lab_vllm
from nemo_geomask.tools.lab.policy_model import build_policy, checkpoint_weights, token_logprobs

pytestmark = pytest.mark.timeout(240)
# float32 on both sides; the order of sums differs.
ROUNDING = 2e-5


def greedy(llm, prompts, length=12):
    """The likeliest response to each prompt, and its log-probs."""
    params = vllm.SamplingParams(temperature=0.0, max_tokens=length, logprobs=0, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    completions = [output.outputs[0] for output in llm.generate(requests, params, use_tqdm=False)]
    tokens = [list(completion.token_ids) for completion in completions]
    logprobs = [
        [entry[token].logprob for token, entry in zip(own, completion.logprobs, strict=True)]
        for own, completion in zip(tokens, completions, strict=True)
    ]
    return torch.tensor(tokens), torch.tensor(logprobs)


@torch.no_grad()
def trainers(policy, prompts, tokens):
    """What the trainer says of the same tokens, and whether it too would have taken them."""
    ids = torch.cat([torch.tensor(prompts), tokens], dim=1)
    start = len(prompts[0]) - 1
    likeliest = policy(input_ids=ids).logits[:, start:-1].argmax(dim=-1)
    return token_logprobs(policy, ids)[:, start:], likeliest


def test_greedy_logprobs_are_the_trainers_once_its_weights_are_loaded(sampler, policy, task):
    # Long enough for vLLM to keep their keys and values, which belong to the weights that computed them.
    prompts = torch.randint(task.vocab_size, (6, 270), generator=torch.Generator().manual_seed(0)).tolist()
    other = build_policy(sampler.recipe.policy.model, task, seed=1)
    load_weights(sampler.llm, checkpoint_weights(other))
    tokens, before = greedy(sampler.llm, prompts)
    gap = (before - trainers(policy, prompts, tokens)[0]).abs()
    assert gap.mean() > 0.5
    assert (before - trainers(other, prompts, tokens)[0]).abs().max() < ROUNDING
    for step in range(3):
        load_weights(sampler.llm, checkpoint_weights(policy))
        tokens, after = greedy(sampler.llm, prompts)
        expected, likeliest = trainers(policy, prompts, tokens)
        assert torch.equal(tokens, likeliest), step
        assert (after - expected).abs().max() < ROUNDING, step
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)))
        # Without the new weights the engine still speaks for the old ones, cache and all.
        assert (after - trainers(policy, prompts, tokens)[0]).abs().max() > 0.05


def test_every_weight_matters(sampler, policy):
    """Each tensor by itself reaches the engine: none is left behind by a name that vLLM passes over."""
    prompts = [[1, 7, 3, 8], [5, 7, 2, 8]]
    load_weights(sampler.llm, checkpoint_weights(policy))
    names = {name.split("layers.1.")[-1] for name in dict(policy.named_parameters()) if "layers.0." not in name}
    assert len(names) == 14
    tokens, before = greedy(sampler.llm, prompts)
    for name, weight in policy.named_parameters():
        if "layers.0." in name:
            continue
        with torch.no_grad():
            # Not a common factor, which a norm behind it would undo.
            weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        load_weights(sampler.llm, checkpoint_weights(policy))
        tokens, after = greedy(sampler.llm, prompts)
        assert (after - trainers(policy, prompts, tokens)[0]).abs().max() < ROUNDING, name
        assert before.shape != after.shape or (before - after).abs().max() > 1e-3, name
        before = after


def test_a_batch_of_real_outputs_holds_the_trainers_logprobs(sampler, policy, task):
    load_weights(sampler.llm, checkpoint_weights(policy))
    params = vllm.SamplingParams(
        n=3, temperature=1.0, max_tokens=10, logprobs=2, seed=7, stop_token_ids=[task.eos_id], detokenize=False
    )
    prompts = task.sample(5, torch.Generator().manual_seed(2)).token_ids.tolist()
    outputs = sampler.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    data = rollout_batch(
        outputs, pad_token_id=task.pad_id, sampling_params=params, logprobs_mode=sampler.llm.model_config.logprobs_mode
    )
    ids, mask = data["input_ids"], data["token_mask"].bool()
    assert ids[:, :4].tolist() == [prompt for prompt in prompts for _ in range(3)]
    with torch.no_grad():
        gap = token_logprobs(policy, ids) - data["generation_logprobs"][:, 1:]
    assert gap[mask[:, 1:]].abs().max() < ROUNDING
    assert (data["generation_logprobs"][~mask] == 0).all()
    ended = (ids[:, 4:] == task.eos_id).any(dim=1)
    assert torch.equal(data["truncated"], ~ended)
    assert ended.any()
    assert (~ended).any()
    assert (data["input_lengths"][~ended] == 14).all()


def test_processed_logprobs_are_those_of_the_tempered_and_cut_distribution(sampler, policy, task):
    load_weights(sampler.llm, checkpoint_weights(policy))
    temperature, top_k = 0.7, 4
    params = vllm.SamplingParams(temperature=temperature, top_k=top_k, max_tokens=6, logprobs=0, seed=1)
    prompt = [1, 7, 3, 8]
    outputs = sampler.llm.generate([{"prompt_token_ids": prompt}] * 8, params, use_tqdm=False)
    settings = {"pad_token_id": task.pad_id, "sampling_params": params}
    data = rollout_batch(outputs, logprobs_mode=sampler.llm.model_config.logprobs_mode, **settings)
    with torch.no_grad():
        logits = policy(input_ids=data["input_ids"]).logits[:, :-1] / temperature
    kept = logits >= logits.topk(top_k, dim=-1).values[..., -1:]
    expected = torch.where(kept, logits, -torch.inf).log_softmax(dim=-1)
    expected = expected.gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
    mask = data["token_mask"][:, 1:].bool()
    assert (expected - data["generation_logprobs"][:, 1:])[mask].abs().max() < ROUNDING
    with pytest.raises(ConfigError, match=r"temperature=0\.7, top_k=4"):
        rollout_batch(outputs, logprobs_mode="raw_logprobs", **settings)


def test_the_sampler_repeats_itself_by_seed_and_stops_where_asked(sampler, policy, task):
    def sample(seed):
        prompts = task.sample(16, torch.Generator().manual_seed(4))
        return prompts, sampler.sample([policy], prompts, torch.Generator().manual_seed(seed))

    (prompts, one), (_, same), (_, other) = sample(5), sample(5), sample(6)
    assert torch.equal(one.input_ids, same.input_ids)
    assert torch.equal(one.logprobs, same.logprobs)
    assert not torch.equal(one.input_ids[:, :8], other.input_ids[:, :8])
    lengths = one.token_mask.sum(dim=1)
    assert (lengths <= prompts.terms).all()
    for row, length, terms in zip(one.input_ids.tolist(), lengths.int().tolist(), prompts.terms.tolist(), strict=True):
        response = row[task.prompt_width : task.prompt_width + length]
        assert task.eos_id not in response[:-1]
        assert response[-1] == task.eos_id or length == terms


def test_an_engine_that_drops_the_weights_is_noticed(sampler, policy, task, monkeypatch):
    load_weights(sampler.llm, checkpoint_weights(build_policy(sampler.recipe.policy.model, task, seed=1)))
    monkeypatch.setattr(lab_vllm, "load_weights", lambda llm, weights: None)
    prompts = task.sample(16, torch.Generator().manual_seed(4))
    with pytest.raises(EngineError, match="does not use these weights"):
        sampler.sample([policy], prompts, torch.Generator().manual_seed(0))


def test_weights_are_not_loaded_under_a_running_request(sampler, policy):
    engine = sampler.llm.llm_engine
    engine.add_request("running", {"prompt_token_ids": [1, 2]}, vllm.SamplingParams(max_tokens=4, detokenize=False))
    try:
        with pytest.raises(EngineError, match="unfinished requests"):
            load_weights(sampler.llm, checkpoint_weights(policy))
    finally:
        while engine.has_unfinished_requests():
            engine.step()


def test_torchs_threads_stay_the_trainers(sampler):
    torch.set_num_threads(2)
    try:
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
