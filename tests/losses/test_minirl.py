"""The settings that docs/how_to/peers.md names for MiniRL, against its formula in a float64 loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.helpers import batches
from tests.helpers.batches import Batch

LOW, HIGH = 0.2, 0.28
BLOCK: dict[str, Any] = {
    "name": "clipped_pg",
    "ratio_clip_min": LOW,
    "ratio_clip_max": HIGH,
    "use_importance_sampling_correction": True,
    "is_correction_level": "token",
    "loss_normalization": "documents",
}
# The same gradient by other settings: the weight is the ratio to the sampler, and a mask is the gate.
GATED: dict[str, Any] = {
    "name": "cispo",
    "ratio_anchor": "gen",
    "ratio_clip_min": 1.0,
    "ratio_clip_max": 1e6,
    "masks": [{"log_ratio": "policy", "level": "token", "min": 1 - LOW, "max": 1 + HIGH, "when": "pushing"}],
    "loss_normalization": "documents",
}
NO_KL = {"reference_policy_kl_penalty": 0}


def minirl(batch: Batch) -> tuple[float, torch.Tensor, int]:
    """Return loss and gradient of L = -1/N Σ_i Σ_t M_t·sg(π/μ)·A_t·log π, and the number of tokens with M_t = 0.

    M_t = 0 where A > 0 and π/π_old > 1 + ε_high, and where A < 0 and π/π_old < 1 - ε_low. Source: arXiv:2512.01374
    eq. 5 and 7, as in verl PR 4491.
    """
    data = {key: value.double() for key, value in batch.data.items()}
    gradient = torch.zeros_like(batch.curr, dtype=torch.float64)
    loss, gated = 0.0, 0
    for i, row in enumerate(batch.curr.double().tolist()):
        for t, curr in enumerate(row):
            mask = data["token_mask"][i, t + 1].item() * data["sample_mask"][i].item()
            if not mask:
                continue
            prev, gen, advantage = (
                data[key][i, t + 1].item() for key in ("prev_logprobs", "generation_logprobs", "advantages")
            )
            staleness = math.exp(curr - prev)
            if (advantage > 0 and staleness > 1 + HIGH) or (advantage < 0 and staleness < 1 - LOW):
                gated += 1
                continue
            coefficient = -mask * math.exp(curr - gen) * advantage / batch.seqs
            loss += coefficient * curr
            gradient[i, t] = coefficient
    return loss, gradient, gated


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [BLOCK, GATED], ids=["documented", "gated"])
def test_settings_are_minirl(settings, seed):
    batch = batches.rollouts(seed)
    loss, gradient, gated = minirl(batch)
    result = batches.evaluate({**settings, **NO_KL}, batch)
    torch.testing.assert_close(result.grad.double(), gradient, rtol=1e-5, atol=1e-8)
    assert gated > 0
    if settings is GATED:  # clipped_pg reports -w·r·A in place of -w·r·A·log π
        assert result.loss.item() == pytest.approx(loss, rel=1e-5)
