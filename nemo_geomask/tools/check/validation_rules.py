"""GM216 to GM218, GM338: validation that measures nothing, and checkpoints that are ranked by nothing."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.config.strict import as_yaml
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, Rule

__all__ = ["RULES"]

_METRIC = "checkpointing.metric_name"
_MAX_LEFT_OUT = 0.1  # share of the validation samples that may be left out without a warning
_LARGER_IS_BETTER = ("accuracy", "reward")


def _validates(facts: RecipeFacts) -> bool:
    """Return True if NeMo-RL validates on batches of its own; NeMo-Gym validates on all its prompts."""
    section = facts.algorithm
    if facts.is_true("env.should_use_nemo_gym"):
        return False
    switches = (f"{section}.val_at_start", f"{section}.val_at_end")
    return (facts.number(f"{section}.val_period") or 0) > 0 or any(map(facts.is_true, switches))


def _validation_batches(facts: RecipeFacts) -> tuple[int, int] | None:
    """Return the numbers of samples and of samples a batch; None if nothing is validated or one is not set."""
    samples = facts.number(f"{facts.algorithm}.max_val_samples")
    batch = facts.number(f"{facts.algorithm}.val_batch_size")
    return (int(samples), int(batch)) if _validates(facts) and samples and batch and batch >= 1 else None


def _no_validation_batch(facts: RecipeFacts) -> Iterator[Hit]:
    sizes = _validation_batches(facts)
    if sizes is not None and sizes[0] < sizes[1]:
        yield Hit(
            f"{facts.algorithm}.val_batch_size",
            f"{sizes[1]} exceeds max_val_samples: {sizes[0]}: NeMo-RL validates on whole batches, here on none, and "
            f"reports an accuracy of 0, by which checkpoints are ranked; set at most {sizes[0]}",
        )


def _partial_validation_batch(facts: RecipeFacts) -> Iterator[Hit]:
    sizes = _validation_batches(facts)
    if sizes is not None and sizes[0] > sizes[1] and sizes[0] % sizes[1] > _MAX_LEFT_OUT * sizes[0]:
        used = sizes[0] // sizes[1] * sizes[1]
        yield Hit(
            f"{facts.algorithm}.max_val_samples",
            f"{sizes[0]}: NeMo-RL validates on whole batches of val_batch_size: {sizes[1]}, that is on {used} samples; "
            f"set {used}, or a val_batch_size that divides {sizes[0]}",
        )


def _unranked_checkpoints(facts: RecipeFacts) -> Iterator[Hit]:
    metric = facts.get(_METRIC)
    saves = facts.is_true("checkpointing.enabled") and facts.number("checkpointing.keep_top_k")
    if not saves or not isinstance(metric, str):
        return
    name = metric.partition(":")[2]
    if name in _LARGER_IS_BETTER and facts.get("checkpointing.higher_is_better") is False:
        yield Hit(
            "checkpointing.higher_is_better",
            f"false, but {_METRIC}: {metric}: the worst checkpoints are kept; set true",
        )
    if not metric.startswith("val:"):
        return
    period_key = f"{facts.algorithm}.val_period"
    period, saving = facts.number(period_key) or 0, facts.number("checkpointing.save_period")
    if not period and not facts.is_true(f"{facts.algorithm}.val_at_end"):
        yield Hit(
            _METRIC,
            f"{metric}, but {period_key}: {as_yaml(facts.get(period_key))} never validates, so no checkpoint has "
            f"the metric, and the newest are kept; set {period_key}, or null for the metric",
        )
    elif period and saving and saving % period:
        yield Hit(
            "checkpointing.save_period",
            f"{saving:g} is not a multiple of {period_key}: {period:g}: a checkpoint between two validations has no "
            f"{metric}, ranks last and is deleted first; set a multiple of {period:g}",
        )


def _unknown_metric(facts: RecipeFacts) -> Iterator[Hit]:
    metric = facts.get(_METRIC)
    if not facts.is_true("checkpointing.enabled") or not isinstance(metric, str):
        return
    if not metric.startswith(("train:", "val:")):
        yield Hit(
            _METRIC,
            f"{metric}: NeMo-RL stops at the first checkpoint, because the name must begin with train: or val:; set "
            "val:accuracy, or null",
        )
    elif metric == "val:reward" and _validates(facts):
        yield Hit(
            _METRIC,
            f"{metric}: NeMo-RL stops at the first checkpoint, because its validation reports no reward; set "
            "val:accuracy, which is the mean reward, or null",
        )


_VALIDATE = "NeMo-RL `validate` (grpo.py): `max_val_samples // val_batch_size` batches"

RULES = (
    Rule("GM216", "error", "validation without a batch", _VALIDATE, _no_validation_batch, applies_to_lab=False),
    Rule(
        "GM217",
        "warning",
        "validation samples that are left out",
        _VALIDATE,
        _partial_validation_batch,
        applies_to_lab=False,
    ),
    Rule(
        "GM218",
        "warning",
        "checkpoints that are not ranked by their metric, or by the wrong end of it",
        "NeMo-RL `CheckpointManager`, `grpo_train`",
        _unranked_checkpoints,
        applies_to_lab=False,
    ),
    Rule(
        "GM338",
        "error",
        "metric of checkpoints that NeMo-RL does not have",
        "NeMo-RL `grpo_train`",
        _unknown_metric,
        applies_to_lab=False,
    ),
)
