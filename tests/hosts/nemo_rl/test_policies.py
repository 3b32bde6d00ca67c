"""``batch_veto``, ``denominator: kept`` and ``ratio_anchor: gen`` in NeMo-RL's policies, here stand-ins."""

import os
import pickle
import subprocess
import sys

import pytest
import torch

from nemo_geomask import PrestepPass, build_loss
from nemo_geomask.errors import BatchVetoError, ConfigError, DataError, HostAPIError
from nemo_geomask.hosts.nemo_rl import build_nemo_rl_loss, policies
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
from nemo_geomask.hosts.nemo_rl.policies import convert_policy, geomask_class
from nemo_geomask.losses.policy_loss import PREPARED_KEY
from tests.helpers.batches import rollouts
from tests.helpers.nemo_rl.fake_policies import COLUMNS, Batch

GEOMETRIC = [{"preset": "geometric", "min": 0.85, "max": 1.2}]
KEPT = {"denominator": "kept", "masks": GEOMETRIC}
VETO = {"batch_veto": {"max": 1e-9, "max_in_a_row": 1}}


def split(data, at):
    return (
        {name: value[:at] for name, value in data.items()},
        {name: value[at:] for name, value in data.items()},
    )


def build(**config):
    return build_loss({"name": "gspo", **config})


def train_in_parts(policy, loss, metas):
    policy.begin_train_step(loss)
    for meta in metas:
        policy.train_microbatches_from_meta(meta)
    return policy.finish_train_step()


