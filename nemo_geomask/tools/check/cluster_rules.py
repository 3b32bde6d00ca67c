"""Layouts over GPUs that NeMo-RL refuses, or in which training is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.config.conflicts import whole_batch_problems
from nemo_geomask.hosts.nemo_rl.facts import splits_replicated_experts
from nemo_geomask.hosts.nemo_rl.source_words import is_in_source
from nemo_geomask.tools.check.parallel_layout import MODEL_AXES, largest_divisor, layout_keys, layout_of, training_gpus
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule

_COLOCATED = "policy.generation.colocated"
_MCORE, _VLLM = "policy.generation.mcore_generation_config", "policy.generation.vllm_cfg"
_BATCH, _MICROBATCH = "policy.train_global_batch_size", "policy.train_micro_batch_size"
_MAX_SIZES = 10**6  # of batches that are tried


@rule(
    "GM316",
    "error",
    "NeMo-RL `Policy.__init__`, `Value.__init__`",
    refusals=("must be divisible by PP * CP * TP",),
    models=("value", "teacher"),
    needs_loss=False,
)
def _indivisible_gpus(facts: RecipeFacts) -> Iterator[Hit]:
    """Parallel sizes that do not divide the number of GPUs that train."""
    sizes = {key: facts.number(key) or 1 for axis, key in layout_keys(facts).items() if axis in MODEL_AXES}
    gpus, product = training_gpus(facts), int(math.prod(sizes.values()))
    if gpus is None or gpus % product == 0:
        yield from _indivisible_replicas(facts, gpus)
        return
    keys = [key for key, size in sizes.items() if size > 1]
    factors = " x ".join(f"{key.rpartition('.')[2]} ({sizes[key]:g})" for key in keys)
    yield Hit(
        keys[0],
        f"{factors} = {product} does not divide the {gpus} GPUs that train; change one of the sizes, "
        "cluster.gpus_per_node or cluster.num_nodes",
    )


def _indivisible_replicas(facts: RecipeFacts, gpus: int | None) -> Iterator[Hit]:
    key = "policy.dtensor_cfg.dp_replicate_size"
    replicas, ranks = facts.size(key), (gpus or 0) // (layout_of(facts).ranks_per_replica * layout_of(facts).ep)
    is_refused = facts.nemo_rl is None or is_in_source(facts.nemo_rl, "dp_replicate_size ({")
    if facts.uses_dtensor and ranks and ranks % replicas and is_refused:
        yield Hit(
            key,
            f"{replicas} does not divide the {ranks} data-parallel ranks",
            fix={key: largest_divisor(ranks, replicas)},
        )


def _sampling_gpus(facts: RecipeFacts) -> int | None:
    """Return the number of GPUs that sample: all that train, or those reserved for generation; None if unknown."""
    if facts.get(f"{_COLOCATED}.enabled") is not False:
        return training_gpus(facts)
    gpus_per_node, nodes = facts.number("cluster.gpus_per_node"), facts.number("cluster.num_nodes")
    if not gpus_per_node or not nodes:
        return None
    per_node = facts.number(f"{_COLOCATED}.resources.gpus_per_node")
    if nodes == 1:
        return int(per_node) if per_node else None
    sampling_nodes = facts.number(f"{_COLOCATED}.resources.num_nodes")
    return int((per_node or gpus_per_node) * sampling_nodes) if sampling_nodes else None


@rule("GM329", "error", "NeMo-RL `VllmGeneration.__init__`", needs_loss=False, applies_to_lab=False)
def _vllm_sizes(facts: RecipeFacts) -> Iterator[Hit]:
    """Sampler's parallel sizes that do not fit each other or the GPUs."""
    if facts.get("policy.generation.backend") == "megatron":
        yield from _megatron_sizes(facts)
    if not facts.uses_vllm:
        return
    tp, pp, ep = (facts.size(f"{_VLLM}.{axis}_parallel_size") for axis in ("tensor", "pipeline", "expert"))
    gpus = _sampling_gpus(facts)
    if gpus is not None and gpus % (tp * pp):
        key = "tensor" if tp > 1 else "pipeline"
        yield Hit(
            f"{_VLLM}.{key}_parallel_size",
            f"tensor_parallel_size ({tp}) x pipeline_parallel_size ({pp}) = {tp * pp} does not divide the {gpus} GPUs "
            "that sample; change one of the sizes",
        )
    if ep > 1 and ep % tp:
        yield Hit(
            f"{_VLLM}.expert_parallel_size",
            f"{ep} is not a multiple of tensor_parallel_size ({tp}), as vLLM's groups of experts must be",
            fix={f"{_VLLM}.expert_parallel_size": tp},
        )
    elif ep > tp and facts.is_true(f"{_VLLM}.async_engine"):
        yield Hit(
            f"{_VLLM}.expert_parallel_size",
            f"{ep} above tensor_parallel_size ({tp}) needs data parallelism inside vLLM, which NeMo-RL does not "
            "support with async_engine: true",
            fix={f"{_VLLM}.expert_parallel_size": tp},
        )


