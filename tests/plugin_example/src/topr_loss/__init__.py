"""TOPR, tapered off-policy REINFORCE (arXiv:2503.14286), as a loss variant of its own distribution.

    ℓ_t = −A·log π                      where A ≥ 0
    ℓ_t = −A·sg(min(r, cap))·log π      where A < 0

Good samples are imitated whatever their ratio; bad ones are pushed away only as far as the policy still makes them.
"""

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import StrictModel
from nemo_geomask.losses import SurrogateInputs, Variant


class Options(StrictModel):
    """``loss_fn.options`` of ``topr``."""

    cap: float = Field(default=1.0, gt=0, description="Upper bound on the ratio where the advantage is negative.")


def surrogate(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    """Per-token loss; see the module."""
    ratio = F.saturating_exp(inputs.log_ratio.detach())
    capped = torch.where(inputs.advantages < 0, ratio.clamp(max=inputs.options.cap), ratio)
    weight = torch.where(inputs.advantages < 0, capped, 1.0)
    return F.Surrogate(
        loss=-inputs.advantages * weight * inputs.curr,
        ratio=ratio,
        ratio_clamped=capped,
    )


TOPR = Variant(
    surrogate=surrogate,
    defaults={"reference_policy_kl_penalty": 0.0},
    refuses={"disable_ppo_ratio": "TOPR is defined on the ratio that this setting removes"},
    options=Options,
    source="arXiv:2503.14286",
)
