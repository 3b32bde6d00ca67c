"""Mismatch that is usual for a pair of precisions and a kind of model, with its sources."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_geomask.tools.check import RecipeFacts
from nemo_geomask.tools.rehearse.healthy_limits import HealthyLimits, at_temperature

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
_MARGIN = 3.0
"""Factor beyond the usual mismatch at which a run is stopped: layouts and lengths differ as much. It is chosen."""
_NOISE, _FAR = {"bfloat16": 0.1, "nvfp4": 0.1, "fp8": 0.3}, 0.1
"""Limits of a typical token's noise, and of the share of tokens far apart.

Eight healthy preflights on CPUs (DTensor v1, also with TP 2, v2, Megatron with EP 2 or TP 2, asynchronous; dense and
mixtures of experts; random weights, bfloat16) had 0.018 to 0.025, and 0 to 0.031; rehearsals with an fp8 cache 0.12 to
0.16. Five of NeMo-RL's recipes with small checkpoints (Megatron, packed, asynchronous, CP 2; v2 with Nemotron-H and
GLM-4.7-Flash) had 0.011 to 0.027, and 0 to 0.012. No real model's was measured.
"""
UPDATE = HealthyLimits(noise=0.1, far=0.1, of="a trainer against itself")
"""Limits of π_θ at a first update against π_old. The same preflights had 0; a GPU's kernels may depend on the batch."""


def precisions(facts: RecipeFacts) -> tuple[str, str]:
    """Return the precisions of trainer and engine: ``float32``, ``bfloat16``, ``fp8`` or ``nvfp4``."""
    trainer = "fp8" if facts.is_true("policy.megatron_cfg.fp8_cfg.enabled") else str(facts.get("policy.precision"))
    engine = str(facts.get("policy.generation.vllm_cfg.precision", facts.get("policy.precision")))
    is_quantised = [facts.get(f"{section}.quant_cfg") is not None for section in ("policy", "policy.generation")]
    return "nvfp4" if is_quantised[0] else trainer, "nvfp4" if is_quantised[1] else engine


def usual_limits(facts: RecipeFacts, *, experts: bool) -> HealthyLimits:
    """Return the limits on the mismatch of a recipe's run."""
    pair = precisions(facts)
    lowest = next((name for name in ("nvfp4", "fp8") if name in pair), "bfloat16")
    k3, source = USUAL[lowest, experts]
    kind = "a mixture of experts" if experts else "a dense model"
    of = f"{kind}, {pair[0]} trainer and {pair[1]} engine ({source})"
    limits = HealthyLimits(noise=_NOISE[lowest], far=_FAR if lowest == "bfloat16" else 0.25, of=of, k3=_MARGIN * k3)
    return at_temperature(limits, facts.temperature)
