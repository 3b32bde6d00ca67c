"""Shims of vLLM's CPU build: weights that can be replaced, and routes that are reported."""

from __future__ import annotations

import functools
import importlib
import inspect
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from nemo_geomask.hosts.nemo_rl.patch import Patch, attribute

__all__ = ["arguments", "experts", "fused_experts", "layers", "moe_config", "requests", "routes"]


def arguments(module: Any) -> Iterator[Patch]:
    """vllm_worker.py:590: enable_sleep_mode=True, which no platform has but CUDA's.

    Not on NeMo-RL's worker: Ray copies an actor's methods when it is decorated.
    """

    def post_init(original: Any) -> Any:
        def awake(self: Any) -> None:
            self.enable_sleep_mode = False
            original(self)

        return awake

    yield attribute(module.EngineArgs, "__post_init__", post_init)


def layers(module: Any) -> Iterator[Patch]:
    """vllm/model_executor/layers/utils.py: kernels for CPUs keep a packed copy of the weight and drop the weight, so
    that new weights have nowhere to go. Here it stays, and is read at every call."""
    from torch.nn.functional import linear

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    yield attribute(module, "dispatch_cpu_unquantized_gemm", lambda original: dispatch)


def experts(module: Any) -> Iterator[Patch]:
    """vllm/.../cpu_fused_moe.py: packed weights of experts replace the parameters, as in :func:`layers`."""
    yield attribute(module.CPUFusedMOE, "check_grouped_gemm", lambda original: lambda self, layer: (False, "none"))
    if hasattr(module.CPUFusedMOE, "_pad_moe_intermediate_for_grouped_gemm"):
        name = "_pad_moe_intermediate_for_grouped_gemm"
        yield attribute(module.CPUFusedMOE, name, lambda original: lambda self, layer: None)
    activations = module.MoEActivation
    if hasattr(activations, "RELU2_NO_MUL"):
        more = {activations.RELU2_NO_MUL: lambda x: x.relu().square()}
        yield attribute(module, "_CPU_MOE_ACT_FN", lambda original: {**original, **more})
    yield attribute(module, "select_experts", _choosing)


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Choose experts by sigmoids, or with a bias, without groups: as with one group of all experts."""

    @functools.wraps(original)
    def choose(hidden_states: Any, router_logits: Any, top_k: int, *args: Any, **kwargs: Any) -> Any:
        parameters = list(inspect.signature(original).parameters)[3:]
        how = {**dict(zip(parameters, args, strict=False)), **kwargs}
        is_plain = how.get("scoring_func", "softmax") == "softmax" and how.get("e_score_correction_bias") is None
        if not how.get("use_grouped_topk") and how.get("custom_routing_function") is None and not is_plain:
            how |= {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
        return original(hidden_states, router_logits, top_k, **how)

    return choose


def moe_config(module: Any) -> Iterator[Patch]:
    """fused_moe/config.py:1370: experts without a gate, as Nemotron's, are refused on CPUs; see :func:`experts`."""

    def allowing(original: Any) -> Any:
        def post_init(self: Any) -> None:
            try:
                original(self)
            except NotImplementedError:
                # Its last statement; nothing is left undone.
                if self.is_act_and_mul:
                    raise

        return post_init

    yield attribute(module.FusedMoEConfig, "__post_init__", allowing)


def fused_experts(module: Any) -> Iterator[Patch]:
    """NeMo-RL v0.7.0's vllm/quantization/fp8.py imports a class that vLLM 0.20 had and 0.27 has no more."""
    if not hasattr(module, "FusedMoE"):

        def apply() -> None:
            module.FusedMoE = type("FusedMoE", (), {})

        yield Patch(module, "FusedMoE", apply, lambda: delattr(module, "FusedMoE"))


def requests(module: Any) -> Iterator[Patch]:
    """vllm_worker_async.py:1121: concurrent requests draw from one generator in the order in which they happen to come,
    so that no two runs sample the same. Here each has its own, seeded by the engine's seed, the prompt and how often it
    was asked before."""
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
    """gpu_model_runner.py, _bind_routed_experts_capturer: experts for CPUs choose the routes themselves and do
    not report them, so that router replay is refused. Here the same function chooses them once more, to report them."""

    def bind(original: Any) -> Any:
        def bound(self: Any, capturer: Any) -> None:
            runner = importlib.import_module("vllm.model_executor.layers.fused_moe.layer").MoERunner
            for layer in self.model.modules():
                if isinstance(layer, runner):
                    method = layer._quant_method
                    # Not the function that it calls: new weights replace that one.
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
