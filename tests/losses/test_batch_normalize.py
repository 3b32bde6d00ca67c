"""``is_correction_batch_normalize``: weights divided by their mean over the whole batch."""

import pickle

import pytest
import torch

from nemo_geomask import PrestepPass, build_loss
from nemo_geomask.errors import ConfigError, DataError
from tests.helpers import batches, oracle
from tests.helpers.batches import packed_rows, rollouts

ON = {"use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.0}
NORMALIZED = {**ON, "is_correction_batch_normalize": True}
KEPT = {"denominator": "kept", "masks": [{"preset": "icepop", "min": 0.7, "max": 1.6}]}
TIS = {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.2}
LEVELS = ["token", "sequence", "sequence_mean"]


def prepared(loss_fn, batch):
    decision = PrestepPass(loss_fn.config)(batch.data)
    return batch.with_data(**decision.changes), decision.metrics["geomask/batch_weight_mean"]


def true_mean(config, batch):
    """From the oracle's weights."""
    answer = oracle.evaluate(build_loss(config).config, batch.curr, batch.data, batch.seqs, batch.toks)
    mask = batch.data["token_mask"][:, 1:] * batch.data["sample_mask"].unsqueeze(-1)
    if config.get("is_correction_level", "token") == "token":
        return float((torch.tensor(answer.weights) * mask).sum() / mask.sum())
    # One weight a sequence, on each of its tokens.
    first = [row[int(train.argmax())] for row, train in zip(answer.weights, mask, strict=True) if train.any()]
    return sum(first) / len(first)


@pytest.mark.parametrize("truncation", [{}, TIS], ids=["raw", "tis"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_is_divided_by_the_mean_weight(level, truncation):
    batch = rollouts(1)
    shape = {"is_correction_level": level, **truncation}
    loss_fn = build_loss({**NORMALIZED, **shape})
    told, mean = prepared(loss_fn, batch)
    assert mean == pytest.approx(true_mean({**ON, **shape}, batch), rel=1e-6)
    assert abs(mean - 1) > 5e-3
    found, plain = batches.evaluate(loss_fn, told), batches.evaluate({**ON, **shape}, batch)
    torch.testing.assert_close(found.loss, plain.loss / mean, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found.grad, plain.grad / mean, rtol=1e-5, atol=1e-8)


def test_the_kl_is_not():
    batch = rollouts(1)
    loss_fn = build_loss({**NORMALIZED, "reference_policy_kl_penalty": 0.3})
    told, mean = prepared(loss_fn, batch)
    found = batches.evaluate(loss_fn, told)
    plain = batches.evaluate(ON, batch)
    torch.testing.assert_close(found.loss, plain.loss / mean + 0.3 * found.metrics["kl_penalty"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_split_and_packed_are_the_whole(level):
    loss_fn = build_loss({**NORMALIZED, "is_correction_level": level})
    told, _ = prepared(loss_fn, rollouts(2))
    whole = batches.evaluate(loss_fn, told)
    parts = [batches.evaluate(loss_fn, told.rows(part)) for part in (slice(0, 1), slice(1, 5), slice(5, None))]
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(torch.cat([part.grad for part in parts]), whole.grad, rtol=1e-6, atol=1e-9)
    logprobs, data, segments = packed_rows(told)
    value, _ = loss_fn.packed(logprobs, data, segments, told.seqs, told.toks)
    torch.testing.assert_close(value, whole.loss, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_kept_takes_no_part(level):
    batch = rollouts(3)
    loss_fn = build_loss({**NORMALIZED, **KEPT, "is_correction_level": level})
    told, mean = prepared(loss_fn, batch)
    assert mean == pytest.approx(true_mean({**ON, "is_correction_level": level}, told), rel=1e-6)
    assert mean != pytest.approx(true_mean({**ON, "is_correction_level": level}, batch), rel=1e-3)


def test_masked_values_take_no_part():
    batch = rollouts(4)
    hidden = (batch.data["token_mask"] * batch.data["sample_mask"].unsqueeze(-1)) == 0
    loss_fn = build_loss(NORMALIZED)
    for bad in (float("nan"), float("inf"), 1e6):
        spoilt = batch.data["prev_logprobs"].masked_fill(hidden, bad)
        assert prepared(loss_fn, batch.with_data(prev_logprobs=spoilt))[1] == prepared(loss_fn, batch)[1]


def test_weights_that_are_all_0_stay_0():
    batch = rollouts(5)
    icepop = {"type": "icepop", "ratio_min": 1e6, "ratio": 1e7}
    loss_fn = build_loss({**NORMALIZED, **{f"truncated_importance_sampling_{key}": icepop[key] for key in icepop}})
    told, mean = prepared(loss_fn, batch)
    assert mean == 1.0
    assert batches.evaluate(loss_fn, told).loss.item() == 0.0


@pytest.mark.parametrize("size", [-100.0, -30.0])
def test_weights_that_have_vanished_stay_so(size):
    # e^-100 is no float32, and a division by it made NaN; e^-30 over itself made noise as large as a weight of 1.
    batch = rollouts(5)
    prev = batch.data["generation_logprobs"] + size
    loss_fn = build_loss({**NORMALIZED, "disable_ppo_ratio": True})
    told, mean = prepared(loss_fn, batch.with_data(prev_logprobs=prev))
    assert mean == 1.0
    assert abs(batches.evaluate(loss_fn, told).loss.item()) < 1e-10


def test_a_loss_that_is_told_carries_it():
    # NeMo-RL's data plane takes no further column.
    batch = rollouts(6)
    loss_fn = build_loss(NORMALIZED)
    decision = PrestepPass(loss_fn.config)(batch.data)
    sent = pickle.loads(pickle.dumps(loss_fn.for_prepared_batches(decision.changes)))
    assert torch.equal(batches.evaluate(sent, batch).loss, batches.evaluate(loss_fn, prepared(loss_fn, batch)[0]).loss)
    with pytest.raises(DataError, match="_normalize: the weight's mean needs a pass over the whole batch"):
        batches.evaluate(loss_fn, batch)


def test_a_batch_in_parts_has_no_mean():
    with pytest.raises(ConfigError, match="the weight's mean is computed over the whole batch"):
        PrestepPass(build_loss(NORMALIZED).config).open()


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"is_correction_batch_normalize": True}, "has no effect while use_importance_sampling_correction is false"),
        ({**NORMALIZED, "ratio_anchor": "gen"}, "set is_correction_batch_normalize: false, or ratio_anchor: prev"),
        ({**NORMALIZED, "force_on_policy_ratio": True}, "the weight's mean reads prev_logprobs before the step"),
    ],
)
def test_settings_that_do_not_go_together(settings, found):
    with pytest.raises(ConfigError, match=found) as caught:
        build_loss(settings)
    assert len(caught.value.problems) == 1
