"""The settings of one loss: what follows from the fields of a ``loss_fn:`` block, and whether they go together."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, model_validator

from nemo_geomask.config.conflicts import conflicts
from nemo_geomask.config.corrections import LEVELS, TRUNCATIONS, Truncation, WeightLevel
from nemo_geomask.config.fields import CorrectionLevel, LossFields, Normalization
from nemo_geomask.config.masks import MaskRule, mask_rules
from nemo_geomask.config.strict import conflicting, problems
from nemo_geomask.errors import ConfigError

__all__ = ["WEIGHT_MEAN", "LossConfig", "LossSettings"]

WEIGHT_MEAN = "_weight_mean"
"""No mask has this label: theirs begin with a letter."""


class LossSettings(LossFields):
    """The settings of one loss; whether they go together, only :class:`LossConfig` asks."""

    _of_objective: int = 0

    @property
    def given(self) -> dict[str, Any]:
        """What a recipe or a caller says, without what the objective adds to it."""
        values = {key: getattr(self, key) for key in self.model_fields_set}
        return values | {"masks": self.masks[self._of_objective :]} if self._of_objective else values

    @property
    def normalization(self) -> Normalization:
        """The denominator in force."""
        if self.loss_normalization is not None:
            return self.loss_normalization
        return "tokens" if self.token_level_loss else "sequences"

    @property
    def correction_level(self) -> CorrectionLevel:
        """The weight's level in force; NeMo-RL's derivation where none is given."""
        if self.is_correction_level is not None:
            return self.is_correction_level
        return "sequence" if self.sequence_level_importance_ratios else "token"

    @cached_property
    def own_level(self) -> WeightLevel | None:
        """The weight's level, where another distribution brings it."""
        return LEVELS.find(self.is_correction_level)

    @cached_property
    def own_truncation(self) -> Truncation | None:
        """The truncation, where another distribution brings it."""
        return TRUNCATIONS.find(self.truncated_importance_sampling_type)

    @property
    def weighs_tokens(self) -> bool:
        """Whether each token has a weight of its own."""
        return self.correction_level == "token" or self.own_level is not None

    @property
    def applies_weight(self) -> bool:
        """Whether the surrogate is multiplied by the weight against the mismatch."""
        return self.use_importance_sampling_correction and self.ratio_anchor == "prev"

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the weight or the ratio accounts for the mismatch."""
        return self.use_importance_sampling_correction or self.ratio_anchor == "gen"

    @property
    def needs_prev(self) -> bool:
        """Whether anything reads ``prev_logprobs``."""
        if self.ratio_anchor == "prev" or self.force_on_policy_ratio:
            return not self.force_on_policy_ratio
        on_prev = any(rule.log_ratio != "total" for rule in self.mask_rules)
        return on_prev or self.looks_before_step or self.use_kl_in_reward

    @property
    def knows_prev(self) -> bool:
        """Whether π_old is known: from the batch, or as the current policy by ``force_on_policy_ratio``."""
        return self.needs_prev or self.force_on_policy_ratio

    @property
    def skips_prev(self) -> bool:
        """Whether ``prev_logprobs`` are not to be computed, but for a sample of the sequences."""
        return not self.knows_prev and self.audit_fraction < 1

    @property
    def truncation(self) -> str | None:
        """The truncation in force: None also where a ratio is missing."""
        return self.truncated_importance_sampling_type if self.truncated_importance_sampling_ratio is not None else None

    @property
    def kl_coefficient(self) -> float:
        """β of the loss's own KL term; 0 when the KL is in the reward."""
        return 0.0 if self.use_kl_in_reward else self.reference_policy_kl_penalty

    @cached_property
    def mask_rules(self) -> tuple[MaskRule, ...]:
        """The masks in the raw form, with unique labels."""
        return mask_rules(self.masks, of_objective=self._of_objective)

    @property
    def rules_before_step(self) -> tuple[MaskRule, ...]:
        """Masks that are applied before the step, under ``denominator: kept``: those that need no current policy."""
        if self.denominator == "original":
            return ()
        return tuple(rule for rule in self.mask_rules if rule.log_ratio == "mismatch")

    @property
    def looks(self) -> dict[str, str]:
        """Settings for which each batch is to be looked at before its step, each with what asks for it, in words."""
        asked = {
            "masks": ("a mask with a budget", bool(self.budgets)),
            "is_correction_batch_normalize": ("the weight's mean", self.is_correction_batch_normalize),
            "batch_veto": ("batch_veto", self.batch_veto is not None),
            "denominator": ("denominator: kept", self.denominator == "kept"),
        }
        return {key: words for key, (words, on) in asked.items() if on}

    @property
    def looks_before_step(self) -> bool:
        """Whether each batch is to be looked at before its step."""
        return bool(self.looks)

    @property
    def budgets(self) -> tuple[MaskRule, ...]:
        """Masks whose bounds the whole batch sets."""
        return tuple(rule for rule in self.mask_rules if rule.budgeted)

    @property
    def told(self) -> tuple[str, ...]:
        """Labels of the numbers that the loss is told of the whole batch: its masks' bounds, the weight's mean."""
        bounds = tuple(rule.label for rule in self.rules_in_loss if rule.budgeted)
        return (*bounds, *((WEIGHT_MEAN,) if self.is_correction_batch_normalize else ()))

    @property
    def rules_in_loss(self) -> tuple[MaskRule, ...]:
        """The other masks."""
        before = self.rules_before_step
        return tuple(rule for rule in self.mask_rules if rule not in before)


class LossConfig(LossSettings):
    """Settings of one loss; frozen, refuses unknown keys.

    Raises: ConfigError: (a ValueError) unknown keys, values out of range and settings at odds with each other.
    Pydantic's own entries (``model_validate``, an assignment to a field) raise pydantic's ``ValidationError``, a
    ValueError too.
    """

    if not TYPE_CHECKING:  # which knows the fields from pydantic

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise ConfigError(*problems(error, prefix="loss_fn")) from None

        # Or pydantic would call it from model_validate, too.
        __init__.__pydantic_base_init__ = True

    def in_force(self, *, given: Set[str], masks: int) -> LossConfig:
        """These settings, of which only ``given`` are a recipe's and the first ``masks`` masks are the objective's."""
        made = super().model_copy()
        made.__dict__.pop("mask_rules", None)  # of another number of masks
        object.__setattr__(made, "__pydantic_fields_set__", set(given))
        made._of_objective = masks
        return made

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> LossConfig:
        """A copy; with ``update`` of what was given, valid or a ConfigError, and without what an objective added."""
        return LossConfig(**self.given | dict(update)) if update else super().model_copy(deep=deep)

    @model_validator(mode="after")
    def _compatible(self) -> LossConfig:
        if found := conflicts(self):
            raise ValidationError.from_exception_data(
                type(self).__name__, [conflicting(conflict.keys, conflict.message) for conflict in found]
            )
        return self
