"""Environments of the sequences that NeMo-RL logs, and the mismatch of each environment.

NeMo-RL names the environment of a sequence in one place: under NeMo-Gym, the ``agent_ref`` of each sequence is part of
what the loops pass to ``Logger.log_batched_dict_as_jsonl``. Its rows are those of the batch that trains, and so are the
rows of all other columns except ``rewards`` under dynamic sampling. The loop over the data plane is an exception. It
takes ``agent_ref`` from the batch that was generated last, of which dynamic sampling may train other rows or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nemo_geomask import functional as F
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS
from nemo_geomask.records.record_schema import is_recordable_text

__all__ = ["environment_names", "mismatch_by_environment"]

_COLUMNS = ("input_lengths", "sample_loss_mask", "token_loss_mask", GENERATION_LOGPROBS, PREV_LOGPROBS)
"""Keys of the logged batch that the mismatch is computed from."""


def environment_names(to_log: Mapping[str, Any]) -> list[str | None] | None:
    """Return the name of each logged sequence's environment, None where it is missing; None if no names are logged."""
    agents = to_log.get("agent_ref")
    if not isinstance(agents, list):
        return None
    names = [agent.get("name") if isinstance(agent, Mapping) else None for agent in agents]
    return [name if is_recordable_text(name) else None for name in names]


def mismatch_by_environment(names: list[str | None], to_log: Mapping[str, Any]) -> dict[str, float]:
    r"""Return the metric ``geomask/environment/<name>/mismatch_k3`` of each environment of a logged batch.

    It is the mean of :math:`e^\Delta - 1 - \Delta` with Δ = prev − gen over the environment's trained tokens, each
    weighted by its masks, without tokens whose log-probs are not finite.

    Args:
        names: the name of each sequence's environment, see :func:`environment_names`.
        to_log: what NeMo-RL logs of the step, lists of one value a sequence.

    Returns: the metrics by name; empty if the batch has fewer than two environments, or lacks what they need.
    Raises: ValueError: the batch has another number of sequences than names.
    """
    if len({*names} - {None}) < 2 or not all(key in to_log for key in _COLUMNS):
        return {}
    sums: dict[str, tuple[float, float]] = {}
    for name, length, sample_weight, *token_lists in zip(names, *(to_log[key] for key in _COLUMNS), strict=True):
        if name is None:
            continue
        # No log-prob predicts the first token. Behind the length is padding.
        mask, gen, prev = (torch.tensor(values[1:length], dtype=torch.float64) for values in token_lists)
        is_finite = torch.isfinite(gen) & torch.isfinite(prev)
        weight = sample_weight * mask[is_finite]
        k3 = F.k3(prev[is_finite] - gen[is_finite])
        k3_sum, weight_sum = sums.get(name, (0.0, 0.0))
        sums[name] = k3_sum + float((weight * k3).sum()), weight_sum + float(weight.sum())
    return {
        f"geomask/environment/{name}/mismatch_k3": k3_sum / weight_sum
        for name, (k3_sum, weight_sum) in sorted(sums.items())
        if weight_sum > 0
    }
