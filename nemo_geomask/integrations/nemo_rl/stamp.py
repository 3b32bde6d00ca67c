"""What the replay buffer is asked in its own process, where nemo_geomask may be missing: standard library only."""

from __future__ import annotations

from typing import Any

__all__ = ["sample"]


def sample(buffer: Any, key: str, args: Any, kwargs: Any) -> Any:
    """``buffer.sample(…)``, each group's batch with the version of the weights that sampled it under ``key``, [B]."""
    groups, numbers = getattr(buffer, "trajectories", ()), getattr(buffer, "trajectory_versions", ())
    versions = {id(group): number for group, number in zip(groups, numbers, strict=False)}
    answer = buffer.sample(*args, **kwargs)
    drawn = answer.get("trajectories", ()) if isinstance(answer, dict) else ()
    if all(id(group) in versions and "total_reward" in group.get("batch", ()) for group in drawn):
        for group in drawn:
            rewards = group["batch"]["total_reward"]
            group["batch"][key] = rewards.new_full(rewards.shape, versions[id(group)]).long()
    return answer
