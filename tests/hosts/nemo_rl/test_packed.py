"""Packed rows under ``logprob_backend: nemo_rl``: one call of the loss equals one a sequence, as NeMo-RL makes them."""

from __future__ import annotations

import functools
import itertools
import types

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import DataError, ShapeError
from nemo_geomask.hosts.nemo_rl import packed_microbatch
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.losses.policy_loss import PREPARED_KEY
from nemo_geomask.metrics import summarize_step
from tests.helpers.batches import MASKS, VARIANTS, rollouts

EXTREMES = {
    "probs_ratio_min": min,
    "probs_ratio_clamped_min": min,
    "probs_ratio_max": max,
    "probs_ratio_clamped_max": max,
}
RICH = {
    "name": "gspo",
    "use_importance_sampling_correction": True,
    "is_correction_level": "sequence_mean",
    "masks": [MASKS["geometric"], MASKS["opsm"], MASKS["veto"]],
    "positive_example_nll_weight": 0.3,
    "positive_example_nll_normalization": "loss",
}
CONFIGS = {**VARIANTS, "rich": RICH, "tokens": {**RICH, "loss_normalization": "tokens"}}


class Once(PolicyLoss):
    """Counts its calls."""

    def __init__(self, loss):
        self.__dict__.update(loss.__dict__)
        self.calls = []

    def __call__(self, *args):
        self.calls.append("padded")
        return super().__call__(*args)

    def packed(self, *args):
        self.calls.append("packed")
        return super().packed(*args)


def case(seed=0, width=14, absorbed=0):
    """A packed row of log-probs: every sequence padded to a multiple of 4, the last one's length as NeMo-RL may count
    it, padding included."""
    batch = rollouts(seed, width=width)
    reach = torch.where(batch.data["token_mask"].bool(), torch.arange(width), 0).amax(dim=1) + 1
    lengths = reach.clamp(min=2)
    lengths[-1] += absorbed
    padded = -(-lengths // 4) * 4
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), padded.cumsum(0)])
    values = torch.full((1, int(starts[-1])), 1e6)
    for row, length in enumerate(lengths.tolist()):
        end = min(length, width) - 1
        values[0, starts[row] : starts[row] + end] = batch.curr[row, :end]
    return batch, dict(batch.data), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), starts, values


def by_row(logits, data, loss_fn, filtered=False, **groups):
    """NeMo-RL's preparation of one sequence, where the model gives log-probs."""
    logprobs = logits[:, : data["input_ids"].shape[1] - 1]
    if filtered:
        data["curr_logprobs_unfiltered"] = logprobs + 0.1
    return {"next_token_logprobs": logprobs}, data


def all_rows(logits, data, loss_fn, cu_seqlens_q, cu_seqlens_q_padded, filtered=False, **groups):
    """NeMo-RL's preparation of a whole row."""
    rows, width = data["input_ids"].shape
    found = torch.zeros(rows, width - 1)
    for row, (start, end) in enumerate(itertools.pairwise(cu_seqlens_q_padded)):
        count = min(int(end - start) - 1, width - 1)
        found[row, :count] = logits[0, start : start + count]
    if filtered:
        data["curr_logprobs_unfiltered"] = found + 0.1
    return {"next_token_logprobs": found}, data


def wrapper(loss, prepare, lengths, starts):
    return types.SimpleNamespace(
        loss_fn=loss,
        prepare_fn=prepare,
        cu_seqlens_q=lengths,
        cu_seqlens_q_padded=starts,
        vocab_parallel_rank=0,
        vocab_parallel_group=None,
        context_parallel_group=None,
    )


HOW = {
    "by sequence": (packed_microbatch.loss_by_sequence, by_row),
    "at once": (packed_microbatch.loss_at_once, all_rows),
}


def each_by_itself(loss, prepare, batch, data, lengths, starts, values):
    """What NeMo-RL's wrapper makes of it."""
    total, metrics = torch.zeros(()), {}
    for row, length in enumerate(lengths.diff().tolist()):
        mine = {key: value[row : row + 1] for key, value in data.items()}
        mine = {key: value[:, :length] if value.dim() > 1 else value for key, value in mine.items()}
        given, mine = prepare(values[:, starts[row] : starts[row + 1]], mine, loss)
        part, numbers = loss(given["next_token_logprobs"], mine, torch.tensor(batch.seqs), torch.tensor(batch.toks))
        total = total + part
        for name, value in numbers.items():
            metrics[name] = EXTREMES.get(name, lambda a, b: a + b)(metrics[name], value) if name in metrics else value
    return total, metrics


