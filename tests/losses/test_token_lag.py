"""``max_token_lag``: tokens sampled too many updates ago are in no sum and in no count."""

from __future__ import annotations

import pytest
import torch

from nemo_geomask import PrestepPass, build_loss
from nemo_geomask.errors import MissingDataError, ShapeError
from nemo_geomask.losses.prestep import valid_counts
from tests.helpers import batches

CONFIG = {"max_token_lag": 1, "use_importance_sampling_correction": True, "is_correction_level": "sequence_mean"}


def versions(batch, old, version=9):
    """The batch with versions: ``old`` [B, T] is True at tokens two updates behind."""
    added = {"token_weight_versions": torch.where(old, version - 2, version - 1)}
    added["training_weight_version"] = torch.full_like(batch.data["sample_mask"], version, dtype=torch.int64)
    return batch.with_data(**added)


def test_the_example():
    # v = [7, 7, 8], trainer at 9, τ = 1: only the last stays.
    batch = batches.one_row(curr=[-1.0] * 3, prev=[-1.0] * 3)
    data = {
        **batch.data,
        "token_weight_versions": torch.tensor([[0, 7, 7, 8]]),
        "training_weight_version": torch.tensor([9]),
    }
    decision = PrestepPass(build_loss(CONFIG).config)(data)
    assert decision.train
    assert decision.changes["token_mask"].tolist() == [[0, 0, 0, 1]]
    assert decision.metrics == {"geomask/stale_tokens": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    "part", [{}, {"batch_veto": {"max": 0.5}}, {"masks": [batches.MASKS["geometric"]], "denominator": "kept"},
             {"masks": [batches.BUDGETS["m2po"]]}], ids=["alone", "veto", "kept", "budget"]
)  # fmt: skip
def test_loss_and_counts_are_those_of_a_batch_without_them(part):
    batch = batches.rollouts(1)
    old = torch.rand(batch.data["token_mask"].shape, generator=torch.Generator().manual_seed(3)) < 0.4
    old[2] = True  # a sequence that loses all of its tokens
    without = batch.with_data(
        token_mask=batch.data["token_mask"].masked_fill(old, 0.0),
        sample_mask=batch.data["sample_mask"].masked_fill(torch.arange(len(old)) == 2, 0.0),
    )
    answers = []
    for config, given in (
        ({**CONFIG, **part}, versions(batch, old)),
        ({**CONFIG, "max_token_lag": None, **part}, without),
    ):
        loss_fn = build_loss(config)
        data = {**given.data, **PrestepPass(loss_fn.config)(given.data).changes}
        curr = given.curr.clone().requires_grad_()
        loss, _ = loss_fn(curr, data, *(count.float() for count in valid_counts([data])))
        loss.backward()
        answers.append((loss.detach(), curr.grad))
    torch.testing.assert_close(answers[0], answers[1])
    assert answers[0][1].abs().sum() > 0


def test_a_batch_of_stale_tokens_is_not_trained_on():
    batch = batches.rollouts(1)
    decision = PrestepPass(build_loss(CONFIG).config)(
        versions(batch, torch.ones_like(batch.data["token_mask"]) > 0).data
    )
    assert not decision.train
    assert "max_token_lag: 1" in decision.reason
    assert decision.metrics["geomask/stale_tokens"] == 1


def test_versions_that_are_missing_or_do_not_fit_are_named():
    batch = batches.one_row(curr=[-1.0] * 13, prev=[-1.0] * 13)
    prestep_pass = PrestepPass(build_loss(CONFIG).config)
    with pytest.raises(MissingDataError, match=r"data\['token_weight_versions'\] is missing.*max_token_lag"):
        prestep_pass(batch.data)
    wrong = {"token_weight_versions": torch.zeros(3), "training_weight_version": torch.zeros(3)}
    with pytest.raises(ShapeError, match=r"data\['token_weight_versions'\] must be a tensor \[1, 14\]"):
        prestep_pass({**batch.data, **wrong})