def _megatron_sizes(facts: RecipeFacts) -> Iterator[Hit]:
    """Yield hits of a layout of Megatron's for generation that does not fit the GPUs that sample."""
    gpus, own, section = _sampling_gpus(facts) or 0, facts.get(_MCORE) or {}, "policy.megatron_cfg"
    for axes in (("tensor_model", "pipeline_model"), ("expert_model", "expert_tensor", "pipeline_model")):
        names = [f"{axis}_parallel_size" for axis in axes]
        sizes = {name: facts.size(f"{_MCORE if name in own else section}.{name}") for name in names}
        if (key := next((name for name in names if name in own), None)) and gpus % math.prod(sizes.values()):
            factors = " x ".join(f"{name} ({size})" for name, size in sizes.items())
            yield Hit(f"{_MCORE}.{key}", f"{factors} does not divide the {gpus} GPUs that sample; change one of them")


@rule(
    "GM330",
    "error",
    "Megatron-LM `initialize_model_parallel` (parallel_state.py); Automodel `create_device_mesh`",
    models=("value", "teacher"),
    needs_loss=False,
)
def _expert_groups(facts: RecipeFacts) -> Iterator[Hit]:
    """Expert-parallel size that does not divide the number of GPUs that train."""
    gpus = training_gpus(facts)
    if gpus is None:
        return
    key = layout_keys(facts)["ep"]
    ep = facts.size(key)
    etp_key, pp_key = (f"policy.megatron_cfg.{axis}_parallel_size" for axis in ("expert_tensor", "pipeline_model"))
    etp, pp = (facts.size(size_key) if facts.uses_megatron else 1 for size_key in (etp_key, pp_key))
    product = ep * etp * pp
    factors = f"{ep} x {etp_key.rpartition('.')[2]} ({etp}) x {pp_key.rpartition('.')[2]} ({pp}) = {product}"
    factors = factors if product > ep else str(ep)
    if ep > 1 and gpus % product:
        yield Hit(key, f"{factors} does not divide the {gpus} GPUs that train; set a size that does")


def _data_parallel_ranks(facts: RecipeFacts) -> int | None:
    gpus, replica = training_gpus(facts), layout_of(facts).ranks_per_replica
    return None if gpus is None or gpus % replica else gpus // replica


def _varies_microbatches(facts: RecipeFacts) -> bool:
    """Return True if packing or dynamic batching decides how many sequences a microbatch has."""
    return any(facts.is_true(f"policy.{name}.enabled") for name in ("sequence_packing", "dynamic_batching"))


def _fixed_microbatch(facts: RecipeFacts, key: str = _MICROBATCH) -> int:
    """Return the number of sequences of a microbatch; 1 where packing or dynamic batching varies it."""
    return 1 if _varies_microbatches(facts) else max(1, facts.size(key))


def _fitting_batch(facts: RecipeFacts) -> dict[str, int]:
    """Return the nearest training batch that ranks and microbatches divide, and that divides the rollout batch.

    Where no batch does, the rollout batch gets more prompts.
    """
    rollout, batch, prompts_key = facts.rollout_size or 0, facts.size(_BATCH), f"{facts.algorithm}.num_prompts_per_step"
    unit = (_data_parallel_ranks(facts) or 1) * _fixed_microbatch(facts)
    settings: dict[str, int] = {}
    if rollout % unit:
        responses = rollout // facts.size(prompts_key)
        step = unit // math.gcd(unit, responses)
        settings[prompts_key] = math.ceil(facts.size(prompts_key) / step) * step
        rollout = settings[prompts_key] * responses
    if not rollout:
        return {_BATCH: max(1, round(batch / unit)) * unit}
    if rollout // unit > _MAX_SIZES:
        return {}
    is_whole = facts.uses_single_controller or facts.is_true("loss_fn.force_on_policy_ratio")
    sizes = [size for size in range(unit, rollout + 1, unit) if rollout % size == 0]
    size = rollout if is_whole else min(sizes, key=lambda size: abs(math.log(size / batch)))
    return {_BATCH: size, **settings}


