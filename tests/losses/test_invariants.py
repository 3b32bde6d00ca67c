"""What must hold for every batch and every objective."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_geomask import build_loss
from nemo_geomask.errors import DataError, NonFiniteError, ShapeError
from nemo_geomask.functional import LOG_RATIO_LIMIT
from nemo_geomask.losses.batch import is_finite
from nemo_geomask.losses.raw_batch import requested_tensors
from nemo_geomask.testing.promises import (
    find_influence_of_untrained,
    find_nonfinite,
    find_pickle_difference,
    find_split_difference,
)
from tests.helpers import batches
from tests.helpers.batches import MASKS, VARIANTS, Batch, for_promises

CORRECTED = {"use_importance_sampling_correction": True}
TIS = {
    **CORRECTED,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 1.3,
    "truncated_importance_sampling_ratio_min": 0.6,
}
ALL_MASKS = {"masks": list(MASKS.values())}
LOOSE_MASKS = {"masks": [{"preset": "icepop", "min": 0.6, "max": 2.0}, {"preset": "opsm", "delta": 0.3}]}
NLL = {"positive_example_nll_weight": 0.2, "positive_example_nll_normalization": "loss"}
KL4 = {"reference_policy_kl_gradient": "k4", "reference_policy_kl_type": "k2"}
SEQ_MASK = {
    **CORRECTED,
    "truncated_importance_sampling_type": "seq-mask-tis",
    "truncated_importance_sampling_ratio": 1.2,
    "truncated_importance_sampling_ratio_min": 0.85,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "everything": {**VARIANTS["dual_clip"], **TIS, **LOOSE_MASKS, **NLL, **KL4},
    "sequence_ratio": {**VARIANTS["sequence_ratio"], **CORRECTED},
    "seq_mask": SEQ_MASK,
    "sequences": {"token_level_loss": False, **TIS, **ALL_MASKS},
    "documents": {"loss_normalization": "documents", **LOOSE_MASKS},
    "constant": {"loss_normalization": "constant", "loss_normalization_constant": 11.0},
    "no_ratio": {**VARIANTS["no_ratio"], **NLL},
    "on_policy": VARIANTS["on_policy"],
    "importance_kl": {"use_on_policy_kl_approximation": True, "reference_policy_kl_type": "k4"},
    "gspo": {"name": "gspo", **TIS, "is_correction_level": "sequence_mean", **LOOSE_MASKS},
    "gspo_token": {**VARIANTS["gspo_token"], **CORRECTED, "is_correction_level": "token"},
    "gmpo": {"name": "gmpo", **CORRECTED, "is_correction_level": "sequence", **LOOSE_MASKS},
    "cispo": {**VARIANTS["cispo"], **TIS, **KL4},
    "sapo": {**VARIANTS["sapo"], **CORRECTED},
    "anchored": {"ratio_anchor": "gen", **NLL},
    "anchored, with prev": {**VARIANTS["gspo"], "ratio_anchor": "gen", **LOOSE_MASKS},
}
LOSSES = {name: build_loss(config) for name, config in CONFIGS.items()}
# NeMo-RL defines these over one microbatch.
EXTREMA = {f"{name}_{side}" for name in ("probs_ratio", "probs_ratio_clamped") for side in ("min", "max")}
OF_SIZES = {"geomask/mismatch_max", "geomask/total_max"}

every_config = pytest.mark.parametrize("name", CONFIGS)
few = settings()  # of the profile, see conftest.py


@st.composite
def any_batch(draw: st.DrawFn, min_width: int = 1) -> Batch:
    """Random rows: any mask, empty responses, invalid rows, ratios far from 1."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(min_width, 10))
    spread = draw(st.sampled_from([0.02, 0.3, 1.0]))
    filled = draw(st.sampled_from([0.3, 0.8, 1.0]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, width, generator=random)

    gen = -5 * torch.rand(rows, width, generator=random)
    prev = gen + normal(spread)
    curr = prev + normal(spread)
    token_mask = (torch.rand(rows, width, generator=random) < filled).float()
    sample_mask = (torch.rand(rows, generator=random) < 0.8).float()
    data = {
        "advantages": normal(1.0),
        "prev_logprobs": prev,
        "generation_logprobs": gen,
        "reference_policy_logprobs": curr + normal(spread),
        "token_mask": token_mask,
        "sample_mask": sample_mask,
        "rewards": normal(1.0)[:, 0],
    }
    toks = float((token_mask[:, 1:] * sample_mask.unsqueeze(-1)).sum()) + draw(st.integers(0, 20))
    return Batch(curr[:, 1:].contiguous(), data, float(sample_mask.sum()) + draw(st.integers(0, 5)), toks)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def same_bits(a: batches.Result, b: batches.Result) -> None:
    assert torch.equal(bits(a.loss), bits(b.loss))
    assert torch.equal(bits(a.grad), bits(b.grad))
    assert a.metrics == b.metrics


def close(a: float, b: float) -> bool:
    # Sums in another order: 2^-24 a term, some hundred terms that may cancel.
    return a == b or math.isclose(a, b, rel_tol=2e-5, abs_tol=2e-6)


def same(a: batches.Result, b: batches.Result, *, skip: set[str] = frozenset()) -> None:
    assert close(a.loss.item(), b.loss.item())
    torch.testing.assert_close(a.grad, b.grad, rtol=2e-5, atol=2e-6)
    assert set(a.metrics) == set(b.metrics)
    assert [k for k in a.metrics if k not in skip and not close(a.metrics[k], b.metrics[k])] == []


def trained(batch: Batch) -> torch.Tensor:
    return (batch.data["token_mask"][:, 1:] * batch.data["sample_mask"].unsqueeze(-1)).bool()


# ------------------------------------------------------------------- what does not train does not matter


@pytest.mark.slow
@every_config
@given(batch=any_batch())
@settings(max_examples=5, deadline=None, derandomize=True)
def test_masked_positions_change_no_bit(name, batch):
    junk = [math.nan, math.inf, -math.inf, 1e6, -1e6]
    assert not find_influence_of_untrained(LOSSES[name], *for_promises(batch), junk=junk)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6])
