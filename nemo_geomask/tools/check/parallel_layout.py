"""Parallel layout of a recipe's trainer, and the part of it that fits on fewer ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from nemo_geomask.tools.check.recipe_facts import RecipeFacts

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
"""Key of each size in a section of the recipe, by training backend."""
MODEL_AXES = ("tp", "cp", "pp")
"""Axes along which a model and its sequences are split; the product of their sizes is the ranks of one replica."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the trainer's parallel groups; every rank is in one group of each kind."""

    tp: int = 1  # tensor parallel
    cp: int = 1  # context parallel
    ep: int = 1  # expert parallel: number of ranks of one pipeline stage among which experts are divided
    pp: int = 1  # pipeline parallel
    dp: int = 1  # data parallel

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that hold one copy of the model."""
        return math.prod(getattr(self, axis) for axis in MODEL_AXES)

    @property
    def ranks(self) -> int:
        """Number of ranks that train."""
        return self.ranks_per_replica * self.dp

    def fit_to(self, ranks: int, *, cp: bool = True) -> Layout:
        """Return the part of this layout that fits on fewer ranks.

        TP is reduced last: it takes as many ranks as it can, then CP, EP and PP in this order take what is left, and DP
        takes the rest. Each size is the largest divisor of the recipe's size that fits, so that the model and its batch
        stay divisible.

        Args:
            ranks: number of ranks, at least 1.
            cp: False if sequences can't be split.
        """
        tp_size = largest_divisor(self.tp, ranks)
        cp_size = largest_divisor(self.cp, ranks // tp_size) if cp else 1
        # Experts are divided among ranks that also hold parts of tensors and sequences.
        stage_ranks = tp_size * cp_size
        ep_size = next(size for size in _divisors(self.ep) if math.lcm(size, stage_ranks) <= ranks)
        ep_replicas = math.lcm(ep_size, stage_ranks) // stage_ranks
        pp_size = largest_divisor(self.pp, ranks // (stage_ranks * ep_replicas))
        most_replicas = ranks // (stage_ranks * pp_size)
        dp_size = max(ep_replicas, min(self.dp, most_replicas) // ep_replicas * ep_replicas)
        return Layout(tp_size, cp_size, ep_size, pp_size, dp_size)

    def __str__(self) -> str:
        return ", ".join(f"{field.name.upper()} {getattr(self, field.name)}" for field in fields(self))


def trained_sections(facts: RecipeFacts) -> tuple[str, ...]:
    """Return the sections of the models that a recipe trains: ``policy``, and PPO's critic, ``value``."""
    return ("policy", "value") if facts.algorithm == "ppo" and facts.get("value") is not None else ("policy",)


def layout_keys(facts: RecipeFacts, section: str = "policy") -> Mapping[str, str]:
    """Return the dotted key of each parallel size (``tp``, ``cp``, …) of a section."""
    backend = "megatron" if facts.is_true(f"{section}.megatron_cfg.enabled") else "dtensor"
    return {axis: f"{section}.{key}" for axis, key in _KEYS[backend].items()}


def layout_of(facts: RecipeFacts, section: str = "policy") -> Layout:
    """Return the layout of a recipe, whose data parallelism takes all GPUs that train.

    Args:
        facts: the recipe.
        section: ``policy``, or PPO's ``value``.
    """

    def size(key: str) -> int:
        return max(1, facts.size(key))

    sizes = {axis: size(key) for axis, key in layout_keys(facts, section).items()}
    gpus = training_gpus(facts) or size("cluster.gpus_per_node") * size("cluster.num_nodes")
    replica = Layout(**sizes)
    return replace(replica, dp=max(1, gpus // replica.ranks_per_replica))


def training_gpus(facts: RecipeFacts) -> int | None:
    """Return the number of GPUs that train: those of the cluster without those that only sample.

    Returns:
        None if the recipe does not determine it.
    """
    gpus_per_node, nodes = facts.number("cluster.gpus_per_node"), facts.policy_nodes or 0
    # With segment_size, NeMo-RL leaves out GPUs that don't fill a segment.
    if facts.get("cluster.segment_size") is not None or not gpus_per_node or nodes < 1:
        return None
    if facts.scores_by_model and facts.size("cluster.num_nodes") == 1:
        gpus_per_node -= facts.number("env.reward_model.resources.gpus_per_node") or 0
    if gpus_per_node <= 0 or not float(gpus_per_node * nodes).is_integer():
        return None
    if facts.get("policy.generation.colocated.enabled") is not False:
        return int(gpus_per_node * nodes)
    resources = "policy.generation.colocated.resources"
    sampling_gpus_per_node = facts.number(f"{resources}.gpus_per_node") or gpus_per_node
    sampling_nodes = facts.number(f"{resources}.num_nodes") or nodes
    # NeMo-RL splits a single node by GPUs, and a larger cluster by nodes.
    gpus = gpus_per_node - sampling_gpus_per_node if nodes == 1 else gpus_per_node * (nodes - sampling_nodes)
    return int(gpus) if gpus > 0 else None


def _divisors(size: int) -> Iterator[int]:
    """Yield the divisors of a size, the largest first."""
    return (divisor for divisor in range(size, 0, -1) if size % divisor == 0)


def largest_divisor(size: int, limit: int) -> int:
    """Return the largest divisor of a size up to a limit."""
    return next(divisor for divisor in _divisors(size) if divisor <= max(1, limit))
