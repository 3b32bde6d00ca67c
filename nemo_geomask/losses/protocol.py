"""Enums of NeMo-RL's loss protocol.

NeMo-RL compares members by identity (``normalizer is MetricNormalizer.TOKENS``). So a loss must return NeMo-RL's own
members if ``nemo_rl`` is importable, and members of the enums here if it is not. A loss therefore stores plain strings
and calls :func:`resolve` at each access; a pickled loss adapts to the process that unpickles it.
"""

from __future__ import annotations

import enum
import importlib
from typing import Any

LossType = enum.Enum("LossType", {"TOKEN_LEVEL": "token_level", "SEQUENCE_LEVEL": "sequence_level"})
"""Global count that divides the loss."""
LossInputType = enum.Enum("LossInputType", {"LOGIT": "logit", "LOGPROB": "logprob"})
"""First argument of a loss: logits or log-probs."""
MetricNormalizer = enum.Enum("MetricNormalizer", {"TOKENS": "tokens", "SEQUENCES": "sequences", "NONE": "none"})
"""Global count that divides a metric."""


def resolve(member: enum.Enum) -> Any:
    """Return NeMo-RL's member of the same enum and value, or ``member`` itself if NeMo-RL has none.

    NeMo-RL v0.6.0 and v0.7.0 have no ``MetricNormalizer``.
    """
    try:
        interfaces = importlib.import_module("nemo_rl.algorithms.loss.interfaces")
    except ImportError:
        # NeMo-RL or one of its requirements is missing, so none of its trainers can be running in this process.
        return member
    enum_class = getattr(interfaces, type(member).__name__, None)
    return member if enum_class is None else enum_class(member.value)
