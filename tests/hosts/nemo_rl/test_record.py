"""``loss_fn.record`` around NeMo-RL's policies, here stand-ins with NeMo-RL's signatures."""

import json
import math
import pickle
import sys
import time
import types

import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow.parquet as parquet

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl import current_logprobs, prestep_hooks, record_hooks, replay_stamp, uninstall
from nemo_geomask.hosts.nemo_rl.patch import in_force
from nemo_geomask.hosts.nemo_rl.resumed_step import remember_resumed_step
from nemo_geomask.losses.batch_masks import removed_tokens
from nemo_geomask.records import step_files
from tests.helpers.batches import rollouts

NAMES = (
    *("nemo_rl", "nemo_rl.models", "nemo_rl.models.policy", "nemo_rl.models.policy.lm_policy"),
    *("nemo_rl.models.policy.tq_policy", "nemo_rl.algorithms", "nemo_rl.algorithms.advantage_estimator"),
    "nemo_rl.algorithms.async_utils",
)


class Policy:
    """NeMo-RL's."""

    def __init__(self, group=None):
        self.worker_group = group or types.SimpleNamespace()
        self.cfg = {"train_global_batch_size": 8}
        self.trained = []

    def train(self, data, loss_fn, eval_mode=False, *, gbs=None, mbs=None, timer=None):
        self.trained.append(loss_fn)
        return {"all_mb_metrics": {}}


class TQPolicy(Policy):
    """NeMo-RL's over its data plane: ``meta.key`` is a key of ``store``."""

    def __init__(self, store, group=None):
        Policy.__init__(self, group)
        self.store = store

    def read_from_dataplane(self, meta, *, select_fields, pad_value_dict=None):
        return {name: self.store[meta.key][name].clone() for name in select_fields}

    def write_to_dataplane(self, meta, fields):
        self.store[meta.key].update(fields)

    def train_from_meta(self, meta, loss_fn, eval_mode=False, gbs=None, mbs=None, timer=None):
        self.trained.append(loss_fn)
        return {"all_mb_metrics": {}}

    def begin_train_step(self, loss_fn, gbs=None, mbs=None):
        self.trained.append(loss_fn)

    def train_microbatches_from_meta(self, meta, timer=None):
        pass

    def finish_train_step(self):
        return {"all_mb_metrics": {}}

    def abort_train_step(self):
        pass


class GRPOAdvantageEstimator:
    def compute_advantage(self, prompt_ids, rewards, mask, **kwargs):
        return rewards[:, None].expand(mask.shape)


def methods(kind):
    return {name: value for name, value in vars(kind).items() if callable(value)}


@pytest.fixture
def nemo_rl(monkeypatch):
    """Modules of NeMo-RL's with fresh classes, since wrappers go into the classes."""
    modules = {name: types.ModuleType(name) for name in NAMES}
    modules["nemo_rl"].__version__ = "9.9"
    lm, tq = modules["nemo_rl.models.policy.lm_policy"], modules["nemo_rl.models.policy.tq_policy"]
    lm.Policy = type("Policy", (), {**methods(Policy), "__module__": lm.__name__})
    tq.TQPolicy = type("TQPolicy", (lm.Policy,), {**methods(TQPolicy), "__module__": tq.__name__})
    estimators = modules["nemo_rl.algorithms.advantage_estimator"]
    estimators.GRPOAdvantageEstimator = type("GRPOAdvantageEstimator", (), methods(GRPOAdvantageEstimator))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield types.SimpleNamespace(lm=lm, tq=tq, estimators=estimators, buffers=modules["nemo_rl.algorithms.async_utils"])
    uninstall()


def recorded(directory, **config):
    loss = build_loss({"name": "gspo", "record": {"dir": str(directory)}, **config})
    prestep_hooks.wrap_policy(loss)
    record_hooks.attach_recorder(loss)
    return loss


def batch(seed=1):
    data = dict(rollouts(seed=seed).data)
    del data["rewards"]  # no batch of NeMo-RL's has them
    rows, width = data["token_mask"].shape
    return {**data, "input_lengths": torch.full((rows,), width), "total_reward": torch.arange(rows) / 4}


