"""The loss that a recipe trains, or the problems that keep it from being built."""

from __future__ import annotations

from typing import Any, NamedTuple

from nemo_geomask.errors import GeomaskError, Problem
from nemo_geomask.hosts.nemo_rl.facts import LOSS_FIELDS, neutral_values_in_source
from nemo_geomask.hosts.nemo_rl.loss_block import unread_fields
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.losses.build import build_with_warnings
from nemo_geomask.recipe import Recipe

__all__ = ["RecipeLoss", "build_recipe_loss", "other_algorithm", "trains_nemo_rl_loss"]

_ALGORITHMS_WITHOUT_POLICY_LOSS = {
    "sft": "supervised fine-tuning",
    "dpo": "DPO",
    "rm": "a reward model",
    "distillation": "distillation",
    "eval": "evaluation",
}
"""Names of NeMo-RL's algorithms by the section of a recipe that configures them."""


class RecipeLoss(NamedTuple):
    """Result of building the loss of a recipe.

    Attributes:
        loss: None if ``loss_fn`` is invalid, or if the recipe trains no policy loss.
        problems: reasons why ``loss_fn`` is invalid.
        warnings: settings that the loss accepts, but that are probably not what was meant.
    """

    loss: PolicyLoss | None
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


def trains_nemo_rl_loss(recipe: Recipe) -> bool:
    """Return True if NeMo-RL's own loss trains, since ``loss_fn`` has no name. The lab always uses this package's."""
    block = recipe.data.get("loss_fn")
    return isinstance(block, dict) and block.get("name") is None and "lab" not in recipe.data


def other_algorithm(recipe: Recipe) -> str | None:
    """Return the name of the recipe's algorithm if that trains no policy loss, such as DPO; None if it trains one."""
    if {"grpo", "ppo", "lab"} & set(recipe.data):
        return None
    return next((name for section, name in _ALGORITHMS_WITHOUT_POLICY_LOSS.items() if section in recipe.data), None)


def build_recipe_loss(recipe: Recipe) -> RecipeLoss:
    """Build the loss that a recipe trains.

    Without ``loss_fn.name``, NeMo-RL's own loss trains. The loss returned for it is ``clipped_pg`` with the settings
    that NeMo-RL reads, which computes the same.
    """
    block = recipe.data.get("loss_fn")
    algorithm = other_algorithm(recipe)
    if algorithm is not None:
        is_named = isinstance(block, dict) and block.get("name") is not None
        message = f"names a policy loss, but this recipe ({algorithm}) trains none; remove name, or add a grpo section"
        return RecipeLoss(None, (Problem(("loss_fn.name",), message),) if is_named else ())
    if block is None:
        origin = recipe.origins.at("loss_fn")
        message = (
            f"{origin} sets it to null or deletes it; write the block there, or remove that line to inherit the block"
            if origin
            else "neither the recipe nor what it inherits from has such a block; add one"
        )
        return RecipeLoss(None, (Problem(("loss_fn",), message),))
    if isinstance(block, dict) and block.get("name", "") is None:
        # NeMo-RL's trainers treat `name: null` as no name.
        block = {key: value for key, value in block.items() if key != "name"}
    unread: dict[str, Problem | None] = {}
    if isinstance(block, dict) and recipe.nemo_rl is not None and "lab" not in recipe.data:
        unread = unread_fields(block, neutral_values_in_source(recipe.nemo_rl))
        block = {key: value for key, value in block.items() if key not in unread}
    built = _build(block)
    if not trains_nemo_rl_loss(recipe):
        problems = tuple(problem for problem in unread.values() if problem is not None)
        return RecipeLoss(None, (*built.problems, *problems)) if problems else built
    if built.loss is not None:
        # The block must be valid with the keys that NeMo-RL ignores, but those keys don't change what trains.
        built = _build({key: value for key, value in block.items() if key in LOSS_FIELDS})
    doubts = tuple(_unchecked(key) for key, problem in unread.items() if problem is not None)
    return built._replace(warnings=(*built.warnings, *doubts))


def _build(block: Any) -> RecipeLoss:
    try:
        loss, warnings = build_with_warnings(block)
    except GeomaskError as error:
        return RecipeLoss(None, error.problems)
    return RecipeLoss(loss, (), warnings)


def _unchecked(key: str) -> Problem:
    # Without keys: it is reported even if NeMo-RL's own files set it, because the printed objective lacks it.
    return Problem(
        (),
        f"{key}: NeMo-RL's own loss reads it, but this version of nemo_geomask does not know it, so it is missing in "
        "the objective that check prints; see docs/new_nemo_rl.md",
    )
