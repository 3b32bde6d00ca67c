"""Temperature, top-k and top-p against plain loops, in the engine and in training."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.generation_engine import draw_tokens, filter_logits
from nemo_geomask.tools.lab.policy_config import GenerationConfig
from nemo_geomask.tools.lab.policy_model import build_policy
from nemo_geomask.tools.lab.tasks import load_task
from nemo_geomask.tools.lab.trainer import Trainer


def kept(logits: list[float], temperature: float, top_k: int | None, top_p: float) -> list[float]:
    scaled = [value / temperature for value in logits]
    least = sorted(scaled, reverse=True)[min(top_k or len(scaled), len(scaled)) - 1]
    left = {index: value for index, value in enumerate(scaled) if value >= least}
    total = sum(math.exp(value) for value in left.values())
    held, order = 0.0, sorted(left, key=lambda index: (-left[index], index))
    result = [-math.inf] * len(scaled)
    for place, index in enumerate(order):
        if place == 0 or held < top_p:
            result[index] = scaled[index]
        held += math.exp(left[index]) / total
    return result


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (3, 1.0), (None, 0.6), (5, 0.8), (99, 1e-9), (1, 1.0)])
def test_logits_are_filtered_as_by_plain_loops(temperature, top_k, top_p):
    logits = 2 * torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    logits[0] = 0.0
    config = GenerationConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = [kept(row, temperature, top_k, top_p) for row in logits.double().tolist()]
    torch.testing.assert_close(filter_logits(logits, config).double(), torch.tensor(expected, dtype=torch.float64))


def test_what_is_filtered_out_is_never_drawn():
    config = GenerationConfig(top_k=2)
    logits = torch.randn(4000, 6, generator=torch.Generator().manual_seed(1))
    logits[:, 0] = logits[:, -1] = -9.0
    distribution = filter_logits(logits, config).log_softmax(dim=-1)
    uniform = torch.rand(4000, generator=torch.Generator().manual_seed(2))
    uniform[0], uniform[1] = 0.0, 1 - 2.0**-24
    token = draw_tokens(distribution, uniform)
    assert torch.isfinite(distribution.gather(1, token[:, None])).all()
    drawn = torch.zeros(6)
    for row in range(4000):
        drawn[token[row]] += 1
    torch.testing.assert_close(drawn / 4000, distribution.exp().mean(dim=0), rtol=0, atol=0.03)


def batch_of(recipe):
    trainer = Trainer(recipe, build_loss(recipe.loss_fn))
    before = [weight.detach().clone() for weight in trainer.policy.parameters()]
    metrics, rollout = trainer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.policy.parameters(), strict=True))
    with torch.no_grad():
        policy = build_policy(recipe.policy.model, load_task(recipe.env), recipe.grpo.seed)
        logits = policy(input_ids=rollout.data["input_ids"]).logits[:, :-1].double()
    mask = rollout.data["token_mask"][:, 1:].bool()
    tokens = rollout.data["input_ids"][:, 1:][mask]
    prev, gen = (rollout.data[key][:, 1:][mask] for key in ("prev_logprobs", "generation_logprobs"))
    return metrics, logits[mask], tokens, prev.double(), gen.double()


SAMPLED = {"precision": "float32", "temperature": 0.8, "top_p": 0.7, "top_k": 6}


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
@pytest.mark.parametrize("filters", [True, False])
def test_both_engines_report_what_they_are_asked_for(tiny, mode, filters):
    recipe = tiny(policy={"generation": {**SAMPLED, "logprobs_mode": mode}}, lab={"filter_logprobs": filters})
    metrics, logits, tokens, prev, gen = batch_of(recipe)

    def of(values):
        return values.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)

    drawn_from = torch.tensor([kept(row, 0.8, 6, 0.7) for row in logits.tolist()], dtype=torch.float64)
    assert torch.isfinite(of(drawn_from)).all()
    expected = of(drawn_from) if mode == "processed_logprobs" else of(logits)
    torch.testing.assert_close(gen, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(prev, of(drawn_from) if filters else of(logits / 0.8), rtol=0, atol=1e-4)
    assert ("outside_filter" in metrics) == filters
    if filters:
        assert metrics["outside_filter"] == 0


def test_tokens_that_the_trainer_would_not_have_drawn(tiny):
    coarse = {"top_p": 0.5, "quantization": {"weights": "int4", "layers": "linears"}}
    metrics, logits, tokens, prev, _ = batch_of(tiny(policy={"generation": coarse}))
    filtered_out = torch.tensor([kept(row, 1.0, None, 0.5) for row in logits.tolist()]).gather(-1, tokens[:, None])
    outside = torch.isinf(filtered_out).squeeze(-1)
    assert metrics["outside_filter"] == pytest.approx(float(outside.double().mean()), abs=2 / len(tokens))
    assert outside.any()
    # As NeMo-RL has it: their log-prob is 0 in π_old and in π, so they have a mismatch and no gradient.
    assert (prev[outside] == 0).float().mean() > 0.9
    assert torch.isfinite(prev).all()
    assert torch.isfinite(torch.tensor(metrics["grad_norm"]))


def test_a_kl_in_the_loss_needs_all_tokens(tiny):
    recipe = tiny(policy={"generation": {"top_p": 0.9}}, loss_fn={"reference_policy_kl_penalty": 0.1})
    with pytest.raises(ConfigError, match=r"reference_policy_kl_penalty .*lab.filter_logprobs: false"):
        Trainer(recipe, build_loss(recipe.loss_fn))
    more = {"reference_policy_kl_penalty": 0.1}
    recipe = tiny(policy={"generation": {"top_p": 0.9}}, lab={"filter_logprobs": False}, loss_fn=more)
    Trainer(recipe, build_loss(recipe.loss_fn)).step()
