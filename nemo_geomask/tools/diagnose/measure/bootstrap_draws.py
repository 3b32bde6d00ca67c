"""Poisson draws for a bootstrap over sequences, reproducible whatever order the sequences are read in."""

from __future__ import annotations

import math

import numpy as np

from nemo_geomask.tools.diagnose.read.record_reader import Array

# Cumulative probabilities of a Poisson variable of mean 1; the probability of 12 and more is 1e-9.
_CUMULATIVE = np.cumsum([math.exp(-1) / math.factorial(count) for count in range(12)])
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def poisson_draws(step: int, rows: Array, replicates: int) -> Array:
    """Return [replicates, S] draws of a Poisson variable of mean 1: how often each replicate contains each sequence.

    A draw depends only on the step, the row and the replicate, so sums over parts of a step that are read by different
    processes, in any order, add up to those of the whole step.

    ``rows`` [S] are the rows of the sequences within the step's batch.
    """
    with np.errstate(over="ignore"):  # integer overflow is part of the hash
        sequence_seed = rows.astype(np.uint64) + np.uint64(step) * GOLDEN_GAMMA
        seed = sequence_seed[None, :] * np.uint64(replicates) + np.arange(replicates, dtype=np.uint64)[:, None]
    return np.searchsorted(_CUMULATIVE, uniform_bits(seed), side="right").astype(float)


def mix_bits(bits: Array) -> Array:
    """Return independent bits for consecutive uint64 numbers, by splitmix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        bits = bits + GOLDEN_GAMMA
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Array = bits ^ (bits >> np.uint64(31))
    return mixed


def uniform_bits(seed: Array) -> Array:
    """Return a number in [0, 1) for each uint64 seed."""
    uniform: Array = (mix_bits(seed) >> np.uint64(11)).astype(float) * 2.0**-53
    return uniform
