"""Benchmarks whose results are in ``docs/performance``: ours, NeMo-RL's and every peer that can be imported."""
