"""Pure functions on tensors: no state, no collectives, no configuration objects.

Tensors are float32 or float64 and of one layout, [B, T], [N] or any other: :func:`check_layout` asks it of all of them.
"""

from __future__ import annotations

from nemo_geomask.functional import budgets, entry, kl, ratios, reductions, surrogates
from nemo_geomask.functional.budgets import *  # noqa: F403 -- all formulas, whatever the file
from nemo_geomask.functional.entry import *  # noqa: F403
from nemo_geomask.functional.kl import *  # noqa: F403
from nemo_geomask.functional.ratios import *  # noqa: F403
from nemo_geomask.functional.reductions import *  # noqa: F403
from nemo_geomask.functional.surrogates import *  # noqa: F403

__all__ = [*budgets.__all__, *entry.__all__, *kl.__all__, *ratios.__all__, *reductions.__all__, *surrogates.__all__]
