"""Metrics as a mapping: what a trainer does with a dict of floats, and one copy from the device."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_geomask import build_loss
from nemo_geomask.metrics import Label, Metrics
from tests.helpers import batches

LABELS = (
    Label(("a",), "tokens", "tokens"),
    Label(("b", "c"), "sequences", "sequences"),
    Label(("d",), "part", "tokens", 2.0),
    Label(("e_min",), "lowest", "none"),
)
EXPECTED = {"a": 0.5, "b": 0.25, "c": 0.25, "d": 3.0, "e_min": -1.0}


def made() -> Metrics:
    return Metrics(LABELS, torch.tensor([4.0, 1.0, 1.5, -1.0, 4.0, 8.0]))


def test_sums_are_divided_by_the_steps_counts():
    assert made() == EXPECTED
    assert {type(value) for value in made().values()} == {float}


def test_a_count_of_zero_meets_sums_of_zero():
    found = Metrics(LABELS[:1], torch.zeros(3))
    assert found == {"a": 0.0}


def test_names_are_known_without_reading(monkeypatch):
    copies = []
    to_host = torch.Tensor.tolist

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            copies.append(func)
            return func(*args, **(kwargs or {}))

    def tolist(self):
        copies.append("tolist")
        return to_host(self)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    metrics = made()
    with Watch():
        assert list(metrics) == list(metrics.keys()) == list(EXPECTED)
        assert len(metrics) == 5
        assert "a" in metrics
        assert "z" not in metrics
        assert copies == []
        assert metrics["d"] == 3.0
        assert metrics["a"] == 0.5
        assert copies == ["tolist"]


def test_scaling_in_place_while_iterating():
    # NeMo-RL's DTensor workers: for k in m.keys(): m[k] /= n, and the first of them reads.
    metrics = made()
    for name in metrics.keys():  # noqa: SIM118
        metrics[name] /= 2
    assert metrics == {name: value / 2 for name, value in EXPECTED.items()}


def test_new_keys_deletion_merging_and_copies():
    metrics = made()
    metrics["lr"] = 1e-3
    del metrics["a"]
    expected = {**EXPECTED, "lr": 1e-3}
    del expected["a"]
    assert metrics == expected
    assert dict(metrics) == {**metrics} == metrics.copy() == expected
    assert metrics | {"b": 2.0} == {**expected, "b": 2.0}
    assert metrics.pop("b") == 0.25
    with pytest.raises(KeyError):
        metrics["b"]


def test_it_travels_as_a_plain_dict():
    sent = pickle.loads(pickle.dumps(made()))
    assert type(sent) is dict
    assert sent == EXPECTED
    assert json.loads(json.dumps(dict(made()))) == EXPECTED
    assert repr(made()) == repr(EXPECTED)


@pytest.mark.parametrize("config", [{}, {"name": "gspo"}, {"truncated_importance_sampling_type": None}], ids=str)
def test_nemo_rl_reports_what_its_class_does(config):
    batch = batches.rollouts(1)
    full = batches.evaluate(config, batch)
    own = batches.evaluate({**config, "metrics": "nemo_rl"}, batch)
    assert dict(own.metrics) == {name: x for name, x in full.metrics.items() if not name.startswith("geomask/")}
    assert torch.equal(own.loss, full.loss)
    assert torch.equal(own.grad, full.grad)
    loss_fn = build_loss({**config, "metrics": "nemo_rl"})
    assert set(loss_fn.metric_normalizations) == set(own.metrics)


def test_the_loss_does_not_travel_through_its_metrics():
    batch = batches.rollouts(1)
    curr = batch.curr.clone().requires_grad_()
    loss, metrics = build_loss({})(curr, batch.data, batch.seqs, batch.toks)
    before = loss.item()
    metrics["loss"] *= 2
    assert loss.item() == before
