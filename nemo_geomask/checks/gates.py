"""GM3: what NeMo-RL itself refuses when a run starts, found before there is a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.checks.rule import Hit, Rule
from nemo_geomask.checks.tree import holds, reads
from nemo_geomask.config import LossConfig
from nemo_geomask.config.strict import as_yaml
from nemo_geomask.errors import Problem

__all__ = [
    "NO_ENTROPY",
    "RULES",
    "chunk_needs",
    "fused_key",
    "fused_needs",
    "lacks_entropy",
    "logit_needs",
    "readers_of_prev",
    "scoring_passes",
    "unread",
]

NO_ENTROPY = (
    "true, but NeMo-RL computes no entropies as it trains; set loss_fn.logprob_backend: geomask or geomask_linear, "
    "whose pass over the logits has them, or set false"
)

_CORRECTION = "loss_fn.use_importance_sampling_correction"
_GENERATION = "policy.generation"
_VLLM = f"{_GENERATION}.vllm_cfg"
_FUSED = "policy.megatron_cfg.use_fused_linear_logprobs"
_FUSED_BEFORE = "policy.megatron_cfg.use_linear_ce_fusion_loss"  # its name until v0.7.0
_MEGATRON = "policy.megatron_cfg.enabled"
_DEFERRED = "policy.megatron_cfg.defer_fp32_logits"
_CHUNKS = "policy.logprob_chunk_size"
_UNFILTERED = f"{_GENERATION}.top_p: 1.0 and top_k: null"
_CONTEXT = "policy.dtensor_cfg.context_parallel_size"
_TAKES = {"mcore": "works over Megatron's own process groups", "geomask_linear": "takes hidden states"}
_REPLAY = "policy.router_replay.enabled"
_BATCH = "policy.train_global_batch_size"


def _backends(facts: RecipeFacts) -> Iterator[Hit]:
    key = _MEGATRON
    if "policy" in facts.recipe.data and "lab" not in facts.recipe.data:
        both = facts.megatron and facts.on("policy.dtensor_cfg.enabled")
        if both or not (facts.megatron or facts.on("policy.dtensor_cfg.enabled")):
            yield Hit(key, f"{'both' if both else 'neither'} of megatron_cfg and dtensor_cfg enabled; enable one")


def _async_uncorrected(facts: RecipeFacts) -> Iterator[Hit]:
    if facts.asynchronous and not facts.config.use_importance_sampling_correction:
        yield Hit(_CORRECTION, "asynchronous training needs the correction for its stale samples; set true")


def _async_engine(facts: RecipeFacts) -> Iterator[Hit]:
    if not facts.asynchronous or not facts.vllm:
        return
    if not facts.on(f"{_VLLM}.async_engine"):
        yield Hit(f"{_VLLM}.async_engine", "asynchronous training needs vLLM's async engine; set true")
    if facts.on(f"{_GENERATION}.colocated.enabled"):
        yield Hit(
            f"{_GENERATION}.colocated.enabled",
            "asynchronous training needs GPUs of its own for vLLM; set false, and give colocated.resources",
        )


def _fp8_uncorrected(facts: RecipeFacts) -> Iterator[Hit]:
    fp8 = facts.vllm and facts.get(f"{_VLLM}.precision") == "fp8"
    if fp8 and not facts.config.use_importance_sampling_correction:
        yield Hit(_CORRECTION, f"{_VLLM}.precision: fp8 needs the correction; set true")


def _fp8_cache(facts: RecipeFacts) -> Iterator[Hit]:
    key = f"{_VLLM}.kv_cache_dtype"
    if not facts.vllm or not str(facts.get(key, "")).startswith("fp8"):
        return
    broken = {
        f"{_VLLM}.precision: fp8": facts.get(f"{_VLLM}.precision") != "fp8",
        "policy.dtensor_cfg.enabled: false": facts.on("policy.dtensor_cfg.enabled"),
        f"{_VLLM}.async_engine: false": facts.on(f"{_VLLM}.async_engine"),
        "policy.megatron_cfg.pipeline_model_parallel_size: 1": (
            facts.number("policy.megatron_cfg.pipeline_model_parallel_size") or 1
        )
        > 1,
    }
    wanted = [setting for setting, applies in broken.items() if applies]
    if wanted:
        yield Hit(key, f"an FP8 cache needs {', '.join(wanted)}; set so, or kv_cache_dtype: auto")


def _on_policy_batch(facts: RecipeFacts) -> Iterator[Hit]:
    batch = facts.number(_BATCH)
    if facts.config.force_on_policy_ratio and facts.rollouts and batch and facts.rollouts != batch:
        yield Hit(
            "loss_fn.force_on_policy_ratio",
            f"needs exactly one optimiser step a rollout batch: {_BATCH} ({batch:g}) must be num_prompts_per_step x "
            f"num_generations_per_prompt ({facts.rollouts})",
        )


def _batch_divides(facts: RecipeFacts) -> Iterator[Hit]:
    batch = facts.number(_BATCH)
    if facts.rollouts and batch and facts.rollouts % batch:
        yield Hit(
            _BATCH,
            f"{batch:g} does not divide the rollout batch of num_prompts_per_step x num_generations_per_prompt "
            f"({facts.rollouts})",
        )


def _batch_variant(facts: RecipeFacts) -> Iterator[Hit]:
    training = facts.number("policy.train_micro_batch_size")
    scoring = facts.number("policy.logprob_batch_size")
    size = facts.tensor_parallel
    if size < 4 or facts.config.force_on_policy_ratio or training is None or scoring in (None, training):
        return
    yield Hit(
        "policy.logprob_batch_size",
        f"{scoring:g}, but train_micro_batch_size: {training:g}: with tensor parallelism {size} the two give other "
        "log-probs for the same tokens, so that curr differs from prev without an update; make them equal, or start "
        "with NRL_IGNORE_TP_ACCURACY_CHECK=1",
    )


def chunk_needs(facts: RecipeFacts) -> list[str]:
    """Settings that NeMo-RL needs to train on its log-probs in chunks and a recipe has not."""
    broken = {
        f"{_MEGATRON}: true": not facts.megatron,
        f"{_DEFERRED}: true": facts.megatron and not facts.on(_DEFERRED),
        _UNFILTERED: facts.filtered is not None,
        "NeMo-RL v0.7.0 or later": (
            facts.nemo_rl is not None and not holds(facts.nemo_rl, "algorithms/loss/utils.py", "chunk_size")
        ),
    }
    return [setting for setting, applies in broken.items() if applies]


def _chunks(facts: RecipeFacts) -> Iterator[Hit]:
    if facts.megatron and (facts.number(_CHUNKS) or 0) > 0 and not facts.on(_DEFERRED):
        yield Hit(
            _CHUNKS, f"in chunks, log-probs need Megatron's half-precision logits; set {_DEFERRED}: true, or null"
        )


def scoring_passes(facts: RecipeFacts) -> int:
    """Forward passes without gradient over a batch: for ``prev_logprobs``, and for the reference's."""
    tree, config = facts.nemo_rl, facts.config
    # v0.6.0 skips neither on its own.
    skips = tree is None or holds(tree, "algorithms/grpo.py", "_skip_prev_logprobs")
    masked = facts.get(f"{facts.algorithm}.seq_logprob_error_threshold") is not None
    prev = not config.skips_prev and (masked or not (skips and config.force_on_policy_ratio))
    left_out = facts.on(f"{facts.algorithm}.skip_reference_policy_logprobs_calculation")
    return prev + (not left_out and not (skips and not config.reference_policy_kl_penalty))


