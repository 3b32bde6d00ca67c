"""The parallel layout of a recipe, and what is left of it on a few ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from nemo_geomask.checks.facts import RecipeFacts

__all__ = ["SHARING", "Layout", "layout_keys", "layout_of", "trained"]

_KEYS: Mapping[str, Mapping[str, str]] = {
    "megatron": {
        "tp": "megatron_cfg.tensor_model_parallel_size",
        "cp": "megatron_cfg.context_parallel_size",
        "ep": "megatron_cfg.expert_model_parallel_size",
        "pp": "megatron_cfg.pipeline_model_parallel_size",
    },
    "dtensor": {
        "tp": "dtensor_cfg.tensor_parallel_size",
        "cp": "dtensor_cfg.context_parallel_size",
        "ep": "dtensor_cfg.expert_parallel_size",
    },
}
"""Where each size stands in a section, by the back end that trains."""
SHARING = ("tp", "cp", "pp")
"""Sizes of the groups that share out a model and its sequences; their product is the ranks of one copy."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the trainer's parallel groups; every rank is in one of each.

    Attributes:
        tp: tensor parallel.
        cp: context parallel.
        ep: expert parallel: ranks of one pipeline stage, over which experts are spread.
        pp: pipeline parallel.
        dp: data parallel.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def shared(self) -> int:
        """Processes that one copy of the model and its sequences are shared out to."""
        return math.prod(getattr(self, name) for name in SHARING)

    @property
    def ranks(self) -> int:
        """Processes that train."""
        return self.shared * self.dp

    def within(self, ranks: int, *, cp: bool = True) -> Layout:
        """What of this layout fits: TP first, then CP, EP and PP get what the ones before leave; DP gets the rest.

        Each is the largest divisor of the recipe's size that fits, so that whatever is divided by it still is.

        Args:
            ranks: processes there are, at least 1.
            cp: False where sequences can't be shared out.
        """
        kept_tp = _divisor(self.tp, ranks)
        kept_cp = _divisor(self.cp, ranks // kept_tp) if cp else 1
        # Experts are spread over ranks that also have shares of tensors and sequences.
        shares = kept_tp * kept_cp
        kept_ep = next(size for size in _divisors(self.ep) if math.lcm(size, shares) <= ranks)
        copies = math.lcm(kept_ep, shares) // shares
        kept_pp = _divisor(self.pp, ranks // (shares * copies))
        room = ranks // (shares * kept_pp)
        kept_dp = max(copies, min(self.dp, room) // copies * copies)
        return Layout(kept_tp, kept_cp, kept_ep, kept_pp, kept_dp)

    def __str__(self) -> str:
        return ", ".join(f"{field.name.upper()} {getattr(self, field.name)}" for field in fields(self))


def trained(facts: RecipeFacts) -> tuple[str, ...]:
    """Sections of the models that a recipe trains: PPO has a critic."""
    return ("policy", "value") if facts.algorithm == "ppo" and facts.get("value") is not None else ("policy",)


def layout_keys(facts: RecipeFacts, section: str = "policy") -> Mapping[str, str]:
    """Where the recipe has each size of what a section trains."""
    back_end = "megatron" if facts.on(f"{section}.megatron_cfg.enabled") else "dtensor"
    return {name: f"{section}.{key}" for name, key in _KEYS[back_end].items()}


def layout_of(facts: RecipeFacts, section: str = "policy") -> Layout:
    """That of the recipe: data parallel as far as its cluster goes.

    Args:
        facts: the recipe.
        section: ``policy``, or PPO's ``value``.
    """

    def size(key: str) -> int:
        return max(1, int(facts.number(key) or 1))

    sizes = {name: size(key) for name, key in layout_keys(facts, section).items()}
    world = size("cluster.gpus_per_node") * size("cluster.num_nodes")
    alone = Layout(**sizes)
    return replace(alone, dp=max(1, world // alone.shared))


def _divisors(size: int) -> Iterator[int]:
    """Of a size, the largest first."""
    return (part for part in range(size, 0, -1) if size % part == 0)


def _divisor(size: int, limit: int) -> int:
    return next(part for part in _divisors(size) if part <= max(1, limit))