def test_masked_unfiltered_log_probs_change_no_bit(garbage):
    batch = batches.rollouts(1)
    answers = []
    for fill in (-1.0, garbage):
        other = torch.where(trained(batch), batch.curr - 0.1, fill).requires_grad_()
        answers.append(batches.evaluate({}, batch.with_data(curr_logprobs_unfiltered=other)))
        assert other.grad is not None
        assert bits(other.grad)[~trained(batch)].eq(0).all()
    same_bits(*answers)


def test_is_finite_is_that_of_torch():
    values = torch.tensor([math.nan, math.inf, -math.inf, 1e30, 3.4e38, -0.0, 2.5, 1e-45])
    assert torch.equal(is_finite(values), torch.isfinite(values))


@every_config
@given(batch=any_batch(min_width=2), columns=st.integers(1, 7))
@few
def test_right_padding_changes_nothing(name, batch, columns):
    rows = len(batch.curr)
    padding = torch.full((rows, columns), -3.0)
    data = {key: torch.cat([batch.data[key], padding], dim=1) for key in batches.TOKEN_KEYS if key in batch.data}
    data["token_mask"][:, -columns:] = 0
    padded = replace(batch, curr=torch.cat([batch.curr, padding], dim=1)).with_data(**data)
    result = batches.evaluate(LOSSES[name], padded)
    width = batch.curr.shape[1]
    assert result.grad[:, width:].eq(0).all()
    same(batches.evaluate(LOSSES[name], batch), replace(result, grad=result.grad[:, :width]))


# ------------------------------------------------------------------------------- order, split, denominators


@every_config
@given(batch=any_batch(), seed=st.integers(0, 99))
@few
def test_order_of_rows_does_not_matter(name, batch, seed):
    order = torch.randperm(len(batch.curr), generator=torch.Generator().manual_seed(seed))
    shuffled = batches.evaluate(LOSSES[name], batch.rows(order))
    same(batches.evaluate(LOSSES[name], batch), replace(shuffled, grad=shuffled.grad[order.argsort()]))


