"""Variants by name, over the entry-point group ``nemo_geomask.losses``."""

from __future__ import annotations

from nemo_geomask.config.plugins import Entry, PluginGroup
from nemo_geomask.losses import variants
from nemo_geomask.losses.variant import Variant

__all__ = ["BUILT_IN", "GROUP", "Entry", "available", "load"]

GROUP = "nemo_geomask.losses"
# A test keeps this equal to pyproject.toml.
BUILT_IN = {name.lower(): f"{variants.__name__}:{name}" for name in variants.__all__}
_VARIANTS: PluginGroup[Variant] = PluginGroup(
    group=GROUP,
    what="loss",
    key="loss_fn.name",
    must_be="a nemo_geomask.losses.Variant instance (data plus one function, see docs/plugins.md)",
    fits=lambda found: isinstance(found, Variant),
    built_in=BUILT_IN,
    # What papers call losses that NeMo-RL's flags select; "grpo" is spelt much like "gspo", and is not it.
    known_as=dict.fromkeys(("grpo", "dapo", "ppo", "rloo"), "clipped_pg"),
)
available, load = _VARIANTS.available, _VARIANTS.load
