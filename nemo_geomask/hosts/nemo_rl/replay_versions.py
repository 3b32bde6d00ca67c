"""Versions of the weights that generated the samples of NeMo-RL's replay buffer.

The functions run in the buffer's own process, where nemo_geomask may be missing. This module therefore imports only the
standard library.
"""

from __future__ import annotations

from typing import Any

__all__ = ["sample_and_keep_versions", "versions_of_sample"]

_ATTRIBUTE = "_nemo_geomask_versions"


def sample_and_keep_versions(buffer: Any, args: Any, kwargs: Any) -> Any:
    """Call ``buffer.sample(*args, **kwargs)``, and keep the version of the weights that generated each row.

    Args:
        buffer: NeMo-RL's replay buffer.
        args: positional arguments of ``sample``.
        kwargs: keyword arguments of ``sample``.
    """
    groups, numbers = getattr(buffer, "trajectories", ()), getattr(buffer, "trajectory_versions", ())
    versions = {id(group): number for group, number in zip(groups, numbers, strict=False)}
    answer = buffer.sample(*args, **kwargs)
    drawn = answer.get("trajectories", ()) if isinstance(answer, dict) else ()
    rows: list[int] | None = None
    if drawn and all(id(group) in versions and "total_reward" in group.get("batch", ()) for group in drawn):
        rows = [int(versions[id(group)]) for group in drawn for _ in group["batch"]["total_reward"]]
    setattr(buffer, _ATTRIBUTE, rows)
    return answer


def versions_of_sample(buffer: Any) -> list[int] | None:
    """Return the version of each row of the buffer's last sample; None if they are unknown.

    Args:
        buffer: one whose samples are taken by :func:`sample_and_keep_versions`.
    """
    return getattr(buffer, _ATTRIBUTE, None)