def fused_key(facts: RecipeFacts) -> str | None:
    """The setting that turns NeMo-RL's fused linear log-probs on in a recipe; None where they are off."""
    tree = facts.nemo_rl
    keys = (_FUSED, _FUSED_BEFORE) if tree is None else (_FUSED if reads(tree, _FUSED) else _FUSED_BEFORE,)
    return next((key for key in keys if facts.megatron and facts.on(key)), None)


def fused_needs(facts: RecipeFacts) -> list[str]:
    """Settings that NeMo-RL's fused linear log-probs need and a recipe has not."""
    tree = facts.nemo_rl
    broken = {
        # Until v0.7.0 the losses of supervised fine-tuning and DPO alone take them.
        "NeMo-RL's main and use_fused_linear_logprobs": (
            fused_key(facts) == _FUSED_BEFORE or (tree is not None and not reads(tree, _FUSED))
        ),
        "policy.megatron_cfg.enabled: true": not facts.megatron,
        "policy.sequence_packing.enabled: false": facts.on("policy.sequence_packing.enabled"),
        "policy.megatron_cfg.context_parallel_size: 1": (facts.number("policy.megatron_cfg.context_parallel_size") or 1)
        > 1,
        _UNFILTERED: facts.filtered is not None,
    }
    return [setting for setting, applies in broken.items() if applies]


