"""Losses: the object a trainer calls, the variants and the registry over their entry points."""

from __future__ import annotations

from nemo_geomask.losses.build import build_loss
from nemo_geomask.losses.loss import PolicyLoss
from nemo_geomask.losses.prestep import BeforeStep, Decision, OpenBatch
from nemo_geomask.losses.registry import GROUP, Entry, available, load
from nemo_geomask.losses.variant import NoOptions, Part, SurrogateInputs, Variant

__all__ = [
    "GROUP",
    "BeforeStep",
    "Decision",
    "Entry",
    "NoOptions",
    "OpenBatch",
    "Part",
    "PolicyLoss",
    "SurrogateInputs",
    "Variant",
    "available",
    "build_loss",
    "load",
]
