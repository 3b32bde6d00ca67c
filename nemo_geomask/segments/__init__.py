"""Token layouts: which token belongs to which sequence, and statistics over sequences.

All sequence statistics of a loss go through a :class:`Segments`. It pools token values to one value for each sequence,
and spreads such values over the tokens. A loss therefore does not depend on the layout of its tokens. Only this
sub-package exchanges statistics of sequences between ranks.
"""

from __future__ import annotations

from nemo_geomask.segments.packed import PackedSegments
from nemo_geomask.segments.packed_tokens import PackedTokens
from nemo_geomask.segments.padded import NO_TENSORS, PaddedSegments, Pooled, Prefix, Segments

__all__ = ["NO_TENSORS", "PackedSegments", "PackedTokens", "PaddedSegments", "Pooled", "Prefix", "Segments"]
