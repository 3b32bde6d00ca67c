"""GM3, second part: layouts that the cluster has not."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.checks.layout import SHARING, layout_keys
from nemo_geomask.checks.rule import Hit, Rule
from nemo_geomask.losses.prestep import needs_whole_batch

__all__ = ["RULES", "training_cards"]


def _layout(facts: RecipeFacts) -> Iterator[Hit]:
    sizes = {key: facts.number(key) or 1 for name, key in layout_keys(facts).items() if name in SHARING}
    cards, product = training_cards(facts), int(math.prod(sizes.values()))
    if cards is None or cards % product == 0:
        return
    keys = [key for key, size in sizes.items() if size > 1]
    factors = " x ".join(f"{key.rpartition('.')[2]} ({sizes[key]:g})" for key in keys)
    yield Hit(
        keys[0],
        f"{factors} = {product} does not divide the {cards} GPUs that train; change one of the sizes, "
        "cluster.gpus_per_node or cluster.num_nodes",
    )


def training_cards(facts: RecipeFacts) -> int | None:
    """GPUs that train: those of the cluster, less those on which vLLM samples alone; None where teachers take some."""
    each, nodes = facts.number("cluster.gpus_per_node"), facts.number("cluster.num_nodes")
    if facts.get("on_policy_distillation") is not None or not each or not nodes or not float(each * nodes).is_integer():
        return None
    colocated = "policy.generation.colocated"
    if facts.get(f"{colocated}.enabled") is not False:
        return int(each * nodes)
    apart, apart_nodes = (facts.number(f"{colocated}.resources.{key}") for key in ("gpus_per_node", "num_nodes"))
    left = each - (apart or each) if nodes == 1 else each * (nodes - (apart_nodes or nodes))
    return int(left) if left > 0 else None


def _unpacked(facts: RecipeFacts) -> Iterator[Hit]:
    size = facts.number("policy.megatron_cfg.context_parallel_size") or 1
    if facts.megatron and size > 1 and facts.get("policy.sequence_packing.enabled") is False:
        yield Hit(
            "policy.sequence_packing.enabled",
            f"context_parallel_size: {size:g} shares out packed sequences only; set true, or context_parallel_size: 1",
        )


def _whole_batch(facts: RecipeFacts) -> Iterator[Hit]:
    if facts.get("async_rl") is not None:
        for problem in needs_whole_batch(facts.config):
            for key in problem.keys:
                yield Hit(key, problem.message)


RULES = (
    Rule(
        "GM316", "error", "parallel sizes that do not divide the GPUs that train", "NeMo-RL `Policy.__init__`", _layout
    ),
    Rule(
        "GM317",
        "error",
        "context parallelism under Megatron without packed sequences",
        "NeMo-RL `_apply_parallelism_config` (megatron/setup.py)",
        _unpacked,
    ),
    Rule(
        "GM318",
        "error",
        "what looks at a whole batch, under the single controller",
        "NeMo-RL `SingleController` (single_controller.py): `train_microbatches_from_meta` by parts",
        _whole_batch,
    ),
)
