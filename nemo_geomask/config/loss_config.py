"""Validated configuration of one loss: the settings of a ``loss_fn:`` block, checked for contradictions."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, model_validator

from nemo_geomask.config.conflicts import find_conflicts
from nemo_geomask.config.loss_settings import LossSettings
from nemo_geomask.config.strict import conflict_error, problems
from nemo_geomask.errors import ConfigError


class LossConfig(LossSettings):
    """Settings of one loss; frozen, refuses unknown keys and settings that contradict each other.

    Raises: ConfigError: (a ValueError) unknown keys, values out of range, contradictory settings.
    Pydantic's own entry points (``model_validate``, assignment to a field) raise pydantic's ``ValidationError``, which
    is a ValueError too.
    """

    if not TYPE_CHECKING:  # type checkers know the fields from pydantic's plugin

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise ConfigError(*problems(error, prefix="loss_fn")) from None

        # Without this attribute, pydantic would call the method above from model_validate, too.
        __init__.__pydantic_base_init__ = True

    def with_objective(self, *, explicit: Set[str], objective_masks: int) -> LossConfig:
        """Return a copy that distinguishes the recipe's settings from those that the objective added.

        Args:
            explicit: names of the fields that the recipe itself sets.
            objective_masks: number of masks that the objective added; they come first in ``masks``.
        """
        copy = super().model_copy()
        copy.__dict__.pop("mask_rules", None)  # self cached it under its own number of objective masks
        object.__setattr__(copy, "__pydantic_fields_set__", set(explicit))
        copy._objective_masks = objective_masks
        return copy

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> LossConfig:
        """Return a copy; with ``update``, validate the recipe's settings and the update together.

        Settings that the objective added are left out of an updated copy.

        Raises: ConfigError: the updated settings are not valid.
        """
        return LossConfig(**self.explicit_settings | dict(update)) if update else super().model_copy(deep=deep)

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> LossConfig:
        if conflicts := find_conflicts(self):
            raise ValidationError.from_exception_data(
                type(self).__name__,
                [conflict_error(conflict.keys, conflict.template, conflict.fix) for conflict in conflicts],
            )
        return self
