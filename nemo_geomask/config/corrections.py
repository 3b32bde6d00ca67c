"""Corrections that other distributions bring: statistics of masks, levels and truncations of the weight.

Each is data plus one function of tensors, named where this package's own are; nothing of it is imported before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from nemo_geomask.config.plugins import PluginGroup

__all__ = ["LEVELS", "SIGNED", "STATISTICS", "TRUNCATIONS", "MaskStatistic", "Truncation", "WeightLevel"]


@dataclass(frozen=True)
class MaskStatistic:
    """What a mask compares with its bounds at each token.

    Attributes:
        of: from the two log-probs whose difference the mask's ``log_ratio`` is, float32 in one layout: the same shape.
            It may not reduce over tokens; where both are 0 it is not looked at.
        signed: whether it is negative where the token has become less likely, as lower bounds on it then are.
        words: what it is called in ``check``.
    """

    of: Callable[[Any, Any], Any]
    signed: bool = False
    words: str = ""


@dataclass(frozen=True)
class WeightLevel:
    """How the mismatch makes the weight of each token.

    Attributes:
        log_weight: from three float32 tensors of one layout: Δ = prev − gen of the token, the sum of its sequence's and
            the number of the sequence's trained tokens; gives the logarithm of the weight, the same shape.
        words: the weight, as in "the weight against the mismatch is the …".
    """

    log_weight: Callable[[Any, Any, Any], Any]
    words: str = ""


@dataclass(frozen=True)
class Truncation:
    """What becomes of a weight.

    Attributes:
        of: called with the logarithm of the weight, float32, and ``min=`` and ``max=``, the bounds on the weight itself
            or None; gives a :class:`nemo_geomask.functional.Weight`.
        words: what it does, as in "the weight is …".
    """

    of: Callable[..., Any]
    words: str = ""


T = TypeVar("T")


def _group(kind: type[T], group: str, what: str, key: str, *own: str) -> PluginGroup[T]:
    return PluginGroup(
        group=f"nemo_geomask.{group}",
        what=what,
        key=key,
        must_be=f"a nemo_geomask.config.{kind.__name__} (see docs/plugins.md)",
        fits=lambda found: isinstance(found, kind),
        built_in={name: f"{__name__}:{name}" for name in own},
    )


SIGNED = ("prob_diff", "binary_kl", "binary_kl_reverse", "binary_kl_max")
"""Statistics that are negative where the token has become less likely, as lower bounds on them are."""
STATISTICS = _group(MaskStatistic, "mask_statistics", "statistic", "loss_fn.masks", "ratio", "k2", "k3", *SIGNED)
LEVELS = _group(
    WeightLevel, "weight_levels", "level", "loss_fn.is_correction_level", "token", "sequence", "sequence_mean"
)
TRUNCATIONS = _group(
    *(Truncation, "truncations", "truncation", "loss_fn.truncated_importance_sampling_type"),
    *("tis", "icepop", "seq-mask-tis"),
)
