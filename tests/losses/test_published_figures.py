"""Numbers that other systems' issues and papers give for their rules, computed by hand there."""

from __future__ import annotations

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError, MissingDataError
from tests.helpers import batches
from tests.helpers.plugin_corrections import CORRECTION

WEIGHTED = {**CORRECTION, "metrics": "full"}
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


def gradient(config, batch, packed):
    if not packed:
        return batches.evaluate(config, batch).grad.flatten()
    curr, data, segments = batches.packed_rows(batch)
    curr = curr.clone().requires_grad_()
    build_loss(config).packed(curr, data, segments, batch.seqs, batch.toks)[0].backward()
    return curr.grad


@PACKED
@pytest.mark.parametrize("level", ["turn", "tests.helpers.plugin_corrections:BY_TURN"], ids=["turn", "plugin"])
def test_turns_have_weights_of_their_own(level, packed):
    # Δ = [.1, −.3], tool output, [.2, .4] (ROLL's segments; SORL arXiv:2511.20718)
    mismatch = torch.tensor([0.1, -0.3, 9.0, 0.2, 0.4])
    batch = batches.one_row(curr=[-1.0] * 5, prev=[-1.0] * 5, gen=-1.0 - mismatch)
    mask = batch.data["token_mask"].clone()
    mask[0, 3] = 0.0
    batch = batch.with_data(token_mask=mask)

    def weights(of_level):
        # The ratio is 1 and A = 1, so that the gradient is minus the weight, divided by the five tokens.
        return (-5 * gradient({**WEIGHTED, "is_correction_level": of_level}, batch, packed)).tolist()

    assert weights(level) == pytest.approx([0.8187, 0.8187, 0.0, 1.8221, 1.8221], abs=1e-4)
    assert weights("turn_mean") == pytest.approx([0.9048, 0.9048, 0.0, 1.3499, 1.3499], abs=1e-4)
    assert weights("sequence_mean") == pytest.approx([1.1052, 1.1052, 0.0, 1.1052, 1.1052], abs=1e-4)


def test_the_sequence_error_of_nemo_rl():
    # PR 4171: a sequence stays if the mean of exp(|curr − gen|) is at most the threshold.
    mask = {"log_ratio": "total", "level": "sequence_mean", "statistic": "ratio_abs", "max": 2.0}
    for total, error, stays in (([0.1, -0.2], 1.1633, True), ([1.5, 0.0], 2.7408, False)):
        gen = -2.0 - torch.tensor(total)
        batch = batches.one_row(curr=[-2.0, -2.0], prev=[-2.0, -2.0], gen=gen)
        for bound in (error - 1e-3, error + 1e-3):
            result = batches.evaluate({"masks": [{**mask, "max": bound}], "reference_policy_kl_penalty": 0.0}, batch)
            assert result.metrics["geomask/kept_tokens"] == float(bound > error)
        result = batches.evaluate({"masks": [mask], "reference_policy_kl_penalty": 0.0}, batch)
        assert bool(result.grad.any()) is stays


def test_one_filtered_token_gives_a_sequence_weight_of_148():
    batch = batches.one_row(curr=[-1.0, 0.0, -1.0, -1.0], prev=[-1.0, 0.0, -1.0, -1.0], gen=[-1.0, -5.0, -1.0, -1.0])
    config = {**WEIGHTED, "is_correction_level": "sequence"}
    assert batches.evaluate(config, batch).metrics["sampling_importance_ratio"] == pytest.approx(148.4, abs=0.05)
    token_weight = batches.evaluate(WEIGHTED, batch).metrics["sampling_importance_ratio"]
    assert token_weight == pytest.approx(37.9, abs=0.06)


def test_topr_truncates_the_ratio_of_negatives_alone():
    for ratio, advantage, weight in ((0.3, -1.0, 0.3), (1.7, -1.0, 1.0), (0.3, 1.0, 1.0), (1.7, 1.0, 1.0)):
        gen = [-1.0 - float(torch.tensor(ratio).log())]
        batch = batches.one_row(curr=[-1.0], prev=[-1.0], gen=gen, advantage=advantage)
        result = batches.evaluate({"name": "topr", "reference_policy_kl_penalty": 0.0}, batch)
        assert result.grad.item() == pytest.approx(-weight * advantage, rel=1e-5)


def test_the_kl_at_prev_has_an_unbiased_gradient():
    # TRL `use_bias_correction_kl`: r · k3, all of it differentiated.
    batch = batches.one_row(curr=[-1.0, -2.0], prev=[-1.2, -1.9], ref=[-1.5, -1.8], advantage=0.0)
    config = {"use_on_policy_kl_approximation": True, "kl_ratio_anchor": "prev", "reference_policy_kl_penalty": 1.0}
    result = batches.evaluate(config, batch)
    assert result.loss.item() == pytest.approx((0.13012 + 0.01937) / 2, abs=1e-5)
    assert (2 * result.grad).flatten().tolist() == pytest.approx([0.61070, -0.18097], abs=1e-5)


def test_the_interpolated_policy_of_a_stale_sample():
    # A-3PO: v_θ = 5, sampled at 3, 4 and 2; log π_b = −2, log π_θ = −1. The ratio is π_θ/π_prox.
    batch = batches.one_row(curr=[-1.0] * 3, prev=[0.0] * 3, gen=[-2.0] * 3)
    batch = batch.with_data(
        token_weight_versions=torch.tensor([[0, 3, 4, 2]]), training_weight_version=torch.tensor([5])
    )
    config = {"proximal_policy": "interpolated", "reference_policy_kl_penalty": 0.0, "ratio_clip_max": 9.0}
    result = batches.evaluate(config, batch)
    proximal = torch.tensor([-1.5, -2.0, -1.333])
    torch.testing.assert_close(result.grad[0], -(-1.0 - proximal).exp() / 3, atol=1e-3, rtol=0)
    with pytest.raises(MissingDataError, match="token_weight_versions'] is missing.*proximal_policy: interpolated"):
        batches.evaluate(config, batches.one_row(curr=[-1.0], prev=[-1.0]))
    forced = "proximal_policy, loss_fn.force_on_policy_ratio|force_on_policy_ratio: true takes π_old"
    with pytest.raises(ConfigError, match=forced):
        build_loss({**config, "force_on_policy_ratio": True})
    assert build_loss(config).config.skips_prev
