"""Registry of the variants by name, from the entry-point group ``nemo_geomask.losses``."""

from __future__ import annotations

from nemo_geomask.config.plugins import Entry, PluginGroup
from nemo_geomask.losses import variants
from nemo_geomask.losses.variant import Variant

__all__ = ["BUILT_IN", "GROUP", "Entry", "available", "load"]

GROUP = "nemo_geomask.losses"
BUILT_IN = {name.lower(): f"{variants.__name__}:{name}" for name in variants.__all__}
"""This package's entry points, the same as in pyproject.toml."""
_VARIANTS: PluginGroup[Variant] = PluginGroup(
    group=GROUP,
    noun="loss",
    key="loss_fn.name",
    requirement="a nemo_geomask.losses.Variant instance (data plus one function, see docs/plugins.md)",
    accepts=lambda variant: isinstance(variant, Variant),
    built_in=BUILT_IN,
    # Papers' names for losses that NeMo-RL's flags select. Without them, "grpo" would suggest the similar name "gspo".
    aliases=dict.fromkeys(("grpo", "dapo", "ppo", "rloo"), "clipped_pg"),
)
available, load = _VARIANTS.available, _VARIANTS.load
