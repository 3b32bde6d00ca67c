"""Configuration: the strict schema of the ``loss_fn:`` block. Its only dependency is pydantic."""

from __future__ import annotations

from nemo_geomask.config.corrections import MaskStatistic, Truncation, WeightLevel
from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.config.masks import MaskPreset, MaskRule
from nemo_geomask.config.strict import StrictModel, nearest, parse

__all__ = [
    "LossConfig",
    "MaskPreset",
    "MaskRule",
    "MaskStatistic",
    "StrictModel",
    "Truncation",
    "WeightLevel",
    "nearest",
    "parse",
]
