"""Softmax kernels over logits [rows, vocabulary], in Triton and in plain torch, and the choice between them."""

from __future__ import annotations

from nemo_geomask.kernels.cpu import RowGradientInputs
from nemo_geomask.kernels.dispatch import KERNELS, Kernels, choose

__all__ = ["KERNELS", "Kernels", "RowGradientInputs", "choose"]