def _fused(facts: RecipeFacts) -> Iterator[Hit]:
    key = fused_key(facts)
    if key and (wanted := fused_needs(facts)):
        yield Hit(key, f"the fused path needs {', '.join(wanted)}")


def _router_replay(facts: RecipeFacts) -> Iterator[Hit]:
    if not facts.on(_REPLAY):
        return
    if not facts.vllm or not facts.megatron:
        yield Hit(_REPLAY, f"needs {_GENERATION}.backend: vllm and policy.megatron_cfg.enabled: true")
    if (facts.number("policy.megatron_cfg.virtual_pipeline_model_parallel_size") or 1) != 1:
        yield Hit(_REPLAY, "does not go with virtual pipeline parallelism")
    if facts.asynchronous and facts.on("data_plane.enabled"):
        yield Hit(_REPLAY, "in asynchronous training it needs data_plane.enabled: false, or the single controller")


def _kl_in_reward(facts: RecipeFacts) -> Iterator[Hit]:
    config = facts.config
    threshold = facts.get(f"{facts.algorithm}.seq_logprob_error_threshold")
    penalised = config.use_kl_in_reward and config.reference_policy_kl_penalty
    if penalised and config.force_on_policy_ratio and threshold is None:
        yield Hit(
            "loss_fn.use_kl_in_reward",
            "needs prev, which force_on_policy_ratio: true leaves out; set force_on_policy_ratio: false, or "
            "reference_policy_kl_penalty: 0",
        )


def readers_of_prev(recipe: Mapping[str, Any]) -> Iterator[Problem]:
    """What else than the loss reads ``prev_logprobs`` in a recipe whose loss does without, and so would read NaN."""
    found = {
        "grpo.seq_logprob_error_threshold": "masks sequences",
        "ppo.seq_logprob_error_threshold": "masks sequences",
        "on_policy_distillation.enabled": "makes advantages",
    }
    for key, what in found.items():
        section, _, name = key.partition(".")
        value = (recipe.get(section) or {}).get(name)
        if value is not None and value is not False:
            yield unread(key, value, what)


def unread(key: str, value: Any, what: str) -> Problem:
    """That a setting does something with ``prev_logprobs``, which then are not there."""
    return Problem(
        (key, "loss_fn.ratio_anchor"),
        f"{key}: {as_yaml(value)} {what} by prev_logprobs, which are not computed under loss_fn.ratio_anchor: "
        "gen; remove it, or set loss_fn.audit_fraction: 1, which has all of them computed",
    )


def _no_prev(facts: RecipeFacts) -> Iterator[Hit]:
    if facts.config.skips_prev:
        for problem in readers_of_prev(facts.recipe.data):
            yield Hit(problem.keys[0], problem.message)


def _no_entropy(facts: RecipeFacts) -> Iterator[Hit]:
    if lacks_entropy(facts.config) and "lab" not in facts.recipe.data:
        yield Hit("loss_fn.record.entropy", NO_ENTROPY)


def lacks_entropy(config: LossConfig) -> bool:
    """Whether entropies are to be recorded that no worker of NeMo-RL's would compute."""
    return config.record is not None and config.record.entropy and not config.logprob_backend.startswith("geomask")


def _no_reference(facts: RecipeFacts) -> Iterator[Hit]:
    key = f"{facts.algorithm}.skip_reference_policy_logprobs_calculation"
    if facts.on(key) and facts.config.reference_policy_kl_penalty:
        yield Hit(
            key, "leaves out what loss_fn.reference_policy_kl_penalty needs; set the penalty to 0, or this to false"
        )


def logit_needs(facts: RecipeFacts, backend: str) -> list[str]:
    """Settings that a ``logprob_backend`` which takes logits, or hidden states, needs and a recipe has not."""
    broken = {
        _UNFILTERED: facts.filtered is not None,
        f"{_FUSED}: false": facts.megatron and facts.on(_FUSED),
        f"{_FUSED_BEFORE}: false": facts.megatron and facts.on(_FUSED_BEFORE),
        f"{_MEGATRON}: true": backend == "mcore" and not facts.megatron,
        f"{_CONTEXT}: 1": backend == "geomask_linear" and not facts.megatron and (facts.number(_CONTEXT) or 1) > 1,
    }
    return [setting for setting, applies in broken.items() if applies]


