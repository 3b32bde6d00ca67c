"""Registry of the variants by name, from the entry-point group ``nemo_geomask.losses``."""

from __future__ import annotations

from typing import cast

from nemo_geomask.config.objectives import LOSSES
from nemo_geomask.config.plugins import Entry
from nemo_geomask.losses.variant import Variant

__all__ = ["BUILT_IN", "GROUP", "Entry", "available", "load"]

GROUP = LOSSES.group
BUILT_IN = LOSSES.built_in
"""This package's entry points, the same as in pyproject.toml."""
available = LOSSES.available


def load(name: str) -> Variant:
    """Return the variant of a registered name, or of ``module:attribute``.

    Raises: PluginError: see :meth:`~nemo_geomask.config.plugins.PluginGroup.load`.
    """
    return cast(Variant, LOSSES.load(name))
