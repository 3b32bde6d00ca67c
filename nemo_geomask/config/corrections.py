"""Types of the corrections that plugins can provide: mask statistics, and levels and truncations of the weight.

The weight is the importance weight π_old/μ, which corrects the mismatch between training and generation engine. A
correction consists of one function of tensors and a description. There is one plugin group for each type; it lists the
names of the plugins and those of the built-in corrections, whose functions are in ``losses/``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from nemo_geomask.config.plugins import PluginGroup

T = TypeVar("T")


@dataclass(frozen=True)
class MaskStatistic:
    """Statistic of each token that a mask compares with its bounds.

    Attributes:
        of: function of two float32 tensors of one shape, the log-probs whose difference is the mask's ``log_ratio``:
            prev and gen, curr and prev, or curr and gen. It returns a tensor of the same shape and must not reduce over
            tokens. Where both log-probs are 0, its value is not used.
        signed: True if the statistic is negative where the token has become less likely; lower bounds on it are then
            negative, too.
        description: noun phrase for the statistic, for the sentences of ``nemo-geomask check``.
    """

    of: Callable[[Any, Any], Any]
    signed: bool = False
    description: str = ""


@dataclass(frozen=True)
class WeightLevel:
    """Level of the weight: how the mismatch of a sequence's tokens becomes the weight of each of them.

    Attributes:
        log_weight: function of three float32 tensors of one shape: Δ = prev − gen of each token, the sum of Δ over the
            token's sequence, and the number of trained tokens in that sequence. It returns the logarithm of the weight,
            in the same shape.
        over: ``turn`` if sum and number are those of the token's turn, the contiguous run of trained tokens.
        description: completes the sentence "The weight against the mismatch is …" of ``nemo-geomask check``.
    """

    log_weight: Callable[[Any, Any, Any], Any]
    description: str = ""
    over: Literal["sequence", "turn"] = "sequence"


@dataclass(frozen=True)
class Truncation:
    """Truncation of the weight.

    Attributes:
        of: function of the logarithm of the weight (float32), called with ``min=`` and ``max=``, the bounds on the
            weight itself or None; returns a :class:`nemo_geomask.functional.Weight`.
        description: participle such as "clamped", which follows the weight and precedes the bounds in the sentence of
            ``nemo-geomask check``.
    """

    of: Callable[..., Any]
    description: str = ""


def _plugin_group(cls: type[T], group: str, noun: str, key: str, *built_in: str) -> PluginGroup[T]:
    """Return the group of the plugins of one type, with the names of the built-in corrections of that type."""
    return PluginGroup(
        group=f"nemo_geomask.{group}",
        noun=noun,
        key=key,
        requirement=f"a nemo_geomask.config.{cls.__name__} (see docs/how_to/plugin_corrections.md)",
        accepts=lambda plugin: isinstance(plugin, cls),
        # These paths are placeholders and never imported: the loss has its own functions for the built-in names.
        built_in={name: f"{__name__}:{name}" for name in built_in},
    )


SIGNED = ("prob_diff", "binary_kl", "binary_kl_reverse", "binary_kl_max")
"""Built-in statistics that are negative where the token has become less likely; lower bounds on them are negative."""
STATISTICS = _plugin_group(
    MaskStatistic, "mask_statistics", "statistic", "loss_fn.masks", "ratio", "ratio_abs", "k2", "k3", *SIGNED
)
LEVELS = _plugin_group(
    WeightLevel,
    "weight_levels",
    "level",
    "loss_fn.is_correction_level",
    "token",
    "turn",
    "turn_mean",
    "sequence",
    "sequence_mean",
    "masks_only",
)
TRUNCATIONS = _plugin_group(
    Truncation,
    "truncations",
    "truncation",
    "loss_fn.truncated_importance_sampling_type",
    "tis",
    "icepop",
    "seq-mask-tis",
)
