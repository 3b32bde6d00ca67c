"""The interface of a loss variant: data plus one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.config.objective import NoOptions, Objective, Part
from nemo_geomask.functional import Surrogate

__all__ = ["NoOptions", "Part", "SurrogateInputs", "Variant"]


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


SurrogateFunction = Callable[[SurrogateInputs, Mapping[str, Tensor]], Surrogate]


@dataclass(frozen=True)
class Variant(Objective):
    """An objective, provided by an entry point of the group ``nemo_geomask.losses``.

    :class:`~nemo_geomask.losses.PolicyLoss` does the rest: reading the batch, weights, masks, KL, normalisation,
    metrics, parallelism. The other attributes are those of :class:`~nemo_geomask.config.objective.Objective`.

    Attributes:
        surrogate: returns the per-token loss and its ratios. Its arguments are the inputs and the sequence statistics
            that ``pool`` requests.
        pool: returns token tensors whose mean over each sequence's trained tokens ``surrogate`` needs. ``surrogate``
            receives the means under the same keys, spread over the tokens and differentiable. A variant must not reduce
            over tokens itself, since the tokens of a sequence may be spread over ranks.
        pooled_by: ``mean``, or ``sum`` if ``surrogate`` needs the sums instead.
    """

    surrogate: SurrogateFunction
    pool: Callable[[SurrogateInputs], Mapping[str, Tensor]] | None = None
    pooled_by: Literal["mean", "sum"] = "mean"

    def invalid_attributes(self) -> list[str]:
        """Return a description of each attribute with an invalid value."""
        is_known = self.pooled_by in ("mean", "sum")
        faults = [] if is_known else [f"has pooled_by {self.pooled_by!r}, which must be 'mean' or 'sum'"]
        return [*faults, *super().invalid_attributes()]

    @classmethod
    def of(cls, objective: Objective, surrogate: SurrogateFunction, **functions: Any) -> Variant:
        """Return the variant that computes an objective."""
        settings = {item.name: getattr(objective, item.name) for item in fields(Objective)}
        return cls(surrogate, **functions, **settings)
