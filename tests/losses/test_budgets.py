"""Masks whose bounds the whole batch sets before its step."""

import functools
import math
from dataclasses import replace

import pytest
import torch

from nemo_geomask import PrestepPass, build_loss
from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.losses.evaluate import evaluate
from nemo_geomask.losses.prestep import untrained_metrics
from nemo_geomask.losses.raw_batch import requested_tensors, take_padded
from nemo_geomask.segments import PaddedSegments
from tests.helpers import oracle
from tests.helpers.batches import BUDGETS, TOKEN_KEYS, one_row, packed_rows, rollouts, stack

REINFORCE = {"disable_ppo_ratio": True, "reference_policy_kl_penalty": 0.0}


def told(loss_fn, batch):
    """The batch with what its look at the whole says."""
    decision = PrestepPass(loss_fn.config)(batch.data)
    assert decision.train
    return batch.with_data(**decision.changes)


def answer(loss_fn, batch):
    curr = batch.curr.clone().requires_grad_()
    loss, metrics = loss_fn(curr, batch.data, batch.seqs, batch.toks)
    loss.backward()
    return loss, curr.grad, metrics


def kept(mask, *rows):
    """Which of the tokens still train, by row, REINFORCE's gradient being −A where they do; of log(prev/gen)."""
    level = [-9.0] * len(rows[0])
    batch = stack(*(one_row(curr=level, prev=level, gen=[-9.0 - x for x in row]) for row in rows))
    loss_fn = build_loss({**REINFORCE, "masks": [mask]})
    return (answer(loss_fn, told(loss_fn, batch))[1] != 0).tolist()


@pytest.mark.parametrize("mask", BUDGETS)
def test_the_default_device_plays_no_part(mask):
    batch = rollouts(seed=3)
    loss_fn = build_loss({**REINFORCE, "masks": [BUDGETS[mask]], "denominator": "kept", "batch_veto": {"max": 1e3}})

    def run():
        prepared = told(loss_fn, batch)
        decision = PrestepPass(loss_fn.config)(batch.data)
        return *answer(loss_fn, prepared), untrained_metrics(loss_fn, [batch.data | decision.changes], decision)

    expected = run()
    with torch.device("meta"):
        found = run()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2:] == expected[2:]


# ---------------------------------------------------------------------------------------------- bounds by hand


def test_m2po_by_hand():
    # The mean square of all is 0.092, without the largest 0.06, without two 0.035.
    rows = [0.1, -0.2, 0.3], [-0.4, 0.5, 0.0]
    assert kept({"preset": "m2po"}, *rows) == [[True, True, True], [False, False, True]]
    assert kept({"preset": "m2po", "tau": 0.061}, *rows) == [[True, True, True], [True, False, True]]
    assert kept({"preset": "m2po", "tau": 0.2}, *rows) == [[True, True, True], [True, True, True]]


def _m2po_by_area(x, tau):
    """AReaL's rule in loops: drop from the top until the mean of the rest is below tau."""
    order = sorted(range(len(x)), key=lambda i: -(x[i] ** 2))
    for count in range(len(x)):
        if sum(x[i] ** 2 for i in order[count:]) / (len(x) - count) < tau:
            return set(order[:count])
    return set(order[:-1])


@pytest.mark.parametrize("seed", range(5))
def test_m2po_drops_what_areal_drops(seed):
    x = (0.4 * torch.randn(200, generator=torch.Generator().manual_seed(seed))).tolist()
    found = kept({"preset": "m2po"}, x[:100], x[100:])
    gone = {i for i, stays in enumerate([*found[0], *found[1]]) if not stays}
    assert gone == _m2po_by_area(x, 0.04)
    assert 10 < len(gone) < 150


def test_sequences_go_whole_and_count_once():
    # Means 0.1, -0.3, 0.2; the worst token is the first row's.
    rows = [0.9, -0.7], [-0.3, -0.3], [0.2, 0.2]
    mean = {"log_ratio": "mismatch", "level": "sequence_mean"}
    worst = {"log_ratio": "mismatch", "level": "sequence_max"}
    assert kept({**mean, "drop_at_most": 0.34}, *rows) == [[True, True], [False, False], [True, True]]
    assert kept({**worst, "drop_at_most": 0.34}, *rows) == [[False, False], [True, True], [True, True]]
    assert kept({**mean, "drop_at_most": 0.33}, *rows) == [[True, True]] * 3
    # (0.1 + 0.2) / 2
    assert kept({**mean, "until_mean": 0.151}, *rows) == [[True, True], [False, False], [True, True]]


