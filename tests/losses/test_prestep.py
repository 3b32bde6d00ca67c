"""Before the step: the batch veto and the masks that decide what the loss is a mean over."""

import math

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import BatchVetoError, ConfigError, DataError, ShapeError
from nemo_geomask.losses import PrestepPass
from nemo_geomask.losses.policy_loss import PREPARED_KEY
from nemo_geomask.losses.prestep import untrained_metrics
from tests.helpers import oracle
from tests.helpers.batches import evaluate, one_row, rollouts, stack

ICEPOP = {"preset": "icepop", "min": 0.7, "max": 1.6}
GEOMETRIC = {"preset": "geometric", "min": 0.85, "max": 1.2}
OPSM = {"preset": "opsm", "delta": 0.1}


def mismatch_kl(data, estimator):
    """Mean over trained tokens, one at a time."""
    total, count = 0.0, 0.0
    rows, width = data["token_mask"].shape
    for i in range(rows):
        for t in range(1, width):
            weight = float(data["token_mask"][i, t]) * float(data["sample_mask"][i])
            if weight:
                x = float(data["prev_logprobs"][i, t]) - float(data["generation_logprobs"][i, t])
                total += weight * (-x if estimator == "k1" else math.exp(x) - 1 - x)
                count += weight
    return total / count


def settings(**config):
    return build_loss(config).config


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_veto_compares_the_mean_over_tokens(estimator):
    batch = rollouts(seed=1, offsets=(-0.3, -0.4, -0.1, -0.3, -0.05, -0.02))
    batch = batch.with_data(sample_mask=torch.tensor([0.5, 1.0, 0.25, 1.0, 0.75, 1.0, 0.5, 0.0]))
    kl = mismatch_kl(batch.data, estimator)
    assert kl > 0.01
    for bound, train in ((kl * 1.001, True), (kl * 0.999, False)):
        decision = PrestepPass(settings(batch_veto={"estimator": estimator, "max": bound}))(batch.data)
        assert decision.train is train
        assert set(decision.changes) == {PREPARED_KEY}
        assert decision.metrics["geomask/batch_kl"] == pytest.approx(kl, rel=1e-5)
        assert decision.metrics["geomask/batch_vetoed"] == float(not train)


def test_a_k1_far_below_zero_is_a_mismatch_too():
    batch = rollouts(seed=1)
    data = {**batch.data, "generation_logprobs": batch.data["prev_logprobs"] - 3.0}
    decision = PrestepPass(settings(batch_veto={"estimator": "k1", "max": 0.1}))(data)
    assert not decision.train
    assert decision.metrics["geomask/batch_kl"] == pytest.approx(-3.0, rel=1e-6)
    assert decision.reason == "mismatch KL -3 is beyond loss_fn.batch_veto.max: 0.1"


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_a_batch_of_mostly_nonfinite_log_probs_is_vetoed(value):
    batch = rollouts(seed=2)
    calm = {**batch.data, "generation_logprobs": batch.data["prev_logprobs"].clone()}
    look = PrestepPass(settings(batch_veto={"max": 0.1}))
    few, most = (
        {**calm, "generation_logprobs": calm["generation_logprobs"].index_fill(0, torch.tensor(rows), value)}
        for rows in ([1], [0, 1, 2, 4, 5])
    )
    # What is dropped does not train, so one bad response costs no batch.
    assert look(few).metrics == {"geomask/batch_kl": 0.0, "geomask/batch_vetoed": 0.0}
    assert look(most).metrics == {"geomask/batch_kl": math.inf, "geomask/batch_vetoed": 1.0}


@pytest.mark.parametrize(("bad", "kl"), [(1, 0.0), (2, 0.0), (3, math.inf)])
def test_half_of_the_tokens_must_have_finite_log_probs(bad, kl):
    batch = stack(*[one_row(curr=[-1.0, -2.0], prev=[-1.0, -2.0]) for _ in range(4)])
    gen = batch.data["generation_logprobs"].clone()
    gen[:bad] = math.nan
    decision = PrestepPass(settings(batch_veto={"max": 0.1}))({**batch.data, "generation_logprobs": gen})
    assert decision.metrics["geomask/batch_kl"] == kl
    assert decision.train == (kl == 0)


@pytest.mark.parametrize("key", ["token_mask", "sample_mask"])
def test_what_is_counted_is_whole(key):
    batch = rollouts(seed=1)
    data = {**batch.data, key: batch.data[key] * 0.5}
    look = PrestepPass(settings(denominator="kept", masks=[{"preset": "icepop", "min": 0.5, "max": 2.0}]))
    with pytest.raises(DataError, match=rf"data\['{key}'\] must hold 0 and 1 only, but it holds 0.5"):
        look(data)


