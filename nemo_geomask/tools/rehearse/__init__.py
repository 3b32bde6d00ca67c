"""Rehearsal of a recipe: a small version of it runs through NeMo-RL's own script, workers and training loop.

The driver, Ray, the training workers, vLLM, refit, loop, logger and checkpoints are NeMo-RL's. A tiny random model of
the recipe's architecture, its tokenizer, the prompts and the reward are made up; on a machine without GPUs,
:mod:`nemo_geomask.tools.rehearse.cpu_shims` replaces CUDA.
"""

from __future__ import annotations
