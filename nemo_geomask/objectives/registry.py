"""Registry of the objectives by name: the entry-point group ``nemo_geomask.losses``."""

from __future__ import annotations

from nemo_geomask.config.plugins import Entry, PluginGroup
from nemo_geomask.objectives.variant import Variant

__all__ = ["BUILT_IN", "GROUP", "LOSSES", "Entry", "available", "load"]

GROUP = "nemo_geomask.losses"
BUILT_IN = {
    name: f"nemo_geomask.objectives.{module}:{name.upper()}"
    for name, module in {
        "clipped_pg": "clipped_pg",
        "gspo": "gspo",
        "gspo_token": "gspo",
        "gmpo": "gmpo",
        "cispo": "clipped_pg",
        "reinforce": "clipped_pg",
        "sapo": "sapo",
        "dppo": "probability_bounds",
        "ipo": "probability_bounds",
        "vespo": "vespo",
        "dro": "dro",
        "topr": "topr",
    }.items()
}
"""This package's entry points, the same as in pyproject.toml."""

LOSSES: PluginGroup[Variant] = PluginGroup(
    group=GROUP,
    noun="loss",
    key="loss_fn.name",
    requirement="a nemo_geomask.losses.Variant instance (data plus one function, see docs/how_to/plugins.md)",
    accepts=lambda variant: isinstance(variant, Variant),
    built_in=BUILT_IN,
    # Papers' names for losses that NeMo-RL's flags select. Without them, "grpo" would suggest the similar name "gspo".
    aliases=dict.fromkeys(("grpo", "dapo", "ppo", "rloo"), "clipped_pg"),
)
available = LOSSES.available
load = LOSSES.load
