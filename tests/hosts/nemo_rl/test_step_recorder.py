"""``loss_fn.record`` in NeMo-RL's policies, here stand-ins with NeMo-RL's signatures."""

import contextlib
import json
import math
import os
import pickle
import subprocess
import sys
import time
import types
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow.parquet as parquet

import nemo_geomask
from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl import current_logprobs, patch, uninstall
from nemo_geomask.hosts.nemo_rl.host_patches import make_patches
from nemo_geomask.hosts.nemo_rl.loop_values import (
    LoopValues,
    ReplayBufferClass,
    RewardLogger,
    give_up_logged_rows,
    loop_values,
)
from nemo_geomask.hosts.nemo_rl.policies import convert_policy
from nemo_geomask.hosts.nemo_rl.step_recorder import check_recording
from nemo_geomask.losses.batch_masks import removed_tokens
from nemo_geomask.records import step_files
from nemo_geomask.records.flight import JSONL_KEYS
from tests.helpers.batches import rollouts


class Logger:
    """NeMo-RL's."""

    def __init__(self):
        self.logged, self.metrics = [], []

    def log_batched_dict_as_jsonl(self, to_log, filename):
        self.logged.append((filename, to_log))
        return f"logs/{filename}"

    def log_metrics(self, metrics, step, prefix=""):
        self.metrics.append((metrics, step, prefix))
        return f"{prefix}{step}: {metrics}"


def compute(self, method, data, loss_fn):
    """Train on nothing, and remember the loss."""
    self.losses.append(loss_fn)
    return {"all_mb_metrics": {}}


@pytest.fixture(autouse=True)
def _no_values_of_other_tests():
    vars(loop_values).update(vars(LoopValues()))
    for step in range(10):
        current_logprobs.take_kept(None, step)
    yield
    give_up_logged_rows()


@pytest.fixture
def nemo_rl(nemo_rl):
    """Modules of NeMo-RL, whose policies train on nothing."""
    nemo_rl.lm.Policy.compute = compute
    return nemo_rl


def build(directory, **config):
    """A loss whose steps are recorded."""
    return build_loss({"name": "gspo", "record": {"dir": str(directory)}, **config})


REWARDS = [index / 4 for index in range(8)]


def batch(seed=1, **columns):
    """A batch as GRPO's loop hands it over, without rewards."""
    data = dict(rollouts(seed=seed).data)
    del data["rewards"]
    rows, width = data["token_mask"].shape
    return {**data, "input_lengths": torch.full((rows,), width), **columns}


def stored_batch(seed=1):
    """A batch as the data plane stores it."""
    data = batch(seed)
    return {**data, "total_reward": torch.tensor(REWARDS)}


def meta(key="all", **tags):
    """NeMo-RL's keys of a batch in the data plane."""
    rows = [dict(zip(tags, values, strict=True)) for values in zip(*tags.values(), strict=True)] if tags else None
    return types.SimpleNamespace(key=key, tags=rows, fields=["input_ids", "total_reward"])


def read_records(directory, count):
    """Wait until the recorder has written ``count`` steps, for 10 s at most; return their tables by step."""
    for _ in range(200):
        if directory.exists() and len(step_files(directory)) == count:
            break
        time.sleep(0.05)
    return {step: parquet.read_table(path) for step, (path,) in step_files(directory).items()}


@pytest.fixture
def record_step(nemo_rl, tmp_path):
    """``record_step(data, *logged, **config)`` trains on a batch and logs; returns step, record and logger."""

    def run(data=None, *logged, checkpoint=None, **config):
        loss, logger = build(tmp_path, **config), RewardLogger(Logger(), logs_mismatch=True)
        policy = convert_policy(nemo_rl.lm.Policy(), loss.config, checkpoint=checkpoint)
        policy.train(batch() if data is None else data, loss)
        for name, to_log in logged:
            logger.log_batched_dict_as_jsonl(to_log, f"{name}.jsonl")
        give_up_logged_rows()
        ((step, table),) = read_records(tmp_path, 1).items()
        return step, table, logger

    return run


