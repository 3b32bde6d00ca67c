from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")

from nemo_geomask.tools.lab.generation_engine import generate
from nemo_geomask.tools.lab.policy_model import build_policy, generation_copy, token_logprobs
from nemo_geomask.tools.lab.rollout import collect_rollout, write_rollout
from nemo_geomask.tools.lab.samplers import CopySampler
from nemo_geomask.tools.lab.tasks import Progressions
from nemo_geomask.tools.lab.training_engine import TrainingEngine


@pytest.fixture
def parts(tiny):
    def build(**change):
        recipe = tiny(**change)
        task = Progressions(recipe.env.modulus, recipe.env.min_terms, recipe.env.max_terms)
        return recipe, task, build_policy(recipe.policy.model, task, seed=0)

    return build


def seeded(count=2):
    return tuple(torch.Generator().manual_seed(seed) for seed in range(count))


def test_policy_is_a_float32_moe_that_the_seed_determines(parts):
    recipe, task, policy = parts()
    assert type(policy).__name__ == "Qwen3MoeForCausalLM"
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    assert any("experts" in name for name, _ in policy.named_parameters())
    again, other = (build_policy(recipe.policy.model, task, seed) for seed in (0, 1))
    for mine, same in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, same)
    assert not torch.equal(policy.lm_head.weight, other.lm_head.weight)


def test_generation_logprobs_are_those_of_the_engine_that_sampled(parts):
    recipe, task, policy = parts(grpo={"num_prompts_per_step": 16})
    prompts = task.sample(64, torch.Generator().manual_seed(5))
    engine = generation_copy(policy, recipe.policy.generation)
    assert {weight.dtype for weight in engine.parameters()} == {torch.bfloat16}
    sampled = generate([engine], prompts, task, recipe.policy.generation, torch.Generator().manual_seed(6))
    valid = sampled.token_mask[:, 1:].bool()
    with torch.no_grad():
        references = {
            "replayed": replayed(engine, sampled.input_ids, task.prompt_width),
            "whole": token_logprobs(engine, sampled.input_ids),
            "policy": token_logprobs(policy, sampled.input_ids),
        }
    gap = {name: (sampled.logprobs[:, 1:] - value)[valid].abs() for name, value in references.items()}
    # Fed its own tokens one by one, the engine says the same again; only the number of rows per step differs.
    assert (gap["replayed"] < 1e-6).float().mean() > 0.9
    # In one pass without the cache, bfloat16 rounds elsewhere; some tokens still come out equal, and all are close.
    assert (gap["whole"] < 1e-6).float().mean() > 0.1
    assert gap["whole"].mean() < 0.02
    # The float32 policy is another distribution.
    assert (gap["policy"] < 1e-6).float().mean() < 0.05
    assert gap["policy"].mean() > 1e-3