def meta(key="all", **tags):
    """NeMo-RL's keys of a batch in the data plane."""
    rows = [dict(zip(tags, values, strict=True)) for values in zip(*tags.values(), strict=True)] if tags else None
    return types.SimpleNamespace(key=key, tags=rows, fields=["input_ids", "total_reward"])


def written(directory, wait):
    """What the policy's recorder wrote, by step."""
    for _ in range(200):
        if directory.exists() and len(step_files(directory)) == wait:
            break
        time.sleep(0.05)
    return {step: parquet.read_table(path) for step, (path,) in step_files(directory).items()}


def heard(nemo_rl, data, **batch_of_loop):
    nemo_rl.estimators.GRPOAdvantageEstimator().compute_advantage(
        prompt_ids=None, rewards=data["total_reward"], mask=data["token_mask"], repeated_batch=batch_of_loop
    )


def test_each_batch_is_recorded_with_its_rewards(nemo_rl, tmp_path):
    loss, policy = recorded(tmp_path), nemo_rl.lm.Policy()
    for seed in (1, 2):
        data = batch(seed)
        heard(nemo_rl, data)
        policy.train(data, loss)
    tables = written(tmp_path, 2)
    assert list(tables) == [1, 2]
    assert tables[2]["reward"].to_pylist() == (torch.arange(8) / 4).tolist()
    assert torch.tensor(tables[2]["gen"].to_pylist()).equal(batch(2)["generation_logprobs"])
    # A loop that waits for its samples has those of the weights that it trains.
    assert tables[1]["weight_version"].to_pylist() == [0] * 8
    assert tables[2]["weight_version"].to_pylist() == [1] * 8
    assert tables[2]["staleness"].to_pylist() == [0] * 8
    # The loss goes its way, and keeps what it sees in the workers.
    assert [repr(sent).replace("Keeping", "Policy") for sent in policy.trained] == [repr(loss)] * 2


def test_an_evaluation_is_no_step(nemo_rl, tmp_path):
    loss, policy = recorded(tmp_path), nemo_rl.lm.Policy()
    policy.train(batch(1), loss, eval_mode=True)
    policy.train(batch(2), loss)
    assert torch.tensor(written(tmp_path, 1)[1]["gen"].to_pylist()).equal(batch(2)["generation_logprobs"])


def test_epochs_on_one_batch_are_one_step(nemo_rl, tmp_path):
    loss, policy = recorded(tmp_path), nemo_rl.lm.Policy()
    first, second = batch(1), batch(2)
    for data in (first, first, first, second):
        policy.train(dict(data), loss)
    assert list(written(tmp_path, 2)) == [1, 2]


def test_rewards_of_another_batch_are_not_taken(nemo_rl, tmp_path):
    loss, policy = recorded(tmp_path), nemo_rl.lm.Policy()
    heard(nemo_rl, {key: value[:4] for key, value in batch().items()})
    policy.train(batch(), loss)
    assert written(tmp_path, 1)[1]["reward"].null_count == 8


def test_a_resumed_run_goes_on_with_its_numbers(nemo_rl, tmp_path):
    for place, last in (("/ckpt/step_40/policy/weights", 40), (None, 0), ("/run/step_3/step_12/policy/weights", 12)):
        group = types.SimpleNamespace()
        remember_resumed_step(group, {"weights_path": place})
        directory = tmp_path / str(last)
        loss = recorded(directory)
        nemo_rl.lm.Policy(group).train(batch(), loss)
        assert list(written(directory, 1)) == [last + 1]


def test_with_a_look_before_the_step_the_batch_is_recorded_as_it_came(nemo_rl, tmp_path):
    kept = {"denominator": "kept", "masks": [{"preset": "geometric", "min": 0.85, "max": 1.2}]}
    loss, policy, data = recorded(tmp_path, **kept), nemo_rl.lm.Policy(), batch()
    policy.train(data, loss)
    table = written(tmp_path, 1)[1]
    assert torch.tensor(table["mask"].to_pylist()).equal(data["token_mask"] != 0)
    assert torch.tensor(table["removed.geometric"].to_pylist()).any()
    assert policy.trained[0] is not loss


