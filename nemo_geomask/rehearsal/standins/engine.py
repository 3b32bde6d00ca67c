"""vLLM, in its build for CPUs: weights that can be replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_geomask.integrations.nemo_rl.patch import Patch, attribute

__all__ = ["arguments", "experts", "fused_experts", "layers"]


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
    """vllm/.../cpu_fused_moe.py: likewise, packed weights of experts in place of the parameters."""
    yield attribute(module.CPUFusedMOE, "check_grouped_gemm", lambda original: lambda self, layer: (False, "none"))
    if hasattr(module.CPUFusedMOE, "_pad_moe_intermediate_for_grouped_gemm"):
        name = "_pad_moe_intermediate_for_grouped_gemm"
        yield attribute(module.CPUFusedMOE, name, lambda original: lambda self, layer: None)


def fused_experts(module: Any) -> Iterator[Patch]:
    """NeMo-RL v0.7.0's vllm/quantization/fp8.py imports a class that vLLM 0.20 had and 0.27 has no more."""
    if not hasattr(module, "FusedMoE"):

        def apply() -> None:
            module.FusedMoE = type("FusedMoE", (), {})

        yield Patch(module, "FusedMoE", apply, lambda: delattr(module, "FusedMoE"))
