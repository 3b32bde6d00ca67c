"""Exactness across ranks: vocabulary-parallel log-probs."""

from __future__ import annotations

from nemo_geomask.parallel.vocab import vocab_parallel_logprobs

__all__ = ["vocab_parallel_logprobs"]
