"""GM0: the recipe itself."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.checks.loss import NEMO_RL_FIELDS
from nemo_geomask.checks.rule import Hit, Rule
from nemo_geomask.checks.written import nearest_given, theirs
from nemo_geomask.config.loss import LossConfig
from nemo_geomask.errors import Problem

__all__ = ["RULES"]


def _invalid(facts: RecipeFacts) -> Iterator[Hit]:
    for problem in facts.problems:
        yield _located(problem, facts)


def _doubtful(facts: RecipeFacts) -> Iterator[Hit]:
    foreign, origins = theirs(facts), facts.recipe.origins
    for doubt in facts.doubts:
        written = [origin for key in doubt.keys if (origin := origins.at(key))]
        # What NeMo-RL's own files say as a whole is its way to say it, not the user's mistake.
        if not written or any(origin.where not in foreign for origin in written):
            yield _located(doubt, facts)


def _located(problem: Problem, facts: RecipeFacts) -> Hit:
    """A problem is put at the one of its keys that was written nearest the user."""
    return Hit(nearest_given(problem.keys, facts) if problem.keys else "loss_fn", problem.message)


def _nameless(facts: RecipeFacts) -> Iterator[Hit]:
    if not facts.nameless:
        return
    for key, field in LossConfig.model_fields.items():
        value = facts.given.get(key)
        if key not in NEMO_RL_FIELDS and value is not None and value != field.default:
            yield Hit(
                f"loss_fn.{key}",
                "loss_fn has no name, so NeMo-RL's own loss is trained, which ignores this key; add name: clipped_pg "
                f"(or another objective), or remove {key}",
            )


def _unresolved(facts: RecipeFacts) -> Iterator[Hit]:
    for key, why in facts.recipe.unresolved.items():
        yield Hit(key, f"not known here, and so not checked: {why}")


RULES = (
    Rule(
        "GM001",
        "error",
        "`loss_fn` is invalid",
        "docs/loss_reference.md",
        _invalid,
        needs_loss=False,
        may_be_ignored=False,
    ),
    Rule("GM002", "warning", "`loss_fn` is valid, but probably not as meant", "docs/loss_reference.md", _doubtful),
    Rule(
        "GM003",
        "error",
        "settings of this package's without `loss_fn.name`",
        "NeMo-RL `ClippedPGLossConfig`: extra keys are allowed and ignored",
        _nameless,
    ),
    Rule(
        "GM007",
        "note",
        "a path that only the cluster's environment knows",
        "the recipe; NeMo-RL resolves it at its start",
        _unresolved,
        needs_loss=False,
    ),
)
