"""Mismatch that is usual for a pair of precisions and a kind of model, with its sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

USUAL: Mapping[tuple[str, bool], tuple[float, str]] = {
    # By the engine's precision and whether the model has experts: the largest usual gen_kl_error (k3, nats a token),
    # and who measured it.
    ("bfloat16", False): (1e-3, "NeMo-RL docs/guides/grpo.md: about 1e-3"),
    ("bfloat16", True): (3.2e-3, "NeMo-RL issue 2971: 0.0015 to 0.0032 over six layouts of a 30B model"),
    ("fp8", False): (1.8e-3, "NeMo-RL docs/guides/models/qwen/qwen3-5.md: 0.0014 to 0.0018 of the 9B model"),
    ("fp8", True): (1.06e-2, "NeMo-RL issue 2971: 0.0056 to 0.0106; qwen3-5.md: 0.0024 to 0.0031 of the 35B model"),
    ("nvfp4", False): (1e-3, "NeMo-RL docs/guides/quantization-aware-rl.md: at first close to that of bfloat16"),
    ("nvfp4", True): (3.2e-3, "NeMo-RL docs/guides/quantization-aware-rl.md: at first close to that of bfloat16"),
}


def precisions(get: Callable[..., Any]) -> tuple[str, str]:
    """Return the precisions of trainer and engine: ``float32``, ``bfloat16``, ``fp8`` or ``nvfp4``.

    Args:
        get: function that returns the recipe's setting at a dotted key, or a default.
    """
    trainer = "fp8" if get("policy.megatron_cfg.fp8_cfg.enabled") is True else str(get("policy.precision"))
    engine = str(get("policy.generation.vllm_cfg.precision", get("policy.precision")))
    is_quantised = [get(f"{section}.quant_cfg") is not None for section in ("policy", "policy.generation")]
    return "nvfp4" if is_quantised[0] else trainer, "nvfp4" if is_quantised[1] else engine


def usual_kl(get: Callable[..., Any], *, experts: bool) -> tuple[float, str]:
    """Return the largest usual mismatch KL of a recipe's precisions in nats per token, and who measured it."""
    pair = precisions(get)
    return USUAL[next((name for name in ("nvfp4", "fp8") if name in pair), "bfloat16"), experts]
