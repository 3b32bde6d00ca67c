"""Settings derived from the fields of a ``loss_fn:`` block, such as the weight's level and the data the loss needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from nemo_geomask.config.corrections import LEVELS, TRUNCATIONS, Truncation, WeightLevel
from nemo_geomask.config.fields import CorrectionLevel, LossFields, Normalization
from nemo_geomask.config.masks import MaskRule, mask_rules

WEIGHT_MEAN = "_weight_mean"
"""Name of the weight's mean in :attr:`LossSettings.batch_scalars`; its underscore keeps it apart from masks' labels."""

PRESTEP_REASONS: Mapping[str, str] = {
    "masks": "a mask with a budget",
    "is_correction_batch_normalize": "the weight's mean",
    "batch_veto": "batch_veto",
    "denominator": "denominator: kept",
    "max_token_lag": "max_token_lag",
}
"""Settings that can need a pass over the whole batch before its first optimiser step, with their names in messages."""


class LossSettings(LossFields):
    """The fields of a ``loss_fn:`` block and what is derived from them.

    Contradictory settings are accepted here; :class:`~nemo_geomask.config.LossConfig` refuses them.
    """

    # Number of masks that the objective added; they come first in `masks`, before the recipe's.
    _objective_masks: int = 0

    @property
    def explicit_settings(self) -> dict[str, Any]:
        """The settings that the recipe or the caller set, without those that the objective added."""
        values = {key: getattr(self, key) for key in self.model_fields_set}
        return values | {"masks": self.masks[self._objective_masks :]} if self._objective_masks else values

    @property
    def normalization(self) -> Normalization:
        """Denominator of the loss, with the default that ``token_level_loss`` implies."""
        if self.loss_normalization is not None:
            return self.loss_normalization
        return "tokens" if self.token_level_loss else "sequences"

    @property
    def correction_level(self) -> CorrectionLevel:
        """Level of the weight; if ``is_correction_level`` is null, the one that NeMo-RL derives from the ratio's."""
        if self.is_correction_level is not None:
            return self.is_correction_level
        return "sequence" if self.sequence_level_importance_ratios else "token"

    @cached_property
    def plugin_level(self) -> WeightLevel | None:
        """The weight's level if a plugin provides it, else None."""
        return LEVELS.load_plugin(self.is_correction_level)

    @cached_property
    def plugin_truncation(self) -> Truncation | None:
        """The truncation if a plugin provides it, else None."""
        return TRUNCATIONS.load_plugin(self.truncated_importance_sampling_type)

    @property
    def has_token_weights(self) -> bool:
        """True if the tokens of a sequence may have different weights, False if they share one."""
        return self.correction_level in ("token", "turn", "turn_mean", "masks_only") or self.plugin_level is not None

    @property
    def applies_weight(self) -> bool:
        """True if the surrogate is multiplied by the weight against the mismatch."""
        is_weighted = self.use_importance_sampling_correction and self.correction_level != "masks_only"
        return is_weighted and self.ratio_anchor == "prev"

    @property
    def corrects_mismatch(self) -> bool:
        """True if the weight or the ratio accounts for the mismatch."""
        return self.use_importance_sampling_correction or self.ratio_anchor == "gen"

    @property
    def needs_prev(self) -> bool:
        """True if the loss reads ``prev_logprobs``."""
        if self.proximal_policy == "interpolated":
            return False
        if self.ratio_anchor == "prev" or self.force_on_policy_ratio:
            return not self.force_on_policy_ratio
        reads_prev = any(rule.log_ratio != "total" for rule in self.mask_rules) or self.kl_ratio_anchor == "prev"
        return reads_prev or self.needs_prestep_pass or self.use_kl_in_reward

    @property
    def knows_prev(self) -> bool:
        """True if π_old is known: from the batch, interpolated, or as the current policy if the ratio is set to 1."""
        return self.needs_prev or self.force_on_policy_ratio or self.proximal_policy == "interpolated"

    @property
    def skips_prev(self) -> bool:
        """True if ``prev_logprobs`` are computed for no sequence, or only for those of ``audit_fraction``."""
        return not self.needs_prev and not self.force_on_policy_ratio and self.audit_fraction < 1

    @property
    def truncation(self) -> str | None:
        """Truncation of the weight; None if it has no type or no upper bound, as ``tis`` then does nothing."""
        return self.truncated_importance_sampling_type if self.truncated_importance_sampling_ratio is not None else None

    @property
    def kl_coefficient(self) -> float:
        """β of the loss's own KL term; 0 when the KL is in the reward."""
        return 0.0 if self.use_kl_in_reward else self.reference_policy_kl_penalty

    @cached_property
    def mask_rules(self) -> tuple[MaskRule, ...]:
        """The masks as rules that the loss evaluates, with unique labels; the objective's come first."""
        return mask_rules(self.masks, objective_masks=self._objective_masks)

    @property
    def rules_before_step(self) -> tuple[MaskRule, ...]:
        """Masks applied before the step: under ``denominator: kept``, those that don't need the current policy."""
        if self.denominator != "kept":
            return ()
        return tuple(rule for rule in self.mask_rules if rule.log_ratio == "mismatch")

    @property
    def rules_in_loss(self) -> tuple[MaskRule, ...]:
        """Masks applied in the loss: all but :attr:`rules_before_step`."""
        before = self.rules_before_step
        return tuple(rule for rule in self.mask_rules if rule not in before)

    @property
    def budget_rules(self) -> tuple[MaskRule, ...]:
        """Masks whose bounds are computed from the whole batch."""
        return tuple(rule for rule in self.mask_rules if rule.has_budget)

    @property
    def objective_masks_on_total(self) -> tuple[str, ...]:
        """Labels of the objective's own masks that compare the current policy with the generation engine."""
        rules = self.mask_rules[: self._objective_masks]
        return tuple(rule.label for rule in rules if rule.log_ratio == "total")

    @property
    def prestep_reasons(self) -> dict[str, str]:
        """Entries of :data:`PRESTEP_REASONS` whose settings here need the pre-step pass."""
        in_force = {
            "masks": bool(self.budget_rules),
            "is_correction_batch_normalize": self.is_correction_batch_normalize,
            "batch_veto": self.batch_veto is not None,
            "denominator": self.denominator == "kept",
            "max_token_lag": self.max_token_lag is not None,
        }
        return {key: reason for key, reason in PRESTEP_REASONS.items() if in_force[key]}

    @property
    def needs_prestep_pass(self) -> bool:
        """True if the loss needs a pass over each whole batch before the batch's first optimiser step."""
        return bool(self.prestep_reasons)

    @property
    def batch_scalars(self) -> tuple[str, ...]:
        """Names of the numbers that the pre-step pass computes for the loss: masks' bounds and the weight's mean."""
        bounds = tuple(rule.label for rule in self.rules_in_loss if rule.has_budget)
        return (*bounds, *((WEIGHT_MEAN,) if self.is_correction_batch_normalize else ()))
