"""The library in float32 against the float64 oracle."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from nemo_geomask import build_loss
from tests.helpers import batches, oracle
from tests.helpers.batches import VARIANTS

NORMALIZATIONS = {
    "tokens": {"loss_normalization": "tokens"},
    "sequences": {"loss_normalization": "sequences"},
    "documents": {"loss_normalization": "documents"},
    "constant": {"loss_normalization": "constant", "loss_normalization_constant": 7.0},
}


def merged(variant: str, *parts: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {**VARIANTS[variant]}
    for part in parts:
        config |= part
        if "loss_normalization" in part:
            # The two ways to state it may not contradict each other, nor a variant's default.
            config["token_level_loss"] = part["loss_normalization"] == "tokens"
    return config


def agree(config: dict[str, Any], batch: batches.Batch) -> oracle.Answer:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "loss_fn.ratio_anchor")  # the variants are all tried at both anchors
        warnings.filterwarnings("ignore", "loss_fn.masks, loss_fn.force_on_policy_ratio")  # and with all masks
        loss_fn = build_loss(config)
    result = batches.evaluate(loss_fn, batch)
    expected = oracle.evaluate(
        loss_fn.config, batch.curr, batch.data, batch.seqs, batch.toks, loss_fn.options.model_dump()
    )
    assert expected.margin > 1e-5, "a decision lies within float32 rounding of its bound: choose other numbers"
    close = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(result.loss.double(), torch.tensor(expected.loss).double(), **close)
    grad = torch.tensor(expected.grad, dtype=torch.float64)
    torch.testing.assert_close(result.grad.double(), grad, **close)
    # Relative to the largest entry as well: a gradient that is small everywhere must not hide behind atol.
    assert (result.grad.double() - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-12
    assert set(result.metrics) == set(expected.metrics)
    for name, value in expected.metrics.items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    return expected
