"""The interface of a loss variant: data plus one function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from torch import Tensor

from nemo_geomask.config import LossConfig, StrictModel
from nemo_geomask.functional import Surrogate

__all__ = ["NoOptions", "Part", "SurrogateInputs", "Variant"]


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
    """Options of a variant that has none."""


@dataclass(frozen=True)
class SurrogateInputs:
    """Inputs of a variant's functions; token tensors share one layout and are 0 at tokens that aren't trained.

    Attributes:
        curr: log π_θ of the sampled tokens, float32, with gradient.
        log_ratio: log of the policy ratio: log π_θ − log π_old, or log π_θ − log μ under ``ratio_anchor: gen``;
            float32, with gradient.
        advantages: A, float32.
        config: settings in force.
        options: the variant's own settings, an instance of :attr:`Variant.options`.
    """

    curr: Tensor
    log_ratio: Tensor
    advantages: Tensor
    config: LossConfig
    options: Any


Parts = tuple[Part, ...]
"""The lines of an objective's formula, in order."""


@dataclass(frozen=True)
class Variant:
    """An objective, provided by an entry point of the group ``nemo_geomask.losses``.

    :class:`~nemo_geomask.losses.PolicyLoss` does the rest: reading the batch, weights, masks, KL, normalisation,
    metrics, parallelism.

    Attributes:
        surrogate: returns the per-token loss and its ratios. Its arguments are the inputs and the sequence statistics
            that ``pool`` requests.
        pool: returns token tensors whose mean over each sequence's trained tokens ``surrogate`` needs. ``surrogate``
            receives the means under the same keys, spread over the tokens and differentiable. A variant must not reduce
            over tokens itself, since the tokens of a sequence may be spread over ranks.
        pooled_by: ``mean``, or ``sum`` if ``surrogate`` needs the sums instead.
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
            stands for a setting or an option; ``docs/plugins.md`` lists the other placeholders.
    """

    surrogate: Callable[[SurrogateInputs, Mapping[str, Tensor]], Surrogate]
    pool: Callable[[SurrogateInputs], Mapping[str, Tensor]] | None = None
    pooled_by: Literal["mean", "sum"] = "mean"
    masks: Callable[[Any], Sequence[Mapping[str, Any]]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    forces: Mapping[str, Any] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    options: type[BaseModel] = NoOptions
    source: str = ""
    parts: Parts | Callable[[LossConfig], Parts] = ()