def test_a_batch_in_the_data_plane(nemo_rl, tmp_path):
    loss, data = recorded(tmp_path), batch()
    policy = nemo_rl.tq.TQPolicy({"all": dict(data)})
    heard(nemo_rl, {**data, "total_reward": data["total_reward"] + 1})  # what the driver shaped
    policy.train_from_meta(meta(), loss_fn=loss)
    policy.train_from_meta(meta(), loss_fn=loss)
    tables = written(tmp_path, 2)
    assert tables[1]["reward"].to_pylist() == (data["total_reward"] + 1).tolist()
    assert tables[2]["reward"].to_pylist() == data["total_reward"].tolist()
    assert torch.tensor(tables[1]["tokens"].to_pylist()).equal(data["input_ids"])


def test_a_step_that_comes_in_parts_and_a_policy_that_is_sent(nemo_rl, tmp_path):
    loss, whole = recorded(tmp_path), batch()
    group = types.SimpleNamespace()
    remember_resumed_step(group, {"weights_path": "/c/step_5/policy/weights"})
    parts = {
        name: {key: value[rows] for key, value in whole.items()}
        for name, rows in (("a", slice(0, 3)), ("b", slice(3, 8)))
    }
    sent = pickle.dumps(nemo_rl.tq.TQPolicy(parts, group))
    uninstall()
    policy = pickle.loads(sent)
    for _ in range(2):
        policy.begin_train_step(loss)
        policy.train_microbatches_from_meta(meta("a", weight_version=[4, 4, 5]))
        policy.train_microbatches_from_meta(meta("b", weight_version=[5] * 5))
        policy.finish_train_step()
    table = written(tmp_path, 2)[6]
    assert table["row"].to_pylist() == list(range(8))
    assert table["reward"].to_pylist() == whole["total_reward"].tolist()
    assert table["weight_version"].to_pylist() == [4, 4, 5, 5, 5, 5, 5, 5]
    assert table["staleness"].to_pylist() == [1, 1, 0, 0, 0, 0, 0, 0]


class Actor:
    """Ray's actor class and the handle of one, in one process; the buffer of the asynchronous loops."""

    def __init__(self, buffer=None):
        self.buffer = buffer

    def options(self, **options):
        return Actor()

    def remote(self, **settings):
        handle = Actor(Buffer())
        handle.sample = None  # as Ray's own, which is replaced
        return handle

    @property
    def __ray_call__(self):
        return types.SimpleNamespace(remote=lambda function, *args: function(self.buffer, *args))


class Buffer:
    def __init__(self):
        self.trajectories = [{"batch": {"total_reward": torch.zeros(2)}} for _ in range(4)]
        self.trajectory_versions = [3, 4, 4, 5]

    def sample(self, num_prompt_groups, current_weight_version, max_age_steps):
        if num_prompt_groups > 4:
            return None
        return {"trajectories": [self.trajectories[place] for place in (3, 0, 1, 2)], "avg_trajectory_age": 1.0}


@pytest.fixture
def ray(monkeypatch):
    module = types.ModuleType("ray")
    module.cloudpickle = types.SimpleNamespace(
        register_pickle_by_value=lambda module: None, unregister_pickle_by_value=lambda module: None
    )
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


def test_an_asynchronous_loop_is_told_which_weights_sampled(nemo_rl, ray, tmp_path):
    nemo_rl.buffers.ReplayBuffer = Actor()
    loss, data = recorded(tmp_path), batch()
    group = types.SimpleNamespace()
    remember_resumed_step(group, {"weights_path": "/c/step_5/policy/weights"})
    handle = nemo_rl.buffers.ReplayBuffer.options(runtime_env={}).remote(max_size=4)
    asked = {"current_weight_version": 5, "max_age_steps": 2}
    assert handle.sample.remote(num_prompt_groups=5, **asked) is None
    drawn = handle.sample.remote(num_prompt_groups=4, **asked)
    assert drawn["avg_trajectory_age"] == 1.0
    groups = [each["batch"] for each in drawn["trajectories"]]
    together = {key: torch.cat([each[key] for each in groups]) for key in groups[0]}
    policy = nemo_rl.lm.Policy(group)
    heard(nemo_rl, data, **together)
    policy.train(data, loss)
    # Of a batch that nobody told of, an asynchronous loop's versions are not known.
    policy.train(batch(2), loss)
    tables = written(tmp_path, 2)
    assert tables[6]["weight_version"].to_pylist() == [5, 5, 3, 3, 4, 4, 4, 4]
    assert tables[6]["staleness"].to_pylist() == [0, 0, 2, 2, 1, 1, 1, 1]
    assert tables[7]["weight_version"].null_count == 8


