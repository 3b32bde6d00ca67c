"""Rejection masks: which tokens or sequences stay in the surrogate.

Every rule is a statistic of a log-ratio, pooled at a level and compared with bounds. These functions hold the
two elementary steps; pooling over a sequence belongs to :mod:`nemo_geomask.segments`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from nemo_geomask.functional.entry import check_choice, check_layout
from nemo_geomask.functional.ratios import LOG_RATIO_LIMIT

__all__ = ["Statistic", "token_statistic"]

Statistic = Literal["ratio", "k2", "k3"]


def token_statistic(log_ratio: Tensor, statistic: Statistic) -> Tensor:
    r"""Per-token value that a mask pools, for a log-ratio x = log ρ.

    ============ ======================== ==========================================================
    statistic    value                    pooled mean estimates
    ============ ======================== ==========================================================
    ``ratio``    :math:`x`                log of the geometric mean of ρ; bounds are taken as logs
    ``k2``       :math:`x^2 / 2`          half the mean squared log-ratio
    ``k3``       :math:`e^x - 1 - x`      KL(sampler ‖ other) with tokens from the sampler
    ============ ======================== ==========================================================

    Means of signed x cancel (ρ = ¼, 1, 4 has geometric mean 1); k2 and k3 are non-negative and don't.

    Args:
        log_ratio: any shape, float32.
        statistic: one of the table.

    Returns:
        Same shape, float32.

    Raises:
        ArgumentError: an unknown statistic.
        ShapeError: half precision or integers.

    Source: Schulman, "Approximating KL divergence" (2020); trust-region masking, arXiv:2512.23075.
    """
    check_choice("statistic", statistic, get_args(Statistic))
    check_layout(log_ratio=log_ratio)
    if statistic == "ratio":
        return log_ratio
    if statistic == "k2":
        return log_ratio.square() / 2
    clamped = log_ratio.clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(clamped) - clamped
