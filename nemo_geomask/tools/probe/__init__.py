"""Attribution of a mismatch between sampler and trainer to settings, by experiments with NeMo-RL's own workers.

The same tokens are scored by the engine's decode, by its prefill and by the trainer, with the recipe's settings and
with conservative values of single settings.
"""

from __future__ import annotations
