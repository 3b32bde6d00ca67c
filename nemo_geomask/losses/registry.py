"""Variants by name, over the entry-point group ``nemo_geomask.losses``."""

from __future__ import annotations

from nemo_geomask.config.plugins import Entry, PluginGroup
from nemo_geomask.losses.variant import Variant

__all__ = ["BUILT_IN", "GROUP", "Entry", "available", "load"]

GROUP = "nemo_geomask.losses"
# A test keeps this equal to pyproject.toml.
BUILT_IN = {
    name: f"nemo_geomask.losses.variants:{name.upper()}"
    for name in (
        "clipped_pg",
        "gspo",
        "gspo_token",
        "gmpo",
        "cispo",
        "reinforce",
        "sapo",
        "dppo",
        "ipo",
        "vespo",
        "dro",
    )
}
_VARIANTS = PluginGroup(
    group=GROUP,
    what="loss",
    key="loss_fn.name",
    must_be="a nemo_geomask.losses.Variant instance (data plus one function, see docs/plugins.md)",
    fits=lambda found: isinstance(found, Variant),
    built_in=BUILT_IN,
    # What papers call losses that NeMo-RL's flags select; "grpo" is spelt much like "gspo", and is not it.
    known_as=dict.fromkeys(("grpo", "dapo", "ppo", "rloo"), "clipped_pg"),
)
available = _VARIANTS.available


def load(name: str) -> Variant:
    """The variant registered under ``name``, or found at ``module:attribute``.

    Raises: PluginError: as :meth:`~nemo_geomask.config.plugins.PluginGroup.load`.
    """
    found: Variant = _VARIANTS.load(name)
    return found
