"""Weights in fewer bits, against plain loops in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")

from nemo_geomask.tools.lab.policy_model import build_policy, generation_copy, round_to_format
from nemo_geomask.tools.lab.tasks import load_task

# Every finite value of e4m3: 4 bits of exponent with bias 7, 3 of mantissa; the last code of all is NaN.
E4M3 = [
    sign * value
    for sign in (1, -1)
    for value in (
        *(2.0**-9 * mantissa for mantissa in range(8)),
        *(2.0 ** (exponent - 7) * (1 + mantissa / 8) for exponent in range(1, 16) for mantissa in range(8)),
    )
    if value <= 448
]


def nearest(row: list[float], to: str) -> list[float]:
    largest = {"int8": 127, "int4": 7, "float8_e4m3": 448}[to]
    codes = E4M3 if to == "float8_e4m3" else range(-largest, largest + 1)
    scale = max(abs(value) for value in row) / largest
    if not scale:
        return [0.0] * len(row)
    return [scale * min(codes, key=lambda code: abs(value / scale - code)) for value in row]


@pytest.mark.parametrize("to", ["int8", "int4", "float8_e4m3"])
@pytest.mark.parametrize("block_size", [None, 8])
def test_each_block_is_rounded_to_its_own_grid(to, block_size):
    weight = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    weight[0, 0] *= 1e4
    weight[1, 2] = 0.0
    size = block_size or 16
    expected = [nearest(row, to) for row in weight.double().reshape(-1, size).tolist()]
    found = round_to_format(weight, to, block_size)
    torch.testing.assert_close(found.double().reshape(-1, size), torch.tensor(expected, dtype=torch.float64))
    # What is on the grid stays there, and a block's largest weight is what it was.
    torch.testing.assert_close(round_to_format(found, to, block_size), found)
    extremes = (value.reshape(-1, size).abs().amax(dim=1) for value in (found, weight))
    torch.testing.assert_close(*extremes)


@pytest.mark.parametrize(("layers", "touched"), [("experts", ("experts",)), ("linears", ("experts", "_proj"))])
def test_the_layers_that_are_named_and_no_others(tiny, layers, touched):
    chosen = {"precision": "float32", "quantization": {"weights": "int4", "block_size": 16, "layers": layers}}
    recipe = tiny(policy={"generation": chosen})
    policy = build_policy(recipe.policy.model, load_task(recipe.env), seed=0)
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    engine = generation_copy(policy, recipe.policy.generation)
    for name, weight in engine.named_parameters():
        assert torch.equal(weight, before[name]) != any(part in name for part in touched), name
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_parameters())
