"""``nemo-geomask bench``: our paths beside every peer that is importable."""

from __future__ import annotations

from typing import Any

__all__ = ["add"]


def add(subparsers: Any) -> None:
    """Register the command."""
    from nemo_geomask.bench import add_arguments

    add_arguments(
        subparsers.add_parser(
            "bench",
            help="measure log-probs, losses and sequence statistics beside the peers that are importable",
            description="Measure log-probs, losses and sequence statistics: ours and every importable peer's in turn, "
            "with medians and quartiles, bytes, memory, launches, collectives and errors against float64.",
        )
    )
