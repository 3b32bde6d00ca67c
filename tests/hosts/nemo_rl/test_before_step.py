"""``batch_veto`` and ``denominator: kept`` around NeMo-RL's policies, here stand-ins with NeMo-RL's signatures."""

import pickle
import sys
import types

import pytest
import torch

from nemo_geomask import PrestepPass, build_loss
from nemo_geomask.errors import BatchVetoError, ConfigError, DataError
from nemo_geomask.hosts.nemo_rl import HostAPIError, prestep_hooks, uninstall
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
from nemo_geomask.losses.policy_loss import PREPARED_KEY
from tests.helpers.batches import rollouts

GEOMETRIC = [{"preset": "geometric", "min": 0.85, "max": 1.2}]
KEPT = {"denominator": "kept", "masks": GEOMETRIC}
VETO = {"batch_veto": {"max": 1e-9, "max_in_a_row": 1}}
COLUMNS = ("token_mask", "sample_mask", "generation_logprobs", "prev_logprobs", "reference_policy_logprobs")


class Policy:
    """NeMo-RL's; remembers what it was to train on."""

    def __init__(self):
        self.calls = []
        self.cfg = {"train_global_batch_size": 4}

    def train(self, data, loss_fn, eval_mode=False, *, gbs=None, mbs=None, timer=None):
        return self.trained("train", data, loss_fn)

    def trained(self, how, data, loss_fn):
        curr = data["prev_logprobs"][:, 1:]
        loss, _ = loss_fn(
            curr, data, data["sample_mask"].sum(), (data["token_mask"] * data["sample_mask"][:, None]).sum()
        )
        self.calls.append((how, {name: data[name].clone() for name in COLUMNS}, float(loss)))
        return {"loss": loss, "grad_norm": torch.ones(1), "all_mb_metrics": {}}


class TQPolicy(Policy):
    """NeMo-RL's over its data plane: ``meta`` is a key of ``store``."""

    def __init__(self, store):
        Policy.__init__(self)
        self.store = store

    def read_from_dataplane(self, meta, *, select_fields, pad_value_dict=None):
        return {name: self.store[meta][name].clone() for name in select_fields}

    def write_to_dataplane(self, meta, fields):
        assert set(fields) <= set(COLUMNS)
        self.store[meta].update(fields)

    def train_from_meta(self, meta, loss_fn, eval_mode=False, gbs=None, mbs=None, timer=None):
        return self.trained("train_from_meta", self.store[meta], loss_fn)

    def begin_train_step(self, loss_fn, gbs=None, mbs=None):
        self.loss_fn = pickle.loads(pickle.dumps(loss_fn))
        self.calls.append(("begin",))

    def train_microbatches_from_meta(self, meta, timer=None):
        self.trained("part", self.store[meta], self.loss_fn)

    def finish_train_step(self):
        self.calls.append(("finish",))
        return {"loss": torch.ones(1), "grad_norm": torch.ones(1), "all_mb_metrics": {}}

    def abort_train_step(self):
        self.calls.append(("abort",))


def methods(kind):
    return {name: value for name, value in vars(kind).items() if callable(value)}


@pytest.fixture
def nemo_rl(monkeypatch):
    """Modules of NeMo-RL's with fresh classes, since wrappers go into the classes."""
    modules = {}
    for name in ("nemo_rl", "nemo_rl.models", "nemo_rl.models.policy", "nemo_rl.models.policy.lm_policy"):
        modules[name] = types.ModuleType(name)
    modules["nemo_rl"].__version__ = "9.9"
    tq = modules["nemo_rl.models.policy.tq_policy"] = types.ModuleType("nemo_rl.models.policy.tq_policy")
    lm = modules["nemo_rl.models.policy.lm_policy"]
    lm.Policy = type("Policy", (), {**methods(Policy), "__module__": lm.__name__})
    tq.TQPolicy = type("TQPolicy", (lm.Policy,), {**methods(TQPolicy), "__module__": tq.__name__})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield types.SimpleNamespace(lm=lm, tq=tq)
    uninstall()