def test_each_batch_is_recorded_with_the_rewards_that_nemo_rl_logs(nemo_rl, tmp_path):
    loss, logger = build(tmp_path), RewardLogger(Logger())
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    for step in (1, 2):
        data = batch(seed=step)
        policy.train(data, loss)
        # The step is not written before its rewards are known.
        assert len(step_files(tmp_path) if tmp_path.exists() else ()) < step
        rewards = [reward + step for reward in REWARDS]
        logger.log_batched_dict_as_jsonl({"rewards": rewards}, f"train_data_step{step}.jsonl")
    tables = read_records(tmp_path, 2)
    assert list(tables) == [1, 2]
    for step, table in tables.items():
        assert table["reward"].to_pylist() == [reward + step for reward in REWARDS]
    assert torch.tensor(tables[2]["gen"].to_pylist()).equal(batch(2)["generation_logprobs"])
    # A loop that waits for its samples has those of the weights that it trains.
    assert tables[1]["weight_version"].to_pylist() == [0] * 8
    assert tables[2]["weight_version"].to_pylist() == [1] * 8
    assert tables[2]["staleness"].to_pylist() == [0] * 8
    # The workers get the same loss, which keeps its log-probs.
    assert [repr(sent).replace("Keeping", "Policy") for sent in policy.losses] == [repr(loss)] * 2


def test_the_logger_logs_as_always(nemo_rl):
    inner = Logger()
    logger = RewardLogger(inner)
    to_log = {"rewards": [1.0], "content": ["text"]}
    assert logger.log_batched_dict_as_jsonl(to_log, "train_data_step3.jsonl") == "logs/train_data_step3.jsonl"
    assert logger.log_batched_dict_as_jsonl(filename="val_data_step3.jsonl", to_log={}) == "logs/val_data_step3.jsonl"
    assert inner.logged == [("train_data_step3.jsonl", to_log), ("val_data_step3.jsonl", {})]
    assert inner.logged[0][1] is to_log
    assert logger.log_metrics({"loss": 1}, 3, prefix="train") == "train3: {'loss': 1}"
    assert logger.logged is inner.logged
    with pytest.raises(AttributeError, match="no_such"):
        _ = logger.no_such


LOGGED = {
    "a validation before": (
        [("val_data_step1", {"rewards": [9.0] * 8}), ("train_data_step1", {"rewards": REWARDS})],
        True,
    ),
    # As many unfiltered rewards are logged as rows train.
    "dynamic sampling": ([("train_data_step1", {"rewards": [9.0] * 8, "filtered_rewards": REWARDS})], True),
    "none": ([("train_data_step1", {"content": []})], False),
    "another number": ([("train_data_step1", {"rewards": [1.0] * 4})], False),
}


@pytest.mark.parametrize(("logged", "is_known"), LOGGED.values(), ids=LOGGED)
def test_rewards_are_those_that_belong_to_the_batch(record_step, logged, is_known):
    _, table, _ = record_step(None, *logged)
    assert table["reward"].to_pylist() == (REWARDS if is_known else [None] * 8)


AGENTS = ["math", "math", "code", "code", "code", "code", "math", "math"]
"""Name of NeMo-Gym's agent of each row of a batch."""


def agent_refs(names=AGENTS):
    """NeMo-Gym's ``agent_ref`` of each row."""
    return [{"type": "responses_api_agents", "name": name} for name in names]


def logged_batch(data, **columns):
    """What GRPO's loop passes to the logger of a batch."""
    keys = {name: key for name, key in JSONL_KEYS.items() if key in data}
    return {"agent_ref": agent_refs(), **{name: data[key].tolist() for name, key in keys.items()}, **columns}


@pytest.mark.parametrize("record", [{}, {"fraction": 0.5, "by": "group"}])
def test_environments_are_the_agents_that_nemo_rl_logs(record_step, tmp_path, record):
    to_log = {"rewards": REWARDS, "agent_ref": agent_refs()}
    _, table, _ = record_step(None, ("train_data_step1", to_log), record={"dir": str(tmp_path), **record})
    rows = table["row"].to_pylist()
    assert table["environment"].to_pylist() == [AGENTS[row] for row in rows]
    assert table["reward"].to_pylist() == [REWARDS[row] for row in rows]


@pytest.mark.parametrize(
    ("agents", "recorded"),
    [
        (None, [None] * 8),
        ("math", [None] * 8),
        (agent_refs(AGENTS[:7]), [None] * 8),
        (agent_refs([*AGENTS, "math"]), [None] * 8),
        (
            [*agent_refs(AGENTS[:2]), None, "code", {"type": "x"}, *agent_refs([3, "\ud800", "x" * 129])],
            ["math", "math", *[None] * 6],
        ),
    ],
    ids=["none", "no list", "too few", "too many", "other types"],
)
def test_environments_that_are_not_known_are_null(record_step, agents, recorded):
    to_log = logged_batch(batch(), rewards=REWARDS, agent_ref=agents)
    _, table, logger = record_step(None, ("train_data_step1", to_log))
    assert table["environment"].to_pylist() == recorded
    assert table["reward"].to_pylist() == REWARDS
    assert logger.metrics == []