def test_a_veto_keeps_the_batch_from_the_policy(nemo_rl):
    loss, data = build(**VETO), rollouts(seed=1).data
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    tq = convert_policy(nemo_rl.tq.TQPolicy({"all": dict(data)}), loss.config)
    for results, calls in (
        (policy.train(data, loss), policy.calls),
        (tq.train_from_meta("all", loss), tq.calls),
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
    loss, gentle_loss = build(**VETO, **KEPT), build(**KEPT)
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    data = rollouts(seed=1).data
    for _ in range(5):
        assert policy.train(dict(data), loss)["all_mb_metrics"]["geomask/batch_vetoed"] == [1.0]
    # max_in_a_row is 1: counted twice, they would have ended the run.
    for _ in range(2):
        policy.train(dict(data), gentle_loss)
    (_, first_batch, first_loss), (_, second_batch, second_loss) = policy.calls
    assert torch.equal(first_batch["sample_mask"], second_batch["sample_mask"])
    assert first_loss == second_loss


def test_a_batch_of_which_nothing_is_kept_is_not_trained_on(nemo_rl, caplog):
    data = rollouts(seed=2).data
    loss = build(denominator="kept", masks=[{"preset": "veto", "max": 1e-6}])
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    metrics = policy.train(data, loss)["all_mb_metrics"]
    assert policy.calls == []
    assert metrics["geomask/batch_emptied"] == [1.0]
    assert metrics["global_valid_toks"] == [0.0]
    assert "no update on this batch: loss_fn.masks keep nothing of it" in caplog.text
    tq = convert_policy(nemo_rl.tq.TQPolicy({"a": data}), loss.config)
    train_in_parts(tq, loss, ["a"])
    assert tq.calls[-1] == ("abort",)


def test_an_error_in_training_is_not_hidden_by_one_after_it(nemo_rl, caplog):
    loss = build(**KEPT)

    class FailingPolicy(nemo_rl.tq.TQPolicy):
        def compute(self, method, data, loss_fn):
            self.store.clear()
            raise RuntimeError("out of memory")

    policy = convert_policy(FailingPolicy({"all": rollouts(seed=3).data}), loss.config)
    with pytest.raises(RuntimeError, match="out of memory"):
        policy.train_from_meta("all", loss)
    assert "write_to_dataplane failed" in caplog.text


def test_masks_reach_the_policy_and_leave_the_batch(nemo_rl):
    data = rollouts(seed=2).data
    before = {name: value.clone() for name, value in data.items()}
    loss = build(**KEPT)
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    tq = convert_policy(nemo_rl.tq.TQPolicy({"all": data}), loss.config)
    policy.train(data, loss)
    results = tq.train_from_meta("all", loss)
    assert results["all_mb_metrics"]["geomask/mask/geometric/removed"][0] > 0
    ((_, batch, value),) = policy.calls
    ((_, tq_batch, tq_value),) = tq.calls
    assert value == tq_value
    assert 0 < batch["sample_mask"].sum() < before["sample_mask"].sum()
    for name in COLUMNS:
        assert torch.equal(batch[name], tq_batch[name])
        # In the caller's hands and in the data plane the batch is what it was.
        assert torch.equal(data[name], before[name])
    assert PREPARED_KEY not in data


BUDGET = {"masks": [{"preset": "m2po"}]}


@pytest.mark.parametrize("eval_mode", [False, True])
def test_a_bound_reaches_the_loss_and_no_column_changes(nemo_rl, eval_mode):
    data = rollouts(seed=2).data
    loss = build(**BUDGET)
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    tq = convert_policy(nemo_rl.tq.TQPolicy({"all": data}), loss.config)
    policy.train(data, loss, eval_mode)
    tq.train_from_meta("all", loss, eval_mode)
    ((_, batch, value),) = policy.calls
    ((_, _, tq_value),) = tq.calls
    assert all(torch.equal(batch[name], data[name]) for name in COLUMNS)
    changed = {**data, **PrestepPass(loss.config)(data).changes}
    curr, toks = data["prev_logprobs"][:, 1:], (data["token_mask"] * data["sample_mask"][:, None]).sum()
    expected, metrics = loss(curr, changed, data["sample_mask"].sum(), toks)
    assert value == tq_value == float(expected)
    assert metrics["geomask/mask/m2po/removed"] > 0.1


def test_a_budget_over_parts_is_refused(nemo_rl):
    loss = build(**BUDGET)
    policy = convert_policy(nemo_rl.tq.TQPolicy({}), loss.config)
    with pytest.raises(ConfigError, match=r"loss_fn\.masks\[0\]: a budget is computed over the whole batch"):
        policy.begin_train_step(loss)


def test_a_step_in_parts_is_decided_at_its_end(nemo_rl):
    data = rollouts(seed=3).data
    first, second = split(data, 3)
    loss = build(**KEPT, batch_veto={"max": 100.0})
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    expected = policy.train(data, loss)["all_mb_metrics"]
    tq = convert_policy(nemo_rl.tq.TQPolicy({"a": first, "b": second}), loss.config)
    results = train_in_parts(tq, loss, ["a", "b"])
    assert [call[0] for call in tq.calls] == ["begin", "part", "part", "finish"]
    metrics = {name: sum(values) for name, values in results["all_mb_metrics"].items()}
    assert metrics == pytest.approx({name: sum(values) for name, values in expected.items()})
    kept = torch.cat([call[1]["sample_mask"] for call in tq.calls if call[0] == "part"])
    assert torch.equal(kept, policy.calls[0][1]["sample_mask"])


def test_a_vetoed_step_in_parts_is_aborted(nemo_rl):
    first, second = split(rollouts(seed=4).data, 5)
    loss = build(**VETO)
    policy = convert_policy(nemo_rl.tq.TQPolicy({"a": first, "b": second}), loss.config)
    results = train_in_parts(policy, loss, ["a", "b"])
    assert [call[0] for call in policy.calls] == ["begin", "part", "part", "abort"]
    metrics = results["all_mb_metrics"]
    assert metrics["geomask/batch_vetoed"] == [1.0]
    # k3 over the whole batch, from the decision and from the loss's own metrics of each part.
    assert sum(metrics["geomask/mismatch_k3"]) == pytest.approx(metrics["geomask/batch_kl"][0], rel=1e-5)
    assert len(metrics["gen_kl_error"]) == 2
    assert metrics["global_valid_seqs"] == [7.0]  # of the step in parts; Policy.train takes two on such a batch
    with pytest.raises(BatchVetoError, match="2 batches in a row"):
        train_in_parts(policy, loss, ["a", "b"])
    assert policy.calls[-1] == ("abort",)
    # An open step that never ended leaves nothing for the next.
    policy.begin_train_step(loss)
    policy.train_microbatches_from_meta("a")
    assert train_in_parts(policy, build(), ["b"])["all_mb_metrics"] == {}


@pytest.mark.parametrize("config", [VETO, KEPT, {**VETO, "logprob_backend": "geomask"}], ids=["veto", "kept", "logits"])
def test_a_pickled_policy_arrives_with_its_methods(nemo_rl, config):
    # NeMo-RL's single controller trains in another process, to which the driver sends policy and loss.
    plain_loss = build(**config)
    loss = LogitLoss(plain_loss) if "logprob_backend" in config else plain_loss
    policy = convert_policy(nemo_rl.tq.TQPolicy({"a": rollouts(seed=5).data}), loss.config)
    pickled = pickle.dumps((policy, loss))
    assert b"GeomaskTQPolicy" in pickled
    policies.subclasses.clear()  # as in another process, which defines the class when it arrives
    (policy, arrived_loss), (policy_in_parts, _) = pickle.loads(pickled), pickle.loads(pickled)
    assert type(policy) is policies.GeomaskTQPolicy
    assert isinstance(policy, nemo_rl.tq.TQPolicy)
    expected_metrics = {"geomask/batch_kl", "geomask/mask/geometric/removed"}
    assert expected_metrics & set(policy.train_from_meta("a", arrived_loss)["all_mb_metrics"])
    if loss is plain_loss:
        assert expected_metrics & set(train_in_parts(policy_in_parts, arrived_loss, ["a"])["all_mb_metrics"])
        plain_policy = nemo_rl.tq.TQPolicy({"a": rollouts(seed=5).data})
        with pytest.raises(DataError, match="needs a pass over the whole batch before the step"):
            plain_policy.train_from_meta("a", arrived_loss)


def test_each_policy_counts_for_itself_and_its_copy_too(nemo_rl):
    loss = build(**VETO)
    first, second = (convert_policy(nemo_rl.lm.Policy(), loss.config) for _ in range(2))
    for policy in (first, second):
        policy.train(rollouts(seed=1).data, loss)
    # The first veto of the copy, and the second of the policy.
    arrived = pickle.loads(pickle.dumps(first))
    assert arrived.train(rollouts(seed=2).data, loss)["all_mb_metrics"]["geomask/batch_vetoed"] == [1.0]
    with pytest.raises(BatchVetoError, match="2 batches in a row"):
        first.train(rollouts(seed=2).data, loss)


def test_the_importable_classes_are_those_of_the_installed_nemo_rl(nemo_rl):
    assert policies.GeomaskPolicy is geomask_class(nemo_rl.lm.Policy)
    assert policies.GeomaskTQPolicy is geomask_class(nemo_rl.tq.TQPolicy)
    for name, base in (("GeomaskPolicy", nemo_rl.lm.Policy), ("GeomaskTQPolicy", nemo_rl.tq.TQPolicy)):
        cls = getattr(policies, name)
        assert (cls.__module__, cls.__qualname__) == (policies.__name__, name)
        assert issubclass(cls, base)
    with pytest.raises(AttributeError, match="no attribute 'GeomaskValue'"):
        _ = policies.GeomaskValue


def test_adopting_changes_one_object_only(nemo_rl):
    loss = build(**VETO)
    pickled = pickle.dumps(loss)
    classes = (nemo_rl.lm.Policy, nemo_rl.tq.TQPolicy)
    before = [dict(vars(cls)) for cls in classes]
    policy, plain_policy = nemo_rl.lm.Policy(), nemo_rl.lm.Policy()
    assert convert_policy(policy, loss.config) is policy
    assert type(policy) is policies.GeomaskPolicy
    assert type(plain_policy) is nemo_rl.lm.Policy
    policy.train(rollouts(seed=5).data, loss)
    assert pickle.dumps(loss) == pickled
    assert [dict(vars(cls)) for cls in classes] == before
    with pytest.raises(DataError, match="needs a pass over the whole batch before the step"):
        plain_policy.train(rollouts(seed=1).data, loss)


def test_adopting_twice_is_adopting_once_with_the_last_settings(nemo_rl):
    first, second, data = build(**VETO), build_loss({"ratio_anchor": "gen"}), Batch(rollouts(seed=1).data)
    policy = convert_policy(nemo_rl.lm.Policy(), first.config)
    adopted_class = type(policy)
    assert not policy.get_logprobs(data)["logprobs"].isnan().any()
    assert convert_policy(policy, second.config) is policy
    assert type(policy) is adopted_class
    assert policy.geomask_config is second.config
    assert policy.get_logprobs(data)["logprobs"].isnan().all()
    # A step is counted once: the first veto ends no run, the second does.
    assert policy.train(data, first)["all_mb_metrics"]["geomask/batch_vetoed"] == [1.0]
    with pytest.raises(BatchVetoError, match="2 batches in a row"):
        policy.train(rollouts(seed=2).data, first)


@pytest.mark.parametrize("base", ["lm", "tq"])
def test_a_policy_class_of_ones_own(nemo_rl, base):
    class LoggedPolicy(nemo_rl.lm.Policy if base == "lm" else nemo_rl.tq.TQPolicy):
        """Somebody's subclass, whose methods still run."""

        def train(self, data, loss_fn, eval_mode=False, *, learning_rate=None):
            self.calls.append(("logged", learning_rate))
            return super().train(data, loss_fn, eval_mode)

    loss, data = build(**KEPT), rollouts(seed=2).data
    policy = LoggedPolicy() if base == "lm" else LoggedPolicy({"all": dict(data)})
    convert_policy(policy, loss.config)
    assert isinstance(policy, LoggedPolicy)
    assert type(policy).__name__ == "GeomaskLoggedPolicy"
    metrics = policy.train(data, loss, learning_rate=0.5)["all_mb_metrics"]
    assert metrics["geomask/mask/geometric/removed"][0] > 0
    assert policy.calls[0] == ("logged", 0.5)
    assert policy.calls[1][1]["sample_mask"].sum() < data["sample_mask"].sum()
    if base == "tq":
        assert policy.train_from_meta("all", loss)["all_mb_metrics"] == metrics
    with pytest.raises((pickle.PicklingError, AttributeError)):  # by reference, it would arrive as NeMo-RL's
        pickle.dumps(policy)


ARRIVAL = """
import pickle, sys
from tests.helpers.nemo_rl import fake_policies
fake_policies.install_modules()
policy, loss, data = pickle.load(open(sys.argv[1], "rb"))
print(type(policy).__name__, policy.name(), policy.train(data, loss)["all_mb_metrics"]["geomask/batch_vetoed"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OwnPolicy", "Policy"])
def test_a_policy_class_of_ones_own_arrives_by_value(nemo_rl, tmp_path, name):
    cloudpickle = pytest.importorskip("cloudpickle")
    # Defined in the script that runs, as far as the pickler is concerned.
    own_class = type(name, (nemo_rl.lm.Policy,), {"__module__": "__main__", "name": lambda self: "somebody's"})
    loss = build(**VETO)
    policy = convert_policy(own_class(), loss.config)
    (tmp_path / "policy.pickle").write_bytes(cloudpickle.dumps((policy, loss, rollouts(seed=1).data)))
    done = subprocess.run(
        [sys.executable, "-c", ARRIVAL, str(tmp_path / "policy.pickle")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.stdout.split("\n")[0] == f"Geomask{name} somebody's [1.0]", done.stderr


def test_workers_get_a_loss_that_takes_batches_without_a_mark(nemo_rl):
    losses = []

    class RecordingPolicy(nemo_rl.lm.Policy):
        def compute(self, method, data, loss_fn):
            losses.append(pickle.loads(pickle.dumps(loss_fn)))
            return {"all_mb_metrics": {}}

    loss, plain_loss, batch = build(**KEPT), build(), rollouts(seed=6)
    policy = convert_policy(RecordingPolicy(), loss.config)
    policy.train(batch.data, loss)
    losses[0](batch.data["prev_logprobs"][:, 1:], batch.data, batch.seqs, batch.toks)
    # Other losses pass through as they are.
    policy.train(batch.data, plain_loss)
    assert losses[1].config == plain_loss.config
    policy.train({"prev_logprobs": None}, "somebody's own")
    assert losses[2] == "somebody's own"


def test_evaluation_is_masked_and_never_vetoed(nemo_rl):
    loss, data = build(**VETO, **KEPT), rollouts(seed=7).data
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    for _ in range(3):
        policy.train(data, loss, eval_mode=True)
    assert len(policy.calls) == 3
    assert policy.calls[0][1]["sample_mask"].sum() < data["sample_mask"].sum()


def test_older_versions_lack_what_is_optional(nemo_rl, monkeypatch):
    for name in ("begin_train_step", "train_microbatches_from_meta", "finish_train_step"):
        delattr(nemo_rl.tq.TQPolicy, name)
    loss = build(**VETO)
    tq = convert_policy(nemo_rl.tq.TQPolicy({"all": rollouts(seed=8).data}), loss.config)
    assert tq.train_from_meta("all", loss)["all_mb_metrics"]["geomask/batch_vetoed"] == [1.0]
    # v0.6.0 has no data plane at all.
    monkeypatch.setitem(sys.modules, "nemo_rl.models.policy.tq_policy", None)
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    assert policy.train(rollouts(seed=8).data, loss)["all_mb_metrics"]["geomask/batch_vetoed"] == [1.0]


@pytest.mark.parametrize("missing", ["finish_train_step", "abort_train_step", "write_to_dataplane"])
def test_half_a_known_api_is_an_error(nemo_rl, missing):
    delattr(nemo_rl.tq.TQPolicy, missing)
    policy = nemo_rl.lm.Policy()
    with pytest.raises(HostAPIError, match=rf"tq_policy\.TQPolicy.*{missing}"):
        convert_policy(policy, build().config)
    assert type(policy) is nemo_rl.lm.Policy


def test_unknown_signatures_are_an_error(nemo_rl):
    nemo_rl.lm.Policy.train = lambda self, batch, loss_fn: None
    policy = nemo_rl.lm.Policy()
    with pytest.raises(
        HostAPIError,
        match=r"NeMo-RL 9\.9 .*lm_policy\.Policy\.train takes \(self, batch, loss_fn\).*Remove loss_fn\.name",
    ):
        convert_policy(policy, build().config)
    assert type(policy) is nemo_rl.lm.Policy


METRICS = {
    "loss": [0.25, 0.5],
    "geomask/mismatch_max": [0.016, 0.02],
    **{f"geomask/mismatch_bin_{index:02}": [0.0, 0.0] for index in range(34)},
    "geomask/mismatch_bin_05": [0.25, 0.0],
    "geomask/mismatch_bin_15": [0.25, 0.5],
    "geomask/weight_mean": [0.5, 0.5],
    "geomask/weight_sq": [1, 1.0],
}


@pytest.mark.parametrize("method", ["train", "train_from_meta", "finish_train_step"])
def test_metrics_that_do_not_add_up_are_those_of_the_step(nemo_rl, method):
    """NeMo-RL's loops take the sum of a list that they do not know: ours contain one number."""
    loss = build()
    policy = convert_policy(nemo_rl.tq.TQPolicy({"a": rollouts(seed=1).data}), loss.config)
    results = {"all_mb_metrics": dict(METRICS)}
    if method == "finish_train_step":
        nemo_rl.tq.TQPolicy.finish_train_step = lambda self: results
        metrics = train_in_parts(policy, loss, ["a"])["all_mb_metrics"]
    else:
        policy.compute = lambda *_: results
        batch = policy.store["a"] if method == "train" else "a"
        metrics = getattr(policy, method)(batch, loss)["all_mb_metrics"]
    assert metrics["loss"] == [0.25, 0.5]
    assert metrics["geomask/mismatch_max"] == [0.02]
    assert metrics["geomask/weight_ess"] == [0.5]
    assert 2**-6 < metrics["geomask/mismatch_q50"][0] < metrics["geomask/mismatch_q99"][0] <= 2**-5.5
    assert {len(values) for name, values in metrics.items() if name != "loss"} == {1}
    assert not any("_bin_" in name for name in metrics)


GEN = {"ratio_anchor": "gen"}


def config_of(**settings):
    return build_loss(settings).config


def test_there_is_no_forward_pass(nemo_rl):
    data = Batch(rollouts(seed=1).data)
    policy = convert_policy(nemo_rl.lm.Policy(), config_of(**GEN))
    result = policy.get_logprobs(data, timer=None)
    assert type(result) is Batch
    assert result["logprobs"].shape == data["input_ids"].shape
    assert result["logprobs"].isnan().all()
    tq = convert_policy(nemo_rl.tq.TQPolicy({"all": data}), config_of(**GEN))
    assert tq.get_logprobs_from_meta("all", timer=None) is None
    assert data["prev_logprobs"].shape == data["generation_logprobs"].shape
    assert data["prev_logprobs"].isnan().all()
    assert (type(policy).forward_passes, type(tq).forward_passes) == (0, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"force_on_policy_ratio": True},
        {**GEN, "masks": [{"preset": "veto", "max": 2.0}]},
        {**GEN, "audit_fraction": 1.0},
    ],
    ids=["prev", "on policy", "mask", "audit of all rows"],
)
def test_a_loss_that_reads_them_gets_them(nemo_rl, settings):
    data = Batch(rollouts(seed=1).data)
    policy, tq = nemo_rl.lm.Policy(), nemo_rl.tq.TQPolicy({"all": data})
    for each in (GEN, settings):  # the last one counts
        convert_policy(policy, config_of(**each))
        convert_policy(tq, config_of(**each))
    assert not policy.get_logprobs(data)["logprobs"].isnan().any()
    tq.get_logprobs_from_meta("all")
    assert not data["prev_logprobs"].isnan().any()
    assert (type(policy).forward_passes, type(tq).forward_passes) == (1, 1)