def split(data, at):
    return (
        {name: value[:at] for name, value in data.items()},
        {name: value[at:] for name, value in data.items()},
    )


def watched(**config):
    loss = build_loss({"name": "gspo", **config})
    prestep_hooks.wrap_policy(loss)
    return loss


def stream(policy, loss, metas):
    policy.begin_train_step(loss)
    for meta in metas:
        policy.train_microbatches_from_meta(meta)
    return policy.finish_train_step()


def test_a_veto_keeps_the_batch_from_the_policy(nemo_rl):
    loss, data = watched(**VETO), rollouts(seed=1).data
    policy, tq = nemo_rl.lm.Policy(), nemo_rl.tq.TQPolicy({"all": dict(data)})
    for results, calls in (
        (policy.train(data, loss), policy.calls),
        (watched_from_meta(tq, **VETO), tq.calls),
    ):
        assert calls == []
        assert results["all_mb_metrics"]["geomask/batch_vetoed"] == [1.0]
        assert results["all_mb_metrics"]["loss"] == [0.0]
        # Of one of the two optimiser steps that would have been taken, as NeMo-RL counts.
        assert results["all_mb_metrics"]["global_valid_seqs"] == [3.5]
        assert float(results["grad_norm"]) == 0.0
    with pytest.raises(BatchVetoError, match="2 batches in a row"):
        policy.train(rollouts(seed=1).data, loss)


def test_epochs_on_one_batch_are_one_batch(nemo_rl):
    loss, policy = watched(**VETO, **KEPT), nemo_rl.lm.Policy()
    data = rollouts(seed=1).data
    for _ in range(5):
        assert policy.train(dict(data), loss)["all_mb_metrics"]["geomask/batch_vetoed"] == [1.0]
    # max_in_a_row is 1: counted twice, they would have ended the run.
    gentle = watched(**KEPT)
    for _ in range(2):
        policy.train(dict(data), gentle)
    (_, first, one), (_, second, other) = policy.calls
    assert torch.equal(first["sample_mask"], second["sample_mask"])
    assert one == other


def test_a_batch_of_which_nothing_is_kept_is_not_trained_on(nemo_rl, caplog):
    nothing = {"denominator": "kept", "masks": [{"preset": "veto", "max": 1e-6}]}
    data = rollouts(seed=2).data
    loss, policy = watched(**nothing), nemo_rl.lm.Policy()
    metrics = policy.train(data, loss)["all_mb_metrics"]
    assert policy.calls == []
    assert metrics["geomask/batch_emptied"] == [1.0]
    assert metrics["global_valid_toks"] == [0.0]
    assert "no update on this batch: loss_fn.masks keep nothing of it" in caplog.text
    streamed = nemo_rl.tq.TQPolicy({"a": data})
    stream(streamed, loss, ["a"])
    assert streamed.calls[-1] == ("abort",)


def test_an_error_in_training_is_not_hidden_by_one_after_it(nemo_rl, caplog):
    loss = watched(**KEPT)

    class Broken(nemo_rl.tq.TQPolicy):
        def trained(self, how, data, loss_fn):
            self.store.clear()
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Broken({"all": rollouts(seed=3).data}).train_from_meta("all", loss)
    assert "write_to_dataplane failed" in caplog.text


def watched_from_meta(policy, **config):
    loss = watched(**config)
    return policy.train_from_meta("all", loss)