def test_under_dynamic_sampling_the_agents_are_those_of_the_rows_that_train(nemo_rl, tmp_path):
    """NeMo-RL filters them together with the rows, except over the data plane, where they are of another batch."""
    data = batch()
    filtered = {"filtered_rewards": REWARDS, "rewards": [9.0] * 8}
    for name in ("loop", "data plane", "data plane without a filter"):
        loss, logger = build(tmp_path / name), RewardLogger(Logger(), logs_mismatch=True)
        if name == "loop":
            convert_policy(nemo_rl.lm.Policy(), loss.config).train(data, loss)
        else:
            policy = convert_policy(nemo_rl.tq.TQPolicy({"all": dict(data)}), loss.config)
            without_rewards = meta()
            without_rewards.fields = ["input_ids"]
            policy.train_from_meta(without_rewards, loss_fn=loss)
        is_filtered = name != "data plane without a filter"
        to_log = logged_batch(data, **(filtered if is_filtered else {"rewards": REWARDS}))
        logger.log_batched_dict_as_jsonl(to_log, "train_data_step1.jsonl")
        table = read_records(tmp_path / name, 1)[1]
        assert table["reward"].to_pylist() == REWARDS
        assert table["environment"].to_pylist() == ([None] * 8 if name == "data plane" else AGENTS)
        assert len(logger.metrics) == (0 if name == "data plane" else 1)


def mismatch_by_plain_loops(to_log, names):
    """The mean of exp(Δ) − 1 − Δ over the trained tokens of each environment, in float64."""
    sums = {}
    for row, name in enumerate(names):
        for column in range(1, to_log["input_lengths"][row]):
            gen, prev = to_log["generation_logprobs"][row][column], to_log["prev_logprobs"][row][column]
            weight = to_log["token_loss_mask"][row][column] * to_log["sample_loss_mask"][row]
            if name is not None and weight and math.isfinite(gen) and math.isfinite(prev):
                total = sums.setdefault(name, [0.0, 0.0])
                total[0] += weight * (math.exp(prev - gen) - 1 - (prev - gen))
                total[1] += weight
    return {f"geomask/environment/{name}/mismatch_k3": k3 / weight for name, (k3, weight) in sums.items()}


def test_the_mismatch_of_each_environment_is_logged(nemo_rl):
    data = batch()
    data["sample_mask"] = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0])
    data["prev_logprobs"] = data["prev_logprobs"].clone()
    row, column = (data["token_mask"] != 0).nonzero()[5].tolist()
    data["prev_logprobs"][row, column] = math.nan
    data["input_lengths"][4] -= 3
    # Neither the first token nor padding is trained, whatever their masks say.
    data["token_mask"] = data["token_mask"].clone()
    data["token_mask"][:, 0] = data["token_mask"][4, -3:] = 1
    names = [*AGENTS[:7], None]
    inner = Logger()
    logger, to_log = RewardLogger(inner, logs_mismatch=True), logged_batch(data, agent_ref=agent_refs(names))
    assert logger.log_batched_dict_as_jsonl(to_log, "train_data_step17.jsonl") == "logs/train_data_step17.jsonl"
    ((metrics, step, prefix),) = inner.metrics
    assert (step, prefix) == (17, "train")
    assert metrics == pytest.approx(mismatch_by_plain_loops(to_log, names), rel=1e-9)
    assert len(metrics) == 2
    # A validation batch is not trained on, and an environment whose sequences do not train has no mean.
    logger.log_batched_dict_as_jsonl(to_log, "val_data_step17.jsonl")
    assert len(inner.metrics) == 1
    to_log["sample_loss_mask"] = [float(name == "code") for name in names]
    logger.log_batched_dict_as_jsonl(to_log, "train_data_step18.jsonl")
    assert inner.metrics[1][0].keys() == {"geomask/environment/code/mismatch_k3"}