def test_a_buffer_that_is_not_as_known_is_asked_as_always():
    class Other:
        def sample(self, **asked):
            return {"trajectories": [{"no batch": 1}], **asked}

    answer = replay_stamp.sample_with_versions(Other(), "version", (), {"age": 3})
    assert answer == {"trajectories": [{"no batch": 1}], "age": 3}


def test_entropies_are_refused_where_nobody_computes_them(nemo_rl, tmp_path):
    settings = {"record": {"dir": str(tmp_path), "entropy": True}}
    with pytest.raises(ConfigError, match=r"loss_fn\.record\.entropy.*computes no entropies"):
        record_hooks.attach_recorder(build_loss(settings))
    record_hooks.attach_recorder(build_loss({**settings, "logprob_backend": "geomask"}))


class Worker:
    """A policy worker, in this process, as Ray's handle of it: calls come in order."""

    @property
    def __ray_call__(self):
        return types.SimpleNamespace(remote=lambda function, *args: self.asked.append(args) or function(self, *args))

    def __init__(self):
        self.asked = []


def in_workers(nemo_rl, ray, steps=2, order=(5, 0, 3, 7, 1, 6, 2, 4), fails=False, lacks=""):
    """A policy whose workers, two ranks of one tensor-parallel group, train on a batch's rows in another order, in
    several optimiser steps; returns it and the log-probs [B, T-1] of the rows by step."""
    seen = []

    def train(self, data, loss_fn, eval_mode=False, *, gbs=None, mbs=None, timer=None):
        self.trained.append(loss_fn)
        draw = torch.Generator().manual_seed(len(seen))
        curr = data["prev_logprobs"][:, 1:] + 0.1 * torch.randn(data["prev_logprobs"][:, 1:].shape, generator=draw)
        seen.append(curr)
        sent = pickle.loads(pickle.dumps(loss_fn))
        for rows in torch.tensor(order).chunk(steps):
            part = {key: value[rows] for key, value in data.items() if key != lacks}
            # As in a worker that fills its microbatches up to a width of their own.
            part |= {key: torch.nn.functional.pad(value, (0, 3)) for key, value in part.items() if value.dim() == 2}
            sent(torch.nn.functional.pad(curr[rows], (0, 3)), data=part, global_valid_seqs=8.0, global_valid_toks=100.0)
        if fails:
            raise RuntimeError("the collective was aborted")
        return {"all_mb_metrics": {}}

    nemo_rl.lm.Policy.train = train
    ray.get = lambda references, timeout: references
    sharding = types.SimpleNamespace(get_worker_coords=lambda index: {"tensor_parallel": index})
    return nemo_rl.lm.Policy(types.SimpleNamespace(workers=[Worker(), Worker()], sharding_annotations=sharding)), seen


def trained(data):
    return (data["token_mask"][:, 1:] != 0) & (data["sample_mask"] != 0)[:, None]


POLICY_MASK = {"masks": [{"preset": "opsm", "delta": 0.001}]}


