"""Weight versions for samples of NeMo-RL's replay buffer.

:func:`sample_with_versions` runs in the buffer's own process, where nemo_geomask may be missing. This module therefore
imports only the standard library.
"""

from __future__ import annotations

from typing import Any

__all__ = ["sample_with_versions"]


def sample_with_versions(buffer: Any, key: str, args: Any, kwargs: Any) -> Any:
    """Call ``buffer.sample(*args, **kwargs)``, and add the version of the weights that generated each group.

    Args:
        buffer: NeMo-RL's replay buffer.
        key: batch key under which each group's version is stored, as [B] int64.
        args: positional arguments of ``sample``.
        kwargs: keyword arguments of ``sample``.
    """
    groups, numbers = getattr(buffer, "trajectories", ()), getattr(buffer, "trajectory_versions", ())
    versions = {id(group): number for group, number in zip(groups, numbers, strict=False)}
    answer = buffer.sample(*args, **kwargs)
    drawn = answer.get("trajectories", ()) if isinstance(answer, dict) else ()
    if all(id(group) in versions and "total_reward" in group.get("batch", ()) for group in drawn):
        for group in drawn:
            rewards = group["batch"]["total_reward"]
            group["batch"][key] = rewards.new_full(rewards.shape, versions[id(group)]).long()
    return answer