def test_where_the_mismatch_by_environment_is_not_logged(nemo_rl, caplog):
    inner, to_log = Logger(), logged_batch(batch())
    RewardLogger(inner).log_batched_dict_as_jsonl(to_log, "train_data_step1.jsonl")
    logger = RewardLogger(inner, logs_mismatch=True)
    one_environment = {**to_log, "agent_ref": [*agent_refs(["math"] * 7), None]}
    without_prev = {name: value for name, value in to_log.items() if name != "prev_logprobs"}
    for other in (one_environment, without_prev):
        logger.log_batched_dict_as_jsonl(other, "train_data_step1.jsonl")
    assert (inner.metrics, caplog.records) == ([], [])
    # An error fails no step and is logged once.
    for step in (2, 3):
        broken = {**to_log, "agent_ref": agent_refs(AGENTS[:7])}
        path = f"train_data_step{step}.jsonl"
        assert logger.log_batched_dict_as_jsonl(broken, path) == f"logs/{path}"
    (record,) = caplog.records
    assert record.message == "train_data_step2.jsonl: the mismatch by environment is not logged"
    # A later batch may be complete.
    logger.log_batched_dict_as_jsonl(to_log, "train_data_step4.jsonl")
    assert [step for _, step, _ in inner.metrics] == [4]


def test_rewards_that_never_come_are_null_when_the_next_step_begins(nemo_rl, tmp_path):
    loss, logger = build(tmp_path), RewardLogger(Logger())
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    policy.train(batch(1), loss)
    for step in (2, 3):
        policy.train(batch(step), loss)
        assert list(read_records(tmp_path, step - 1)) == list(range(1, step))
    # What is logged of a step does not go to an earlier one.
    logger.log_batched_dict_as_jsonl({"rewards": REWARDS}, "train_data_step3.jsonl")
    tables = read_records(tmp_path, 3)
    assert tables[1]["reward"].null_count == tables[2]["reward"].null_count == 8
    assert tables[3]["reward"].to_pylist() == REWARDS


@pytest.mark.slow
def test_rewards_that_never_come_do_not_hold_up_the_end_of_the_process(tmp_path):
    """NeMo-RL logs nothing after the last step if training is stopped; what waits for 30 s at the end is lost."""
    code = f"""
from pathlib import Path
from tests.helpers.nemo_rl import fake_policies
lm = fake_policies.install_modules()
from tests.hosts.nemo_rl import test_step_recorder as tests
lm.Policy.compute = tests.compute
for folder in ("a", "b"):  # two policies, such as those of two runs one after the other
    loss = tests.build(Path({str(tmp_path)!r}) / folder)
    policy = tests.convert_policy(lm.Policy(), loss.config)
    policy.train(tests.batch(1), loss)
    policy.train(tests.batch(2), loss)
"""
    root = Path(nemo_geomask.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=500,
        cwd=root,
    )
    for folder in ("a", "b"):
        tables = {step: parquet.read_table(path) for step, (path,) in step_files(tmp_path / folder).items()}
        assert list(tables) == [1, 2], done.stderr
        assert all(table["reward"].null_count == 8 for table in tables.values())


@pytest.mark.parametrize("name", ["rewards", "total_reward"])
def test_rewards_in_the_batch_are_recorded_at_once(record_step, name):
    """PPO puts them there."""
    data = {**batch(), name: torch.tensor(REWARDS)}
    _, table, _ = record_step(data)
    assert table["reward"].to_pylist() == REWARDS
    assert set(data) == {*batch(), name}


def test_evaluations_and_further_epochs_on_a_batch_are_no_steps(nemo_rl, tmp_path):
    loss = build(tmp_path)
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    first, second = batch(1), batch(2)
    policy.train(batch(3), loss, eval_mode=True)
    for data in (first, first, first, second):
        policy.train(dict(data), loss)
    give_up_logged_rows()
    tables = read_records(tmp_path, 2)
    assert list(tables) == [1, 2]
    assert torch.tensor(tables[1]["gen"].to_pylist()).equal(first["generation_logprobs"])


@pytest.mark.parametrize(
    ("checkpoint", "last"), [("/ckpt/step_40", 40), (None, 0), (Path("/run/step_3/step_12"), 12), ("/ckpt/best", 0)]
)
def test_a_resumed_run_goes_on_with_its_numbers(record_step, checkpoint, last):
    step, table, _ = record_step(checkpoint=checkpoint)
    assert step == last + 1
    assert table["weight_version"].to_pylist() == [last] * 8


def test_under_a_prestep_pass_the_batch_is_recorded_as_it_came(record_step):
    masks = [{"preset": "geometric", "min": 0.85, "max": 1.2}]
    _, table, _ = record_step(denominator="kept", masks=masks)
    assert torch.tensor(table["mask"].to_pylist()).equal(batch()["token_mask"] != 0)
    assert torch.tensor(table["removed.geometric"].to_pylist()).any()