def test_the_current_policys_log_probs_come_from_the_workers(nemo_rl, ray, tmp_path):
    policy, seen = in_workers(nemo_rl, ray)
    loss = recorded(tmp_path, **POLICY_MASK)
    for seed in (1, 2):
        policy.train(batch(seed), loss)
    tables = written(tmp_path, 2)
    for seed in (1, 2):
        data, table = batch(seed), tables[seed]
        found = torch.tensor(table["curr"].to_pylist())
        assert found[:, 0].isnan().all()
        assert found[:, 1:].nan_to_num(9.0).equal(torch.where(trained(data), seen[seed - 1], 9.0))
        removed = removed_tokens(
            loss.config, data, torch.where(trained(data), seen[seed - 1], data["prev_logprobs"][:, 1:])
        )
        assert torch.tensor(table["removed.opsm"].to_pylist()).equal(removed["opsm"])
        assert removed["opsm"].any()
        assert json.loads(table.schema.metadata[b"nemo_geomask.facts"])["policy"] == "curr"


def test_of_a_batch_that_is_trained_on_again_the_first_epoch_counts(nemo_rl, ray, tmp_path):
    policy, seen = in_workers(nemo_rl, ray)
    loss, first, second = recorded(tmp_path), batch(1), batch(2)
    for data in (first, first, second):
        policy.train(data, loss)
    tables = written(tmp_path, 2)
    for step, data, curr in ((1, first, seen[0]), (2, second, seen[2])):
        found = torch.tensor(tables[step]["curr"].to_pylist())[:, 1:]
        assert found[trained(data)].equal(curr[trained(data)])
    assert type(policy.trained[1]).__name__ == "PolicyLoss"


@pytest.mark.parametrize("by", ["sequence", "group"])
def test_workers_hand_over_what_is_recorded_alone(nemo_rl, ray, tmp_path, by):
    policy, seen = in_workers(nemo_rl, ray)
    answers = []
    ray.get = lambda references, timeout: answers.extend(references) or references
    loss = recorded(tmp_path, record={"dir": str(tmp_path), "fraction": 0.3, "by": by, "every": 2})
    data = batch()
    for _ in range(3):
        policy.train({**data}, loss)
        policy.train(batch(5), loss)
    tables = written(tmp_path, 3)
    assert list(tables) == [1, 3, 5]
    rows = tables[3]["row"].to_pylist()
    assert 0 < len(rows) < 8
    some = trained(data).any(dim=1)
    assert [len(kept) for kept in answers] == [int(some[table["row"].to_pylist()].sum()) for table in tables.values()]
    found = torch.tensor(tables[3]["curr"].to_pylist())[:, 1:]
    assert found[trained(data)[rows]].equal(seen[2][rows][trained(data)[rows]])


def test_a_step_that_fails_is_recorded_and_not_asked_for(nemo_rl, ray, tmp_path):
    policy, _ = in_workers(nemo_rl, ray, fails=True)
    loss = recorded(tmp_path)
    with pytest.raises(RuntimeError, match="collective was aborted"):
        policy.train(batch(), loss)
    table = written(tmp_path, 1)[1]
    assert table["curr"].null_count == 8
    assert json.loads(table.schema.metadata[b"nemo_geomask.facts"])["policy"] == "prev"


def test_workers_that_do_not_answer_cost_curr_and_no_record(nemo_rl, ray, tmp_path, caplog):
    policy, _ = in_workers(nemo_rl, ray)

    def get(references, timeout):
        raise TimeoutError("worker 3 is gone")

    ray.get, loss = get, recorded(tmp_path)
    policy.train(batch(), loss)
    table = written(tmp_path, 1)[1]
    assert table["curr"].null_count == 8
    assert table["gen"].null_count == 0
    assert "step 1 is without curr: TimeoutError: worker 3 is gone" in caplog.text


def test_one_rank_of_a_tensor_parallel_group_answers_and_none_keeps_on(nemo_rl, ray, tmp_path):
    policy, _ = in_workers(nemo_rl, ray)
    loss = recorded(tmp_path)
    policy.train(batch(), loss)
    (one,), (other,) = (worker.asked for worker in policy.worker_group.workers)
    assert one == (1, None)
    assert other[1].numel() == 0
    assert not current_logprobs.take_kept(None, 1)


