"""Computations across ranks: vocabulary-parallel log-probs, and optimiser steps with a target number of documents."""

from __future__ import annotations

from nemo_geomask.parallel.accumulate import DocumentStep, collect_documents
from nemo_geomask.parallel.linear import linear_logprobs
from nemo_geomask.parallel.vocab import vocab_parallel_logprobs

__all__ = ["DocumentStep", "collect_documents", "linear_logprobs", "vocab_parallel_logprobs"]
