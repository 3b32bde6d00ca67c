"""NeMo-RL's keys of the tensors in a training batch (``BatchedDataDict``).

If NeMo-RL renames one, change it here; messages and docstrings may still spell it out. Fields of logs and records have
names of their own, so that old files stay readable. Keys that are plain words
(``advantages``, ``input_ids``, ``sample_mask``) are written where they are used.
"""

from __future__ import annotations

PREV_LOGPROBS = "prev_logprobs"
"""log π_old [B, T]: the sampled tokens under the training engine before the batch."""

GENERATION_LOGPROBS = "generation_logprobs"
"""log μ [B, T]: the sampled tokens under the generation engine."""

REFERENCE_POLICY_LOGPROBS = "reference_policy_logprobs"
"""log π_ref [B, T]."""

CURR_LOGPROBS_UNFILTERED = "curr_logprobs_unfiltered"
"""log π_θ [B, T − 1] before top-k and top-p were applied to the logits."""

CURR_LOGPROBS_KEEP_MASK = "curr_logprobs_keep_mask"
"""[B, T − 1]: nonzero at the tokens that the training engine's own top-k and top-p keep (NeMo-RL PR 3551)."""

TOKEN_WEIGHT_VERSIONS = "token_weight_versions"
"""[B, T]: number of updates behind the policy that sampled each token. NeMo-RL's batches don't have it."""

TRAINING_WEIGHT_VERSION = "training_weight_version"
"""[B]: number of updates behind the policy that trains. NeMo-RL's batches don't have it."""

TOKEN_MASK = "token_mask"
"""[B, T]: nonzero at the tokens that are trained."""