def test_a_batch_without_a_token_to_train_says_nothing():
    look = PrestepPass(settings(batch_veto={"max": 1e-9, "max_in_a_row": 1}))
    wild = rollouts(seed=3)
    assert not look(wild.data).train
    assert look({**wild.data, "sample_mask": torch.zeros(8)}).train
    with pytest.raises(BatchVetoError, match="2 batches in a row"):
        look(wild.data)


def test_masks_keep_their_labels_and_their_denominator():
    batch = rollouts(seed=4)
    masks = [
        {"log_ratio": "policy", "level": "token", "max": 1.5},
        {"log_ratio": "mismatch", "level": "token", "max": 1.5},
        GEOMETRIC,
        {**GEOMETRIC, "min": 0.5},
    ]
    data = {**batch.data, "generation_logprobs": batch.data["generation_logprobs"].clone()}
    data["generation_logprobs"][0] = math.nan
    before = PrestepPass(settings(masks=masks, denominator="kept"))(data).metrics
    assert {name.split("/")[2] for name in before if "/mask/" in name} == {"mask_2", "geometric", "geometric_2"}
    # Shares of the same counts as those that the loss reports when it applies the masks itself.
    seqs = float(data["sample_mask"].sum())
    toks = float((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())
    _, inside = build_loss({"masks": masks})(batch.curr, data, seqs, toks)
    for name, value in before.items():
        if "/mask/" in name:
            assert value == pytest.approx(inside[name], rel=1e-6), name


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64])
def test_masks_of_any_dtype(dtype):
    batch = rollouts(seed=5)
    config = settings(masks=[ICEPOP, GEOMETRIC], denominator="kept")
    expected = PrestepPass(config)(batch.data).changes
    typed = {name: batch.data[name].to(dtype) for name in ("token_mask", "sample_mask")}
    found = PrestepPass(config)({**batch.data, **typed}).changes
    for name in typed:
        assert found[name].dtype == dtype
        assert torch.equal(found[name].float(), expected[name])


def test_masked_positions_may_hold_anything():
    batch = rollouts(seed=2)
    look = PrestepPass(settings(batch_veto={"max": 0.1}, masks=[ICEPOP, GEOMETRIC], denominator="kept"))
    clean = look(batch.data)
    idle = (batch.data["token_mask"] * batch.data["sample_mask"][:, None]) == 0
    poisoned = {key: batch.data[key].masked_fill(idle, math.nan) for key in ("prev_logprobs", "generation_logprobs")}
    found = look({**batch.data, **poisoned})
    assert found.metrics == clean.metrics
    for key, value in clean.changes.items():
        assert torch.equal(found.changes[key], value)


def test_vetoes_in_a_row_end_the_run():
    look = PrestepPass(settings(batch_veto={"max": 1e-9, "max_in_a_row": 2}))
    calm = rollouts(seed=3)
    calm = calm.with_data(generation_logprobs=calm.data["prev_logprobs"])
    wild = rollouts(seed=3)
    decisions = [look(batch.data).train for batch in (wild, wild, calm, wild, wild)]
    assert decisions == [False, False, True, False, False]
    with pytest.raises(BatchVetoError, match=r"3 batches in a row .*\(k3\).* max_in_a_row is 2"):
        look(wild.data)
    assert look.vetoed == 5


@pytest.mark.parametrize("masks", [[ICEPOP], [GEOMETRIC], [ICEPOP, GEOMETRIC], [GEOMETRIC, OPSM]])
@pytest.mark.parametrize("name", ["clipped_pg", "gspo"])
def test_kept_is_a_mean_over_what_the_masks_keep(masks, name):
    batch = rollouts(seed=4)
    config = {"name": name, "masks": masks, "denominator": "kept"}
    decision = PrestepPass(settings(**config))(batch.data)
    assert decision.train
    changes = decision.changes
    # One token at a time: the masks on the mismatch judge the batch as it came.
    verdicts = _verdicts(batch.data, masks)
    assert torch.equal(changes["token_mask"][:, 1:], batch.data["token_mask"][:, 1:] * verdicts)
    assert torch.equal(changes["token_mask"][:, 0], batch.data["token_mask"][:, 0])
    removed = batch.data["token_mask"][:, 1:].sum() - changes["token_mask"][:, 1:].sum()
    assert removed > 0
    # The counts that the trainer takes afterwards, and a loss without those masks over what is left.
    kept = batch.with_data(**changes)
    seqs = float(changes["sample_mask"].sum())
    toks = float((changes["token_mask"][:, 1:] * changes["sample_mask"][:, None]).sum())
    answer = evaluate(config, type(batch)(kept.curr, kept.data, seqs, toks))
    plain = build_loss({"name": name, "masks": [mask for mask in masks if mask is OPSM]}).config
    truth = oracle.evaluate(plain, kept.curr, kept.data, seqs, toks, {})
    assert answer.loss.item() == pytest.approx(truth.loss, rel=1e-5)
    torch.testing.assert_close(answer.grad.double(), torch.tensor(truth.grad).double(), rtol=1e-4, atol=1e-8)