@pytest.mark.slow
@every_config
@given(batch=any_batch(), cut=st.integers(0, 5))
@few
def test_microbatches_add_up(name, batch, cut):
    assert not find_split_difference(LOSSES[name], *for_promises(batch), cuts=[cut])


def test_reference_metrics_add_up_where_the_reference_is_certain_of_one_microbatch():
    batch = batches.rollouts(1)
    ref = batch.data["reference_policy_logprobs"].clone()
    ref[0] = 0.0
    batch = batch.with_data(reference_policy_logprobs=ref)
    loss_fn = build_loss({"reference_policy_kl_penalty": 0.0})
    assert batches.evaluate(loss_fn, batch).metrics["geomask/reference_k3"] > 0
    assert not find_split_difference(loss_fn, *for_promises(batch), cuts=[1])


def test_positive_nll_by_microbatch_depends_on_the_split_and_by_the_loss_does_not():
    batch = batches.rollouts(1)

    def split(normalization: str) -> tuple[float, float]:
        config = {**NLL, "positive_example_nll_normalization": normalization}
        whole = batches.evaluate(config, batch)
        halves = [batches.evaluate(config, batch.rows(part)) for part in (slice(0, 2), slice(2, None))]
        return whole.loss.item(), sum(half.loss.item() for half in halves)

    whole, summed = split("microbatch")
    assert abs(whole - summed) > 0.01
    whole, summed = split("loss")
    assert whole == pytest.approx(summed, rel=1e-5)


@pytest.mark.slow
@every_config
@given(batch=any_batch())
@few
def test_placeholder_counts_rescale_by_the_declared_normalizer(name, batch):
    # A trainer may call with both counts 1 and divide once at the end.
    if "positive_example_nll_weight" in CONFIGS[name] and not CONFIGS[name].get("token_level_loss", True):
        return
    loss_fn = LOSSES[name]
    batch = replace(batch, seqs=batch.seqs + 2, toks=batch.toks + 3)
    counts = {"tokens": batch.toks, "sequences": batch.seqs, "none": 1.0}
    raw = batches.evaluate(loss_fn, replace(batch, seqs=1.0, toks=1.0)).metrics
    kinds = loss_fn.metric_normalizations
    final = batches.evaluate(loss_fn, batch).metrics
    assert [key for key in raw if not close(raw[key] / counts[kinds[key].value], final[key])] == []


@every_config
def test_declared_metrics_are_the_returned_ones(name):
    batch = batches.rollouts(1)
    # Both are optional, each with a metric of its own.
    batch = batch.with_data(curr_logprobs_unfiltered=batch.curr, curr_logprobs_keep_mask=torch.ones_like(batch.curr))
    returned = set(batches.evaluate(LOSSES[name], batch).metrics)
    assert returned == set(LOSSES[name].metric_normalizations)


@every_config
def test_own_metrics_are_never_taken_for_extrema(name):
    # NeMo-RL skips the division by the number of batches wherever it reads _min or _max.
    for metric in LOSSES[name].metric_normalizations:
        if "_min" in metric or "_max" in metric:
            assert metric in EXTREMA | OF_SIZES