def test_a_threshold_on_log_probs_that_are_not_computed_is_an_error(host):
    host()

    def build(threshold, section="ppo", **settings):
        sections = {"policy": {}, section: {"seq_logprob_error_threshold": threshold}}
        return build_nemo_rl_loss({"loss_fn": {"name": "clipped_pg", **settings}, **sections})

    assert build(None, **GEN).config.skips_prev
    for section in ("grpo", "ppo"):
        message = rf"{section}.seq_logprob_error_threshold: 1.05 masks .* or set (loss_fn.)?audit_fraction: 1"
        with pytest.raises(ConfigError, match=message):
            build(1.05, section, **GEN)
    assert not build(1.05).config.skips_prev
    assert not build(1.05, **GEN, audit_fraction=1).config.skips_prev


def test_a_sample_is_scored(nemo_rl):
    data = Batch(rollouts(seed=1).data)  # 8 rows
    settings = config_of(**GEN, audit_fraction=0.3)
    scored_rows = []
    policy = convert_policy(nemo_rl.lm.Policy(), settings)
    for _ in range(40):
        logprobs = policy.get_logprobs(data)["logprobs"]
        is_scored = (~logprobs.isnan()).all(dim=1)
        assert (logprobs[is_scored] == 0).all()
        assert logprobs[~is_scored].isnan().all()
        scored_rows.append(is_scored)
    counts = torch.stack(scored_rows).sum(dim=1)
    assert counts.tolist() == [4] * 40  # 2.4 rows, in multiples of the data-parallel size
    # Other rows at every step, each about as often as any other; and the same in another run.
    assert all(10 < count < 30 for count in torch.stack(scored_rows).sum(dim=0).tolist())

    def first_scored_rows(**arguments):
        logprobs = convert_policy(nemo_rl.lm.Policy(), settings, **arguments).get_logprobs(data)["logprobs"]
        return ~logprobs[:, 0].isnan()

    assert torch.equal(first_scored_rows(), scored_rows[0])
    # A resumed run goes on with the rows of its step.
    assert not torch.equal(scored_rows[0], scored_rows[25])
    assert torch.equal(first_scored_rows(checkpoint="checkpoints/step_25"), scored_rows[25])
    policy.cfg = {"logprob_batch_size": 4}
    assert not policy.get_logprobs(data)["logprobs"].isnan().any()