def _verdicts(data, masks):
    kept = torch.ones(data["token_mask"].shape[0], data["token_mask"].shape[1] - 1)
    for i in range(kept.shape[0]):
        tokens = [t for t in range(1, kept.shape[1] + 1) if data["token_mask"][i, t] and data["sample_mask"][i]]
        x = {t: float(data["prev_logprobs"][i, t]) - float(data["generation_logprobs"][i, t]) for t in tokens}
        for mask in masks:
            if mask is ICEPOP:
                gone = [t for t in tokens if not 0.7 <= math.exp(x[t]) <= 1.6]
            elif mask is GEOMETRIC:
                mean = sum(x.values()) / max(len(tokens), 1)
                gone = [] if 0.85 <= math.exp(mean) <= 1.2 else tokens
            else:
                gone = []
            for t in gone:
                kept[i, t - 1] = 0.0
    return kept


def test_rejected_sequences_leave_advantages_and_counts_as_documented():
    batch = rollouts(seed=5)
    decision = PrestepPass(settings(masks=[GEOMETRIC], denominator="kept"))(batch.data)
    assert set(decision.changes) == {"token_mask", "sample_mask", PREPARED_KEY}
    rejected = decision.changes["sample_mask"] < batch.data["sample_mask"]
    assert rejected.any()
    assert not rejected.all()
    assert decision.metrics["geomask/mask/geometric/removed"] == pytest.approx(
        float(rejected.sum() / batch.data["sample_mask"].sum())
    )
    # A sequence that came without a token to train is still counted.
    empty = batch.data["token_mask"][:, 1:].sum(dim=1) == 0
    assert torch.equal(decision.changes["sample_mask"][empty], batch.data["sample_mask"][empty])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"masks": [GEOMETRIC], "denominator": "kept"}, r"denominator: kept"),
        ({"batch_veto": {"max": 0.1}}, r"batch_veto"),
        ({"batch_veto": {"max": 0.1}, "masks": [GEOMETRIC], "denominator": "kept"}, r"batch_veto"),
    ],
)
def test_the_loss_asks_whether_it_was_done(config, named):
    batch = rollouts(seed=6)
    with pytest.raises(DataError, match=rf"loss_fn\.\w+: {named} needs a pass over the whole batch before the step"):
        evaluate(config, batch)
    loss = build_loss(config)
    changed = {**batch.data, **PrestepPass(loss.config)(batch.data).changes}
    told, _ = loss(batch.curr, changed, batch.seqs, batch.toks)
    del changed[PREPARED_KEY]
    trusting, _ = loss.for_prepared_batches()(batch.curr, changed, batch.seqs, batch.toks)
    assert torch.equal(told, trusting)
    with pytest.raises(DataError):
        loss(batch.curr, changed, batch.seqs, batch.toks)


EVERYTHING = {"batch_veto": {"max": 0.05}, "masks": [ICEPOP, GEOMETRIC], "denominator": "kept"}


def parts(data, sizes):
    ends = torch.tensor(sizes).cumsum(0).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        # As a trainer pads them: to a length of their own, with anything.
        yield {
            name: torch.nn.functional.pad(value[start:end], (0, 3), value=7.0 if "mask" not in name else 0.0)
            if value.dim() == 2
            else value[start:end]
            for name, value in data.items()
        }


@pytest.mark.parametrize("sizes", [(8,), (3, 5), (1, 1, 6)])
@pytest.mark.parametrize("train", [True, False])
def test_a_batch_in_parts_is_decided_as_a_whole(sizes, train):
    batch = rollouts(seed=7)
    bound = mismatch_kl(batch.data, "k3") * (1.001 if train else 0.999)
    config = settings(**{**EVERYTHING, "batch_veto": {"max": bound}})
    whole = PrestepPass(config)(batch.data)
    assert whole.train is train
    gate = PrestepPass(config)
    review = gate.open()
    found = [review.add(part) for part in parts(batch.data, sizes)]
    decision = review.decide()
    assert decision.train is whole.train
    assert gate.vetoed == int(not whole.train)
    assert decision.changes == {}
    assert decision.metrics == pytest.approx(whole.metrics, rel=1e-12)
    assert torch.equal(torch.cat([change["sample_mask"] for change in found]), whole.changes["sample_mask"])
    width = batch.data["token_mask"].shape[1]
    assert torch.equal(torch.cat([change["token_mask"][:, :width] for change in found]), whole.changes["token_mask"])


