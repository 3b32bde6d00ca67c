"""What a loss variant is: data plus one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from torch import Tensor

from nemo_geomask.config import LossConfig, StrictModel
from nemo_geomask.functional import Surrogate

__all__ = ["NoOptions", "Part", "SurrogateInputs", "Variant"]


class Part(NamedTuple):
    """One part of an objective: a line of its formula, and the same in words, a sentence."""

    formula: str
    words: str


class NoOptions(StrictModel):
    """The options of a variant that has none."""


@dataclass(frozen=True)
class SurrogateInputs:
    """What a variant's functions may use. Token tensors share one layout; those that don't train hold 0.

    Attributes:
        curr: log π_θ of the sampled tokens, float32, with gradient.
        log_ratio: of the policy ratio: log π_θ − log π_old, or log π_θ − log μ under ``ratio_anchor: gen``; float32,
            with gradient.
        advantages: A, float32.
        config: the settings in force.
        options: the variant's own settings, an instance of :attr:`Variant.options`.
    """

    curr: Tensor
    log_ratio: Tensor
    advantages: Tensor
    config: LossConfig
    options: Any


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Variant:
    """An objective, as an entry point of group ``nemo_geomask.losses`` provides it.

    The loss object does all the rest: reading the batch, weights, masks, KL, normalisation, metrics, parallelism.

    Attributes:
        surrogate: per-token loss from the inputs and the sequence statistics asked for by ``pool``.
        pool: token tensors whose mean over each sequence's trained tokens ``surrogate`` needs; they arrive spread
            over the tokens, differentiable, under the same keys. All statistics of a loss cross ranks together, so
            a variant must not reduce over tokens itself.
        pooled_by: ``sum``: it needs the sums instead.
        masks: those that are part of the objective, from its options: as in ``loss_fn.masks``, whose own come on top.
        defaults: settings of :class:`~nemo_geomask.LossConfig` that the objective's paper prescribes, used where a
            recipe gives none.
        forces: settings that the objective itself decides, whatever the recipe says: NeMo-RL's base recipes spell
            out every default, so a ``false`` there is no statement.
        refuses: settings that must stay falsy, each with the reason.
        options: pydantic model of the variant's own settings (``loss_fn.options``).
        source: paper and equation.
        parts: the surrogate in formula and words, or a function of the settings that chooses among some. ``{name}``
            stands for a setting or an option; ``docs/plugins.md`` says what else can be filled in.
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
