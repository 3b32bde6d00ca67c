"""Rehearsals with all versions of NeMo-RL; the results are in ``docs/hosts``."""