@pytest.mark.parametrize("sizes", [(8,), (3, 5), (1, 1, 6)])
def test_metrics_of_an_untrained_batch_add_up_to_those_of_the_loss(sizes):
    batch = rollouts(seed=8)
    config = {"name": "gspo", **EVERYTHING, "use_importance_sampling_correction": True}
    loss, gate = build_loss(config), PrestepPass(settings(**config))
    review = gate.open()
    changed = [{**part, **review.add(part)} for part in parts(batch.data, sizes)]
    decision = review.decide()
    found = untrained_metrics(loss, changed, decision)

    whole = {**batch.data, **gate(batch.data).changes}
    seqs = whole["sample_mask"].sum()
    toks = (whole["token_mask"][:, 1:] * whole["sample_mask"][:, None]).sum()
    _, expected = loss(batch.data["prev_logprobs"][:, 1:], whole, seqs, toks)
    assert found.pop("loss") == [0.0] * len(sizes)
    del expected["loss"]
    for name, value in decision.metrics.items():
        assert found.pop(name) == [value]
        expected.pop(name, None)
    assert set(found) == set(expected)
    for name, values in found.items():
        assert len(values) == len(sizes)
        merge = {"_min": min, "_max": max}.get(name[-4:], sum)
        assert merge(values) == pytest.approx(expected[name], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"denominator": "kept"}, "no entry of masks is on the mismatch"),
        ({"denominator": "kept", "masks": [OPSM]}, "no entry of masks is on the mismatch"),
        ({"batch_veto": {"max": 0.1}, "force_on_policy_ratio": True}, "batch_veto reads prev_logprobs"),
        ({"batch_veto": {"max": 0.0}}, r"loss_fn\.batch_veto\.max"),
        ({"batch_veto": {"max": 0.1, "estimator": "k2"}}, r"loss_fn\.batch_veto\.estimator"),
        ({"batch_veto": {"maximum": 0.1}}, r"loss_fn\.batch_veto\.maximum: unknown key; did you mean 'max'"),
    ],
)
def test_settings_that_do_nothing_or_contradict(config, message):
    with pytest.raises(ConfigError, match=message):
        build_loss(config)


@pytest.mark.parametrize("missing", ["prev_logprobs", "generation_logprobs", "token_mask"])
def test_a_batch_without_what_is_looked_at_is_an_error(missing):
    data = rollouts(seed=1).data
    del data[missing]
    with pytest.raises(DataError, match=missing):
        PrestepPass(settings(batch_veto={"max": 0.1}))(data)


def test_nothing_to_do_without_settings():
    assert not PrestepPass(settings(masks=[GEOMETRIC])).needed
    assert PrestepPass(settings(batch_veto={"max": 0.1})).needed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (torch.zeros_like, "is 0 at all of the .* returned none"),
        (torch.abs, "above 0 at 100% of .* check logprobs_mode"),
    ],
)
def test_generation_log_probs_that_no_engine_computed_are_refused(change, message):
    data = dict(rollouts(1).data)
    before_step = PrestepPass(settings(batch_veto={"max": 100.0}))
    assert before_step(data).train
    data["generation_logprobs"] = change(data["generation_logprobs"])
    with pytest.raises(DataError, match=message):
        before_step(data)
    # A policy that is sure of every token has them at 0 rightly.
    data["generation_logprobs"] = torch.zeros_like(data["prev_logprobs"])
    data["prev_logprobs"] = torch.full_like(data["prev_logprobs"], -1e-4)
    assert before_step(data).train


def test_a_packed_batch_is_refused():
    data = {"prev_logprobs": torch.zeros(5), "generation_logprobs": torch.zeros(5), "token_mask": torch.ones(5)}
    before_step = PrestepPass(settings(name="clipped_pg", denominator="kept", masks=[ICEPOP]))
    with pytest.raises(ShapeError, match=r"padded rows, data\['prev_logprobs'\] of \[B, T\], but it is \[5\]"):
        before_step({**data, "sample_mask": torch.ones(2)})
