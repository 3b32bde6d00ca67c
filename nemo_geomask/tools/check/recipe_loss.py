"""The loss that a recipe trains, or the problems that keep it from being built."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.config.strict import nearest
from nemo_geomask.errors import GeomaskError, Problem
from nemo_geomask.hosts.nemo_rl.facts import LOSS_FIELDS, neutral_values_in_source
from nemo_geomask.hosts.nemo_rl.loss_block import unread_fields
from nemo_geomask.objectives.resolved_loss import ResolvedLoss, resolve_loss
from nemo_geomask.recipe import Recipe

OTHER_ALGORITHMS = {
    "sft": "supervised fine-tuning",
    "dpo": "DPO",
    "rm": "a reward model",
    "distillation": "distillation",
    "eval": "evaluation",
}
"""Names of NeMo-RL's algorithms without a policy loss by the section of a recipe that configures them."""


class RecipeLoss(NamedTuple):
    """Result of building the loss of a recipe.

    Attributes:
        provisional: loss without the invalid settings, from which the other rules are checked; None if there is a loss,
            or if the recipe trains no policy loss.
        unsettled: dotted keys, and sections, whose value in the provisional loss is not what the user meant.
    """

    loss: ResolvedLoss | None  # None if ``loss_fn`` is invalid, or if the recipe trains no policy loss
    problems: tuple[Problem, ...] = ()  # reasons why ``loss_fn`` is invalid
    warnings: tuple[Problem, ...] = ()  # settings that the loss accepts, but that are probably not what was meant
    provisional: ResolvedLoss | None = None
    unsettled: frozenset[str] = frozenset()


def trains_nemo_rl_loss(recipe: Recipe) -> bool:
    """Return True if NeMo-RL's own loss trains: outside the lab, wherever ``loss_fn`` has no name."""
    block = recipe.data.get("loss_fn")
    return isinstance(block, dict) and block.get("name") is None and "lab" not in recipe.data


def other_algorithm(recipe: Recipe) -> str | None:
    """Return the section of the recipe's algorithm if that trains no policy loss, such as ``dpo``; else None."""
    if "lab" in recipe.data or any(recipe.data.get(section) is not None for section in ("grpo", "ppo")):
        return None
    return next((section for section in OTHER_ALGORITHMS if section in recipe.data), None)


def build_recipe_loss(recipe: Recipe) -> RecipeLoss:
    """Build the loss that a recipe trains.

    Without ``loss_fn.name``, NeMo-RL's own loss trains. The loss returned for it is ``clipped_pg`` with the settings
    that NeMo-RL reads, which computes the same.
    """
    block = recipe.data.get("loss_fn")
    algorithm = other_algorithm(recipe)
    if algorithm is not None:
        is_named = isinstance(block, dict) and block.get("name") is not None
        title = OTHER_ALGORITHMS[algorithm]
        message = f"names a policy loss, but this recipe ({title}) trains none; remove name, or add a grpo section"
        return RecipeLoss(None, (Problem(("loss_fn.name",), message),) if is_named else ())
    if block is None:
        origin = recipe.origins.at("loss_fn")
        message = (
            f"{origin} sets it to null or deletes it; write the block there, or remove that line to inherit the block"
            if origin
            else "neither the recipe nor what it inherits from has such a block; add one"
        )
        return _with_provisional(RecipeLoss(None, (Problem(("loss_fn",), message),)), {})
    if isinstance(block, dict) and block.get("name", "") is None:
        # NeMo-RL's trainers treat `name: null` as no name.
        block = {key: value for key, value in block.items() if key != "name"}
    # Fields of this NeMo-RL's loss that no loss of this package reads; the problem is None where that changes nothing.
    unread: dict[str, Problem | None] = {}
    if isinstance(block, dict) and recipe.nemo_rl is not None and "lab" not in recipe.data:
        unread = unread_fields(block, neutral_values_in_source(recipe.nemo_rl))
        block = {key: value for key, value in block.items() if key not in unread}
    built = _build(block)
    if not trains_nemo_rl_loss(recipe):
        problems = (*built.problems, *(problem for problem in unread.values() if problem is not None))
        return _with_provisional(RecipeLoss(None, problems), block) if problems else built
    if built.loss is not None:
        # The block must be valid with the keys that NeMo-RL ignores, but those keys don't change what trains.
        block = {key: value for key, value in block.items() if key in LOSS_FIELDS}
        built = _build(block)
    unknown_fields = tuple(_unknown_field(key) for key, problem in unread.items() if problem is not None)
    built = built._replace(warnings=(*built.warnings, *unknown_fields))
    return built if built.loss is not None else _with_provisional(built, block)


def _build(block: Any) -> RecipeLoss:
    try:
        loss, warnings = resolve_loss(block)
    except GeomaskError as error:
        return RecipeLoss(None, error.problems)
    return RecipeLoss(loss, (), warnings)


_LOSS = "loss_fn"


def _with_provisional(invalid: RecipeLoss, block: Any) -> RecipeLoss:
    """Add a loss that is built without the settings that the problems name, so that one mistake hides no others."""
    settings = dict(block) if isinstance(block, dict) else {}
    unsettled = set() if isinstance(block, dict) and block else {_LOSS}
    problems = invalid.problems
    while True:
        fields = {field for problem in problems for key in problem.keys if (field := _field_of(key))}
        removed = fields & set(settings)
        # Without a valid name the objective is unknown, so all of loss_fn is unsettled.
        unsettled |= {_LOSS} if "name" in fields else {f"{_LOSS}.{field}" for field in fields}
        # A misspelled field may have been meant for the field that it resembles.
        unsettled |= {f"{_LOSS}.{guess}" for field in fields if (guess := nearest(field, LossConfig.model_fields))}
        if problems and not removed:  # no named setting is left to remove; take defaults
            settings, removed = {}, set()
            unsettled.add(_LOSS)
        # All unknown keys go at once: there may be thousands, of which an error names a few.
        known_fields = LossConfig.model_fields.keys() - removed
        settings = {key: value for key, value in settings.items() if key in known_fields}
        built = _build(settings)
        if built.loss is not None or not settings:
            break
        problems = built.problems
    return invalid._replace(provisional=built.loss, unsettled=frozenset(unsettled))


def _field_of(key: str) -> str:
    """Return the field of ``loss_fn`` that a dotted key is in; empty for ``loss_fn`` itself."""
    section, _, rest = key.partition(".")
    return re.split(r"[.\[]", rest)[0] if section == _LOSS else ""


def _unknown_field(key: str) -> Problem:
    # The problem has no keys. Check leaves out problems at keys that NeMo-RL's own files set, but this one must stay:
    # the printed objective lacks the field, whoever set it.
    return Problem(
        (),
        f"{key}: NeMo-RL's own loss reads it, but this version of nemo_geomask does not know it, so it is missing in "
        "the objective that check prints; see docs/how_to/upgrade.md",
    )
