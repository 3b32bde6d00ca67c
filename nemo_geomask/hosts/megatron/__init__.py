"""Adapter to Megatron-core: its process groups, packed rows and sharded logits."""

from nemo_geomask.hosts.megatron.microbatch import pack_batch, packed_segments, policy_loss

__all__ = ["pack_batch", "packed_segments", "policy_loss"]
