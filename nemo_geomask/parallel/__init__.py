"""Exactness across ranks: vocabulary-parallel log-probs, steps of a given number of documents."""

from __future__ import annotations

from nemo_geomask.parallel.accumulate import DocumentStep, collect_documents
from nemo_geomask.parallel.vocab import vocab_parallel_logprobs

__all__ = ["DocumentStep", "collect_documents", "vocab_parallel_logprobs"]
