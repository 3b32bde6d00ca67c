"""Adapter to vLLM: rollout batches from its outputs, and new weights for a running engine."""

from nemo_geomask.hosts.vllm.rollouts import load_weights, rollout_batch

__all__ = ["load_weights", "rollout_batch"]
