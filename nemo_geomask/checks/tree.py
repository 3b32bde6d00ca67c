"""Which settings the NeMo-RL at hand reads.

Asked of its source, not of its version: between releases, NeMo-RL's main calls itself by the last one's number.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["READ_BY", "holds", "reads"]

READ_BY: dict[str, tuple[str, str]] = {
    # Setting: the module that reads it, and the word to look for there. v0.6.0 has none of them, v0.7.0 the first two.
    "policy.router_replay.enabled": ("models/megatron/router_replay.py", "router_replay"),
    "policy.quant_cfg": ("models/policy/__init__.py", "quant_cfg"),
    "policy.generation.bad_words": ("models/generation/interfaces.py", "bad_words"),
    "policy.generation.vllm_cfg.is_mx": ("models/generation/vllm/config.py", "is_mx"),
    "policy.generation.vllm_cfg.logprobs_mode": ("models/generation/vllm/config.py", "logprobs_mode"),
    "policy.megatron_cfg.use_fused_linear_logprobs": ("models/policy/__init__.py", "use_fused_linear_logprobs"),
}


def reads(checkout: Path, key: str) -> bool:
    """Whether the NeMo-RL in ``checkout`` reads ``key``, which is one of :data:`READ_BY`."""
    return holds(checkout, *READ_BY[key])


def holds(checkout: Path, module: str, word: str) -> bool:
    """Whether ``word`` stands in a module of the NeMo-RL in ``checkout``."""
    try:
        return word in (checkout / "nemo_rl" / module).read_text(encoding="utf-8")
    except OSError:
        return False