@rule("GM306", "error", "NeMo-RL `shard_by_batch_size`", models=("value",), needs_loss=False)
def _rollout_of_other_size(facts: RecipeFacts) -> Iterator[Hit]:
    """Rollout batch that is not a multiple of the training batch."""
    batch, rollout = facts.number(_BATCH) or 0, facts.rollout_size
    if rollout and batch > 0 and rollout % batch:
        yield Hit(
            _BATCH,
            f"{batch:g} does not divide the rollout batch of num_prompts_per_step x num_generations_per_prompt: "
            f"{rollout} responses",
            fix=_fitting_batch(facts),
        )


@rule(
    "GM332",
    "error",
    "NeMo-RL `shard_by_batch_size`, `make_microbatch_iterator`",
    models=("value",),
    needs_loss=False,
)
def _indivisible_batch(facts: RecipeFacts) -> Iterator[Hit]:
    """Batch that ranks or microbatches can't divide."""
    keys = [(_BATCH, _MICROBATCH)]
    # DPO pads batches of validation.
    if facts.algorithm in ("sft", "rm"):
        keys += [(f"{facts.algorithm}.val_global_batch_size", f"{facts.algorithm}.val_micro_batch_size")]
    for batch_key, microbatch_key in keys if facts.algorithm != "eval" else ():
        ranks, batch = _data_parallel_ranks(facts), facts.number(batch_key)
        microbatch = _fixed_microbatch(facts, microbatch_key)
        if ranks is None or not batch:
            continue
        if batch % ranks:
            unit = ranks * microbatch
            nearest = {batch_key: max(1, round(batch / unit)) * unit}
            yield Hit(
                batch_key,
                f"{batch:g} can't be divided among {ranks} data-parallel ranks",
                fix=_fitting_batch(facts) if batch_key == _BATCH else nearest,
            )
        elif (batch / ranks) % microbatch:
            yield Hit(
                microbatch_key,
                f"{microbatch:g} does not divide the {batch / ranks:g} sequences of a data-parallel rank "
                f"({batch_key.rpartition('.')[2]} {batch:g} over {ranks} ranks)",
                fix={microbatch_key: largest_divisor(int(batch) // ranks, microbatch)},
            )


@rule("GM353", "error", "NeMo-RL `Policy.get_logprobs`, `make_microbatch_iterator`", applies_to_lab=False)
def _indivisible_scoring_batch(facts: RecipeFacts) -> Iterator[Hit]:
    """Rollout batch that scoring microbatches can't divide."""
    key, ranks, rollout = "policy.logprob_batch_size", _data_parallel_ranks(facts), facts.rollout_size
    if _varies_microbatches(facts) or not ranks or not rollout or rollout % ranks:
        return
    if rollout // ranks % facts.size(key):
        yield Hit(
            key,
            f"{facts.size(key)} does not divide the {rollout // ranks} responses that each of {ranks} ranks scores",
            fix={key: largest_divisor(rollout // ranks, facts.size(key))},
        )


@rule(
    "GM337",
    "error",
    "https://github.com/NVIDIA/Megatron-LM/pull/5916",
    models=("value",),
    needs_loss=False,
)
def _replicated_experts(facts: RecipeFacts) -> Iterator[Hit]:
    """Copies of experts on tensor-parallel ranks whose gradients are not summed."""
    tp_key, ep_key, etp_key = (
        f"policy.megatron_cfg.{axis}_parallel_size" for axis in ("tensor_model", "expert_model", "expert_tensor")
    )
    tp, ep, etp = (facts.size(key) for key in (tp_key, ep_key, etp_key))
    if not facts.uses_megatron or facts.moe_key is None or ep > 1 or etp == tp:
        return
    if facts.nemo_rl is not None and splits_replicated_experts(facts.nemo_rl):
        yield Hit(
            etp_key,
            f"{etp}, but {tp_key} is {tp} and {ep_key} is 1: the ranks of a tensor-parallel group have copies of the "
            "same experts, and this checkout's Megatron-LM does not sum their gradients. Each rank trains its copies "
            f"on its own tokens alone, and the sampler gets those of one rank; {{fix}}, set {ep_key} above 1, or take "
            "a Megatron-LM with pull request 5916",
            fix={etp_key: tp},
        )


@rule(
    "GM318",
    "error",
    "NeMo-RL `SingleController` (single_controller.py): `train_microbatches_from_meta` trains on parts of a batch",
)
def _needs_whole_batch(facts: RecipeFacts) -> Iterator[Hit]:
    """Setting that needs the whole batch, under the single controller."""
    if facts.uses_single_controller:
        for problem in whole_batch_problems(facts.config):
            for key in problem.keys:
                yield Hit(key, problem.template, fix=problem.fix)
