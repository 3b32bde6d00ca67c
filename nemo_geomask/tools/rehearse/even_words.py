"""Environment of a rehearsal: the reward is the share of even words, which a random model can learn."""

from __future__ import annotations

import re
from typing import Any

import ray
import torch
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.environments.interfaces import EnvironmentReturn


@ray.remote  # type: ignore[untyped-decorator, unused-ignore]
class EvenWords:
    """Single-turn environment."""

    def __init__(self, config: Any) -> None:
        pass

    def step(self, message_logs: list[Any], metadata: list[Any]) -> Any:
        """Return rewards in [0, 1] and end every episode."""
        words = [re.findall(r"w(\d+)", log[-1]["content"]) for log in message_logs]
        rewards = torch.tensor([sum(int(word) % 2 == 0 for word in row) / max(len(row), 1) for row in words])
        count = len(message_logs)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "w3"}] * count,
            metadata=metadata,
            next_stop_strings=[None] * count,
            rewards=rewards,
            terminateds=torch.ones(count, dtype=torch.bool),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Return the batch unchanged, without metrics."""
        return batch, {}

    def shutdown(self) -> bool:
        """Return True: there is nothing to shut down."""
        return True


def collate_with_agents(name: str, prompts: list[Any]) -> Any:
    """Return NeMo-RL's batch of prompts, each with an agent of that name, under NeMo-Gym's key."""
    batch = rl_collate_fn(prompts)
    batch["agent_ref"] = [{"name": name} for _ in prompts]
    return batch
