"""GM001, GM002, GM003 and GM007: invalid, doubtful and ignored settings of ``loss_fn``, and unknown values."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.errors import Problem
from nemo_geomask.hosts.nemo_rl.facts import LOSS_FIELDS
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, Rule
from nemo_geomask.tools.check.setting_author import nearest_to_user, nemo_rl_files

__all__ = ["RULES"]


def _invalid_loss(facts: RecipeFacts) -> Iterator[Hit]:
    for problem in facts.problems:
        yield _hit(problem, facts)


def _doubtful_loss(facts: RecipeFacts) -> Iterator[Hit]:
    nemo_rl, origins = nemo_rl_files(facts), facts.recipe.origins
    for warning in facts.warnings:
        written = [origin for key in warning.keys if (origin := origins.at(key))]
        # If all of the settings are from NeMo-RL's own files, the user made no mistake.
        if not written or any(origin.where not in nemo_rl for origin in written):
            yield _hit(warning, facts)


def _hit(problem: Problem, facts: RecipeFacts) -> Hit:
    return Hit(nearest_to_user(problem.keys, facts) if problem.keys else "loss_fn", problem.message)


def _settings_without_name(facts: RecipeFacts) -> Iterator[Hit]:
    if not facts.trains_nemo_rl_loss:
        return
    for key, field in LossConfig.model_fields.items():
        value = facts.loss_block.get(key)
        if key not in LOSS_FIELDS and value is not None and value != field.default:
            yield Hit(
                f"loss_fn.{key}",
                "loss_fn has no name, so NeMo-RL's own loss trains, which ignores this key; add name: clipped_pg (or "
                f"another objective), or remove {key}",
            )


def _unresolved_value(facts: RecipeFacts) -> Iterator[Hit]:
    for key, reason in facts.recipe.unresolved.items():
        yield Hit(key, f"its value is unknown on this machine, so it was not checked: {reason}")


RULES = (
    Rule(
        "GM001",
        "error",
        "`loss_fn` that is invalid",
        "docs/reference/loss_reference.md",
        _invalid_loss,
        needs_loss=False,
        may_be_ignored=False,
    ),
    Rule(
        "GM002",
        "warning",
        "`loss_fn` that is valid, but probably not what was meant",
        "docs/reference/loss_reference.md",
        _doubtful_loss,
    ),
    Rule(
        "GM003",
        "error",
        "settings of this package without `loss_fn.name`, which NeMo-RL ignores",
        "NeMo-RL `ClippedPGLossConfig`: extra keys are allowed and ignored",
        _settings_without_name,
    ),
    Rule(
        "GM007",
        "note",
        "path that depends on an environment variable which is not set here",
        "the recipe; NeMo-RL resolves it when it starts",
        _unresolved_value,
        needs_loss=False,
    ),
)
