"""The lab on a GPU: the same prompts, weights and draws as on a CPU, and numbers that differ by rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("pydantic", reason="the settings need pydantic, which is not installed")
pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")

from nemo_geomask import build_loss
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.trainer import Trainer
from tests.tools.lab.tiny_recipe import TINY, merged

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def trainer(device: str, change: dict[str, Any]) -> Trainer:
    recipe = LabRecipe.read(merged(TINY, merged(change, {"lab": {"device": device}})), source="test")
    return Trainer(recipe, build_loss(dict(recipe.loss_fn)))


def test_a_run_with_a_float32_engine_is_that_of_a_cpu():
    change = {"policy": {"generation": {"precision": "float32"}}}
    on_cpu, on_gpu = (trainer(device, change) for device in ("cpu", "cuda"))
    assert on_gpu.policy.device.type == "cuda"
    for ours, theirs in zip(on_gpu.policy.parameters(), on_cpu.policy.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    for _ in range(2):
        (found, rollout), (expected, expected_rollout) = on_gpu.step(), on_cpu.step()
        assert torch.equal(rollout.data["input_ids"], expected_rollout.data["input_ids"])
        assert found["geomask/mismatch_abs"] < 1e-4
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    for ours, theirs in zip(on_gpu.policy.parameters(), on_cpu.policy.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"policy": {"precision": "bfloat16"}},
        {"policy": {"generation": {"quantization": {"weights": "int4"}}, "router_replay": {"enabled": True}}},
        {"policy": {"generation": {"top_p": 0.9, "logprobs": "trainer"}}, "grpo": {"val_period": 1}},
        {"policy": {"model": {"moe_intermediate_size": 20}}, "loss_fn": {"reference_policy_kl_penalty": 0.01}},
        {"grpo": {"async_grpo": {"enabled": True, "in_flight_weight_updates": True}}},
        {"env": {"name": "lookups", "min_terms": 8}, "loss_fn": {"batch_veto": {"max": 1e-9, "max_in_a_row": 9}}},
    ],
    ids=["autocast", "int4 with replay", "top_p", "loop over experts and KL", "in flight", "calls and veto"],
)
def test_every_cause_of_mismatch_runs(change):
    run = trainer("cuda", change)
    for _ in range(3):
        metrics, _ = run.step()
    assert all(value == value for value in metrics.values())
    again = trainer("cuda", change)
    again.restore(run.state())
    for ours, theirs in zip(again.policy.parameters(), run.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert again.step()[1].reward == run.step()[1].reward