def test_a_batch_in_the_data_plane(nemo_rl, tmp_path):
    loss, data, logger = build(tmp_path), stored_batch(), RewardLogger(Logger())
    policy = convert_policy(nemo_rl.tq.TQPolicy({"all": dict(data)}), loss.config)
    policy.train_from_meta(meta(), loss_fn=loss)
    logger.log_batched_dict_as_jsonl({"rewards": [9.0] * 8}, "train_data_step1.jsonl")
    # Only the first of these batches has its rewards in the data plane.
    without_rewards = meta()
    without_rewards.fields = ["input_ids"]
    policy.train_from_meta(without_rewards, loss_fn=loss)
    logger.log_batched_dict_as_jsonl({"rewards": [7.0] * 8}, "train_data_step2.jsonl")
    tables = read_records(tmp_path, 2)
    assert tables[1]["reward"].to_pylist() == REWARDS
    assert tables[2]["reward"].to_pylist() == [7.0] * 8
    assert torch.tensor(tables[1]["tokens"].to_pylist()).equal(data["input_ids"])


def test_a_step_in_parts_of_a_policy_that_arrived_pickled(nemo_rl, tmp_path):
    loss, data = build(tmp_path), stored_batch()
    parts = {
        name: {key: value[rows] for key, value in data.items()}
        for name, rows in (("a", slice(0, 3)), ("b", slice(3, 8)))
    }
    policy = convert_policy(nemo_rl.tq.TQPolicy(parts), loss.config, checkpoint="/c/step_5")
    policy = pickle.loads(pickle.dumps(policy))
    for _ in range(2):
        policy.begin_train_step(loss)
        policy.train_microbatches_from_meta(meta("a", weight_version=[4, 4, 5]))
        policy.train_microbatches_from_meta(meta("b", weight_version=[5] * 5))
        policy.finish_train_step()
    table = read_records(tmp_path, 2)[6]
    assert table["row"].to_pylist() == list(range(8))
    assert table["reward"].to_pylist() == REWARDS
    assert table["weight_version"].to_pylist() == [4, 4, 5, 5, 5, 5, 5, 5]
    assert table["staleness"].to_pylist() == [1, 1, 0, 0, 0, 0, 0, 0]


class Reference:
    """Ray's reference to the result of a call."""

    def __init__(self, value):
        self.value = value


def bare(function):
    """A function as it arrives in a process that lacks this package: its code, without the globals of its module."""
    assert function.__closure__ is None
    return types.FunctionType(function.__code__, {"__builtins__": __builtins__})


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
        return types.SimpleNamespace(remote=lambda function, *args: Reference(bare(function)(self.buffer, *args)))


class Buffer:
    def __init__(self):
        self.trajectories = [{"batch": {"total_reward": torch.zeros(2)}} for _ in range(4)]
        self.trajectory_versions = [3, 4, 4, 5]

    def sample(self, num_prompt_groups, current_weight_version, max_age_steps):
        if num_prompt_groups > 4:
            return None
        return {"trajectories": [self.trajectories[index] for index in (3, 0, 1, 2)], "avg_trajectory_age": 1.0}


@pytest.fixture
def ray(monkeypatch):
    module = types.ModuleType("ray")

    def get(references, timeout=None):
        return references.value if isinstance(references, Reference) else [item.value for item in references]

    module.get = get
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


def replace_buffer_class():
    patch.apply_all(list(make_patches(["asynchronous record"])))


def test_an_asynchronous_loop_gets_the_versions_from_the_replay_buffer(nemo_rl, ray, tmp_path):
    nemo_rl.buffers.ReplayBuffer = Actor()
    replace_buffer_class()
    loss = build(tmp_path)
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config, checkpoint="/c/step_5")
    handle = nemo_rl.buffers.ReplayBuffer.options(runtime_env={}).remote(max_size=4)
    request = {"current_weight_version": 5, "max_age_steps": 2}
    assert ray.get(handle.sample.remote(num_prompt_groups=5, **request)) is None
    sample = ray.get(handle.sample.remote(num_prompt_groups=4, **request))
    assert sample["avg_trajectory_age"] == 1.0
    assert set(sample["trajectories"][0]["batch"]) == {"total_reward"}  # NeMo-RL's batch gets no further key
    policy.train(batch(), loss)
    # A sample that nobody drew, and one of another number of rows.
    policy.train(batch(2), loss)
    read_records(tmp_path, 1)  # a third step would be lost while two wait for the disk
    handle.sample.remote(num_prompt_groups=4, **request)
    policy.train({key: value[:6] for key, value in batch(3).items()}, loss)
    read_records(tmp_path, 2)
    # While the critic of asynchronous PPO warms up, versions advance and the policy does not train.
    handle.sample.remote(num_prompt_groups=4, current_weight_version=12, max_age_steps=9)
    policy.train(batch(4), loss)
    give_up_logged_rows()
    tables = read_records(tmp_path, 4)
    assert tables[9]["staleness"].to_pylist() == [7, 7, 9, 9, 8, 8, 8, 8]
    assert tables[6]["weight_version"].to_pylist() == [5, 5, 3, 3, 4, 4, 4, 4]
    assert tables[6]["staleness"].to_pylist() == [0, 0, 2, 2, 1, 1, 1, 1]
    for step, rows in ((7, 8), (8, 6)):
        assert tables[step]["weight_version"].null_count == tables[step]["staleness"].null_count == rows