def replayed(engine, input_ids, width):
    """[B, T-1] log-probs of given tokens, decoded one at a time with the cache; 0 within the prompt."""
    output = engine(input_ids=input_ids[:, :width], use_cache=True)
    columns = [torch.zeros(len(input_ids), width - 1)]
    for position in range(width, input_ids.shape[1]):
        token = input_ids[:, position : position + 1]
        columns.append(output.logits[:, -1].float().log_softmax(dim=-1).gather(-1, token))
        output = engine(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    return torch.cat(columns, dim=1)


def test_float32_generation_has_no_mismatch(parts):
    recipe, task, policy = parts(policy={"generation": {"precision": "float32"}})
    data = collect_rollout((policy,), None, recipe, task, seeded(), TrainingEngine()).data
    difference = (data["prev_logprobs"] - data["generation_logprobs"])[data["token_mask"].bool()]
    assert difference.abs().max() < 1e-5


def test_the_coarser_the_numerics_the_larger_the_mismatch(parts):
    sizes = []
    for generation in (
        {"precision": "float32"},
        {"precision": "float16"},
        {},
        {"quantization": {"weights": "float8_e4m3"}},
        {"quantization": {"weights": "int4"}},
    ):
        recipe, task, policy = parts(policy={"generation": generation})
        data = collect_rollout((policy,), None, recipe, task, seeded(), TrainingEngine()).data
        difference = (data["prev_logprobs"] - data["generation_logprobs"])[data["token_mask"].bool()]
        sizes.append(float(difference.abs().mean()))
        assert torch.isfinite(data["generation_logprobs"]).all()
    assert all(2 * finer < coarser for finer, coarser in itertools.pairwise(sizes)), sizes


def test_training_in_bfloat16_is_another_arithmetic_on_float32_weights(parts):
    recipe, task, policy = parts()
    whole = collect_rollout((policy,), None, recipe, task, seeded(), TrainingEngine()).data
    half, _, _ = parts(policy={"precision": "bfloat16"})
    half = collect_rollout((policy,), None, recipe, task, seeded(), TrainingEngine(recipe=half)).data
    assert torch.equal(whole["input_ids"], half["input_ids"])
    gap = (whole["prev_logprobs"] - half["prev_logprobs"])[whole["token_mask"].bool()].abs().mean()
    assert 1e-3 < gap < 0.1
    assert half["prev_logprobs"].dtype == torch.float32


def test_engine_samples_its_own_distribution(parts):
    recipe, task, policy = parts(env={"min_terms": 4, "max_terms": 4})
    prompts = task.sample(1, torch.Generator().manual_seed(0))
    many = type(prompts)(prompts.token_ids.expand(4000, -1), prompts.terms.expand(4000))
    engine = generation_copy(policy, recipe.policy.generation)
    sampled = generate([engine], many, task, recipe.policy.generation, torch.Generator().manual_seed(1))
    first = sampled.input_ids[:, task.prompt_width]
    counts = torch.bincount(first, minlength=task.vocab_size) / 4000
    for token in range(task.vocab_size):
        drawn = sampled.logprobs[first == token, task.prompt_width]
        if len(drawn):
            probability = float(drawn[0].exp())
            assert float(counts[token]) == pytest.approx(probability, abs=5 * (probability / 4000) ** 0.5)


@dataclass(frozen=True)
class Calls(Progressions):
    """After each ``+`` the environment writes three tokens, the number of its call and EOS among them."""

    @property
    def call_id(self):
        return self.sign_id

    def reply(self, prompt, response, luck):
        assert response[-1] == self.call_id
        return [response.count(self.call_id) % self.modulus, self.eos_id, self.colon_id]


def test_what_the_environment_writes_is_read_and_not_trained_on(parts):
    recipe, _, policy = parts(policy={"generation": {"precision": "float32"}}, grpo={"num_prompts_per_step": 16})
    task = Calls(recipe.env.modulus, recipe.env.min_terms, recipe.env.max_terms)
    prompts = task.sample(64, torch.Generator().manual_seed(3))
    settings = recipe.policy.generation
    sampled = generate([policy], prompts, task, settings, torch.Generator().manual_seed(4))
    said = token_logprobs(policy, sampled.input_ids).detach()
    calls = 0
    for row, terms in enumerate(prompts.terms.tolist()):
        length = int(sampled.input_lengths[row])
        response = sampled.input_ids[row, task.prompt_width : length].tolist()
        own = sampled.token_mask[row, task.prompt_width : length].bool().tolist()
        assert len(response) <= terms
        assert not sampled.token_mask[row, length:].any()
        written, count = [], 0
        for place, token in enumerate(response):
            assert own[place] == (not written)
            if written:
                assert token == written.pop(0)
                assert sampled.logprobs[row, task.prompt_width + place] == 0
                continue
            column = task.prompt_width + place
            assert float(sampled.logprobs[row, column]) == pytest.approx(float(said[row, column - 1]), abs=1e-4)
            if token == task.call_id:
                count += 1
                written = [count % task.modulus, task.eos_id, task.colon_id]
        calls += count
        assert length == task.prompt_width + terms or (response[-1] == task.eos_id and own[-1])
    assert calls > 20
    sampler = CopySampler(recipe, task)
    data = collect_rollout((policy,), None, recipe, task, seeded(), TrainingEngine(), sampler).data
    assert (data["token_mask"].sum(dim=1) < data["input_lengths"] - task.prompt_width).any()


def test_without_an_end_responses_are_as_long_as_asked_for(parts):
    recipe, task, policy = parts(policy={"generation": {"ignore_eos": True}})
    data = collect_rollout((policy,), None, recipe, task, seeded(), TrainingEngine()).data
    lengths = data["token_mask"].sum(dim=1)
    assert torch.equal(lengths + task.prompt_width, data["input_lengths"].float())
    prompts = task.sample(recipe.grpo.num_prompts_per_step, seeded()[0])
    assert torch.equal(lengths, prompts.terms.repeat_interleave(4).float())
    assert (data["input_ids"][:, task.prompt_width :] == task.eos_id).any()


def test_columns_speak_of_their_own_token(parts):
    recipe, task, policy = parts(grpo={"num_prompts_per_step": 8})
    data = collect_rollout((policy,), policy, recipe, task, seeded(), TrainingEngine()).data
    ids, lengths, mask = data["input_ids"], data["input_lengths"], data["token_mask"]
    batch, width = ids.shape
    # Independent of the lab: one row at a time, unpadded, gathered in float64.
    for row in range(batch):
        length = int(lengths[row])
        with torch.no_grad():
            logits = policy(input_ids=ids[row : row + 1, :length]).logits[0].double()
        for t in range(task.prompt_width, length):
            expected = logits[t - 1].log_softmax(-1)[ids[row, t]]
            assert float(data["prev_logprobs"][row, t]) == pytest.approx(float(expected), abs=2e-5)
        assert mask[row].tolist() == [float(task.prompt_width <= position < length) for position in range(width)]
        assert (ids[row, length:] == task.pad_id).all()
        response = ids[row, task.prompt_width : length].tolist()
        assert task.eos_id not in response[:-1]
    assert torch.equal(data["reference_policy_logprobs"], data["prev_logprobs"])
    assert (data["generation_logprobs"][mask == 0] == 0).all()
    assert data["sample_mask"].tolist() == [1.0] * batch
    assert lengths.unique().numel() > 1


def test_dump_has_nemo_rls_format(parts, tmp_path):
    recipe, task, policy = parts()
    rollout = collect_rollout((policy,), None, recipe, task, seeded(), TrainingEngine())
    write_rollout(rollout, task, tmp_path / "train_data_step1.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "train_data_step1.jsonl").read_text().splitlines()]
    batch, width = rollout.data["input_ids"].shape
    assert [line["idx"] for line in lines] == list(range(batch))
    per_token = {"token_ids", "token_loss_mask", "advantages", "generation_logprobs", "prev_logprobs"}
    per_sequence = {"content", "rewards", "input_lengths", "sample_loss_mask"}
    for row, line in enumerate(lines):
        assert set(line) == per_token | per_sequence | {"idx"}
        assert all(len(line[key]) == 1 for key in per_token | per_sequence)
        assert all(len(line[key][0]) == width for key in per_token)
        prompt, response = line["content"][0]
        assert prompt.endswith(":")
        assert len(response.split()) == line["input_lengths"][0] - task.prompt_width
        assert line["prev_logprobs"][0] == rollout.data["prev_logprobs"][row].tolist()
