"""Settings of the backend that does not train, or that it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from nemo_geomask.config.strict import as_yaml
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule
from nemo_geomask.tools.check.setting_author import nearest_to_user

_LORA = "policy.dtensor_cfg.lora_cfg"
_PEFT = "policy.megatron_cfg.peft"
_PRETRAINED = "checkpointing.pretrained_checkpoint"
_MEGATRON_OPTIMIZER = "policy.megatron_cfg.optimizer"
_RATES = {True: f"{_MEGATRON_OPTIMIZER}.lr", False: "policy.optimizer.kwargs.lr"}
"""Key of the learning rate under Megatron, and under DTensor."""


_MEGATRON_SETUP = "NeMo-RL models/megatron/setup.py"
_AUTOMODEL_SETUP = "NeMo-RL models/automodel/setup.py"


@rule(
    "GM219",
    "warning",
    f"{_MEGATRON_SETUP} reads `megatron_cfg.optimizer`, {_AUTOMODEL_SETUP.removeprefix('NeMo-RL ')} `optimizer`",
    needs_loss=False,
    applies_to_lab=False,
)
def _learning_rate_of_the_other(facts: RecipeFacts) -> Iterator[Hit]:
    """Learning rate of the backend that does not train."""
    unread, read = _RATES[not facts.uses_megatron], _RATES[facts.uses_megatron]
    ignored, used = facts.number(unread), facts.number(read)
    if (
        facts.uses_megatron == facts.uses_dtensor
        or ignored is None
        or used is None
        or math.isclose(ignored, used, rel_tol=0.01)
    ):
        return
    # Whoever sets the one that is not read, nearer than the other, believes that it is read.
    if nearest_to_user((read, unread), facts) == unread:
        yield Hit(
            unread,
            f"{as_yaml(facts.get(unread))}: {'Megatron' if facts.uses_megatron else 'DTensor'} trains, and reads "
            f"{read}: {as_yaml(facts.get(read))} instead; set that",
        )


@rule(
    "GM220",
    "error",
    f"{_AUTOMODEL_SETUP} (`lora_cfg`), {_MEGATRON_SETUP.removeprefix('NeMo-RL ')} (`peft`), utils/checkpoint.py",
    needs_loss=False,
    applies_to_lab=False,
)
def _adapter_of_the_other(facts: RecipeFacts) -> Iterator[Hit]:
    """Adapter or initial weights for the backend that does not train."""
    if facts.uses_megatron == facts.uses_dtensor:
        return
    if facts.uses_megatron and facts.is_true(f"{_LORA}.enabled"):
        yield Hit(
            f"{_LORA}.enabled",
            f"true, but Megatron trains and does not read it: all weights are trained; set {_PEFT}.enabled: true",
        )
    if not facts.uses_megatron and facts.is_true(f"{_PEFT}.enabled"):
        yield Hit(
            f"{_PEFT}.enabled",
            f"true, but DTensor trains and does not read it: all weights are trained; set {_LORA}.enabled: true",
        )
    if not facts.uses_megatron and facts.get(_PRETRAINED):
        yield Hit(
            _PRETRAINED,
            "only Megatron reads it, but DTensor trains, from the weights of policy.model_name; set "
            "policy.megatron_cfg.enabled: true, or remove it",
        )


@rule("GM224", "warning", "NeMo-RL `get_tokenizer`", needs_loss=False, applies_to_lab=False)
def _tokenizer_of_another_model(facts: RecipeFacts) -> Iterator[Hit]:
    """Tokenizer of another model."""
    model_key, key = "policy.model_name", "policy.tokenizer.name"
    model, tokenizer = facts.get(model_key), facts.get(key)
    if not isinstance(model, str) or not isinstance(tokenizer, str) or model == tokenizer:
        return
    # Whoever writes both in one file, or the tokenizer last, means the pair.
    if nearest_to_user((key, model_key), facts) == model_key:
        yield Hit(
            key,
            f"{tokenizer} is inherited, but the recipe sets {model_key}: {model}, so ids of one vocabulary go "
            f"to a model with another; set {key}: ${{policy.model_name}}",
        )


@rule(
    "GM409",
    "warning",
    "NeMo-RL data/packing/algorithms.py, `shard_by_batch_size`",
    needs_loss=False,
    applies_to_lab=False,
)
def _microbatch_below_a_sequence(facts: RecipeFacts) -> Iterator[Hit]:
    """Microbatch with fewer tokens than a sequence may have."""
    length_key = "policy.max_total_sequence_length"
    length = facts.number(length_key)
    for section in ("sequence_packing", "dynamic_batching"):
        if not facts.is_true(f"policy.{section}.enabled") or not length:
            continue
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            tokens = facts.number(f"policy.{section}.{name}")
            if tokens is not None and tokens < length:
                yield Hit(
                    f"policy.{section}.{name}",
                    f"{tokens:g}: NeMo-RL stops at the first sequence that is longer, and {length_key}: {length:g} "
                    f"allows that; set at least {length:g}",
                )


@rule("GM341", "error", "Megatron-LM `OptimizerParamScheduler`", needs_loss=False)
def _rate_below_its_minimum(facts: RecipeFacts) -> Iterator[Hit]:
    """Smallest learning rate above the learning rate."""
    rate, minimum = facts.number(f"{_MEGATRON_OPTIMIZER}.lr"), facts.number(f"{_MEGATRON_OPTIMIZER}.min_lr")
    if facts.uses_megatron and rate is not None and minimum is not None and rate < minimum:
        yield Hit(
            f"{_MEGATRON_OPTIMIZER}.min_lr",
            f"{minimum:g} exceeds lr: {rate:g}, and Megatron's scheduler does not start; set at most {rate:g}",
        )


@rule("GM342", "error", f"{_MEGATRON_SETUP} (`_validate_dtype_config`)", needs_loss=False)
def _optimizer_precision(facts: RecipeFacts) -> Iterator[Hit]:
    """Megatron's optimiser for another precision."""
    names = {"float16": "fp16", "bfloat16": "bf16"}
    precision = str(facts.get("policy.precision"))
    name = names.get(precision)
    optimizer = facts.get(_MEGATRON_OPTIMIZER)
    if not facts.uses_megatron or name is None or not isinstance(optimizer, Mapping) or optimizer.get(name) is True:
        return
    is_checked = optimizer.get("use_precision_aware_optimizer") is not False
    if precision == "float16" or is_checked:
        effect = "NeMo-RL does not start" if is_checked else "gradients are not scaled, and small ones become 0"
        yield Hit(
            f"{_MEGATRON_OPTIMIZER}.{name}",
            f"{as_yaml(optimizer.get(name))}, but policy.precision: {precision}: {effect}; set true, and "
            f"{'bf16' if name == 'fp16' else 'fp16'}: false",
        )