class OtherBuffer:
    def sample(self, **request):
        return {"trajectories": [{"no batch": 1}], **request}


def test_the_versions_of_a_sample_are_those_of_its_rows_if_all_are_known():
    def sample(buffer, **request):
        handle = Actor(buffer)
        ReplayBufferClass(types.SimpleNamespace(remote=lambda: handle)).remote()
        return handle.sample.remote(**request).value, loop_values.versions.value

    request = {"current_weight_version": 5, "max_age_steps": 2}
    answer, versions = sample(Buffer(), num_prompt_groups=4, **request)
    assert len(answer["trajectories"]) == 4
    assert versions == [5, 5, 3, 3, 4, 4, 4, 4]
    assert sample(Buffer(), num_prompt_groups=5, **request) == (None, None)
    assert sample(OtherBuffer(), age=3) == ({"trajectories": [{"no batch": 1}], "age": 3}, None)


def test_entropies_are_refused_where_nobody_computes_them(tmp_path):
    settings = {"record": {"dir": str(tmp_path), "entropy": True}}
    with pytest.raises(ConfigError, match=r"loss_fn\.record\.entropy.*computes no entropies"):
        check_recording(build_loss(settings).config)
    check_recording(build_loss({**settings, "logprob_backend": "geomask"}).config)
    check_recording(build_loss({}).config)


class Worker:
    """A policy worker, in this process, as Ray's handle of it: calls come in order."""

    @property
    def __ray_call__(self):
        return types.SimpleNamespace(remote=self.call)

    def __init__(self):
        self.requests = []

    def call(self, function, *args):
        self.requests.append(args)
        return Reference(function(self, *args))


def policy_with_workers(nemo_rl, ray, loss, optimizer_steps=2, order=(5, 0, 3, 7, 1, 6, 2, 4), fails=False, lacks=""):
    """A policy whose workers, two ranks of one tensor-parallel group, train on a batch's rows in another order, in
    several optimiser steps; returns it and the log-probs [B, T-1] of the rows by step."""
    logprobs = []

    def train(self, data, loss_fn, eval_mode=False, *, gbs=None, mbs=None, timer=None):
        self.losses.append(loss_fn)
        generator = torch.Generator().manual_seed(len(logprobs))
        prev = data["prev_logprobs"][:, 1:]
        curr = prev + 0.1 * torch.randn(prev.shape, generator=generator)
        logprobs.append(curr)
        worker_loss = pickle.loads(pickle.dumps(loss_fn))
        for rows in torch.tensor(order).chunk(optimizer_steps):
            part = {key: value[rows] for key, value in data.items() if key != lacks}
            # As in a worker that fills its microbatches up to a width of their own.
            part |= {key: torch.nn.functional.pad(value, (0, 3)) for key, value in part.items() if value.dim() == 2}
            padded = torch.nn.functional.pad(curr[rows], (0, 3))
            worker_loss(padded, data=part, global_valid_seqs=8.0, global_valid_toks=100.0)
        if fails:
            raise RuntimeError("the collective was aborted")
        return {"all_mb_metrics": {}}

    nemo_rl.lm.Policy.train = train
    sharding = types.SimpleNamespace(get_worker_coords=lambda index: {"tensor_parallel": index})
    group = types.SimpleNamespace(workers=[Worker(), Worker()], sharding_annotations=sharding)
    return convert_policy(nemo_rl.lm.Policy(group), loss.config), logprobs


def trained_tokens(data):
    return (data["token_mask"][:, 1:] != 0) & (data["sample_mask"] != 0)[:, None]


def batch_with_rewards(seed=1):
    data = batch(seed)
    return {**data, "rewards": torch.tensor(REWARDS)}


POLICY_MASK = {"masks": [{"preset": "opsm", "delta": 0.001}]}


