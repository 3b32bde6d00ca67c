"""``denominator: kept_in_loss``: a step's gradient times G/K is that of the survivors alone, over any microbatches."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.metrics import kept_factor
from tests.helpers import batches

ERROR = {"log_ratio": "total", "level": "sequence_mean", "statistic": "ratio_abs", "max": 1.7}
CONFIG = {"masks": [ERROR], "denominator": "kept_in_loss", "kl_tokens": "kept"}


@pytest.mark.parametrize("metrics", ["full", "nemo_rl"])
@pytest.mark.parametrize("rows", [[slice(0, 8)], [slice(0, 3), slice(3, 8)]], ids=["whole", "microbatches"])
@pytest.mark.parametrize("mask", [ERROR, {**ERROR, "level": "token"}], ids=["sequences", "tokens"])
def test_gradient_of_the_survivors(mask, rows, metrics):
    batch = batches.rollouts(1, more_seqs=0.0, more_toks=0.0)
    loss_fn = build_loss({**CONFIG, "masks": [mask], "metrics": metrics})
    step, gradients = [], []
    for part in rows:
        result = batches.evaluate(loss_fn, batch.rows(part))
        step.append(result.metrics["geomask/kept_tokens"])
        gradients.append(result.grad)
    factor = kept_factor({"geomask/kept_tokens": sum(step)})
    # By loops: what the mask keeps, as a batch of its own.
    gaps = (batch.curr - batch.data["generation_logprobs"][:, 1:]).abs().double()
    kept = batch.data["token_mask"].clone()
    for i, t in kept[:, 1:].nonzero().tolist():
        pool = batch.data["token_mask"][i, 1:].nonzero().flatten().tolist() if mask["level"] != "token" else [t]
        kept[i, t + 1] = float(sum(math.exp(gaps[i, s]) for s in pool) / len(pool) <= 1.7)
    count = float((kept[:, 1:] * batch.data["sample_mask"].unsqueeze(1)).sum())
    alone = batches.Batch(batch.curr, {**batch.data, "token_mask": kept}, batch.seqs, count)
    expected = batches.evaluate({}, alone)
    assert 0 < count < batch.toks
    assert factor == pytest.approx(batch.toks / count)
    torch.testing.assert_close(factor * torch.cat(gradients), expected.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"masks": [], "reference_policy_kl_penalty": 0.0, "kl_tokens": "trained"}, "set denominator: original"),
        ({"token_level_loss": False}, "set .*loss_normalization: tokens"),
        ({"kl_tokens": "trained"}, "set kl_tokens: kept"),
        ({"positive_example_nll_weight": 0.1}, "set positive_example_nll_weight: 0"),
    ],
)
def test_what_the_factor_would_be_wrong_for_is_refused(change, remedy):
    with pytest.raises(ConfigError, match=remedy):
        build_loss({**CONFIG, **change})


def test_a_step_that_keeps_nothing_has_no_gradient():
    assert kept_factor({"geomask/kept_tokens": 0.0}) == 1.0
