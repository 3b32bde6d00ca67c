"""Values of a batch that the training loop of this process has and its policy does not get, for ``loss_fn.record``.

NeMo-RL does not put into the training batch:

- rewards, except in PPO and the single controller: NeMo-RL's ``Logger`` is replaced by a :class:`RewardLogger`, which
  takes them from what is logged of the step after it;
- environments: under NeMo-Gym, the ``agent_ref`` of each sequence is logged together with the rewards. The rows of what
  is logged are those of the batch that trains, except those of ``rewards`` under dynamic sampling. The loop over the
  data plane takes ``agent_ref`` from the batch that was generated last, of which dynamic sampling may train other rows
  or none;
- the versions of the weights that generated each sample: the asynchronous loops' replay buffer knows them, but does not
  return them, see :class:`ReplayBufferClass`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nemo_geomask import functional as F
from nemo_geomask.records.record_schema import is_recordable_text

_log = logging.getLogger("nemo_geomask")
_TRAIN_LOG = "train_data_step"
"""Start of the name of NeMo-RL's log of a training batch; the number of the step follows."""


class LoggedRows(NamedTuple):
    """Values that NeMo-RL logs of the sequences of a step; None for one that it did not log."""

    rewards: list[float] | None = None
    environments: list[str | None] | None = None


@dataclass
class LoopValues:
    """Values of this process's training loop that its policy does not receive."""

    logged_rows: Future[LoggedRows] | None = None  # of the last recorded step, until NeMo-RL logs them
    versions: Any = None  # Ray's reference to the versions of the weights that generated each row of the next batch
    trained_version: int | None = None  # version of the weights that train on them; None if the loop did not name it
    is_asynchronous: bool = False
    uses_data_plane: bool = False  # True if the batch of the last step was in the data plane

    def resolve_logged_rows(self, rows: LoggedRows) -> None:
        """Hand over what NeMo-RL logged of the last recorded step."""
        if self.logged_rows is not None and not self.logged_rows.done():
            self.logged_rows.set_result(rows)
        self.logged_rows = None


loop_values = LoopValues()
"""Values of this process's loop."""


def give_up_logged_rows() -> None:
    """Let the record of the last step be written without rewards and environments, which will not come any more."""
    loop_values.resolve_logged_rows(LoggedRows())


class RewardLogger:
    """NeMo-RL's ``Logger``; rewards and environments of each step that it logs also go to the step's record.

    Args:
        logger: NeMo-RL's, to which everything is passed on.
        logs_mismatch: True to log the mismatch of each environment as a metric, too.
    """

    def __init__(self, logger: Any, *, logs_mismatch: bool = False) -> None:
        self._logger = logger
        self._logs_mismatch = logs_mismatch
        self._has_failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def log_batched_dict_as_jsonl(self, to_log: Mapping[str, Any], filename: str) -> Any:
        """Log a batch, see NeMo-RL's ``Logger.log_batched_dict_as_jsonl``."""
        if not filename.startswith(_TRAIN_LOG):
            return self._logger.log_batched_dict_as_jsonl(to_log, filename)
        # Under dynamic sampling, the rewards of the rows that train are those that passed the filter. The loop over the
        # data plane does not filter the agents, see above.
        is_filtered = "filtered_rewards" in to_log
        rewards = to_log.get("filtered_rewards" if is_filtered else "rewards")
        environments = None if is_filtered and loop_values.uses_data_plane else environment_names(to_log)
        loop_values.resolve_logged_rows(LoggedRows(None if rewards is None else list(rewards), environments))
        result = self._logger.log_batched_dict_as_jsonl(to_log, filename)
        if environments is not None and self._logs_mismatch:
            self._log_mismatch(environments, to_log, filename)
        return result

    def _log_mismatch(self, environments: list[str | None], to_log: Mapping[str, Any], filename: str) -> None:
        """Log the mismatch of each environment; the first error is logged, too."""
        try:
            metrics = mismatch_by_environment(environments, to_log)
            if metrics:
                step = int(filename.removeprefix(_TRAIN_LOG).removesuffix(".jsonl"))
                self._logger.log_metrics(metrics, step, prefix="train")
        except Exception:
            if not self._has_failed:
                _log.exception("%s: the mismatch by environment is not logged", filename)
            self._has_failed = True


class ReplayBufferClass:
    """Proxy of the Ray actor class of NeMo-RL's replay buffer; its handles' ``sample`` also requests weight versions.

    Args:
        actor_class: NeMo-RL's.
    """

    def __init__(self, actor_class: Any) -> None:
        self._actor_class = actor_class

    def options(self, **options: Any) -> ReplayBufferClass:
        """Return the class with Ray's options."""
        return ReplayBufferClass(self._actor_class.options(**options))

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the buffer's actor and return its handle."""
        loop_values.is_asynchronous = True
        handle = self._actor_class.remote(*args, **kwargs)
        # Only this handle, which the training loop uses, is changed. Pickled copies are plain handles again.
        handle.sample = _SampleMethod(handle)
        return handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor_class, name)


class _SampleMethod:
    """Replacement for the ``sample`` method of the replay buffer's handle."""

    def __init__(self, handle: Any) -> None:
        self._ray_call = handle.__ray_call__

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        # These run in the buffer's process, where this package may be missing: Ray pickles them by value, because they
        # are defined in a function.
        def sample_and_keep_versions(buffer: Any, args: Any, kwargs: Any) -> Any:
            groups, numbers = getattr(buffer, "trajectories", ()), getattr(buffer, "trajectory_versions", ())
            versions = {id(group): number for group, number in zip(groups, numbers, strict=False)}
            buffer.nemo_geomask_versions = None
            answer = buffer.sample(*args, **kwargs)
            drawn = answer.get("trajectories", ()) if isinstance(answer, dict) else ()
            if drawn and all(id(group) in versions and "total_reward" in group.get("batch", ()) for group in drawn):
                rows = [(versions[id(group)], len(group["batch"]["total_reward"])) for group in drawn]
                buffer.nemo_geomask_versions = [int(version) for version, count in rows for _ in range(count)]
            return answer

        def versions_of_sample(buffer: Any) -> Any:
            return buffer.nemo_geomask_versions

        sample = self._ray_call.remote(sample_and_keep_versions, args, kwargs)
        loop_values.versions = self._ray_call.remote(versions_of_sample)  # the actor runs calls in order
        loop_values.trained_version = kwargs.get("current_weight_version")
        return sample


_COLUMNS = ("input_lengths", "sample_loss_mask", "token_loss_mask", "generation_logprobs", "prev_logprobs")
"""Fields of the logged batch that the mismatch is computed from."""


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
