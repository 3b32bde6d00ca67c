"""Dimensions by which trained tokens are split into bins: probability, position, turn, length, staleness and so on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nemo_geomask.tools.diagnose.read.record_reader import Array

ENVIRONMENT = "environment"
"""Value of ``--by`` for the names of environments, which are not known in advance and so have no edges."""
SURPRISE_EDGES = np.array([1e-3, 1e-2, 0.1, 0.35, 0.7, 1.2, 2.0, 3.0, 4.6, 6.9])
"""Edges between the bins of a token's surprise −gen, in nats; above 4.6 its probability is below 1 %."""


@dataclass(frozen=True)
class Dimension:
    """A property of a token, or of its sequence, that the mismatch may depend on, by its name for ``--by``.

    Bin i holds the values from edges[i-1] up to but excluding edges[i]; counts are integers. ``requirement`` are the
    data that it needs besides log-probs.
    """

    name: str
    edges: Array
    unit: str
    is_count: bool = True
    requirement: str = ""

    @property
    def bin_count(self) -> int:
        """Number of bins."""
        return len(self.edges) + 1

    def label(self, first: int, last: int) -> str:
        """Return the range of values in the bins ``first`` to ``last`` as text, such as "16 to 23" or "above 0"."""
        low, high = self._edge(first - 1), self._edge(last)
        if self.is_count:
            if low is None and high == 1:
                return "0"
        elif low == 0:
            return "0" if high == 0 else "above 0" if high is None else f"above 0 to {high:g}"
        if low is None:
            return f"all {self.unit}" if high is None else f"below {high:g}"
        if high is None:
            return f"{low:g} and more"
        last_value = high - 1 if self.is_count else high
        return f"{low:g}" if low == last_value else f"{low:g} to {last_value:g}"

    def describe(self, first: int, last: int) -> str:
        """Return the range of values in the bins ``first`` to ``last`` as a phrase, with what the values are."""
        values = f"{self.label(first, last)} {self.unit}"
        if self.edges is not SURPRISE_EDGES:
            return f"{self.name} {self.label(first, last)} ({self.unit})"
        low, high = self._edge(first - 1), self._edge(last)
        bounds = [f"{math.exp(-edge):.2g}" for edge in (high, low) if edge is not None]
        if len(bounds) == 2:
            return f"probability {bounds[0]} to {bounds[1]} ({values})"
        return f"probability {'above' if low is None else 'below'} {bounds[0]} ({values})"

    def _edge(self, index: int) -> float | None:
        """Return an edge as it is printed, or None beyond the outermost edges.

        Edges of ±1e-6 put the value 0 into a separate bin; both are printed as 0.
        """
        if not 0 <= index < len(self.edges):
            return None
        return round(float(self.edges[index]), 5) + 0.0  # "+ 0.0" turns -0.0 into 0.0


# 16, 24, 32, 48, …, 131072: two bins for each doubling.
_HALF_OCTAVES = np.sort(np.concatenate([2.0 ** np.arange(4, 18), 3.0 * 2.0 ** np.arange(3, 17)]))
DIMENSIONS = (
    Dimension("probability", SURPRISE_EDGES, "nats of surprise", is_count=False),
    Dimension("position", _HALF_OCTAVES, "tokens into the response"),
    Dimension("turn", np.array([1.0, 2, 3, 4, 6, 8]), "earlier turns", requirement="responses of several turns"),
    Dimension("length", _HALF_OCTAVES, "tokens"),
    Dimension(
        "staleness",
        np.array([1.0, 2, 3, 4, 6, 8, 12, 16]),
        "steps",
        requirement="the flight recorder's weight versions, of asynchronous runs",
    ),
    Dimension("reward", np.array([-1e-6, 1e-6, 0.25, 0.5, 0.75, 1.0]), "reward", is_count=False),
    Dimension("advantage", np.array([-1e-6, 1e-6]), "sign", is_count=False),
    Dimension(
        "entropy",
        np.array([0.01, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0]),
        "nats of entropy",
        is_count=False,
        requirement="loss_fn.record.entropy: true",
    ),
)
DIMENSIONS_BY_NAME = {dimension.name: dimension for dimension in DIMENSIONS}
