"""``ratio_anchor: gen`` in NeMo-RL's policies, here stand-ins with NeMo-RL's signatures."""

import pickle

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl import HostAPIError, build_nemo_rl_loss, policies
from nemo_geomask.hosts.nemo_rl.policies import convert_policy
from tests.helpers.batches import rollouts
from tests.helpers.nemo_rl.fake_policies import Batch

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


def test_other_policies_compute_them(nemo_rl):
    convert_policy(nemo_rl.lm.Policy(), config_of(**GEN))
    assert not nemo_rl.lm.Policy().get_logprobs(Batch(rollouts(seed=1).data))["logprobs"].isnan().any()


def test_a_policy_that_arrived_pickled_computes_none_either(nemo_rl):
    policy = convert_policy(nemo_rl.tq.TQPolicy({"a": rollouts(seed=5).data}), config_of(**GEN))
    pickled = pickle.dumps(policy)
    policies.subclasses.clear()  # as in another process, which defines the class when it arrives
    before = dict(vars(nemo_rl.tq.TQPolicy))
    policy = pickle.loads(pickled)
    policy.get_logprobs_from_meta("a")
    assert isinstance(policy, nemo_rl.tq.TQPolicy)
    assert policy.store["a"]["prev_logprobs"].isnan().all()
    assert dict(vars(nemo_rl.tq.TQPolicy)) == before


def test_a_threshold_on_log_probs_that_are_not_computed_is_an_error(host):
    host()

    def build(threshold, section="ppo", **settings):
        sections = {"policy": {}, section: {"seq_logprob_error_threshold": threshold}}
        return build_nemo_rl_loss({"loss_fn": {"name": "clipped_pg", **settings}, **sections})

    assert build(None, **GEN).config.skips_prev
    for section in ("grpo", "ppo"):
        message = rf"{section}.seq_logprob_error_threshold: 1.05 masks .* or set loss_fn.audit_fraction: 1"
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


def test_unknown_signatures_are_an_error_where_they_matter(nemo_rl):
    nemo_rl.lm.Policy.get_logprobs = lambda self, batch: None
    policy = nemo_rl.lm.Policy()
    with pytest.raises(
        HostAPIError, match=r"lm_policy\.Policy\.get_logprobs takes \(self, batch\).*ratio_anchor: prev"
    ):
        convert_policy(policy, config_of(**GEN))
    assert type(policy) is nemo_rl.lm.Policy
    assert convert_policy(policy, config_of()).get_logprobs("batch") is None
