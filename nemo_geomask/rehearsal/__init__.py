"""A recipe, shrunk, through NeMo-RL's own script, workers and loop, before it goes to a cluster.

The driver, Ray, the workers that train, vLLM, refit, loop, logger and checkpoints are NeMo-RL's. What is made up is a
tiny random model of the recipe's architecture, its tokenizer, the prompts and the reward; on a machine without GPUs
also what :mod:`nemo_geomask.rehearsal.standins` has for CUDA.
"""

from __future__ import annotations