@pytest.mark.parametrize("which", ["weight_raw", "weight"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_effective_sample_size_is_exact_after_summing(level, which):
    batch = batches.rollouts(2, more_seqs=0, more_toks=0)
    loss_fn = build_loss({**TIS, "is_correction_level": level})
    parts = [batches.evaluate(loss_fn, batch.rows(part)).metrics for part in (slice(0, 3), slice(3, None))]
    mean, square = (sum(p[f"geomask/{which}_{moment}"] for p in parts) for moment in ("mean", "sq"))
    weights = []
    for row in range(len(batch.curr)):
        delta = batch.data["prev_logprobs"] - batch.data["generation_logprobs"]
        delta = delta[row, 1:][trained(batch)[row]].double()
        if level != "token" and batch.data["sample_mask"][row]:
            delta = delta.sum().reshape(1) / (max(len(delta), 1) if level == "sequence_mean" else 1)
        weights += delta.exp().tolist()
    if which == "weight":
        weights = [min(max(weight, 0.6), 1.3) for weight in weights]
    count = batch.toks if level == "token" else batch.seqs
    assert len(weights) == count
    effective = sum(weights) ** 2 / sum(w * w for w in weights)
    assert count * mean**2 / square == pytest.approx(effective, rel=1e-5)


# ----------------------------------------------------------------------------------------- length and type


def repeated(batch: Batch, times: int) -> Batch:
    """Every token ``times`` times over."""
    keys = [key for key in batches.TOKEN_KEYS if key in batch.data]
    data = {key: batch.data[key][:, 1:].repeat_interleave(times, dim=1) for key in keys}
    data = {key: torch.cat([batch.data[key][:, :1], value], dim=1) for key, value in data.items()}
    return replace(batch.with_data(**data), curr=batch.curr.repeat_interleave(times, dim=1))


@pytest.mark.parametrize("times", [2, 5])
@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo"])
def test_length_does_not_change_a_mean(name, times):
    config = {"name": name, **CORRECTED, "is_correction_level": "sequence_mean", "masks": [MASKS["geometric"]]}
    config |= {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": 0.1, "ratio_clip_max": 0.1}
    batch = batches.rollouts(1)
    short, long = (batches.evaluate(config, each) for each in (batch, repeated(batch, times)))
    assert long.loss.item() == pytest.approx(short.loss.item(), rel=1e-5)
    for key in ("geomask/weight_mean", "geomask/mask/geometric/removed", "sampling_importance_ratio"):
        assert long.metrics[key] == pytest.approx(short.metrics[key], rel=1e-5), key
    # The tokens share a sequence's gradient.
    width = batch.curr.shape[1]
    shares = long.grad.reshape(len(batch.curr), width, times).sum(-1)
    torch.testing.assert_close(shares, short.grad, rtol=1e-4, atol=1e-7)
    assert short.grad.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_length_raises_a_product_to_a_power(name):
    config = {**VARIANTS[name], **CORRECTED, "is_correction_level": "sequence"}
    batch = batches.one_row(curr=[-1.0, -2.0], prev=[-1.0, -2.0], gen=[-1.1, -2.2])
    for times in (1, 2, 4):
        weight = batches.evaluate(config, repeated(batch, times)).metrics["geomask/weight_mean"]
        assert weight == pytest.approx(math.exp(0.3 * times), rel=1e-5)


@every_config
@given(batch=any_batch())
@few
def test_half_precision_is_raised_first(name, batch):
    half = {key: value.to(torch.bfloat16) if key in batches.TOKEN_KEYS else value for key, value in batch.data.items()}
    rounded = replace(batch, curr=batch.curr.bfloat16(), data=half)
    raised = replace(rounded, curr=rounded.curr.float(), data={key: value.float() for key, value in half.items()})
    result, expected = (batches.evaluate(LOSSES[name], each) for each in (rounded, raised))
    assert result.loss.dtype == torch.float32
    assert torch.equal(bits(result.loss), bits(expected.loss))
    assert result.metrics == expected.metrics
    assert torch.equal(result.grad, expected.grad.bfloat16())


@every_config
def test_boolean_and_integer_masks_are_taken(name):
    batch = batches.rollouts(1)
    integers = batch.with_data(token_mask=batch.data["token_mask"].long(), sample_mask=batch.data["sample_mask"].bool())
    same_bits(batches.evaluate(LOSSES[name], batch), batches.evaluate(LOSSES[name], integers))


# --------------------------------------------------------------------------------------------- nothing to do


def _emptied(kind: str) -> Batch:
    batch = batches.rollouts(1)
    rows = len(batch.curr)
    if kind == "no_tokens":
        return batch.with_data(token_mask=torch.zeros_like(batch.data["token_mask"]))
    if kind == "no_samples":
        return batch.with_data(sample_mask=torch.zeros(rows))
    if kind == "prompt_only":
        mask = torch.zeros_like(batch.data["token_mask"])
        mask[:, 0] = 1
        return batch.with_data(token_mask=mask)
    if kind == "no_rows":
        return batch.rows(slice(0, 0))
    data = {key: value[:, :1] if value.dim() == 2 else value for key, value in batch.data.items()}
    return replace(batch, curr=batch.curr[:, :0], data=data)


WEIGHTS = {f"geomask/{name}_{moment}" for name in ("weight", "weight_raw") for moment in ("mean", "sq")}
WEIGHTS |= {"sampling_importance_ratio", "geomask/weight_live"}
EMPTY_KINDS = ["no_tokens", "no_samples", "prompt_only", "one_column", "no_rows"]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(5.0, 40.0), (0.0, 0.0)], ids=["others_count", "nothing_counts"])
@pytest.mark.parametrize("kind", EMPTY_KINDS)
@every_config
def test_empty_microbatch_is_exact_zero_on_the_graph(name, kind, counts):
    batch = replace(_emptied(kind), seqs=counts[0], toks=counts[1])
    curr = batch.curr.clone().requires_grad_()
    loss, metrics = LOSSES[name](curr, batch.data, torch.tensor(batch.seqs), torch.tensor(batch.toks))
    assert loss.item() == 0.0
    assert loss.requires_grad
    loss.backward()
    assert curr.grad is not None
    assert curr.grad.shape == batch.curr.shape
    assert torch.equal(curr.grad, torch.zeros_like(curr))
    valid = batch.data["sample_mask"].sum().item()
    for key, value in metrics.items():
        if key in EXTREMA:
            assert value == (math.inf if key.endswith("_min") else -math.inf)
        elif key == "num_valid_samples":
            assert value == valid
        elif key in WEIGHTS and LOSSES[name].config.correction_level != "token" and counts[0]:
            # A sequence without tokens has the weight exp(0), as in NeMo-RL.
            assert value == pytest.approx(valid / counts[0], rel=1e-6)
        elif key not in WEIGHTS:
            assert value == 0.0, key


@every_config
@given(batch=any_batch())
@few
def test_fully_masked_row_changes_no_other(name, batch):
    # Beside an empty row, the others give what they give alone.
    rows = len(batch.curr)
    blank = batch.rows(slice(0, 1))
    blank = blank.with_data(token_mask=torch.zeros_like(blank.data["token_mask"]))
    joined = replace(batches.stack(batch, blank), seqs=batch.seqs, toks=batch.toks)
    alone, beside = (batches.evaluate(LOSSES[name], each) for each in (batch, joined))
    assert close(alone.loss.item(), beside.loss.item())
    assert beside.grad[rows:].eq(0).all()
    torch.testing.assert_close(alone.grad, beside.grad[:rows], rtol=2e-5, atol=2e-6)


# ------------------------------------------------------------------------------ non-finite and saturated values

BAD = [math.nan, math.inf, -math.inf]
KEYS = {"gen": "generation_logprobs", "prev": "prev_logprobs", "ref": "reference_policy_logprobs"}


def broken(batch: Batch, key: str, value: float, row: int = 1, position: int = 1) -> Batch:
    column = batch.data["token_mask"][row].nonzero().flatten()[position]
    if key == "curr":
        curr = batch.curr.clone()
        curr[row, column - 1] = value
        return replace(batch, curr=curr)
    tensor = batch.data[key].clone()
    tensor[row, column] = value
    return batch.with_data(**{key: tensor})


@pytest.mark.slow
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("tensor", [*KEYS, "curr", "advantages"])
@every_config
def test_nonfinite_drops_its_sequence(name, tensor, value):
    loss_fn = build_loss({**CONFIGS[name], "nonfinite": "drop_sequence"})
    batch = batches.rollouts(1)
    result = batches.evaluate(loss_fn, broken(batch, KEYS.get(tensor, tensor), value))
    sample_mask = batch.data["sample_mask"].clone()
    sample_mask[1] = 0
    expected = batches.evaluate(loss_fn, batch.with_data(sample_mask=sample_mask))
    if tensor not in ("curr", *requested_tensors(loss_fn.config)):
        # Not read at all there.
        same_bits(result, batches.evaluate(loss_fn, batch))
        return
    assert torch.equal(bits(result.loss), bits(expected.loss))
    assert torch.equal(bits(result.grad), bits(expected.grad))
    counted = {f"geomask/nonfinite_{tensor}": 1.0, "geomask/dropped_sequences": 1.0}
    # The batch's own count of valid samples is what its sample mask says.
    counted["num_valid_samples"] = batch.data["sample_mask"].sum().item()
    assert result.metrics == {**expected.metrics, **counted}


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    "config",
    [{"reference_policy_kl_penalty": 0.0}, {"use_kl_in_reward": True}],
)
def test_a_reference_that_is_only_looked_at_changes_nothing(config, value):
    loss_fn = build_loss(config)
    batch = batches.rollouts(1)
    without = batches.evaluate(loss_fn, batch.with_data(reference_policy_logprobs=None))
    seen = batches.evaluate(loss_fn, batch)
    odd = batches.evaluate(loss_fn, broken(batch, "reference_policy_logprobs", value))
    for result in (seen, odd):
        assert torch.equal(bits(result.loss), bits(without.loss))
        assert torch.equal(bits(result.grad), bits(without.grad))
        assert result.metrics["kl_penalty"] == 0.0
        assert 0 < result.metrics["geomask/reference_k3"] < 1
    assert "geomask/reference_k3" not in without.metrics
    # What NeMo-RL puts there where it skips the reference.
    skipped = batch.with_data(reference_policy_logprobs=torch.zeros_like(batch.data["prev_logprobs"]))
    for none in (skipped, broken(skipped, "reference_policy_logprobs", value)):
        metrics = batches.evaluate(loss_fn, none).metrics
        assert [metrics[f"geomask/reference_{name}"] for name in ("k1", "k3", "k1_sequence")] == [0.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("tensor", KEYS)
@every_config
def test_nonfinite_drops_its_token(name, tensor, value):
    loss_fn = build_loss({**CONFIGS[name], "nonfinite": "drop_token"})
    batch = batches.rollouts(1)
    bad = broken(batch, KEYS[tensor], value)
    if tensor not in requested_tensors(loss_fn.config):
        return
    result = batches.evaluate(loss_fn, bad)
    without = batch.data["token_mask"].clone()
    column = without[1].nonzero().flatten()[1]
    without[1, column] = 0
    expected = batches.evaluate(loss_fn, batch.with_data(token_mask=without))
    assert result.grad[1, column - 1] == 0
    assert math.isfinite(result.loss.item())
    assert result.metrics[f"geomask/nonfinite_{tensor}"] == 1
    assert result.metrics["geomask/dropped_sequences"] == 0
    if loss_fn.config.normalization != "sequences":
        assert torch.equal(bits(result.loss), bits(expected.loss))
        assert torch.equal(bits(result.grad), bits(expected.grad))
    else:
        # The row still counts the tokens that it declares: its gradient shrinks by (n - 1) / n.
        n = batch.data["token_mask"][1, 1:].sum()
        torch.testing.assert_close(result.grad[1], expected.grad[1] * (n - 1) / n, rtol=1e-5, atol=1e-8)
        others = [row for row in range(len(batch.curr)) if row != 1]
        torch.testing.assert_close(result.grad[others], expected.grad[others], rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("tensor", KEYS)
def test_nonfinite_raises_and_says_where(tensor, value):
    batch = batches.rollouts(1)
    with pytest.raises(NonFiniteError, match=f"1 in data\\['{KEYS[tensor]}'\\]"):
        batches.evaluate({"nonfinite": "raise"}, broken(batch, KEYS[tensor], value))
    # Silent where nothing is wrong, or only where nothing trains.
    batches.evaluate({"nonfinite": "raise"}, batch)
    unused = batch.data[KEYS[tensor]].clone()
    unused[-1], unused[:, 0] = value, value
    batches.evaluate({"nonfinite": "raise"}, batch.with_data(**{KEYS[tensor]: unused}))


def test_nonfinite_counts_are_of_trained_tokens():
    batch = batches.rollouts(1)
    gen = batch.data["generation_logprobs"].clone()
    gen[0], gen[-1] = math.nan, math.nan
    counts = batches.evaluate({}, batch.with_data(generation_logprobs=gen)).metrics
    assert counts["geomask/nonfinite_gen"] == trained(batch)[0].sum()
    assert counts["geomask/dropped_sequences"] == 1


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("kind", ["tis", "icepop"])
def test_overflowing_weight_saturates(level, kind):
    # exp(200) is no float32. NeMo-RL turns it into 0; it is the most over-weighted sample and gets TIS's upper bound.
    config = {
        **CORRECTED,
        "is_correction_level": level,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": 3.7,
        "truncated_importance_sampling_ratio_min": 0.5,
        "reference_policy_kl_penalty": 0.0,
    }
    size = {"token": 200.0, "sequence": 200.0, "sequence_mean": 800.0}[level]
    prev = torch.tensor([-1.0, -1.5, -2.0, -0.5])
    gen = prev.clone()
    gen[2] -= size
    result = batches.evaluate(config, batches.one_row(curr=prev, prev=prev, gen=gen))
    weight = torch.tensor(3.7 if kind == "tis" else 0.0)
    # Ratio 1, advantage 1, a mean over 4 tokens: the loss is minus the mean weight.
    others = 3.0 if level == "token" else 3 * weight.item()
    assert result.loss.item() == pytest.approx(-(weight.item() + others) / 4, rel=1e-6)
    assert result.grad[0, 2].item() == pytest.approx(-weight.item() / 4, rel=1e-6)
    assert result.metrics["geomask/saturated_weight"] == 1
    assert result.metrics["is_oob_ratio"] == pytest.approx(0.25 if level == "token" else 1.0)
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_overflowing_weight_without_truncation_stays_finite():
    prev = torch.tensor([-1.0, -1.5])
    largest = math.exp(LOG_RATIO_LIMIT)
    batch = batches.one_row(curr=prev, prev=prev, gen=prev - torch.tensor([0.0, 150.0]), advantage=0.5)
    result = batches.evaluate({**CORRECTED, "reference_policy_kl_penalty": 0.0}, batch)
    assert math.isfinite(result.loss.item())
    assert result.grad.isfinite().all()
    assert result.metrics["geomask/weight_raw_mean"] == pytest.approx((largest + 1) / 2, rel=1e-5)
    assert result.metrics["geomask/weight_raw_sq"] == pytest.approx(largest**2 / 2, rel=1e-4)
    assert result.metrics["geomask/saturated_weight"] == 1


WITHOUT_RATIO = ("no_ratio", "reinforce", "on_policy", "cispo_flag")


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in WITHOUT_RATIO])
def test_overflowing_policy_ratio_saturates(name):
    prev = torch.tensor([-120.0, -120.0])
    batch = batches.one_row(curr=[-1.0, -2.0], prev=prev, advantage=1.0)
    result = batches.evaluate({**VARIANTS[name], "reference_policy_kl_penalty": 0.0}, batch)
    assert math.isfinite(result.loss.item())
    assert result.grad.isfinite().all()
    assert result.metrics["geomask/saturated_ratio"] == 2