def test_log_probs_that_are_nan_are_recorded_as_the_loss_saw_them(nemo_rl, ray, tmp_path):
    policy, seen = in_workers(nemo_rl, ray)
    loss, data = recorded(tmp_path, **POLICY_MASK), batch()
    row, column = trained(data).nonzero()[0].tolist()
    data["prev_logprobs"] = data["prev_logprobs"].clone()
    broken, before = data["prev_logprobs"].clone(), data["prev_logprobs"]
    broken[row, column + 1] = math.nan
    policy.train({**data, "prev_logprobs": broken}, loss)
    assert seen[0][row, column].isnan()
    table = written(tmp_path, 1)[1]
    assert torch.tensor(table["curr"].to_pylist())[row, column + 1].isnan()
    curr = torch.where(trained(data), seen[0], before[:, 1:])
    removed = removed_tokens(loss.config, {**data, "prev_logprobs": broken}, curr)["opsm"]
    assert torch.tensor(table["removed.opsm"].to_pylist()).equal(removed)


@pytest.mark.parametrize("missing", ["input_lengths", "worker_group"])
def test_what_workers_cannot_keep_costs_curr_and_neither_step_nor_record(nemo_rl, ray, tmp_path, caplog, missing):
    policy, seen = in_workers(nemo_rl, ray, lacks=missing)
    if missing == "worker_group":
        del policy.worker_group
    loss = recorded(tmp_path)
    policy.train(batch(), loss)
    assert len(seen) == 1
    assert written(tmp_path, 1)[1]["curr"].null_count == 8
    assert missing in caplog.text


def test_what_is_kept_is_a_copy():
    data = batch()
    curr = data["prev_logprobs"][:, 1:].clone()
    keeping = current_logprobs.keep_logprobs(build_loss({"name": "gspo"}), 1)
    keeping(curr, data=data, global_valid_seqs=8.0, global_valid_toks=100.0)
    curr.zero_()
    kept = current_logprobs.take_kept(None, 1)
    assert kept
    assert all(one.values["curr"].all() for one in kept)


def test_rows_are_told_apart_whatever_their_padding():
    draw = torch.Generator().manual_seed(0)
    ids, lengths = torch.randint(0, 3, (200, 12), generator=draw), torch.randint(1, 13, (200,), generator=draw)
    found = current_logprobs.fingerprints(ids, lengths)
    rows = [tuple(row[:length].tolist()) for row, length in zip(ids, lengths, strict=True)]
    assert len(set(found.tolist())) == len(set(rows))
    wider = torch.nn.functional.pad(ids, (0, 5), value=7).to(torch.int32)
    assert current_logprobs.fingerprints(wider, lengths).equal(found)
    assert (
        current_logprobs.fingerprints(ids.flip(1), torch.full((200,), 12))
        .ne(current_logprobs.fingerprints(ids, torch.full((200,), 12)))
        .any()
    )


def test_a_fault_costs_records_and_no_step(nemo_rl, tmp_path, caplog):
    loss, policy, data = recorded(tmp_path), nemo_rl.lm.Policy(), batch()
    policy.train({key: value for key, value in data.items() if key != "sample_mask"}, loss)
    policy.train(batch(2), loss)
    assert "step 1 lost" in caplog.text
    assert list(written(tmp_path, 1)) == [2]
    assert len(policy.trained) == 2


def test_all_of_it_is_undone(nemo_rl, tmp_path):
    nemo_rl.buffers.ReplayBuffer = Actor()
    owners = (nemo_rl.lm.Policy, nemo_rl.tq.TQPolicy, nemo_rl.estimators.GRPOAdvantageEstimator, nemo_rl.buffers)
    before = [dict(vars(owner)) for owner in owners]
    recorded(tmp_path)
    recorded(tmp_path)
    assert in_force(nemo_rl.lm.Policy, "train")
    assert in_force(nemo_rl.buffers, "ReplayBuffer")
    uninstall()
    assert [dict(vars(owner)) for owner in owners] == before


def test_without_the_setting_nothing_is_changed(nemo_rl):
    loss = build_loss({"metrics": "nemo_rl"})
    prestep_hooks.wrap_policy(loss)
    record_hooks.attach_recorder(loss)
    assert not in_force(nemo_rl.lm.Policy, "train")
    assert not in_force(nemo_rl.estimators.GRPOAdvantageEstimator, "compute_advantage")
