"""vLLM's stand-ins, beside a model of its layers; the matrix has them in the engine itself."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.tools.rehearse.cpu_shims import vllm_shim

ROOM = "vllm.model_executor.layers.fused_moe"


class Experts:
    """What vLLM's layer is to its method."""

    top_k, renormalize = 2, True


class Method:
    def __init__(self):
        self.cpu_fused_moe = lambda x: x

    def apply_monolithic(self, layer, x, router_logits, input_ids=None):
        return self.cpu_fused_moe(x)


class Runner(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layer_id = number
        self._quant_method = Method()


class Capturer:
    def __init__(self):
        self.told = {}

    def capture(self, number, chosen):
        self.told[number] = chosen.tolist()


def select_experts(hidden_states, router_logits, top_k, renormalize):
    assert renormalize
    values, chosen = router_logits.topk(top_k)
    return values, chosen


@pytest.fixture
def runner_class(monkeypatch):
    layer, cpu = types.ModuleType(f"{ROOM}.layer"), types.ModuleType(f"{ROOM}.cpu_fused_moe")
    layer.MoERunner, cpu.select_experts = Runner, select_experts
    for module in (layer, cpu):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    class GPUModelRunner:
        def __init__(self, model):
            self.model = model

        def _bind_routed_experts_capturer(self, capturer):
            raise ValueError("routed expert IDs would be silently all-zero")

    made = list(vllm_shim.routes(types.SimpleNamespace(GPUModelRunner=GPUModelRunner)))
    patch.apply_all(made)
    yield GPUModelRunner
    for each in made:
        each.undo()


def test_each_layer_tells_its_routes_and_goes_on_as_it_did(runner_class):
    first, second = Runner(0), Runner(3)
    capturer = Capturer()
    runner_class(torch.nn.Sequential(torch.nn.Identity(), first, second))._bind_routed_experts_capturer(capturer)
    logits = torch.tensor([[0.1, 0.9, 0.5], [3.0, 1.0, 2.0]])
    x = torch.ones(2, 4)
    for layer in (first, second):
        # New weights: what the method calls is made anew.
        layer._quant_method.cpu_fused_moe = lambda x: 2 * x
        assert torch.equal(layer._quant_method.apply_monolithic(Experts(), x, logits, None), 2 * x)
    assert capturer.told == {0: [[1, 2], [0, 2]], 3: [[1, 2], [0, 2]]}


def test_an_engine_that_has_no_routes_to_tell_is_left_alone():
    module = types.SimpleNamespace(GPUModelRunner=type("GPUModelRunner", (), {}))
    assert not list(vllm_shim.routes(module))


def test_a_request_draws_by_its_prompt_and_not_by_its_turn():
    class AsyncLLM:
        vllm_config = types.SimpleNamespace(model_config=types.SimpleNamespace(seed=7))

        def generate(self, prompt, sampling_params, request_id):
            return sampling_params.seed

    def ask(llm, *words):
        asked = [(word, types.SimpleNamespace(seed=None)) for word in words]
        return [llm.generate({"prompt_token_ids": [word]}, params, request_id="x") for word, params in asked]

    original = AsyncLLM.generate
    found = []
    for words in ((1, 1, 2), (2, 1, 1)):
        (stand_in,) = vllm_shim.requests(types.SimpleNamespace(AsyncLLM=AsyncLLM))
        stand_in.apply()
        found.append(ask(AsyncLLM(), *words))
        stand_in.undo()
    stand_in.apply()
    assert AsyncLLM().generate(prompt="a", sampling_params=types.SimpleNamespace(seed=3), request_id="x") == 3
    stand_in.undo()
    assert AsyncLLM.generate is original
    assert sorted(found[0]) == sorted(found[1])
    assert found[0][2] == found[1][0]
    assert len(set(found[0])) == 3


def test_queries_of_latent_attention_are_rotated_by_tensor_code():
    class RotaryEmbedding:
        def forward_cpu(self, positions, query, key=None):
            return "kernel"

        def forward_native(self, positions, query, key=None):
            return "tensor code"

    patch.apply_all(vllm_shim.positions(types.SimpleNamespace(RotaryEmbedding=RotaryEmbedding)))
    assert RotaryEmbedding().forward_cpu(None, torch.zeros(6, 128)) == "kernel"
    assert RotaryEmbedding().forward_cpu(None, torch.zeros(6, 4, 32)) == "tensor code"
