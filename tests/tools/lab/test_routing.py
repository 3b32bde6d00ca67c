"""Which experts tokens go through: read, replayed, and counted where engines differ."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")

from nemo_geomask import build_loss
from nemo_geomask.tools.lab.policy_model import build_policy, hook_routers, routes_differ
from nemo_geomask.tools.lab.tasks import load_task
from nemo_geomask.tools.lab.trainer import Trainer

COARSE = {"precision": "float32", "quantization": {"weights": "int4", "layers": "linears"}}


@pytest.fixture
def policy(tiny):
    recipe = tiny()
    return build_policy(recipe.policy.model, load_task(recipe.env), seed=0)


IDS = torch.arange(14).view(2, 7) % 5


def test_a_replay_of_the_own_choice_changes_nothing(policy):
    with hook_routers(policy) as chosen:
        logits = policy(input_ids=IDS).logits
    assert [route.shape for route in chosen] == [(14, 2), (14, 2)]
    with hook_routers(policy, torch.stack(chosen, dim=1)):
        torch.testing.assert_close(policy(input_ids=IDS).logits, logits)
    with hook_routers(policy, torch.full((14, 2, 2), -1)):
        torch.testing.assert_close(policy(input_ids=IDS).logits, logits)
    other = (torch.stack(chosen, dim=1) + 1) % 4
    with hook_routers(policy, other) as still:
        moved = policy(input_ids=IDS).logits
    assert (moved - logits).abs().max() > 1e-2
    assert torch.equal(still[0], chosen[0])  # Read is the router's own choice, whatever is replayed.
    torch.testing.assert_close(policy(input_ids=IDS).logits, logits)  # Nothing stays behind.


def test_replayed_experts_have_the_routers_own_weights(policy):
    block = policy.model.layers[0].mlp
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    route = torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [0, 3]])
    with hook_routers(policy, route[:, None]):
        found = block(hidden[None])[0]
    found.sum().backward()
    gradient = block.gate.weight.grad
    assert gradient.abs().max() > 1e-3  # The router is trained through the weights.
    probabilities = (hidden.double() @ block.gate.weight.double().T).softmax(-1)
    for row, experts in enumerate(route.tolist()):
        expected = torch.zeros(32, dtype=torch.float64)
        for expert in experts:
            gate, up = (block.experts.gate_up_proj[expert].double() @ hidden[row].double()).chunk(2)
            out = block.experts.down_proj[expert].double() @ (torch.nn.functional.silu(gate) * up)
            expected += out * probabilities[row, expert] / probabilities[row, experts].sum()
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-5)


def test_sets_of_experts_differ_in_any_layer():
    routes = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    others = torch.tensor([[[1, 0], [3, 2]], [[1, 0], [3, 1]], [[2, 0], [3, 2]]])
    assert routes_differ(routes, others).tolist() == [False, True, True]


def test_routes_of_the_same_arithmetic_are_the_same(tiny):
    recipe = tiny(policy={"generation": {"precision": "float32"}})
    metrics, rollout = Trainer(recipe, build_loss(recipe.loss_fn)).step()
    assert metrics["routes_differ"] == 0
    routes, lengths = rollout.data["routed_experts"], rollout.data["input_lengths"]
    for row, length in enumerate(lengths.tolist()):
        assert (routes[row, : length - 1] >= 0).all()
        assert (routes[row, length - 1 :] == -1).all()


def own_routes(trainer, data, replayed=None):
    """[B, T, L, K] of the trainer, row by row and without padding."""
    routes = torch.full_like(data["routed_experts"], -1)
    logprobs = torch.zeros_like(data["prev_logprobs"])
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row : row + 1, :length]
        with (
            torch.no_grad(),
            hook_routers(trainer.policy, None if replayed is None else replayed[row, :length]) as chosen,
        ):
            logits = trainer.policy(input_ids=ids).logits[0]
        routes[row, :length] = torch.stack(chosen, dim=1).to(routes.dtype)
        logprobs[row, 1:length] = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    return routes, logprobs


@pytest.mark.parametrize("enabled", [False, True])
def test_training_takes_the_engines_routes(tiny, enabled):
    # One optimiser step at a rate of next to nothing: the policy afterwards is the one that scored.
    recipe = tiny(
        grpo={"num_prompts_per_step": 16},
        policy={
            "generation": COARSE,
            "router_replay": {"enabled": enabled},
            "lr": 1e-12,
            "train_global_batch_size": 64,
        },
    )
    trainer = Trainer(recipe, build_loss(recipe.loss_fn))
    metrics, rollout = trainer.step()
    data = rollout.data
    mask = data["token_mask"].bool()
    routes, logprobs = own_routes(trainer, data, data["routed_experts"] if enabled else None)
    torch.testing.assert_close(data["prev_logprobs"][mask], logprobs[mask], rtol=0, atol=1e-4)
    # Of the tokens that were trained, whose routes are those of the position before.
    differ = routes_differ(routes[:, :-1], data["routed_experts"][:, :-1])[mask[:, 1:]]
    assert metrics["routes_differ"] == pytest.approx(float(differ.double().mean()), abs=2 / len(differ))
    assert 0.01 < metrics["routes_differ"] < 0.9
    # What trains is what scored: the ratio of the only optimiser step is 1.
    assert metrics["probs_ratio_min"] == pytest.approx(1, abs=1e-4)
    assert metrics["probs_ratio_max"] == pytest.approx(1, abs=1e-4)
