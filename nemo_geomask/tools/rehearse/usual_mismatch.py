"""Limits on the mismatch of a run on the real model."""

from __future__ import annotations

from nemo_geomask.tools.check import RecipeFacts
from nemo_geomask.tools.rehearse.healthy_limits import HealthyLimits, at_temperature
from nemo_geomask.tools.shared.usual_mismatch import precisions, usual_kl

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


def usual_limits(facts: RecipeFacts, *, experts: bool) -> HealthyLimits:
    """Return the limits on the mismatch of a recipe's run."""
    pair = precisions(facts.get)
    lowest = next((name for name in ("nvfp4", "fp8") if name in pair), "bfloat16")
    k3, source = usual_kl(facts.get, experts=experts)
    kind = "a mixture of experts" if experts else "a dense model"
    of = f"{kind}, {pair[0]} trainer and {pair[1]} engine ({source})"
    limits = HealthyLimits(noise=_NOISE[lowest], far=_FAR if lowest == "bfloat16" else 0.25, of=of, k3=_MARGIN * k3)
    return at_temperature(limits, facts.temperature)
