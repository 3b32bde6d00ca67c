"""Who belongs to which sequence, and statistics over it.

Everything in a loss that speaks of a sequence goes through a :class:`Segments`: pool token values to one value a
sequence, work there, spread back. A loss written on it does not know how its tokens are laid out. This is also the
only place where statistics cross ranks.
"""

from __future__ import annotations

from nemo_geomask.segments.base import PaddedSegments, Pooled, Prefix, Segments
from nemo_geomask.segments.packed import PackedSegments, PackedTokens

__all__ = ["PackedSegments", "PackedTokens", "PaddedSegments", "Pooled", "Prefix", "Segments"]
