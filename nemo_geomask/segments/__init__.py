"""Token layouts: which token belongs to which sequence, and statistics over sequences.

All sequence statistics of a loss go through a :class:`Segments`: it pools token values to one value a sequence and
spreads those back over the tokens. So a loss does not depend on how its tokens are laid out. Only this package
exchanges statistics between ranks.
"""

from __future__ import annotations

from nemo_geomask.segments.packed import PackedSegments, PackedTokens
from nemo_geomask.segments.padded import NO_TENSORS, PaddedSegments, Pooled, Prefix, Segments

__all__ = ["NO_TENSORS", "PackedSegments", "PackedTokens", "PaddedSegments", "Pooled", "Prefix", "Segments"]
