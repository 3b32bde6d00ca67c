"""``ratio_anchor: gen`` around NeMo-RL's policies, here stand-ins with NeMo-RL's signatures."""

import pickle
import sys
import types
from typing import ClassVar

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl import HostAPIError, prev_logprobs, uninstall
from nemo_geomask.hosts.nemo_rl.patch import in_force
from tests.helpers.batches import rollouts

GEN = {"ratio_anchor": "gen"}


class Policy:
    """NeMo-RL's; counts forward passes."""

    forward = 0
    cfg: ClassVar = {"logprob_batch_size": 1}
    sharding_annotations = types.SimpleNamespace(get_axis_size=lambda axis: 2)

    def get_logprobs(self, data, timer=None):
        type(self).forward += 1
        return type(data)({"logprobs": torch.zeros(data["input_ids"].shape)})


class TQPolicy(Policy):
    """NeMo-RL's over its data plane: ``meta`` is a key of ``store``."""

    def __init__(self, store):
        self.store = store

    def read_from_dataplane(self, meta, *, select_fields, pad_value_dict=None):
        return {name: self.store[meta][name].clone() for name in select_fields}

    def write_to_dataplane(self, meta, fields):
        self.store[meta].update(fields)

    def get_logprobs_from_meta(self, meta, micro_batch_size=None, timer=None):
        type(self).forward += 1
        self.store[meta]["prev_logprobs"] = torch.zeros(self.store[meta]["generation_logprobs"].shape)


def methods(kind):
    return {name: value for name, value in vars(kind).items() if callable(value)}


SHARED = {name: vars(Policy)[name] for name in ("forward", "cfg", "sharding_annotations")}


def mask(train_data, rewards, seq_logprob_error_threshold):
    return "masked"


@pytest.fixture
def nemo_rl(monkeypatch):
    """Modules of NeMo-RL's with fresh classes, since wrappers go into the classes."""
    names = ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.grpo", "nemo_rl.models", "nemo_rl.models.policy")
    names += ("nemo_rl.algorithms.ppo",)
    policies = ("nemo_rl.models.policy.lm_policy", "nemo_rl.models.policy.tq_policy")
    modules = {name: types.ModuleType(name) for name in (*names, *policies)}
    modules["nemo_rl"].__version__ = "9.9"
    grpo, lm, tq = (modules[name] for name in ("nemo_rl.algorithms.grpo", *policies))
    ppo = modules["nemo_rl.algorithms.ppo"]
    # PPO imports it from GRPO.
    grpo.compute_and_apply_seq_logprob_error_masking = ppo.compute_and_apply_seq_logprob_error_masking = mask
    lm.Policy = type("Policy", (), {**methods(Policy), **SHARED, "__module__": lm.__name__})
    tq.TQPolicy = type("TQPolicy", (lm.Policy,), {**methods(TQPolicy), "__module__": tq.__name__})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield types.SimpleNamespace(grpo=grpo, ppo=ppo, lm=lm, tq=tq)
    uninstall()


class Data(dict):
    """NeMo-RL's batches have a class of their own."""

    def select_indices(self, rows):
        return Data({name: value[rows] for name, value in self.items()})


def test_nothing_goes_forward(nemo_rl):
    prev_logprobs.wrap_policy(build_loss(GEN))
    data = Data(rollouts(seed=1).data)
    found = nemo_rl.lm.Policy().get_logprobs(data, timer=None)
    assert type(found) is Data
    assert found["logprobs"].shape == data["input_ids"].shape
    assert found["logprobs"].isnan().all()
    tq = nemo_rl.tq.TQPolicy({"all": data})
    tq.get_logprobs_from_meta("all", timer=None)
    assert data["prev_logprobs"].shape == data["generation_logprobs"].shape
    assert data["prev_logprobs"].isnan().all()
    assert (nemo_rl.lm.Policy.forward, nemo_rl.tq.TQPolicy.forward) == (0, 0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"force_on_policy_ratio": True}, {**GEN, "masks": [{"preset": "veto", "max": 2.0}]}],
    ids=["prev", "on policy", "mask"],
)
def test_a_loss_that_reads_them_has_them(nemo_rl, settings):
    for order in ([settings], [GEN, settings]):  # the last one built counts
        for each in order:
            prev_logprobs.wrap_policy(build_loss(each))
        policy = nemo_rl.lm.Policy()
        assert not policy.get_logprobs(Data(rollouts(seed=1).data))["logprobs"].isnan().any()
        assert not in_force(nemo_rl.lm.Policy, "get_logprobs")