def _extreme() -> Batch:
    """Finite log-probs whose ratios overflow or vanish, in every combination and with advantages of both signs."""
    # 87.9 is just within float32's range, and thrice its exponential is not.
    pairs = [(x, y) for size in (200.0, 95.0, 87.9) for x in (size, -size) for y in (size, -size)]
    policy, mismatch = torch.tensor(pairs).unbind(1)
    prev = -policy.abs() - 1
    rows = [
        batches.one_row(curr=prev + policy, prev=prev, gen=prev - mismatch, ref=prev, advantage=torch.tensor(advantage))
        for advantage in ([3.0] * 12, [-3.0] * 12, [3.0, -3.0] * 6, [-3.0, 3.0] * 6)
    ]
    return batches.stack(*rows)


@pytest.mark.parametrize(
    "part",
    [{}, CORRECTED, TIS, {**CORRECTED, "is_correction_level": "sequence"}, {"masks": [MASKS["icepop"]]}],
    ids=["uncorrected", "token", "tis", "sequence", "masked"],
)
@pytest.mark.parametrize("name", VARIANTS)
def test_finite_input_gives_a_finite_loss(name, part):
    # Saturation has to leave room for what comes next: an advantage, a weight, a sum over tokens. A saturated ratio
    # under a weight of 0 must not become NaN.
    assert not find_nonfinite(build_loss({**VARIANTS[name], **part}), *for_promises(_extreme()))