def _logits(facts: RecipeFacts) -> Iterator[Hit]:
    backend = facts.config.logprob_backend
    wanted = logit_needs(facts, backend)
    if backend != "nemo_rl" and wanted:
        takes = _TAKES.get(backend, "takes whole logits")
        yield Hit(
            "loss_fn.logprob_backend",
            f"{backend} {takes}, so it needs {', '.join(wanted)}; set so, or logprob_backend: "
            + ("geomask" if wanted in ([f"{_MEGATRON}: true"], [f"{_CONTEXT}: 1"]) else "nemo_rl"),
        )


def _padding(facts: RecipeFacts) -> Iterator[Hit]:
    key, megatron = "policy.make_sequence_length_divisible_by", "policy.megatron_cfg"
    given = facts.number(key)
    packs = facts.on("policy.sequence_packing.enabled") and not facts.on("policy.dynamic_batching.enabled")
    if not facts.megatron or not packs or given is None:
        return
    context, tensor = int(facts.number(f"{megatron}.context_parallel_size") or 1), facts.tensor_parallel
    factors = {
        f"2 x context_parallel_size ({context})": 2 * context if context > 1 else 1,
        f"tensor_model_parallel_size ({tensor}, with sequence_parallel)": (
            tensor if facts.on(f"{megatron}.sequence_parallel") else 1
        ),
    }
    least = math.prod(factors.values())
    if given % least:
        wanted = " x ".join(name for name, factor in factors.items() if factor > 1)
        yield Hit(
            key, f"{given:g} is no multiple of {least} = {wanted}, which packed sequences are split by; set {least}"
        )


_SETUP = "NeMo-RL `grpo.setup`"
_ASYNC = "NeMo-RL `async_grpo_train`"

RULES = (
    Rule("GM301", "error", "asynchronous training without the correction", _ASYNC, _async_uncorrected),
    Rule("GM302", "error", "asynchronous training without an async engine on GPUs of its own", _ASYNC, _async_engine),
    Rule("GM303", "error", "FP8 rollouts without the correction", _SETUP, _fp8_uncorrected),
    Rule("GM304", "error", "FP8 KV cache with what it does not go with", _SETUP, _fp8_cache),
    Rule("GM305", "error", "`force_on_policy_ratio` with several steps a rollout batch", _SETUP, _on_policy_batch),
    Rule(
        "GM306",
        "error",
        "a rollout batch that is no multiple of the training batch",
        "NeMo-RL `shard_by_batch_size`",
        _batch_divides,
    ),
    Rule(
        "GM307",
        "error",
        "tensor parallelism of 4 or more with unequal batch sizes for training and scoring",
        "NeMo-RL docs/guides/dtensor-tp-accuracy.md, `Policy.__init__`",
        _batch_variant,
    ),
    Rule("GM308", "error", "fused linear log-probs with what they do not go with", f"{_SETUP} (main)", _fused),
    Rule(
        "GM309",
        "error",
        "router replay with what it does not go with",
        "NeMo-RL `validate_router_replay_config`",
        _router_replay,
    ),
    Rule(
        "GM310", "error", "KL in the reward without prev", "NeMo-RL `_validate_use_kl_in_reward_compat`", _kl_in_reward
    ),
    Rule("GM311", "error", "KL term without reference log-probs", _SETUP, _no_reference),
    Rule("GM312", "error", "not exactly one training backend", "NeMo-RL `Policy.__init__`", _backends),
    Rule("GM313", "error", "`logprob_backend` with what it does not go with", "docs/loss_reference.md", _logits),
    Rule(
        "GM314",
        "error",
        "packed sequences padded to lengths that context and sequence parallelism do not divide",
        "NeMo-RL `_get_pack_sequence_parameters_for_megatron` (megatron/data.py)",
        _padding,
    ),
    Rule("GM315", "error", "what reads `prev_logprobs` where they are not computed", "docs/nemo_rl.md", _no_prev),
    Rule("GM319", "error", "records of entropies that nobody computes", "docs/records.md", _no_entropy),
    Rule(
        "GM320",
        "error",
        "log-probs in chunks of float32 logits, under Megatron",
        "NeMo-RL `_validate_chunking_config` (megatron/setup.py)",
        _chunks,
    ),
)
