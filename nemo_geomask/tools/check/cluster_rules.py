"""GM316, GM317 and GM318: parallel layouts that NeMo-RL refuses, or that the loss does not support."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.losses.prestep import whole_batch_problems
from nemo_geomask.tools.check.parallel_layout import MODEL_AXES, layout_keys
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, Rule

__all__ = ["RULES", "training_gpus"]


def _indivisible_gpus(facts: RecipeFacts) -> Iterator[Hit]:
    sizes = {key: facts.number(key) or 1 for axis, key in layout_keys(facts).items() if axis in MODEL_AXES}
    gpus, product = training_gpus(facts), int(math.prod(sizes.values()))
    if gpus is None or gpus % product == 0:
        return
    keys = [key for key, size in sizes.items() if size > 1]
    factors = " x ".join(f"{key.rpartition('.')[2]} ({sizes[key]:g})" for key in keys)
    yield Hit(
        keys[0],
        f"{factors} = {product} does not divide the {gpus} GPUs that train; change one of the sizes, "
        "cluster.gpus_per_node or cluster.num_nodes",
    )


def training_gpus(facts: RecipeFacts) -> int | None:
    """Return the number of GPUs that train: those of the cluster without those that only sample.

    Returns:
        None if the recipe does not determine it, or if teachers of on-policy distillation need some of the GPUs.
    """
    gpus_per_node, nodes = facts.number("cluster.gpus_per_node"), facts.number("cluster.num_nodes")
    if facts.get("on_policy_distillation") is not None or not gpus_per_node or not nodes:
        return None
    if not float(gpus_per_node * nodes).is_integer():
        return None
    if facts.get("policy.generation.colocated.enabled") is not False:
        return int(gpus_per_node * nodes)
    resources = "policy.generation.colocated.resources"
    sampling_gpus_per_node = facts.number(f"{resources}.gpus_per_node") or gpus_per_node
    sampling_nodes = facts.number(f"{resources}.num_nodes") or nodes
    # NeMo-RL splits a single node by GPUs, and a larger cluster by nodes.
    gpus = gpus_per_node - sampling_gpus_per_node if nodes == 1 else gpus_per_node * (nodes - sampling_nodes)
    return int(gpus) if gpus > 0 else None


def _context_parallel_without_packing(facts: RecipeFacts) -> Iterator[Hit]:
    size = facts.number("policy.megatron_cfg.context_parallel_size") or 1
    if facts.uses_megatron and size > 1 and facts.get("policy.sequence_packing.enabled") is False:
        yield Hit(
            "policy.sequence_packing.enabled",
            f"false, but policy.megatron_cfg.context_parallel_size: {size:g} needs packed sequences; set true, or "
            "context_parallel_size: 1",
        )


def _needs_whole_batch(facts: RecipeFacts) -> Iterator[Hit]:
    if facts.get("async_rl") is not None:
        for problem in whole_batch_problems(facts.config):
            for key in problem.keys:
                yield Hit(key, problem.message)


RULES = (
    Rule(
        "GM316",
        "error",
        "parallel sizes that do not divide the number of GPUs that train",
        "NeMo-RL `Policy.__init__`",
        _indivisible_gpus,
    ),
    Rule(
        "GM317",
        "error",
        "context parallelism under Megatron without packed sequences",
        "NeMo-RL `_apply_parallelism_config` (megatron/setup.py)",
        _context_parallel_without_packing,
    ),
    Rule(
        "GM318",
        "error",
        "setting that needs the whole batch, under the single controller",
        "NeMo-RL `SingleController` (single_controller.py): `train_microbatches_from_meta` trains on parts of a batch",
        _needs_whole_batch,
    ),
)
