"""Settings and formula of an objective, which are all that reading a recipe needs of it; no torch is imported."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from nemo_geomask.config.strict import StrictModel

if TYPE_CHECKING:
    from nemo_geomask.config.loss_config import LossConfig

__all__ = ["NoOptions", "Objective", "Part", "Parts"]


class _PartFields(NamedTuple):
    formula: str
    explanation: str


class Part(_PartFields):
    """One line of an objective's formula, and a sentence that explains it."""

    __slots__ = ()

    def __new__(cls, formula: str, explanation: str | None = None, *, words: str | None = None) -> Part:
        """Return a part; ``words`` is the former name of ``explanation``, deprecated."""
        if words is not None and explanation is None:
            _warn_of_words()
            explanation = words
        if explanation is None:
            raise TypeError("Part needs a formula and an explanation")
        return super().__new__(cls, formula, explanation)

    @property
    def words(self) -> str:
        """Former name of ``explanation``, deprecated."""
        _warn_of_words()
        return self.explanation


def _warn_of_words() -> None:
    message = "the field words of nemo_geomask.losses.Part is now called explanation"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


class NoOptions(StrictModel):
    """Options of an objective that has none."""


Parts = tuple[Part, ...]
"""The lines of an objective's formula, in order."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Settings and formula of an objective; a :class:`~nemo_geomask.losses.Variant` adds the functions of tensors.

    Attributes:
        masks: returns the masks that are part of the objective from its options, in the form of ``loss_fn.masks``;
            the recipe's masks are added to them.
        defaults: settings of :class:`~nemo_geomask.LossConfig` that the objective's paper prescribes, used where a
            recipe sets none.
        forces: settings that the objective itself determines, whatever the recipe sets. They override the recipe
            without a warning: NeMo-RL's base recipes spell out every default, so a ``false`` may not be intended.
        refuses: settings that a recipe must leave unset or falsy (``false``, 0, null), each with the reason.
        options: pydantic model of the variant's own settings (``loss_fn.options``).
        source: paper and equation.
        parts: the surrogate as formulas and sentences, or a function of the settings that returns them. ``{name}``
            stands for a setting or an option; ``docs/how_to/plugins.md`` lists the other placeholders.
    """

    masks: Callable[[Any], Sequence[Mapping[str, Any]]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    forces: Mapping[str, Any] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    options: type[BaseModel] = NoOptions
    source: str = ""
    parts: Parts | Callable[[LossConfig], Parts] = ()

    def invalid_attributes(self) -> list[str]:
        """Return a description of each attribute with an invalid value; the settings are checked elsewhere."""
        is_model = isinstance(self.options, type) and issubclass(self.options, BaseModel)
        return [] if is_model else [f"has options {self.options!r}, which must be a pydantic model class"]
