"""Limits on gaps between log-probs: measured on healthy rehearsals of tiny models, and those of runs on real models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nemo_geomask.tools.check import RecipeFacts
from nemo_geomask.tools.shared.usual_mismatch import precisions, usual_kl


@dataclass(frozen=True)
class HealthyLimits:
    """Largest mismatch that a healthy tiny model shows."""

    # median of |Δ| / (1 − p) over tokens, with Δ = trainer's − sampler's log-prob, and p the sampler's probability of
    # the token: about the size of the noise on a logit
    noise: float
    far: float  # share of tokens where it exceeds ``far_noise``
    # noise above which a token counts as far apart; a token that is routed to other experts may be
    far_noise: float = 0.5
    of: str = "healthy tiny models"  # what the limits were measured on
    k3: float = math.inf  # largest mean of exp(Δ) − 1 − Δ, nats a token


HEALTHY: Mapping[tuple[str, bool], HealthyLimits] = {
    # By the lower precision of trainer and sampler, and whether the model has experts. Measured on NeMo-RL main of
    # August 2026 with DTensor v1, on CPUs, three steps a rehearsal; noise and far of each healthy one:
    # Qwen3 0.021 and 0 (v0.7.0 the same), another seed and 4 prompts 0.020 and 0, TP 2 0.023 and 0, clipped_pg 0.023
    # and 0, with validation 0.018 and 0, Llama 0.028 and 0.
    ("bfloat16", False): HealthyLimits(noise=0.06, far=0.05),
    # Qwen3 MoE 0.022 and 0.011, another seed and 4 prompts 0.023 and 0.004, the recipe's own masks 0.024 and 0.005,
    # asynchronous 0.020 and 0.005, over the data plane 0.022 and 0.011. Megatron's were not
    # measured; their gen_kl_error is up to 10 times higher, which a few tokens make.
    ("bfloat16", True): HealthyLimits(noise=0.08, far=0.15),
    # Qwen3 1.2e-6 and 0.
    ("float32", False): HealthyLimits(noise=1e-4, far=0.02),
    # Qwen3 MoE 1.2e-6 and 0.
    ("float32", True): HealthyLimits(noise=1e-4, far=0.02),
    # An fp8 KV cache beside weights in bfloat16, with Megatron, one rehearsal each: Qwen3 0.12 and 0.026, Qwen3 MoE
    # 0.16 and 0.11. So a top-p of 0.8 in the sampler alone may stay unnoticed beside such a cache.
    ("fp8 cache", False): HealthyLimits(noise=0.3, far=0.1),
    ("fp8 cache", True): HealthyLimits(noise=0.4, far=0.25),
}
"""Limits by precision and kind of model: two to three times the largest noise measured in bfloat16, more in float32.

The planted mistakes are far beyond them, in bfloat16: a temperature of 0.6 in the sampler has noise 0.99 and far 0.74,
top-p 0.8 has 0.26 and 0.12, log-probs shifted by a token have 1.5 and 0.76.
"""

UPDATE: Mapping[tuple[str, bool], HealthyLimits] = {
    # Of π_θ at the first update against π_old, by the trainer's precision and whether the model has experts.
    ("bfloat16", False): HealthyLimits(noise=0.02, far=0.02),
    ("bfloat16", True): HealthyLimits(noise=0.02, far=0.05),
    ("float32", False): HealthyLimits(noise=1e-4, far=0.01),
    ("float32", True): HealthyLimits(noise=1e-4, far=0.01),
}


def healthy_limits(
    trainer: str, sampler: str, *, experts: bool, temperature: float = 1.0, fp8_cache: bool = False
) -> HealthyLimits:
    """Return the limits for a trainer's and a sampler's precision.

    Args:
        temperature: ``policy.generation.temperature``. Both engines divide their logits by it, and the noise on the
            logits with them. The limits were measured at 1, so they are divided, too, unless it is no temperature.
        fp8_cache: True if the sampler has an fp8 KV cache beside weights in bfloat16.
    """
    both_exact = trainer == sampler == "float32"
    limits = HEALTHY["fp8 cache" if fp8_cache else "float32" if both_exact else "bfloat16", experts]
    return at_temperature(limits, temperature)


def update_limits(trainer: str, *, experts: bool, temperature: float = 1.0) -> HealthyLimits:
    """Return the limits of π_θ at a first update against π_old, for a trainer's precision; else as above."""
    return at_temperature(UPDATE["float32" if trainer == "float32" else "bfloat16", experts], temperature)


def at_temperature(limits: HealthyLimits, temperature: float) -> HealthyLimits:
    """Return limits that were measured at temperature 1 for engines that divide their logits by another one."""
    temperature = temperature if temperature > 0 else 1.0
    return replace(limits, noise=limits.noise / temperature, far_noise=limits.far_noise / temperature)


_MARGIN = 3.0
"""Factor beyond the usual mismatch at which a run is stopped: layouts and lengths differ as much. It is chosen."""
_NOISE, _FAR = {"bfloat16": 0.1, "nvfp4": 0.1, "fp8": 0.3}, 0.1
"""Limits of a typical token's noise, and of the share of tokens far apart.

Eight healthy preflights on CPUs (DTensor v1, also with TP 2, v2, Megatron with EP 2 or TP 2, asynchronous; dense and
mixtures of experts; random weights, bfloat16) had 0.018 to 0.025, and 0 to 0.031; rehearsals with an fp8 cache 0.12 to
0.16. Five of NeMo-RL's recipes with small checkpoints (Megatron, packed, asynchronous, CP 2; v2 with Nemotron-H and
GLM-4.7-Flash) had 0.011 to 0.027, and 0 to 0.012. No real model's was measured.
"""
REAL_UPDATE = HealthyLimits(noise=0.1, far=0.1, of="a trainer against itself")
"""Limits of π_θ at a first update against π_old. The same preflights had 0; a GPU's kernels may depend on the batch."""


def usual_limits(facts: RecipeFacts, *, experts: bool) -> HealthyLimits:
    """Return the limits on the mismatch of a recipe's run."""
    pair = precisions(facts.get)
    lowest = next((name for name in ("nvfp4", "fp8") if name in pair), "bfloat16")
    k3, source = usual_kl(facts.get, experts=experts)
    kind = "a mixture of experts" if experts else "a dense model"
    of = f"{kind}, {pair[0]} trainer and {pair[1]} engine ({source})"
    limits = HealthyLimits(noise=_NOISE[lowest], far=_FAR if lowest == "bfloat16" else 0.25, of=of, k3=_MARGIN * k3)
    return at_temperature(limits, facts.temperature)
