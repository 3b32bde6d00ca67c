"""Shims of vLLM's CPU build: weights that a refit can replace, and routed experts that are reported."""

from __future__ import annotations

import functools
import importlib
import inspect
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from nemo_geomask.hosts.nemo_rl.patch import Patch, attribute


def arguments(module: Any) -> Iterator[Patch]:
    """Switch off sleep mode, which vllm_worker.py:590 enables and only CUDA supports.

    NeMo-RL's worker itself can't be patched: Ray copies an actor's methods when the class is decorated.
    """

    def post_init(original: Any) -> Any:
        def awake(self: Any) -> None:
            self.enable_sleep_mode = False
            original(self)

        return awake

    yield attribute(module.EngineArgs, "__post_init__", post_init)


def layers(module: Any) -> Iterator[Patch]:
    """Keep the weights of linear layers, and read them at every call.

    vLLM's CPU kernels (vllm/model_executor/layers/utils.py) pack a copy and free the weight, so that a refit could not
    replace it.
    """
    from torch.nn.functional import linear

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    yield attribute(module, "dispatch_cpu_unquantized_gemm", lambda original: dispatch)


def positions(module: Any) -> Iterator[Patch]:
    """Rotate queries [N, H, D], as of latent attention, by vLLM's own tensor code (rotary_embedding/base.py).

    The CPU kernel takes them for [N, H·D], and is wrong about them, as it is about views.
    """

    def rotating(original: Callable[..., Any]) -> Callable[..., Any]:
        def rotate(self: Any, at: Any, query: Any, key: Any = None) -> Any:
            return self.forward_native(at, query, key) if query.dim() > 2 else original(self, at, query, key)

        return rotate

    yield attribute(module.RotaryEmbedding, "forward_cpu", rotating)


def experts(module: Any) -> Iterator[Patch]:
    """Keep the weights of experts, as :func:`layers`, and let them have Nemotron's activation (cpu_fused_moe.py)."""
    yield attribute(module.CPUFusedMOE, "check_grouped_gemm", lambda original: lambda self, layer: (False, "none"))
    if hasattr(module.CPUFusedMOE, "_pad_moe_intermediate_for_grouped_gemm"):
        name = "_pad_moe_intermediate_for_grouped_gemm"
        yield attribute(module.CPUFusedMOE, name, lambda original: lambda self, layer: None)
    activations = module.MoEActivation
    if hasattr(activations, "RELU2_NO_MUL"):
        more = {activations.RELU2_NO_MUL: lambda x: x.relu().square()}
        yield attribute(module, "_CPU_MOE_ACT_FN", lambda original: {**original, **more})
    yield attribute(module, "select_experts", _with_one_group)


def _with_one_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Select experts by sigmoid or with a bias also where they have no groups, as one group of all experts."""

    @functools.wraps(original)
    def choose(hidden_states: Any, router_logits: Any, top_k: int, *args: Any, **kwargs: Any) -> Any:
        parameters = list(inspect.signature(original).parameters)[3:]
        settings = {**dict(zip(parameters, args, strict=False)), **kwargs}
        is_plain = (
            settings.get("scoring_func", "softmax") == "softmax" and settings.get("e_score_correction_bias") is None
        )
        if not settings.get("use_grouped_topk") and settings.get("custom_routing_function") is None and not is_plain:
            settings |= {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
        return original(hidden_states, router_logits, top_k, **settings)

    return choose


def moe_config(module: Any) -> Iterator[Patch]:
    """Allow experts without a gate, as Nemotron's, on CPUs: fused_moe/config.py:1370 refuses them."""

    def allowing(original: Any) -> Any:
        def post_init(self: Any) -> None:
            try:
                original(self)
            except NotImplementedError:
                # The refusal is its last statement, so that nothing is left undone.
                if self.is_act_and_mul:
                    raise

        return post_init

    yield attribute(module.FusedMoEConfig, "__post_init__", allowing)


def fused_experts(module: Any) -> Iterator[Patch]:
    """Define a class that NeMo-RL v0.7.0's vllm/quantization/fp8.py imports and that vLLM 0.27 no longer has."""
    if not hasattr(module, "FusedMoE"):

        def apply() -> None:
            module.FusedMoE = type("FusedMoE", (), {})

        yield Patch(module, "FusedMoE", apply, lambda: delattr(module, "FusedMoE"))


def requests(module: Any) -> Iterator[Patch]:
    """Seed each request of an asynchronous engine, so that two runs sample the same responses.

    Concurrent requests (vllm_worker_async.py:1121) would draw from one generator in their order of arrival. Here the
    seed of each follows from the engine's seed, the prompt, and the number of earlier requests for the same prompt.
    """
    request_counts: Counter[str] = Counter()

    def seeding(original: Any) -> Any:
        def generate(self: Any, prompt: Any, sampling_params: Any, *rest: Any, **kwargs: Any) -> Any:
            if sampling_params.seed is None:
                words = prompt
                if isinstance(prompt, dict):
                    words = prompt.get("prompt_token_ids") or prompt.get("prompt")
                text = f"{self.vllm_config.model_config.seed} {words}"
                sampling_params.seed = zlib.crc32(f"{text} {request_counts[text]}".encode())
                request_counts[text] += 1
            return original(self, prompt, sampling_params, *rest, **kwargs)

        return generate

    yield attribute(module.AsyncLLM, "generate", seeding)


def routes(module: Any) -> Iterator[Patch]:
    """Report the routed experts, which router replay needs (gpu_model_runner.py, _bind_routed_experts_capturer).

    vLLM's CPU kernels select them without reporting them. Here the same function selects them once more for the report.
    """

    def bind(original: Any) -> Any:
        def bound(self: Any, capturer: Any) -> None:
            runner = importlib.import_module("vllm.model_executor.layers.fused_moe.layer").MoERunner
            for layer in self.model.modules():
                if isinstance(layer, runner):
                    method = layer._quant_method
                    # The method and not the function that it calls: a refit replaces that one.
                    method.apply_monolithic = _reporting(method.apply_monolithic, layer.layer_id, capturer)

        return bound

    if hasattr(module.GPUModelRunner, "_bind_routed_experts_capturer"):
        yield attribute(module.GPUModelRunner, "_bind_routed_experts_capturer", bind)


def _reporting(experts: Callable[..., Any], number: int, capturer: Any) -> Callable[..., Any]:
    choose = importlib.import_module("vllm.model_executor.layers.fused_moe.cpu_fused_moe").select_experts
    parameters = inspect.signature(choose).parameters

    def run(layer: Any, x: Any, router_logits: Any, *rest: Any, **kwargs: Any) -> Any:
        settings = {name: getattr(layer, name) for name in parameters if hasattr(layer, name)}
        _, chosen = choose(**settings, hidden_states=x, router_logits=router_logits)
        capturer.capture(number, chosen)
        return experts(layer, x, router_logits, *rest, **kwargs)

    return run
