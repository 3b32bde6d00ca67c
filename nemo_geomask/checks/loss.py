"""The loss that a recipe trains, or why there is none."""

from __future__ import annotations

from typing import Any

from nemo_geomask.errors import GeomaskError, Problem
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.losses.build import examined
from nemo_geomask.recipe import Recipe

__all__ = ["NEMO_RL_FIELDS", "loss_of", "nameless", "other_algorithm"]

# NeMo-RL's ClippedPGLossConfig, v0.6.0 to main: what a loss_fn without a name may hold.
NEMO_RL_FIELDS = frozenset(
    {
        "disable_ppo_ratio",
        "force_on_policy_ratio",
        "kl_input_clamp_value",
        "kl_output_clamp_value",
        "positive_example_nll_weight",
        "ratio_clip_c",
        "ratio_clip_max",
        "ratio_clip_min",
        "reference_policy_kl_penalty",
        "reference_policy_kl_type",
        "sequence_level_importance_ratios",
        "token_level_loss",
        "truncated_importance_sampling_ratio",
        "truncated_importance_sampling_ratio_min",
        "truncated_importance_sampling_type",
        "use_cispo",
        "use_importance_sampling_correction",
        "use_kl_in_reward",
        "use_on_policy_kl_approximation",
    }
)


# Sections of NeMo-RL's algorithms without a policy loss.
_OTHERS = {
    "sft": "supervised fine-tuning",
    "dpo": "DPO",
    "rm": "a reward model",
    "distillation": "distillation",
    "eval": "evaluation",
}

Outcome = tuple[PolicyLoss | None, tuple[Problem, ...], tuple[Problem, ...]]


def nameless(recipe: Recipe) -> bool:
    """Whether NeMo-RL's own loss trains; the lab's losses are all this package's."""
    block = recipe.data.get("loss_fn")
    return isinstance(block, dict) and block.get("name") is None and "lab" not in recipe.data


def other_algorithm(recipe: Recipe) -> str | None:
    """What a recipe does that trains no policy loss; None where it does train one."""
    if {"grpo", "ppo", "lab"} & set(recipe.data):
        return None
    return next((name for section, name in _OTHERS.items() if section in recipe.data), None)


def loss_of(recipe: Recipe) -> Outcome:
    """The loss of a recipe, or why there is none; and what it warns of.

    Without ``loss_fn.name`` it is the equal of NeMo-RL's own loss: ``clipped_pg`` with the settings that NeMo-RL reads.

    Returns:
        The loss or None; problems; doubts.
    """
    block = recipe.data.get("loss_fn")
    other = other_algorithm(recipe)
    if other is not None:
        named = isinstance(block, dict) and block.get("name") is not None
        why = f"names a policy loss, but this recipe is {other}, which trains none; remove name, or add a grpo section"
        return None, (Problem(("loss_fn.name",), why),) if named else (), ()
    if block is None:
        origin = recipe.origins.at("loss_fn")
        why = (
            f"{origin} sets it to null or deletes it; write its keys there, or take that out to inherit the block"
            if origin
            else "neither the recipe nor what it inherits from has such a block"
        )
        return None, (Problem(("loss_fn",), why),), ()
    if isinstance(block, dict) and block.get("name", "") is None:
        # To NeMo-RL's trainers a null is no name.
        block = {key: value for key, value in block.items() if key != "name"}
    found = _examined(block)
    if found[0] is not None and nameless(recipe):
        # The whole block must be valid, what NeMo-RL ignores too; what trains has no part of that.
        return _examined({key: value for key, value in block.items() if key in NEMO_RL_FIELDS})
    return found


def _examined(block: Any) -> Outcome:
    try:
        loss, doubts = examined(block)
    except GeomaskError as error:
        return None, error.problems, ()
    return loss, (), doubts
