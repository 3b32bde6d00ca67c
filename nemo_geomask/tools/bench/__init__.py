"""Benchmarks of what a recipe or this GPU gains: log-probs, losses and steps beside NeMo-RL's own."""
