"""Build a loss from its configuration, with the objective's defaults and masks applied."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from nemo_geomask.errors import Problem
from nemo_geomask.losses.policy_loss import PolicyLoss
from nemo_geomask.objectives.resolved_loss import resolve_loss


def build_loss(config: Mapping[str, Any] | BaseModel, *, use_fused_linear_logprobs: bool = False) -> PolicyLoss:
    """Build the loss that ``config`` describes.

    Args:
        config: a :class:`~nemo_geomask.LossConfig`, the ``loss_fn:`` mapping of a recipe, or another pydantic model
            of it such as NeMo-RL's ``ClippedPGLossConfig`` (whose unset fields are ignored).
        use_fused_linear_logprobs: attribute for NeMo-RL, see :class:`~nemo_geomask.losses.PolicyLoss`.

    Returns: a picklable callable under NeMo-RL's loss protocol.
    Raises: ConfigError: unknown keys, values out of range, settings that contradict each other or the variant;
    PluginError: the variant can't be loaded.

    Example:
        >>> from nemo_geomask import build_loss
        >>> loss = build_loss({"name": "gspo", "use_importance_sampling_correction": True,
        ...                    "is_correction_level": "sequence_mean"})
        >>> loss.loss_type.value
        'sequence_level'
    """
    loss, problems = build_with_warnings(config, use_fused_linear_logprobs=use_fused_linear_logprobs)
    for problem in problems:
        warnings.warn(str(problem), UserWarning, stacklevel=2)
    return loss


def build_with_warnings(
    config: Mapping[str, Any] | BaseModel, *, use_fused_linear_logprobs: bool = False
) -> tuple[PolicyLoss, tuple[Problem, ...]]:
    """Build a loss like :func:`build_loss`, but return its warnings: settings that are allowed but probably not meant.

    Arguments and errors are those of :func:`build_loss`.
    """
    resolved, problems = resolve_loss(config)
    loss = PolicyLoss(
        resolved.config, resolved.variant, resolved.options, use_fused_linear_logprobs=use_fused_linear_logprobs
    )
    return loss, problems
