"""The enums by which NeMo-RL's trainers read a loss.

NeMo-RL compares by identity (``kind is MetricNormalizer.TOKENS``), so a loss must answer with NeMo-RL's own members
wherever ``nemo_rl`` is importable, and with equal-valued ones where it is not. A loss therefore keeps plain strings
and asks this module at each access; a pickled loss adapts to the process that opens it.
"""

from __future__ import annotations

import enum
import importlib
from typing import Any

__all__ = ["LossInputType", "LossType", "MetricNormalizer", "resolve"]

LossType = enum.Enum("LossType", {"TOKEN_LEVEL": "token_level", "SEQUENCE_LEVEL": "sequence_level"})
"""Global count that the loss is divided by."""
LossInputType = enum.Enum("LossInputType", {"LOGIT": "logit", "LOGPROB": "logprob"})
"""What a loss is called with."""
MetricNormalizer = enum.Enum("MetricNormalizer", {"TOKENS": "tokens", "SEQUENCES": "sequences", "NONE": "none"})
"""Global count that a metric is divided by."""


def resolve(member: enum.Enum) -> Any:
    """NeMo-RL's member of the same enum and value, or ``member`` itself where NeMo-RL has none.

    NeMo-RL v0.6.0 and v0.7.0 have no ``MetricNormalizer``.
    """
    try:
        interfaces = importlib.import_module("nemo_rl.algorithms.loss.interfaces")
    except ImportError:
        # Absent, the empty placeholder package, or without its own requirements: no trainer of NeMo-RL's can be
        # running in this process.
        return member
    own = getattr(interfaces, type(member).__name__, None)
    return member if own is None else own(member.value)