def assert_same_metrics(metrics, others):
    # NeMo-RL's wrappers add up maxima that they do not know, which a step's summary bounds by the histogram.
    largest = next(name for name in others if name in ("geomask/mismatch_max", "geomask/total_max"))
    assert 1 - 1e-5 <= summarize_step(others)[largest] / metrics[largest] <= 1.42
    assert dict(metrics) == pytest.approx({**others, largest: metrics[largest]}, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_call_equals_one_a_sequence(name, how):
    for seed, filtered, absorbed in ((0, False, 0), (1, True, 3)):
        batch, data, lengths, starts, values = case(seed, absorbed=absorbed)
        plain = build_loss(CONFIGS[name])
        leaf = values.clone().requires_grad_()
        prepare = functools.partial(by_row, filtered=filtered)
        expected, others = each_by_itself(plain, prepare, batch, data, lengths, starts, leaf)
        expected.backward()
        call, prepare = HOW[how]
        mine, once = values.clone().requires_grad_(), Once(plain)
        given = wrapper(once, functools.partial(prepare, filtered=filtered), lengths, starts)
        loss, metrics = call(given, mine, dict(data), torch.tensor(batch.seqs), torch.tensor(batch.toks))
        loss.backward()
        assert once.calls == ["packed"]
        assert leaf.grad.abs().max() > 1e-4
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mine.grad, leaf.grad, rtol=1e-5, atol=1e-7)
        assert_same_metrics(metrics, others)


@pytest.mark.parametrize("name", CONFIGS)
def test_given_log_probs_are_taken_at_once(name):
    batch, data, lengths, starts, values = case(absorbed=3)
    leaf, mine = values.clone().requires_grad_(), values.clone().requires_grad_()
    expected, others = each_by_itself(build_loss(CONFIGS[name]), by_row, batch, data, lengths, starts, leaf)
    expected.backward()
    given = wrapper(build_loss(CONFIGS[name], use_fused_linear_logprobs=True), None, lengths, starts)
    for row in (mine, mine[:, :-1]):  # NeMo-RL's end one before the last sequence's padding
        mine.grad = None
        loss, metrics = packed_microbatch.loss_by_sequence(
            given, row, dict(data), torch.tensor(batch.seqs), torch.tensor(batch.toks)
        )
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mine.grad, leaf.grad, rtol=1e-5, atol=1e-7)
        assert_same_metrics(metrics, others)


def test_what_lies_behind_the_last_sequence_is_nobodys():
    batch, data, lengths, starts, values = case()
    wrapped = wrapper(build_loss(RICH), by_row, lengths, starts)
    rows = [values, torch.cat([values, torch.full((1, 7), torch.nan)], dim=1)]
    rows.append(values[:, :-1])  # where log-probs of a fused linear layer end, one before the padding
    results = [
        packed_microbatch.loss_by_sequence(wrapped, row, data, torch.tensor(batch.seqs), torch.tensor(batch.toks))
        for row in rows
    ]
    for loss, metrics in results[1:]:
        assert float(loss) == float(results[0][0])
        assert dict(metrics) == dict(results[0][1])


@pytest.mark.parametrize("how", HOW)
def test_positive_examples_of_a_microbatch_are_those_of_all_its_sequences(how):
    config = {"positive_example_nll_weight": 0.5, "positive_example_nll_normalization": "microbatch"}
    batch, data, lengths, starts, values = case(2)
    call, prepare = HOW[how]
    loss = build_loss(config)
    _, packed_row = call(
        wrapper(loss, prepare, lengths, starts), values, data, torch.tensor(batch.seqs), torch.tensor(batch.toks)
    )
    _, padded = loss(batch.curr, batch.data, torch.tensor(batch.seqs), torch.tensor(batch.toks))
    assert packed_row["positive_nll_loss"] == pytest.approx(padded["positive_nll_loss"], rel=1e-5)


@pytest.mark.parametrize("how", HOW)
def test_a_batch_that_needs_a_look_and_had_none_is_refused(how):
    batch, data, lengths, starts, values = case()
    call, prepare = HOW[how]
    given = wrapper(build_loss({"batch_veto": {"max": 1.0}}), prepare, lengths, starts)
    counts = torch.tensor(batch.seqs), torch.tensor(batch.toks)
    with pytest.raises(DataError, match="needs a pass over the whole batch before the step"):
        call(given, values, data, *counts)
    call(given, values, {**data, PREPARED_KEY: torch.ones(len(lengths) - 1)}, *counts)


@pytest.mark.parametrize("how", HOW)
def test_another_packing_is_named(how):
    batch, data, lengths, starts, values = case()
    call, prepare = HOW[how]
    fewer = wrapper(build_loss({}), prepare, lengths[:-1], starts[:-1])
    with pytest.raises(ShapeError, match=r"data\['token_mask'\] has 8 rows, but 7 sequences are packed"):
        call(fewer, values, data, torch.tensor(batch.seqs), torch.tensor(batch.toks))