def test_the_current_policys_log_probs_come_from_the_workers_and_rewards_later(nemo_rl, ray, tmp_path):
    loss, logger = build(tmp_path, **POLICY_MASK), RewardLogger(Logger())
    policy, logprobs = policy_with_workers(nemo_rl, ray, loss)
    for seed in (1, 2):
        policy.train(batch(seed), loss)
        logger.log_batched_dict_as_jsonl({"rewards": REWARDS}, f"train_data_step{seed}.jsonl")
    tables = read_records(tmp_path, 2)
    # One rank of a tensor-parallel group answers, and none keeps them any longer.
    first_requests, second_requests = (worker.requests for worker in policy.worker_group.workers)
    assert first_requests == [(1, None), (2, None)]
    assert [request[1].numel() for request in second_requests] == [0, 0]
    assert not current_logprobs.take_kept(None, 2)
    for seed in (1, 2):
        data, table = batch(seed), tables[seed]
        recorded = torch.tensor(table["curr"].to_pylist())
        is_trained = trained_tokens(data)
        assert recorded[:, 0].isnan().all()
        assert recorded[:, 1:].nan_to_num(9.0).equal(torch.where(is_trained, logprobs[seed - 1], 9.0))
        curr = torch.where(is_trained, logprobs[seed - 1], data["prev_logprobs"][:, 1:])
        removed = removed_tokens(loss.config, data, curr)
        assert torch.tensor(table["removed.opsm"].to_pylist()).equal(removed["opsm"])
        assert removed["opsm"].any()
        assert json.loads(table.schema.metadata[b"nemo_geomask.facts"])["policy"] == "curr"
        assert table["reward"].to_pylist() == REWARDS


def test_of_a_batch_that_is_trained_on_again_the_first_epoch_counts(nemo_rl, ray, tmp_path):
    loss, first, second = build(tmp_path), batch_with_rewards(1), batch_with_rewards(2)
    policy, logprobs = policy_with_workers(nemo_rl, ray, loss)
    for data in (first, first, second):
        policy.train(data, loss)
    tables = read_records(tmp_path, 2)
    for step, data, curr in ((1, first, logprobs[0]), (2, second, logprobs[2])):
        recorded = torch.tensor(tables[step]["curr"].to_pylist())[:, 1:]
        assert recorded[trained_tokens(data)].equal(curr[trained_tokens(data)])
    assert type(policy.losses[1]).__name__ == "PolicyLoss"


@pytest.mark.parametrize("by", ["sequence", "group"])
def test_workers_hand_over_what_is_recorded_alone(nemo_rl, ray, tmp_path, by):
    loss = build(tmp_path, record={"dir": str(tmp_path), "fraction": 0.3, "by": by, "every": 2})
    policy, logprobs = policy_with_workers(nemo_rl, ray, loss)
    answers = []
    get = ray.get
    ray.get = lambda references, timeout: answers.extend(get(references)) or get(references)
    data = batch_with_rewards()
    for _ in range(3):
        policy.train({**data}, loss)
        policy.train(batch_with_rewards(5), loss)
    tables = read_records(tmp_path, 3)
    assert list(tables) == [1, 3, 5]
    rows = tables[3]["row"].to_pylist()
    assert 0 < len(rows) < 8
    is_trained = trained_tokens(data)
    assert [len(kept) for kept in answers] == [
        int(is_trained.any(dim=1)[table["row"].to_pylist()].sum()) for table in tables.values()
    ]
    recorded = torch.tensor(tables[3]["curr"].to_pylist())[:, 1:]
    assert recorded[is_trained[rows]].equal(logprobs[2][rows][is_trained[rows]])


@pytest.mark.parametrize("fault", ["aborted", "no answer", "input_lengths", "worker_group"])
def test_a_fault_of_the_workers_costs_curr_and_no_record(nemo_rl, ray, tmp_path, caplog, fault):
    loss = build(tmp_path)
    policy, logprobs = policy_with_workers(nemo_rl, ray, loss, fails=fault == "aborted", lacks=fault)
    workers = policy.worker_group.workers
    if fault == "worker_group":
        del policy.worker_group
    if fault == "no answer":
        ray.get = lambda references, timeout: [].pop()
    with pytest.raises(RuntimeError, match=fault) if fault == "aborted" else contextlib.nullcontext():
        policy.train(batch() if fault == "aborted" else batch_with_rewards(), loss)
    table = read_records(tmp_path, 1)[1]
    assert len(logprobs) == 1
    assert table["curr"].null_count == 8
    assert table["gen"].null_count == 0
    if fault == "aborted":  # nobody is asked, and nobody logs the rewards of such a step, so it waits for none
        assert all(worker.requests == [] for worker in workers)
        assert table["reward"].null_count == 8
    else:
        assert table["reward"].to_pylist() == REWARDS
        assert {"no answer": "step 1 is without curr: IndexError"}.get(fault, fault) in caplog.text


