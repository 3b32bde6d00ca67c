"""Attention, experts and linear layers against transformers' own, and half precision against float64."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")

from nemo_geomask.tools.lab.arithmetic import KVCache, linear
from nemo_geomask.tools.lab.policy_model import build_policy, token_logprobs
from nemo_geomask.tools.lab.tasks import Progressions

TASK = Progressions(7, 4, 12)


@pytest.fixture
def policy(tiny):
    return build_policy(tiny(policy={"model": {"num_experts_per_tok": 3}}).policy.model, TASK, seed=0)


def plain(policy):
    """The same weights by transformers' own implementations."""
    model = copy.deepcopy(policy)
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("eager")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = torch.nn.Linear
    return model


def test_whole_rows_and_their_gradients_are_those_of_transformers(policy):
    ids = torch.randint(0, 9, (5, 16), generator=torch.Generator().manual_seed(1))
    other = plain(policy)
    found, expected = (token_logprobs(model, ids) for model in (policy, other))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    for (name, mine), theirs in zip(policy.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32_and_rounds_once(dtype):
    draw = torch.Generator().manual_seed(2)
    inputs, weight = (torch.randn(n, 96, generator=draw).to(dtype) for n in (40, 24))
    exact = inputs.double() @ weight.double().T
    assert (linear(inputs, weight) == exact.to(dtype)).double().mean() > 0.99
    # Under autocast the operands are rounded first, and so are what comes back for the weight and the inputs.
    wide = torch.randn(24, 96, generator=draw, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = linear(inputs.float(), wide)
    assert out.dtype == torch.bfloat16
    expected = (inputs.bfloat16().double() @ wide.detach().bfloat16().double().T).bfloat16()
    assert (out == expected).double().mean() > 0.99
    out.float().square().sum().backward()
    slope = (2 * out.detach().double()).bfloat16().double().T @ inputs.bfloat16().double()
    torch.testing.assert_close(wide.grad.double(), slope, rtol=1e-2, atol=1e-2)


def test_decoding_with_the_cache_is_the_pass_over_the_whole_row(policy):
    ids = torch.randint(0, 9, (6, 12), generator=torch.Generator().manual_seed(3))
    kept = torch.tensor([0, 2, 5])
    cache = KVCache(12)
    with torch.no_grad():
        whole = policy(input_ids=ids, use_cache=False).logits
        steps = [policy(input_ids=ids[:, :4], past_key_values=cache).logits[:, -1]]
        for position in range(4, 12):
            if position == 8:
                cache.keep(kept)
                ids, whole = ids[kept], whole[kept]
            steps.append(policy(input_ids=ids[:, position : position + 1], past_key_values=cache).logits[:, -1])
    assert cache.get_seq_length() == 12
    for position, logits in enumerate(steps, start=3):
        expected = whole[:, position]
        torch.testing.assert_close(logits[kept] if len(logits) == 6 else logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"moe_intermediate_size": 10}, {"moe_intermediate_size": 7}])
def test_widths_that_no_grouped_product_takes_are_computed_too(settings, tiny):
    policy = build_policy(tiny(policy={"model": settings}).policy.model, TASK, seed=0)
    ids = torch.randint(0, 9, (2, 8), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(token_logprobs(policy, ids), token_logprobs(plain(policy), ids), rtol=1e-5, atol=1e-5)