@rule("GM343", "error", f"NeMo-RL `Policy.__init__`, {_AUTOMODEL_SETUP.removeprefix('NeMo-RL ')}", needs_loss=False)
def _adapter_that_is_refused(facts: RecipeFacts) -> Iterator[Hit]:
    """LoRA that DTensor's workers refuse."""
    if not facts.uses_dtensor or not facts.is_true(f"{_LORA}.enabled"):
        return
    if not facts.is_true("policy.dtensor_cfg._v2"):
        yield Hit(f"{_LORA}.enabled", "true needs policy.dtensor_cfg._v2: true; set that, or false")
    elif facts.tensor_parallel > 1 and facts.get(f"{_LORA}.use_triton") is not False:
        yield Hit(
            f"{_LORA}.use_triton",
            f"{as_yaml(facts.get(f'{_LORA}.use_triton'))} is refused with policy.dtensor_cfg.tensor_parallel_size: "
            f"{facts.tensor_parallel}; set false",
        )


@rule("GM344", "error", "NeMo-RL `setup_response_data` (data/utils.py)", applies_to_lab=False)
def _unknown_environment(facts: RecipeFacts) -> Iterator[Hit]:
    """Data of an environment that the recipe does not have."""
    environments = facts.get("env")
    if not isinstance(environments, Mapping) or facts.is_true("env.should_use_nemo_gym"):
        return
    for split in ("default", "train", "validation"):
        entries = facts.get(f"data.{split}")
        for index, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            name = entry.get("env_name") if isinstance(entry, Mapping) else None
            if isinstance(name, str) and name not in environments:
                place = f"data.{split}[{index}]" if isinstance(entries, list) else f"data.{split}"
                yield Hit(
                    f"{place}.env_name",
                    f"{name}: the section env has no such environment, but only {', '.join(map(str, environments))}; "
                    f"add env.{name}, or name one of these",
                )
