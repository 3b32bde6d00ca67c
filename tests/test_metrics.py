"""Metrics as a mapping: what a trainer does with a dict of floats, and one copy from the device."""

from __future__ import annotations

import json
import math
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_geomask import build_loss
from nemo_geomask.metrics import QUANTILES, Label, Metrics, summarize_step
from tests.helpers import batches

LABELS = (
    Label(("a",), "tokens", "tokens"),
    Label(("b", "c"), "sequences", "sequences"),
    Label(("d",), "local_sum", "tokens", 2.0),
    Label(("e_min",), "min", "none"),
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


def added_up(parts):
    names = dict.fromkeys(name for part in parts for name in part)
    return {n: (max if n.endswith("_max") else sum)(part[n] for part in parts) for n in names}


@pytest.mark.parametrize("anchor", ["prev", "gen"])
def test_quantiles_and_the_maximum_of_a_step_are_those_of_its_tokens(anchor):
    own = "total" if anchor == "gen" else "mismatch"
    loss = build_loss({"ratio_anchor": anchor, "reference_policy_kl_penalty": 0.0})
    rows, columns = 12, 400
    draw = torch.Generator().manual_seed(5)
    one = torch.ones(rows, columns)
    # Sizes over five decades, a tail of its own, and tokens that don't train.
    delta = 10 ** (-5 + 4 * torch.rand(rows, columns, generator=draw)) * torch.sign(one.normal_(generator=draw))
    delta[3, 7], delta[5, 9] = 11.5, 0.0
    mask = (torch.rand(rows, columns, generator=draw) < 0.7).float()
    mask[3, 7] = 1.0
    gen = -1 - torch.rand(rows, columns, generator=draw)
    data = {"generation_logprobs": gen, "prev_logprobs": gen + delta, "advantages": torch.ones(rows, columns)}
    data |= {"token_mask": mask, "sample_mask": torch.ones(rows)}
    data["prev_logprobs"][mask == 0] = gen[mask == 0] + 30.0
    parts = [slice(0, 1), slice(1, 5), slice(5, None)]
    found = summarize_step(
        added_up(
            [
                dict(
                    loss(
                        (gen + delta)[part, 1:].clone(),
                        {key: value[part] for key, value in data.items()},
                        float(rows),
                        mask[:, 1:].sum().item(),
                    )[1]
                )
                for part in parts
            ]
        )
    )
    sizes = (data["prev_logprobs"] - gen)[:, 1:][mask[:, 1:] != 0].abs().double()
    assert found[f"geomask/{own}_max"] == pytest.approx(sizes.max().item())
    for name, share in {"q50": 0.5, "q99": 0.99, "q999": 0.999}.items():
        true = torch.quantile(sizes, share).item()
        assert true / math.sqrt(2) <= found[f"geomask/{own}_{name}"] <= true * math.sqrt(2)
    assert not any("_bin_" in name for name in found)
    # Something that adds up maxima, too, is noticed.
    doubled = {name: 5.0 if name == "geomask/x_max" else float(name.endswith("20")) for name in bins("x")}
    assert summarize_step(doubled)["geomask/x_max"] == pytest.approx(2 ** (-13 + 10))


def bins(name):
    return [f"geomask/{name}_max", *(f"geomask/{name}_bin_{index:02}" for index in range(34))]


def test_a_step_without_tokens_has_quantiles_too():
    found = summarize_step(dict.fromkeys(bins("mismatch"), 0.0))
    assert found == dict.fromkeys(("geomask/mismatch_max", *(f"geomask/mismatch_{name}" for name in QUANTILES)), 0.0)


def test_a_name_that_looks_like_a_bin_is_no_histogram():
    names = {"geomask/mask/long_bin_guard/removed": 0.25, "geomask/x_bin_07": 1.0}
    assert summarize_step(names) == names