def test_finite_input_gives_finite_metrics():
    # One saturated token may not erase a step's mean, nor the effective sample size.
    metrics = batches.evaluate({**TIS, **ALL_MASKS}, _extreme()).metrics
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []


# ------------------------------------------------------------------------------------- object and its errors


@every_config
def test_pickled_loss_gives_the_same_bits(name):
    assert not find_pickle_difference(LOSSES[name], *for_promises(batches.rollouts(1)))


@every_config
def test_calls_leave_no_trace(name):
    batch, other = batches.rollouts(1), batches.rollouts(2)
    before = pickle.dumps(LOSSES[name])
    untouched = {key: value.clone() for key, value in batch.data.items()}
    first = batches.evaluate(LOSSES[name], batch)
    batches.evaluate(LOSSES[name], other)
    same_bits(first, batches.evaluate(LOSSES[name], batch))
    assert pickle.dumps(LOSSES[name]) == before
    for key, value in untouched.items():
        assert torch.equal(batch.data[key], value)


@every_config
def test_device_is_read_once_and_when_metrics_are(name, monkeypatch):
    batch = batches.rollouts(1)
    reads = []
    for method in ("item", "tolist", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, method)

        def counting(self, *args, _original=original, _name=method):
            reads.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(torch.Tensor, method, counting)
    _, metrics = LOSSES[name](batch.curr, batch.data, torch.tensor(batch.seqs), torch.tensor(batch.toks))
    assert reads == []
    assert metrics["loss"] == metrics["loss"]
    assert len(dict(metrics)) > 20
    assert reads == ["tolist"]