def test_a_policy_that_is_sent_computes_none_either(nemo_rl):
    prev_logprobs.wrap_policy(build_loss(GEN))
    sent = pickle.dumps(nemo_rl.tq.TQPolicy({"a": rollouts(seed=5).data}))
    uninstall()
    before = dict(vars(nemo_rl.tq.TQPolicy))
    policy = pickle.loads(sent)
    policy.get_logprobs_from_meta("a")
    assert isinstance(policy, nemo_rl.tq.TQPolicy)
    assert policy.store["a"]["prev_logprobs"].isnan().all()
    assert dict(vars(nemo_rl.tq.TQPolicy)) == before


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_threshold_on_what_is_not_there_is_an_error(nemo_rl, algorithm):
    def call(threshold):
        return getattr(nemo_rl, algorithm).compute_and_apply_seq_logprob_error_masking(
            train_data=None, rewards=None, seq_logprob_error_threshold=threshold
        )

    prev_logprobs.wrap_policy(build_loss(GEN))
    assert call(None) == "masked"
    with pytest.raises(
        ConfigError, match=r"seq_logprob_error_threshold: 1.05 masks .* or set loss_fn.audit_fraction: 1"
    ):
        call(1.05)
    prev_logprobs.wrap_policy(build_loss({}))
    assert call(1.05) == "masked"


def test_a_sample_is_scored(nemo_rl):
    data = Data(rollouts(seed=1).data)  # 8 rows
    scored = []
    policy = nemo_rl.lm.Policy()
    prev_logprobs.wrap_policy(build_loss({**GEN, "audit_fraction": 0.3}))
    for _ in range(40):
        found = policy.get_logprobs(data)["logprobs"]
        rows = (~found.isnan()).all(dim=1)
        assert (found[rows] == 0).all()
        assert found[~rows].isnan().all()
        scored.append(rows)
    counts = torch.stack(scored).sum(dim=1)
    assert counts.tolist() == [4] * 40  # 2.4 rows, in multiples of the data-parallel size
    # Other rows at every step, each about as often as any other; and the same in another run.
    assert all(10 < count < 30 for count in torch.stack(scored).sum(dim=0).tolist())
    again = nemo_rl.lm.Policy()
    assert torch.equal(~again.get_logprobs(data)["logprobs"][:, 0].isnan(), scored[0])
    policy.cfg = {"logprob_batch_size": 4}
    assert not policy.get_logprobs(data)["logprobs"].isnan().any()


class Meta(list):
    """NeMo-RL's keys of a batch in the data plane."""

    def subset(self, rows):
        return Meta(self[row] for row in rows)


def test_a_sample_is_scored_in_the_data_plane(nemo_rl):
    class Plane(nemo_rl.tq.TQPolicy):
        def read_from_dataplane(self, meta, *, select_fields, pad_value_dict=None):
            return {name: torch.stack([self.store[key][name] for key in meta]) for name in select_fields}

        def write_to_dataplane(self, meta, fields):
            for row, key in enumerate(meta):
                self.store[key].update({name: value[row] for name, value in fields.items()})

    def score(self, meta, micro_batch_size=None, timer=None):
        for key in meta:
            self.store[key]["prev_logprobs"] = torch.zeros(14)

    nemo_rl.tq.TQPolicy.get_logprobs_from_meta = score
    data = rollouts(seed=1).data
    rows = {f"row {row}": {name: value[row] for name, value in data.items()} for row in range(8)}
    prev_logprobs.wrap_policy(build_loss({**GEN, "audit_fraction": 0.5}))
    Plane(rows).get_logprobs_from_meta(Meta(rows), timer=None)
    scored = [key for key, row in rows.items() if not row["prev_logprobs"].isnan().any()]
    assert len(scored) == 4
    assert all(row["prev_logprobs"].isnan().all() for key, row in rows.items() if key not in scored)


def test_all_of_them_are_scored_by_nemo_rl_itself(nemo_rl):
    prev_logprobs.wrap_policy(build_loss({**GEN, "audit_fraction": 1.0}))
    assert not in_force(nemo_rl.lm.Policy, "get_logprobs")


def test_all_of_it_is_undone(nemo_rl):
    owners = (nemo_rl.grpo, nemo_rl.ppo, nemo_rl.lm.Policy, nemo_rl.tq.TQPolicy)
    before = [dict(vars(owner)) for owner in owners]
    for _ in range(2):
        prev_logprobs.wrap_policy(build_loss(GEN))
        assert [dict(vars(owner)) for owner in owners] != before
        uninstall()
        assert [dict(vars(owner)) for owner in owners] == before


def test_unknown_signatures_are_an_error(nemo_rl):
    nemo_rl.lm.Policy.get_logprobs = lambda self, batch: None
    with pytest.raises(
        HostAPIError, match=r"lm_policy\.Policy\.get_logprobs takes \(self, batch\).*ratio_anchor: prev"
    ):
        prev_logprobs.wrap_policy(build_loss(GEN))
