"""NeMo-RL's policies as stand-ins with NeMo-RL's signatures: they train in this process and remember on what."""

from __future__ import annotations

import pickle
import sys
import types

import torch

COLUMNS = ("token_mask", "sample_mask", "generation_logprobs", "prev_logprobs", "reference_policy_logprobs")
NAMES = (
    *("nemo_rl", "nemo_rl.models", "nemo_rl.models.policy", "nemo_rl.models.policy.lm_policy"),
    *("nemo_rl.models.policy.tq_policy", "nemo_rl.algorithms", "nemo_rl.algorithms.async_utils"),
)


class Policy:
    """NeMo-RL's; its methods all come down to :meth:`compute`."""

    forward_passes = 0
    sharding_annotations = types.SimpleNamespace(get_axis_size=lambda axis: 2)

    def __init__(self, group=None):
        self.calls, self.losses = [], []
        self.worker_group = group or types.SimpleNamespace()
        self.cfg = {"train_global_batch_size": 4, "logprob_batch_size": 1}

    def train(self, data, loss_fn, eval_mode=False, *, gbs=None, mbs=None, timer=None):
        return self.compute("train", data, loss_fn)

    def compute(self, method, data, loss_fn):
        curr = data["prev_logprobs"][:, 1:]
        loss, _ = loss_fn(
            curr, data, data["sample_mask"].sum(), (data["token_mask"] * data["sample_mask"][:, None]).sum()
        )
        self.calls.append((method, {name: data[name].clone() for name in COLUMNS}, float(loss)))
        return {"loss": loss, "grad_norm": torch.ones(1), "all_mb_metrics": {}}

    def get_logprobs(self, data, timer=None):
        type(self).forward_passes += 1
        return type(data)({"logprobs": torch.zeros(data["input_ids"].shape)})


class TQPolicy(Policy):
    """NeMo-RL's over its data plane: ``meta``, or its ``key``, is a key of ``store``."""

    def __init__(self, store, group=None):
        Policy.__init__(self, group)
        self.store = store

    def read_from_dataplane(self, meta, *, select_fields, pad_value_dict=None):
        return {name: self.store[getattr(meta, "key", meta)][name].clone() for name in select_fields}

    def write_to_dataplane(self, meta, fields):
        assert set(fields) <= set(COLUMNS)
        self.store[getattr(meta, "key", meta)].update(fields)

    def train_from_meta(self, meta, loss_fn, eval_mode=False, gbs=None, mbs=None, timer=None):
        return self.compute("train_from_meta", self.store[getattr(meta, "key", meta)], loss_fn)

    def begin_train_step(self, loss_fn, gbs=None, mbs=None):
        self.loss_fn = pickle.loads(pickle.dumps(loss_fn))
        self.calls.append(("begin",))

    def train_microbatches_from_meta(self, meta, timer=None):
        self.compute("part", self.store[getattr(meta, "key", meta)], self.loss_fn)

    def finish_train_step(self):
        self.calls.append(("finish",))
        return {"loss": torch.ones(1), "grad_norm": torch.ones(1), "all_mb_metrics": {}}

    def abort_train_step(self):
        self.calls.append(("abort",))

    def get_logprobs_from_meta(self, meta, micro_batch_size=None, timer=None):
        type(self).forward_passes += 1
        self.store[meta]["prev_logprobs"] = torch.zeros(self.store[meta]["generation_logprobs"].shape)


class Batch(dict):
    """NeMo-RL's batches have a class of their own."""

    def select_indices(self, rows):
        return Batch({name: value[rows] for name, value in self.items()})


def make_modules():
    """Make NeMo-RL's modules, by name, with classes of their own, whose methods a test may replace or remove."""
    modules = {name: types.ModuleType(name) for name in NAMES}
    modules["nemo_rl"].__version__ = "9.9"
    lm, tq = modules["nemo_rl.models.policy.lm_policy"], modules["nemo_rl.models.policy.tq_policy"]
    own = ("__dict__", "__weakref__", "__module__")
    copies = [{name: value for name, value in vars(cls).items() if name not in own} for cls in (Policy, TQPolicy)]
    lm.Policy = type("Policy", (), {**copies[0], "__module__": lm.__name__})
    tq.TQPolicy = type("TQPolicy", (lm.Policy,), {**copies[1], "__module__": tq.__name__})
    return modules


def install_modules():
    """Put :func:`make_modules` into ``sys.modules``, for a process of its own; return the module of ``Policy``."""
    sys.modules.update(make_modules())
    return sys.modules["nemo_rl.models.policy.lm_policy"]
