r"""What a sequence's prefix has used up of a trust region, token by token."""

from __future__ import annotations

from torch import Tensor

from nemo_geomask.functional.entry import check_layout

__all__ = ["position_weights"]


def position_weights(place: Tensor, length: Tensor, least: float) -> tuple[Tensor, Tensor]:
    r"""Weights that fall from 1 at the first of T tokens to ``least`` at the last, and the sum of those before each.

    .. math:: w_t = w_{min} + (1 - w_{min})\frac{T-t}{T-1}, \qquad W_{t-1} = \sum_{s<t} w_s

    Args:
        place: t from 1, any shape, float32 or float64.
        length: T, same layout; a single token weighs 1.
        least: :math:`w_{min}`.

    Returns: :math:`w_t` and :math:`W_{t-1}`.
    Raises: ShapeError: half precision, integers, or shapes that don't fit.
    Source: CPPO, arXiv:2606.10968, as in its authors' verl PR 6731, which has the padded width of the batch for T.
    """
    check_layout(place=place, length=length)
    step, before = (1.0 - least) / (length - 1.0).clamp(min=1.0), place - 1.0
    return 1.0 - step * before, before - step * before * (before - 1.0) / 2.0