def test_log_probs_that_are_nan_are_recorded_as_the_loss_saw_them(nemo_rl, ray, tmp_path):
    loss, data = build(tmp_path, **POLICY_MASK), batch_with_rewards()
    policy, logprobs = policy_with_workers(nemo_rl, ray, loss)
    row, column = trained_tokens(data).nonzero()[0].tolist()
    prev = data["prev_logprobs"]
    data["prev_logprobs"] = prev.clone()
    data["prev_logprobs"][row, column + 1] = math.nan
    policy.train(data, loss)
    assert logprobs[0][row, column].isnan()
    table = read_records(tmp_path, 1)[1]
    assert torch.tensor(table["curr"].to_pylist())[row, column + 1].isnan()
    curr = torch.where(trained_tokens(data), logprobs[0], prev[:, 1:])
    removed = removed_tokens(loss.config, data, curr)["opsm"]
    assert torch.tensor(table["removed.opsm"].to_pylist()).equal(removed)


def test_what_is_kept_is_a_copy():
    data = batch()
    curr = data["prev_logprobs"][:, 1:].clone()
    keeping = current_logprobs.keep_logprobs(build_loss({"name": "gspo"}), 1)
    keeping(curr, data=data, global_valid_seqs=8.0, global_valid_toks=100.0)
    curr.zero_()
    kept = current_logprobs.take_kept(None, 1)
    assert kept
    assert all(sequence.values["curr"].all() for sequence in kept)


def test_rows_are_told_apart_whatever_their_padding():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (200, 12), generator=generator)
    lengths = torch.randint(1, 13, (200,), generator=generator)
    fingerprints = current_logprobs.fingerprints(ids, lengths)
    rows = [tuple(row[:length].tolist()) for row, length in zip(ids, lengths, strict=True)]
    assert len(set(fingerprints.tolist())) == len(set(rows))
    wider = torch.nn.functional.pad(ids, (0, 5), value=7).to(torch.int32)
    assert current_logprobs.fingerprints(wider, lengths).equal(fingerprints)
    full = torch.full((200,), 12)
    assert current_logprobs.fingerprints(ids.flip(1), full).ne(current_logprobs.fingerprints(ids, full)).any()


def test_a_fault_costs_records_and_no_step(nemo_rl, tmp_path, caplog):
    loss, data = build(tmp_path), batch_with_rewards()
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    policy.train({key: value for key, value in data.items() if key != "sample_mask"}, loss)
    policy.train(batch_with_rewards(2), loss)
    assert "step 1 lost" in caplog.text
    assert list(read_records(tmp_path, 1)) == [2]
    assert len(policy.losses) == 2


def test_a_recorder_does_not_keep_its_policy_alive(nemo_rl, tmp_path):
    loss = build(tmp_path)
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    policy.train(batch_with_rewards(), loss)
    read_records(tmp_path, 1)
    reference = weakref.ref(policy)
    del policy
    assert reference() is None


def test_the_replay_buffer_is_replaced_once_and_put_back(nemo_rl, monkeypatch):
    nemo_rl.buffers.ReplayBuffer = Actor()
    owners = (nemo_rl.lm.Policy, nemo_rl.tq.TQPolicy, nemo_rl.buffers)
    before = [dict(vars(owner)) for owner in owners]
    for _ in range(2):
        replace_buffer_class()
    replacement = nemo_rl.buffers.ReplayBuffer
    assert isinstance(replacement, ReplayBufferClass)
    assert replacement.buffer is before[2]["ReplayBuffer"].buffer  # all else is NeMo-RL's
    assert isinstance(replacement.options(max_restarts=1), ReplayBufferClass)
    with pytest.raises(AttributeError, match="no_such"):
        _ = replacement.no_such
    assert patch.in_force(nemo_rl.buffers, "ReplayBuffer")
    uninstall()
    assert [dict(vars(owner)) for owner in owners] == before
    # Where there is none, there is nothing to replace.
    del nemo_rl.buffers.ReplayBuffer
    replace_buffer_class()
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.async_utils", None)
    replace_buffer_class()


def test_without_the_setting_nothing_is_recorded(nemo_rl, tmp_path):
    loss = build_loss({"name": "gspo"})
    policy = convert_policy(nemo_rl.lm.Policy(), loss.config)
    policy.train(batch(), loss)
    assert policy.losses == [loss]
    assert loop_values.logged_rows is None
    assert list(tmp_path.iterdir()) == []