# ------------------------------------------------------------------------------------------ in the loss


@pytest.mark.parametrize("name", ["clipped_pg", "gspo"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_loss_equals_oracle(budget, name):
    config = {"name": name, "masks": [BUDGETS[budget], {"preset": "icepop", "max": 1.8}]}
    loss_fn, batch = build_loss(config), rollouts(seed=11)
    truth = oracle.evaluate(loss_fn.config, batch.curr, batch.data, batch.seqs, batch.toks, {})
    loss, grad, metrics = answer(loss_fn, told(loss_fn, batch))
    assert truth.margin > 1e-6
    assert 0 < metrics[f"geomask/mask/{loss_fn.config.mask_rules[0].label}/removed"] < 0.9
    assert loss.item() == pytest.approx(truth.loss, rel=1e-5)
    assert metrics == pytest.approx(truth.metrics, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(grad.double(), torch.tensor(truth.grad).double(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("budget", BUDGETS)
def test_split_and_packed_equal_the_whole(budget):
    loss_fn = build_loss({"masks": [BUDGETS[budget]]})
    batch = told(loss_fn, rollouts(seed=12))
    loss, grad, _ = answer(loss_fn, batch)
    parts = [answer(loss_fn, batch.rows(slice(start, start + 2))) for start in range(0, 8, 2)]
    assert sum(part[0] for part in parts).item() == pytest.approx(loss.item(), rel=1e-5)
    assert torch.equal(torch.cat([part[1] for part in parts]), grad)
    curr, data, segments = packed_rows(batch)
    curr = curr.clone().requires_grad_()
    packed, _ = loss_fn.packed(curr, data, segments, batch.seqs, batch.toks)
    packed.backward()
    assert packed.item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(curr.grad.view_as(grad), grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e6])
def test_masked_positions_may_hold_anything(budget, value):
    loss_fn, batch = build_loss({"masks": [BUDGETS[budget]]}), rollouts(seed=13)
    idle = (batch.data["token_mask"] * batch.data["sample_mask"][:, None]) == 0
    spoilt = {key: batch.data[key].masked_fill(idle, value) for key in TOKEN_KEYS if key != "token_mask"}
    clean, dirty = (answer(loss_fn, told(loss_fn, batch.with_data(**changes))) for changes in ({}, spoilt))
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert clean[2] == dirty[2]


def test_what_is_not_finite_is_not_ranked():
    rows = [[0.1, 0.2, 0.3], [0.4, math.nan, 0.5]]
    mask = {"log_ratio": "mismatch", "level": "token", "drop_at_most": 0.34}
    # The second row does not train: the worst of three.
    assert kept(mask, *rows) == [[True, True, False], [False, False, False]]


def test_original_leaves_the_denominator_and_kept_takes_it_along():
    batch = rollouts(seed=11)
    removed = {}
    for denominator in ("original", "kept"):
        loss_fn = build_loss({**REINFORCE, "masks": [BUDGETS["m2po"]], "denominator": denominator})
        changed = told(loss_fn, batch)
        seqs = float(changed.data["sample_mask"].sum())
        toks = float((changed.data["token_mask"][:, 1:] * changed.data["sample_mask"][:, None]).sum())
        _, grad, _ = answer(loss_fn, type(batch)(changed.curr, changed.data, seqs, toks))
        removed[denominator] = grad == 0, grad.abs().max(), toks
    (gone, largest, before), (also, larger, after) = removed["original"], removed["kept"]
    assert torch.equal(gone, also)
    assert after < before
    assert larger.item() == pytest.approx(largest.item() * before / after, rel=1e-6)


def test_a_budget_that_keeps_nothing_takes_no_step():
    loss_fn, batch = build_loss({"masks": [{"preset": "m2po", "tau": 1e-12}]}), rollouts(seed=11)
    decision = PrestepPass(loss_fn.config)(batch.data)
    assert (decision.train, decision.reason) == (False, "loss_fn.masks keep nothing of it")
    assert decision.metrics["geomask/batch_emptied"] == 1
    found = untrained_metrics(loss_fn, [{**batch.data, **decision.changes}], decision)
    assert found["geomask/kept_tokens"] == [0.0]


def test_the_loss_asks_for_the_bound():
    loss_fn, batch = build_loss({"masks": [BUDGETS["m2po"]]}), rollouts(seed=11)
    with pytest.raises(DataError, match=r"masks: a mask with a budget needs a pass over the whole batch"):
        answer(loss_fn, batch)
    changes = PrestepPass(loss_fn.config)(batch.data).changes
    # A trainer that can add no key hands it to the loss.
    by_loss = answer(loss_fn.for_prepared_batches(changes), batch)
    by_batch = answer(loss_fn, batch.with_data(**changes))
    assert torch.equal(by_loss[1], by_batch[1])
    with pytest.raises(DataError, match="a mask with a budget"):
        answer(loss_fn.for_prepared_batches(), batch)


def test_a_microbatch_without_a_row_is_0():
    loss_fn, batch = build_loss({"masks": [BUDGETS["m2po"]]}), rollouts(seed=11)
    ready = told(loss_fn, batch)
    empty = replace(ready.rows(slice(0, 0)), seqs=batch.seqs, toks=batch.toks)
    loss, gradient, _ = answer(loss_fn, empty)
    assert loss.item() == 0.0
    assert gradient.numel() == 0


def test_parts_that_train_as_they_come_are_refused():
    config = build_loss({"masks": [{"preset": "icepop", "max": 2.0}, BUDGETS["m2po"]]}).config
    with pytest.raises(ConfigError, match=r"loss_fn\.masks\[1\]: a budget is computed over the whole batch"):
        PrestepPass(config).open()


TOKEN = {"log_ratio": "mismatch", "level": "token"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"masks": [{**TOKEN, "log_ratio": "total", "drop_at_most": 0.1}]}, r"masks\[0\].*log_ratio: mismatch"),
        (
            {"masks": [{**TOKEN, "log_ratio": "policy", "until_mean": 0.1}]},
            "current policy, which log_ratio: policy needs",
        ),
        ({"masks": [{**TOKEN, "drop_at_most": 0.1, "max": 2.0}]}, "but 'max' is set, too"),
        ({"masks": [{**TOKEN, "drop_at_most": 0.1, "until_mean": 2.0}]}, "but 'until_mean' is set, too"),
        ({"masks": [{**TOKEN, "drop_at_most": 0.1, "when": "pushing"}]}, "but when: pushing restricts the mask"),
        ({"masks": [{**TOKEN, "drop_at_most": 1.0}]}, r"masks\[0\]\.drop_at_most"),
        ({"masks": [{**TOKEN, "drop_at_most": 0.1, "level": "prefix_sum", "statistic": "prob_diff"}]}, "signs cancel"),
        ({"masks": [{"preset": "m2po"}], "force_on_policy_ratio": True}, "a mask with a budget reads prev_logprobs"),
        ({"masks": [{"preset": "m2po", "tau": 0}]}, r"masks\[0\]\.tau"),
    ],
)
def test_settings_that_make_no_sense(config, message):
    with pytest.raises(ConfigError, match=message):
        build_loss(config)


@pytest.mark.slow
@pytest.mark.long
def test_bounds_are_inputs_of_the_graph():
    loss_fn = build_loss({"masks": [BUDGETS["m2po"], BUDGETS["worst_sequences"]]})
    torch._dynamo.reset()
    function = functools.partial(evaluate, loss_fn.config, loss_fn.variant, loss_fn.options)
    graph = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for seed in (11, 12):
        batch = told(loss_fn, rollouts(seed=seed))
        batch_scalars = loss_fn.batch_scalars(batch.data, batch.curr.device)
        counts = torch.tensor(batch.seqs), torch.tensor(batch.toks)
        found = []
        for one in (function, graph):
            curr = batch.curr.clone().requires_grad_()
            raw = take_padded(curr, batch.data, requested_tensors(loss_fn.config))._replace(batch_scalars=batch_scalars)
            with torch._dynamo.config.patch(error_on_recompile=seed > 11):
                loss, values = one(raw, PaddedSegments(), (), *counts)
            loss.backward()
            found.append((loss.detach(), curr.grad, values))
        torch.testing.assert_close(found[1][:2], found[0][:2])
        torch.testing.assert_close(found[1][2], found[0][2], equal_nan=True)
