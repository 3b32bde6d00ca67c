"""A whole batch as its masks judge it: before the step, and for whoever looks at it afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig, MaskRule
from nemo_geomask.errors import MissingDataError
from nemo_geomask.losses.batch import TokenBatch, read, take_padded
from nemo_geomask.losses.observe import Observed, observe
from nemo_geomask.losses.rejection import removed_by, rule_values
from nemo_geomask.metrics import Metric
from nemo_geomask.segments import PaddedSegments

__all__ = ["budget_bounds", "seen_by", "verdicts"]


def seen_by(
    rules: Sequence[MaskRule], config: LossConfig, data: Mapping[str, Any], *, curr: Tensor | None = None
) -> tuple[TokenBatch, Observed, list[Metric]]:
    """A batch as the rules judge it, with what the weight pools too, and how much of it is not finite.

    ``data`` is NeMo-RL's training batch [B, T], see :func:`nemo_geomask.losses.batch.take_padded`; ``curr`` [B, T-1] is
    log π of the current policy, None: those before the step stand for it.

    Raises: MissingDataError: ``prev_logprobs`` are missing.
    """
    if curr is None and "prev_logprobs" not in data:
        raise MissingDataError(
            "batch_veto, denominator: kept and a mask's budget look at data['prev_logprobs'] before the step, but the "
            "batch has none"
        )
    curr = data["prev_logprobs"][:, 1:] if curr is None else curr
    names = ("advantages", "prev", "gen") if config.needs_prev else ("advantages", "gen")
    batch, reports = read(take_padded(curr, data, names), PaddedSegments())
    seen, _ = observe(batch, rules, config)
    return batch, seen, reports


@torch.no_grad()
def budget_bounds(config: LossConfig, data: Mapping[str, Any]) -> dict[str, float]:
    """By label, the bounds that the whole batch sets for masks with a budget."""
    bounds: dict[str, float] = {}
    if config.budgets:
        batch, seen, _ = seen_by(config.budgets, config, data)
        for rule in config.budgets:
            low, high, eligible = rule_values(rule, batch, seen)
            sizes = torch.maximum(-low, high)[eligible]
            if rule.drop_at_most is not None:
                bounds[rule.label] = F.bound_by_share(sizes, rule.drop_at_most)
            elif rule.until_mean is not None:
                bounds[rule.label] = F.bound_by_mean(sizes, rule.until_mean)
    return bounds


@torch.no_grad()
def verdicts(config: LossConfig, data: Mapping[str, Any], curr: Tensor | None = None) -> dict[str, Tensor]:
    """What each mask removes of a whole batch; each judges the batch as it came.

    Args:
        config: the settings in force.
        data: as for :class:`~nemo_geomask.losses.BeforeStep`.
        curr: [B, T-1] log-probs of the current policy; None: ``prev_logprobs`` stand for them, as they are before the
            first optimiser step on the batch.

    Returns: by label, bool [B, T]: the trained tokens that are removed, a whole sequence's by a mask on sequences. None
    where nothing is known of the policy that trains.
    Raises: as :func:`seen_by`.
    """
    if not config.mask_rules or (curr is None and not config.needs_prev):
        return {}
    bounds = budget_bounds(config, data)
    batch, seen, _ = seen_by(config.mask_rules, config, data, curr=curr)
    found = {}
    for rule in config.mask_rules:
        below, above = removed_by(rule, batch, seen, bounds)
        removed = below | above if rule.by_token else batch.segments.spread(below | above)
        found[rule.label] = torch.nn.functional.pad(removed & (seen.trains != 0), (1, 0))
    return found
