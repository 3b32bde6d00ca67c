"""``ratio_anchor: gen`` in NeMo-RL: skip the forward pass for ``prev_logprobs`` that nothing reads.

NeMo-RL's trainers compute them by ``Policy.get_logprobs`` (GRPO, asynchronous GRPO, PPO), or by
``TQPolicy.get_logprobs_from_meta`` where the batch is in the data plane (synchronous GRPO, single controller); they
call neither for anything else. In the subclasses of :mod:`nemo_geomask.hosts.nemo_rl.policies`, both methods return NaN
if the loss does not read ``prev_logprobs``, which makes any unexpected reader visible. Under ``audit_fraction`` they
compute a sample of the rows.
"""

from __future__ import annotations

import inspect
import math
import weakref
from typing import Any

import torch

from nemo_geomask.config import LossConfig
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS
from nemo_geomask.hosts.nemo_rl.policy_methods import nemo_rl_method
from nemo_geomask.hosts.nemo_rl.resumed_step import resumed_step
from nemo_geomask.records.flight import choose_by_hash

__all__ = ["DataPlanePrevLogprobMethods", "PrevLogprobMethods"]

_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by policy


class PrevLogprobMethods:
    """Methods for a subclass of NeMo-RL's ``Policy``.

    Attributes:
        geomask_config: settings of the loss that trains.
    """

    geomask_config: LossConfig

    def get_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the ``prev_logprobs`` that the loss reads, see NeMo-RL's ``Policy.get_logprobs``; NaN elsewhere."""
        method = nemo_rl_method(self, "get_logprobs")
        if not self.geomask_config.skips_prev:
            return method(*args, **kwargs)
        bound = inspect.signature(method).bind(*args, **kwargs)
        data = bound.arguments["data"]
        logprobs = torch.full_like(data["input_ids"], torch.nan, dtype=torch.float32)
        if rows := _audited_rows(self, logprobs.shape[0], self.geomask_config.audit_fraction):
            bound.arguments["data"] = data.select_indices(rows)
            logprobs[rows] = method(*bound.args, **bound.kwargs)["logprobs"].to(logprobs)
        return type(data)({"logprobs": logprobs})


class DataPlanePrevLogprobMethods(PrevLogprobMethods):
    """Methods for a subclass of NeMo-RL's ``TQPolicy``, whose batches are in the data plane."""

    def get_logprobs_from_meta(self, *args: Any, **kwargs: Any) -> Any:
        """Compute ``prev_logprobs`` as :meth:`get_logprobs` does, for NeMo-RL's ``TQPolicy.get_logprobs_from_meta``."""
        method = nemo_rl_method(self, "get_logprobs_from_meta")
        if not self.geomask_config.skips_prev:
            return method(*args, **kwargs)
        bound = inspect.signature(method).bind(*args, **kwargs)
        meta = bound.arguments["meta"]
        policy: Any = self
        shape = policy.read_from_dataplane(meta, select_fields=[GENERATION_LOGPROBS])[GENERATION_LOGPROBS].shape
        policy.write_to_dataplane(meta, fields={PREV_LOGPROBS: torch.full(shape, torch.nan)})
        if rows := _audited_rows(self, shape[0], self.geomask_config.audit_fraction):
            bound.arguments["meta"] = meta.subset(rows)
            method(*bound.args, **bound.kwargs)
        return None


def _audited_rows(policy: Any, rows: int, fraction: float) -> list[int]:
    """Choose the rows to compute by a hash of row and batch number, as many as the workers can share equally."""
    if not fraction:
        return []
    batch = _calls[policy] = _calls.get(policy, resumed_step(policy)) + 1
    # NeMo-RL splits the rows over data-parallel ranks and microbatches.
    unit = policy.sharding_annotations.get_axis_size("data_parallel") * (policy.cfg.get("logprob_batch_size") or 1)
    return choose_by_hash(batch, rows, min(rows, math.ceil(fraction * rows / unit) * unit))
