"""DRO: a squared log-ratio in place of the clip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from nemo_geomask import functional as F
from nemo_geomask.config import StrictModel
from nemo_geomask.objectives.policy_ratio import REFUSED_BY_TOKEN_RATIO
from nemo_geomask.objectives.variant import Part, SurrogateInputs, Variant

if TYPE_CHECKING:
    from torch import Tensor


class DroOptions(StrictModel):
    """``loss_fn.options`` of ``dro``."""

    beta: float = Field(default=1.0, gt=0, description="Weight β of the squared log-ratio; verl has no default.")


def _dro(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    return F.quadratic(inputs.log_ratio, inputs.curr, inputs.advantages, beta=inputs.options.beta)


DRO = Variant(
    surrogate=_dro,
    refuses=REFUSED_BY_TOKEN_RATIO,
    options=DroOptions,
    source="verl `loss_mode: dro` (1dda039b9)",
    parts=(
        Part(
            "ℓ_t = −(A_t·curr − {beta}/2·(curr − {ratio_anchor})²)",
            "DRO: REINFORCE with a quadratic penalty that pulls the ratio to 1.",
        ),
    ),
)
"""Direct Reward Optimization as in verl: a squared log-ratio in place of the clip."""
