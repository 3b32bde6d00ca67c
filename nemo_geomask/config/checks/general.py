"""GM0: the recipe itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nemo_geomask.config.checks.rule import Hit, Rule
from nemo_geomask.config.checks.subject import Subject
from nemo_geomask.config.checks.written import nearest_given
from nemo_geomask.config.loss import LossConfig
from nemo_geomask.config.recipe import Recipe

__all__ = ["NEMO_RL_FIELDS", "RULES", "nameless"]

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

_KEY = r"loss_fn(?:\.\w+|\[\d+\])*"
_PROBLEM = re.compile(rf"({_KEY}(?:, {_KEY})*)(?:: )?(.*)", re.DOTALL)


def _invalid(subject: Subject) -> Iterator[Hit]:
    for problem in subject.problems:
        yield _located(problem, subject)


def _doubtful(subject: Subject) -> Iterator[Hit]:
    for doubt in subject.doubts:
        yield _located(doubt, subject)


def _located(line: str, subject: Subject) -> Hit:
    """A message of the loss's begins with the dotted keys that it is about; it is put at the one nearest the user."""
    match = _PROBLEM.match(line)
    if match is None:
        return Hit("loss_fn", line)
    keys, message = match.groups()
    return Hit(nearest_given(keys.split(", "), subject), message)


def nameless(recipe: Recipe) -> bool:
    """Whether NeMo-RL's own loss trains; the lab's losses are all this package's."""
    block = recipe.data.get("loss_fn")
    return isinstance(block, dict) and block.get("name") is None and "lab" not in recipe.data


def _nameless(subject: Subject) -> Iterator[Hit]:
    if not nameless(subject.recipe):
        return
    for key, field in LossConfig.model_fields.items():
        value = subject.given.get(key)
        if key not in NEMO_RL_FIELDS and value is not None and value != field.default:
            yield Hit(
                f"loss_fn.{key}",
                "loss_fn has no name, so NeMo-RL's own loss is trained, which ignores this key; add name: clipped_pg "
                f"(or another objective), or remove {key}",
            )


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
)