def reads(key):
    """Settings of a loss that reads the key."""
    return {"proximal_policy": "interpolated"} if key == "token_weight_versions" else {}


@pytest.mark.parametrize("key", [*batches.TOKEN_KEYS, "sample_mask"], ids=lambda key: key)
def test_missing_tensor_is_named(key):
    batch = batches.rollouts(1)
    data = {name: value for name, value in batch.data.items() if name != key}
    with pytest.raises(DataError, match=rf"data\['{key}'\]"):
        batches.evaluate(reads(key), replace(batch, data=data))


@pytest.mark.parametrize("key", [*batches.TOKEN_KEYS, "sample_mask", "rewards", "curr_logprobs_unfiltered"])
@pytest.mark.parametrize("wrong", ["narrow", "column", "list"])
def test_tensor_of_another_shape_is_named(key, wrong):
    batch = batches.rollouts(1)
    right = batch.data.get(key, batch.curr)
    value = {"narrow": right[..., :-1], "column": right.unsqueeze(-1), "list": right.tolist()}[wrong]
    with pytest.raises(ShapeError, match=rf"data\['{key}'\]"):
        batches.evaluate({"positive_example_nll_weight": 0.1, **reads(key)}, batch.with_data(**{key: value}))


def test_log_probs_of_another_shape_are_refused():
    batch = batches.rollouts(1)
    for curr in (batch.curr.unsqueeze(0), batch.curr.long(), batch.curr[0]):
        with pytest.raises(ShapeError, match="next_token_logprobs"):
            build_loss({})(curr, batch.data, torch.tensor(1.0), torch.tensor(1.0))


def test_counts_may_be_numbers_or_one_element_tensors():
    batch = batches.rollouts(1)
    loss_fn = LOSSES["everything"]
    scalar = loss_fn(batch.curr, batch.data, torch.tensor(batch.seqs), torch.tensor(batch.toks))
    numbers = loss_fn(batch.curr, batch.data, batch.seqs, batch.toks)
    vectors = loss_fn(batch.curr, batch.data, torch.tensor([batch.seqs]), torch.tensor([batch.toks]))
    for loss, metrics in (numbers, vectors):
        assert torch.equal(loss, scalar[0])
        assert metrics == scalar[1]
