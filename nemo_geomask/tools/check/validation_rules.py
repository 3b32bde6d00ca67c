"""Validation and rankings of checkpoints that measure nothing, and changes of rewards that never apply or fail."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from nemo_geomask.hosts.nemo_rl.facts import calls_dynamic_sampling_in_ppo, single_controller_lacks
from nemo_geomask.hosts.nemo_rl.source_words import is_in_source, source_texts
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule
from nemo_geomask.tools.check.word_rules import nearest_word
from nemo_geomask.yaml_text import as_yaml

_METRIC = "checkpointing.metric_name"
_LARGEST_PENALTY = 8  # in overlong_buffer_penalty, which the longest response may get
_MAX_LEFT_OUT = 0.1  # share of the validation samples that may be left out without a warning


_VALIDATE = "NeMo-RL `validate` (grpo.py): `max_val_samples // val_batch_size` batches"


_REWARD_STEPS = {
    "grpo.use_dynamic_sampling": "use_dynamic_sampling",
    "grpo.overlong_filtering": "overlong_filtering",
    "grpo.reward_scaling.enabled": "reward_scaling",
    "grpo.reward_shaping.enabled": "reward_shaping",
}
"""Switches of what `grpo_train` does with a batch's rewards, and the word for it in NeMo-RL's source."""
_SHAPING = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
_SHAPE = "NeMo-RL `apply_reward_shaping` (algorithms/reward_functions.py)"


@rule("GM217", "warning", _VALIDATE, needs_loss=False, applies_to_lab=False)
def _partial_validation_batch(facts: RecipeFacts) -> Iterator[Hit]:
    """Validation samples that are left out."""
    samples, batch = (facts.size(f"{facts.algorithm}.{name}") for name in ("max_val_samples", "val_batch_size"))
    if facts.validates and samples > batch > 0 and samples % batch > _MAX_LEFT_OUT * samples:
        used = samples // batch * batch
        yield Hit(
            f"{facts.algorithm}.max_val_samples",
            f"{samples}: NeMo-RL validates on whole batches of val_batch_size: {batch}, that is on {used} samples; "
            f"{{fix}}, or a val_batch_size that divides {samples}",
            fix={f"{facts.algorithm}.max_val_samples": used},
        )


@rule("GM218", "warning", "NeMo-RL `CheckpointManager`, `grpo_train`", needs_loss=False, applies_to_lab=False)
def _unranked_checkpoints(facts: RecipeFacts) -> Iterator[Hit]:
    """Checkpoints that are not ranked by their metric, or by the wrong end of it."""
    metric = facts.get(_METRIC)
    saves = facts.is_true("checkpointing.enabled") and facts.number("checkpointing.keep_top_k")
    if not saves or not isinstance(metric, str) or not metric.startswith("val:"):
        return
    period_key = f"{facts.algorithm}.val_period"
    period, saving = facts.number(period_key) or 0, facts.number("checkpointing.save_period")
    has_data = facts.algorithm not in ("dpo", "rm") or facts.get("data.validation") or facts.get("data.val_data_paths")
    if not has_data:
        yield Hit(_METRIC, f"{metric}, but there are no data to validate on (data.validation), so the newest are kept")
    elif not period and not facts.is_true(f"{facts.algorithm}.val_at_end"):
        yield Hit(
            _METRIC,
            f"{metric}, but {period_key}: {as_yaml(facts.get(period_key))} never validates, so no checkpoint has "
            f"the metric, and the newest are kept; set {period_key}, or {{fix}}",
            fix={_METRIC: None},
        )
    elif period and saving and saving % period:
        yield Hit(
            "checkpointing.save_period",
            f"{saving:g} is not a multiple of {period_key}: {period:g}: a checkpoint between two validations has no "
            f"{metric}, ranks last and is deleted first",
            fix={"checkpointing.save_period": math.ceil(saving / period) * int(period)},
        )


@rule(
    "GM351",
    "error",
    "NeMo-RL `grpo_train`, `validate`",
    refusals=("must start with 'val:'",),
    needs_loss=False,
    applies_to_lab=False,
)
def _unreported_metric(facts: RecipeFacts) -> Iterator[Hit]:
    """Metric of checkpoints that the run does not report."""
    metric, stop = facts.get(_METRIC), facts.get(f"{facts.algorithm}.stop_at_validation_metric")
    if facts.is_true("checkpointing.enabled") and isinstance(metric, str):
        yield from _metric_hits(_METRIC, metric, facts)
    if isinstance(stop, str):
        yield from _metric_hits(f"{facts.algorithm}.stop_at_validation_metric", f"val:{stop}", facts)


def _metric_hits(key: str, metric: str, facts: RecipeFacts) -> Iterator[Hit]:
    prefix, _, name = metric.partition(":")
    if prefix not in ("train", "val"):
        reported = _reported("val", facts) or ["accuracy"]
        guess = next(iter(nearest_word(metric.removeprefix("val_"), reported)), reported[0])
        message = f"{metric}: NeMo-RL takes val: or train: with the name of a metric, and stops at the first checkpoint"
        yield Hit(key, message, fix={key: f"val:{guess}"})
        return
    reported = _reported(prefix, facts)
    if not reported or name in reported or (prefix == "val" and not facts.validates):
        return
    # Metrics of the loss and of the rollouts are reported from other modules; some names are put together.
    if (prefix == "train" or facts.algorithm == "distillation") and ("/" in name or _is_rollouts(name, prefix, facts)):
        return
    guess = next(iter(nearest_word(name, reported)), reported[0])
    several = {"grpo.val_num_generations_per_prompt": 4}  # of which alone pass_k is reported
    yield Hit(
        key,
        f"{facts.get(key)}: {'training' if prefix == 'train' else 'validation'} reports no {name}"
        f"{' of one response a prompt' if name == 'pass_k' else ''}, and NeMo-RL stops at the first "
        f"{'checkpoint' if key == _METRIC else 'validation'}",
        fix=several if name == "pass_k" else {key: f"{prefix}:{guess}" if key == _METRIC else guess},
    )


def _reported(prefix: str, facts: RecipeFacts) -> list[str]:
    """Return the names of metrics that training or validation reports, the usual one first; none if unknown."""
    checkout, section = facts.nemo_rl, facts.algorithm
    source = source_texts(checkout).get(checkout / "nemo_rl" / "algorithms" / f"{section}.py", "") if checkout else ""
    if prefix == "train":
        names = re.findall(r"""^ +(?:metrics\[)?["'](\w+)["'](?:: |\] = )""", source, re.MULTILINE)
        return sorted(names, key=lambda name: name not in ("reward", "loss"))
    if pairs := re.search(r"class \w+ValMetrics:\n((?: {4}\w+: \w+\n)+)", source):
        names = re.findall(r"(\w+):", pairs[1])
        return [f"validation-{each}_{name}" for each in facts.get("data.val_data_paths", ["default"]) for name in names]
    literals = re.findall(r"\bval_metrics[^\n=]*= \{(.*?)\n? *\}\n", source, re.DOTALL)
    names = re.findall(r"""["']([\w/]+)["']:""", "".join(literals))
    has_several = facts.size("grpo.val_num_generations_per_prompt") > 1
    return names + (re.findall(r"val_metrics\[.(\w+).\] =", source) if has_several else [])


def _is_rollouts(name: str, prefix: str, facts: RecipeFacts) -> bool:
    """Return True if NeMo-RL's source has the name of a metric outside the trainers, for validation in its rollouts."""
    assert facts.nemo_rl is not None
    rollouts = source_texts(facts.nemo_rl).get(facts.nemo_rl / "nemo_rl" / "experience" / "rollouts.py", "")
    return is_in_source(facts.nemo_rl, f'"{name}"') if prefix == "train" else f'"{name}"' in rollouts


@rule(
    "GM225", "error", "NeMo-RL `SingleController` (algorithms/single_controller.py), `ppo_train`", applies_to_lab=False
)
def _ignored_reward_step(facts: RecipeFacts) -> Iterator[Hit]:
    """Change of the rewards that NeMo-RL's trainer ignores."""
    if facts.uses_single_controller:
        for key, word in _REWARD_STEPS.items():
            if facts.is_true(key) and (facts.nemo_rl is None or single_controller_lacks(facts.nemo_rl, word)):
                yield Hit(
                    key,
                    "true has no effect: NeMo-RL's single controller, which a section async_rl selects, does not "
                    "implement it; {fix}, or remove async_rl and start examples/run_grpo.py",
                    fix={key: False},
                )
    key = "ppo.use_dynamic_sampling"
    if facts.is_true(key) and (facts.nemo_rl is None or not calls_dynamic_sampling_in_ppo(facts.nemo_rl)):
        fix = {key: False, "ppo.batch_multiplier": 1.0}
        yield Hit(key, "true has no effect: NeMo-RL's PPO keeps every prompt", fix=fix)


def _shapes_by_length(facts: RecipeFacts) -> bool:
    """Return True if DAPO's penalty on the length shapes the rewards.

    Asynchronous trainers refuse shaped rewards, and the single controller ignores them (GM225).
    """
    section = f"{facts.algorithm}.reward_shaping"
    is_applied = facts.is_true(f"{section}.enabled") and not (facts.is_async or facts.uses_single_controller)
    return is_applied and facts.get(f"{section}.stop_properly_penalty_coef") is None


@rule("GM410", "warning", _SHAPE, applies_to_lab=False)
def _length_penalty_out_of_reach(facts: RecipeFacts) -> Iterator[Hit]:
    """Length penalty that no response can reach, or without bounds."""
    section = f"{facts.algorithm}.reward_shaping"
    buffer, _, longest = (facts.number(f"{section}.{name}") for name in _SHAPING)
    context = "policy.generation.vllm_cfg.max_model_len"
    if not facts.uses_vllm or facts.number(context) is None:
        context = "policy.max_total_sequence_length"
    limits = {key: limit for key in ("policy.generation.max_new_tokens", context) if (limit := facts.number(key))}
    if not _shapes_by_length(facts) or buffer is None or longest is None or buffer <= 0 or not limits:
        return
    key = min(limits, key=lambda key: limits[key])
    limit = limits[key]
    if limit <= longest - buffer:
        shorter = {f"{section}.overlong_buffer_length": int(limit // 4)} if buffer >= limit else {}
        yield Hit(
            f"{section}.max_response_length",
            f"{longest:g}: the penalty begins at {longest - buffer:g} tokens (max_response_length - "
            f"overlong_buffer_length), but {key} limits responses to {limit:g}, so it never applies",
            fix={f"{section}.max_response_length": int(limit), **shorter},
        )
    elif (times := 1 + (limit - longest) / buffer) > _LARGEST_PENALTY:
        message = f"{longest:g}: the penalty has no floor; {limit:g} tokens get {times:.3g} x overlong_buffer_penalty"
        yield Hit(f"{section}.max_response_length", message, fix={f"{section}.max_response_length": int(limit)})
