"""Types of arguments that several commands take."""

from __future__ import annotations

import argparse
import math

__all__ = ["above_zero"]


def above_zero(text: str) -> float:
    """A finite number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value