def test_masks_reach_the_policy_and_leave_the_batch(nemo_rl):
    data = rollouts(seed=2).data
    before = {name: value.clone() for name, value in data.items()}
    policy, tq = nemo_rl.lm.Policy(), nemo_rl.tq.TQPolicy({"all": data})
    loss = watched(**KEPT)
    policy.train(data, loss)
    results = watched_from_meta(tq, **KEPT)
    assert results["all_mb_metrics"]["geomask/mask/geometric/removed"][0] > 0
    ((_, one, value),) = policy.calls
    ((_, other, same),) = tq.calls
    assert value == same
    assert 0 < one["sample_mask"].sum() < before["sample_mask"].sum()
    for name in COLUMNS:
        assert torch.equal(one[name], other[name])
        # In the caller's hands and in the data plane the batch is what it was.
        assert torch.equal(data[name], before[name])
    assert PREPARED_KEY not in data


BUDGET = {"masks": [{"preset": "m2po"}]}


@pytest.mark.parametrize("eval_mode", [False, True])
def test_a_bound_reaches_the_loss_and_no_column_changes(nemo_rl, eval_mode):
    data = rollouts(seed=2).data
    policy, tq = nemo_rl.lm.Policy(), nemo_rl.tq.TQPolicy({"all": data})
    loss = watched(**BUDGET)
    policy.train(data, loss, eval_mode)
    tq.train_from_meta("all", loss, eval_mode)
    ((_, one, value),) = policy.calls
    ((_, _, same),) = tq.calls
    assert all(torch.equal(one[name], data[name]) for name in COLUMNS)
    changed = {**data, **PrestepPass(loss.config)(data).changes}
    curr, toks = data["prev_logprobs"][:, 1:], (data["token_mask"] * data["sample_mask"][:, None]).sum()
    expected, metrics = loss(curr, changed, data["sample_mask"].sum(), toks)
    assert value == same == float(expected)
    assert metrics["geomask/mask/m2po/removed"] > 0.1


def test_a_budget_over_parts_is_refused(nemo_rl):
    loss = watched(**BUDGET)
    with pytest.raises(ConfigError, match=r"loss_fn\.masks\[0\]: a budget is over the whole batch"):
        nemo_rl.tq.TQPolicy({}).begin_train_step(loss)


def test_a_streamed_step_is_decided_at_its_end(nemo_rl):
    data = rollouts(seed=3).data
    first, second = split(data, 3)
    loss, whole = watched(**KEPT, batch_veto={"max": 100.0}), nemo_rl.lm.Policy()
    expected = whole.train(data, loss)["all_mb_metrics"]
    policy = nemo_rl.tq.TQPolicy({"a": first, "b": second})
    results = stream(policy, loss, ["a", "b"])
    assert [call[0] for call in policy.calls] == ["begin", "part", "part", "finish"]
    found = {name: sum(values) for name, values in results["all_mb_metrics"].items()}
    assert found == pytest.approx({name: sum(values) for name, values in expected.items()})
    kept = torch.cat([call[1]["sample_mask"] for call in policy.calls if call[0] == "part"])
    assert torch.equal(kept, whole.calls[0][1]["sample_mask"])


def test_a_vetoed_stream_is_aborted(nemo_rl):
    first, second = split(rollouts(seed=4).data, 5)
    policy, loss = nemo_rl.tq.TQPolicy({"a": first, "b": second}), watched(**VETO)
    results = stream(policy, loss, ["a", "b"])
    assert [call[0] for call in policy.calls] == ["begin", "part", "part", "abort"]
    metrics = results["all_mb_metrics"]
    assert metrics["geomask/batch_vetoed"] == [1.0]
    # k3 over the whole batch, from the decision and from the loss's own metrics of each part.
    assert sum(metrics["geomask/mismatch_k3"]) == pytest.approx(metrics["geomask/batch_kl"][0], rel=1e-5)
    assert len(metrics["gen_kl_error"]) == 2
    assert metrics["global_valid_seqs"] == [7.0]  # of the streamed step; Policy.train takes two on such a batch
    with pytest.raises(BatchVetoError, match="2 batches in a row"):
        stream(policy, loss, ["a", "b"])
    assert policy.calls[-1] == ("abort",)
    # An open step that never ended leaves nothing for the next.
    policy.begin_train_step(loss)
    policy.train_microbatches_from_meta("a")
    plain = build_loss({"name": "gspo"})
    assert stream(policy, plain, ["b"])["all_mb_metrics"] == {}