class Meta(list):
    """NeMo-RL's keys of a batch in the data plane."""

    def subset(self, rows):
        return Meta(self[row] for row in rows)


def test_a_sample_is_scored_in_the_data_plane(nemo_rl):
    class RowPolicy(nemo_rl.tq.TQPolicy):
        """One whose data plane stores rows."""

        def read_from_dataplane(self, meta, *, select_fields, pad_value_dict=None):
            return {name: torch.stack([self.store[key][name] for key in meta]) for name in select_fields}

        def write_to_dataplane(self, meta, fields):
            for row, key in enumerate(meta):
                self.store[key].update({name: value[row] for name, value in fields.items()})

        def get_logprobs_from_meta(self, meta, micro_batch_size=None, timer=None):
            for key in meta:
                self.store[key]["prev_logprobs"] = torch.zeros(14)

    data = rollouts(seed=1).data
    rows = {f"row {row}": {name: value[row] for name, value in data.items()} for row in range(8)}
    policy = convert_policy(RowPolicy(rows), config_of(**GEN, audit_fraction=0.5))
    policy.get_logprobs_from_meta(Meta(rows), timer=None)
    scored = [key for key, row in rows.items() if not row["prev_logprobs"].isnan().any()]
    assert len(scored) == 4
    assert all(row["prev_logprobs"].isnan().all() for key, row in rows.items() if key not in scored)


def test_unknown_signatures_of_what_is_skipped_are_an_error_where_they_matter(nemo_rl):
    nemo_rl.lm.Policy.get_logprobs = lambda self, batch: None
    policy = nemo_rl.lm.Policy()
    with pytest.raises(
        HostAPIError, match=r"lm_policy\.Policy\.get_logprobs takes \(self, batch\).*ratio_anchor: prev"
    ):
        convert_policy(policy, config_of(**GEN))
    assert type(policy) is nemo_rl.lm.Policy
    assert convert_policy(policy, config_of()).get_logprobs("batch") is None
