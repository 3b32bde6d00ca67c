"""Kernels over [rows, vocabulary] logits, behind one dispatch."""

from __future__ import annotations

from nemo_geomask.kernels.cpu import Incoming
from nemo_geomask.kernels.dispatch import KERNELS, Kernels, choose

__all__ = ["KERNELS", "Incoming", "Kernels", "choose"]
