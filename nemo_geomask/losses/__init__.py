"""Losses: the loss object, the pre-step pass, the variants and the registry of their entry points."""

from __future__ import annotations

from nemo_geomask.losses.build import build_loss
from nemo_geomask.losses.policy_loss import PolicyLoss
from nemo_geomask.losses.prestep import Decision, OpenBatch, PrestepPass
from nemo_geomask.objectives.registry import GROUP, Entry, available, load
from nemo_geomask.objectives.variant import NoOptions, Part, SurrogateInputs, Variant

__all__ = [
    "GROUP",
    "Decision",
    "Entry",
    "NoOptions",
    "OpenBatch",
    "Part",
    "PolicyLoss",
    "PrestepPass",
    "SurrogateInputs",
    "Variant",
    "available",
    "build_loss",
    "load",
]