@pytest.mark.parametrize("config", [VETO, KEPT, {**VETO, "logprob_backend": "geomask"}], ids=["veto", "kept", "logits"])
def test_a_policy_arrives_watched_where_it_is_sent(nemo_rl, config):
    # NeMo-RL's single controller trains in another process, to which the driver sends policy and loss.
    plain = build_loss({"name": "gspo", **config})
    loss = LogitLoss(plain) if "logprob_backend" in config else plain
    untouched = [methods(kind) for kind in (nemo_rl.lm.Policy, nemo_rl.tq.TQPolicy)]
    prestep_hooks.wrap_policy(loss)
    sent = pickle.dumps((nemo_rl.tq.TQPolicy({"a": rollouts(seed=5).data}), loss))
    uninstall()
    (policy, arrived), (streamed, _) = pickle.loads(sent), pickle.loads(sent)
    assert [methods(kind) for kind in (nemo_rl.lm.Policy, nemo_rl.tq.TQPolicy)] == untouched
    assert isinstance(policy, nemo_rl.tq.TQPolicy)
    watches = {"geomask/batch_kl", "geomask/mask/geometric/removed"}
    assert watches & set(policy.train_from_meta("a", arrived)["all_mb_metrics"])
    if loss is plain:
        assert watches & set(stream(streamed, arrived, ["a"])["all_mb_metrics"])
        unwatched = nemo_rl.tq.TQPolicy({"a": rollouts(seed=5).data})
        with pytest.raises(DataError, match="needs a pass over the whole batch before the step"):
            unwatched.train_from_meta("a", arrived)


def test_a_policy_that_comes_back_is_watched_once(nemo_rl):
    loss = watched(**VETO)
    policy = pickle.loads(pickle.dumps(nemo_rl.tq.TQPolicy({"a": rollouts(seed=5).data})))
    assert type(policy) is nemo_rl.tq.TQPolicy
    assert policy.train_from_meta("a", loss)["all_mb_metrics"]["geomask/batch_vetoed"] == [1.0]


def test_a_loss_counts_nothing_and_changes_nothing_when_it_arrives(nemo_rl):
    loss = watched(**VETO)
    policy = nemo_rl.lm.Policy()
    sent = pickle.dumps(loss)
    policy.train(rollouts(seed=5).data, loss)
    assert pickle.dumps(loss) == sent
    uninstall()
    before = [dict(vars(owner)) for owner in (nemo_rl.lm, nemo_rl.lm.Policy, nemo_rl.tq, nemo_rl.tq.TQPolicy)]
    pickle.loads(sent)
    assert [dict(vars(owner)) for owner in (nemo_rl.lm, nemo_rl.lm.Policy, nemo_rl.tq, nemo_rl.tq.TQPolicy)] == before


def test_each_policy_counts_for_itself(nemo_rl):
    loss = watched(**VETO)
    policies = [nemo_rl.lm.Policy() for _ in range(3)]
    for seed, policy in enumerate(policies):
        policy.train(rollouts(seed=seed).data, loss)
    with pytest.raises(BatchVetoError, match="2 batches in a row"):
        policies[0].train(rollouts(seed=9).data, loss)


def test_what_goes_to_the_workers_takes_batches_without_a_mark(nemo_rl):
    seen = []

    class Spy(nemo_rl.lm.Policy):
        def trained(self, how, data, loss_fn):
            seen.append(pickle.loads(pickle.dumps(loss_fn)))
            return {"all_mb_metrics": {}}

    policy, loss, batch = Spy(), watched(**KEPT), rollouts(seed=6)
    policy.train(batch.data, loss)
    seen[0](batch.data["prev_logprobs"][:, 1:], batch.data, batch.seqs, batch.toks)
    # Other losses pass through as they are.
    plain = build_loss({"name": "gspo"})
    policy.train(batch.data, plain)
    assert seen[1].config == plain.config
    policy.train({"prev_logprobs": None}, "somebody's own")
    assert seen[2] == "somebody's own"


