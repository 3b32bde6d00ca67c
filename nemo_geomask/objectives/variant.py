"""The interface of an objective: data plus functions of tensors. No torch is imported until one of these is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel

from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.config.strict import StrictModel

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_geomask.functional import Surrogate


class Part(NamedTuple):
    """One line of an objective's formula, and a sentence that explains it."""

    formula: str
    explanation: str


class NoOptions(StrictModel):
    """Options of an objective that has none."""


Parts = tuple[Part, ...]
"""The lines of an objective's formula, in order."""


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
            stands for a setting or an option; ``docs/how_to/plugins.md`` lists the other placeholders.
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

    def invalid_attributes(self) -> list[str]:
        """Return a description of each attribute with an invalid value; the settings are checked elsewhere."""
        is_known = self.pooled_by in ("mean", "sum")
        faults = [] if is_known else [f"has pooled_by {self.pooled_by!r}, which must be 'mean' or 'sum'"]
        is_model = isinstance(self.options, type) and issubclass(self.options, BaseModel)
        return faults if is_model else [*faults, f"has options {self.options!r}, which must be a pydantic model class"]