def test_evaluation_is_masked_and_never_vetoed(nemo_rl):
    policy, loss, data = nemo_rl.lm.Policy(), watched(**VETO, **KEPT), rollouts(seed=7).data
    for _ in range(3):
        policy.train(data, loss, eval_mode=True)
    assert len(policy.calls) == 3
    assert policy.calls[0][1]["sample_mask"].sum() < data["sample_mask"].sum()


def test_older_versions_lack_what_is_optional(nemo_rl):
    for name in ("begin_train_step", "train_microbatches_from_meta", "finish_train_step"):
        delattr(nemo_rl.tq.TQPolicy, name)
    tq = nemo_rl.tq.TQPolicy({"all": rollouts(seed=8).data})
    assert watched_from_meta(tq, **VETO)["all_mb_metrics"]["geomask/batch_vetoed"] == [1.0]


@pytest.mark.parametrize("missing", ["finish_train_step", "abort_train_step", "write_to_dataplane"])
def test_half_a_known_api_is_an_error(nemo_rl, missing):
    delattr(nemo_rl.tq.TQPolicy, missing)
    with pytest.raises(HostAPIError, match=rf"tq_policy\.TQPolicy.*{missing}"):
        watched(**VETO)


def test_unknown_signatures_are_an_error(nemo_rl):
    nemo_rl.lm.Policy.train = lambda self, batch, loss_fn: None
    with pytest.raises(HostAPIError, match=r"NeMo-RL 9\.9 .*lm_policy\.Policy\.train takes \(self, batch, loss_fn\)"):
        watched(**VETO)


def test_nothing_is_wrapped_without_need(nemo_rl):
    watched(masks=GEOMETRIC, metrics="nemo_rl")
    assert nemo_rl.lm.Policy.train is Policy.train
    watched(**VETO)
    assert nemo_rl.lm.Policy.train is not Policy.train
    uninstall()
    assert nemo_rl.lm.Policy.train is Policy.train


def test_metrics_that_do_not_add_up_are_those_of_the_step(nemo_rl, caplog):
    """NeMo-RL's loops take the sum of a list that they do not know: ours hold one number."""
    loss = watched()
    policy = nemo_rl.lm.Policy()
    lists = {"loss": [0.25, 0.5], "geomask/mismatch_max": [0.016, 0.02], "geomask/mismatch_bin_05": [0.25, 0.0]}
    lists |= {f"geomask/mismatch_bin_{index:02}": [0.0, 0.0] for index in range(34) if index != 5}
    lists |= {"geomask/mismatch_bin_15": [0.25, 0.5], "geomask/weight_mean": [0.5, 0.5], "geomask/weight_sq": [1, 1.0]}
    policy.trained = lambda *_: {"all_mb_metrics": dict(lists)}
    found = policy.train(rollouts(seed=1).data, loss)["all_mb_metrics"]
    assert found["loss"] == [0.25, 0.5]
    assert found["geomask/mismatch_max"] == [0.02]
    assert found["geomask/weight_ess"] == [0.5]
    assert 2**-6 < found["geomask/mismatch_q50"][0] < found["geomask/mismatch_q99"][0] <= 2**-5.5
    assert {len(values) for name, values in found.items() if name != "loss"} == {1}
    assert not any("_bin_" in name for name in found)
    uninstall()
    del nemo_rl.lm.Policy.train
    watched()
    assert "metrics stay sums over microbatches, without quantiles, since" in caplog.text
    before = nemo_rl.tq.TQPolicy.train_from_meta
    watched(metrics="nemo_rl")
    assert nemo_rl.tq.TQPolicy.train_from_meta is before
