"""Table of the possible causes of a mismatch: what each is, how it is detected, its threshold and what to do.

:mod:`~nemo_geomask.tools.diagnose.explain.cause_selection` ranks the causes that a run shows by the share of the
mismatch that each accounts for.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_geomask.tools.diagnose.explain import (
    logprob_detectors,
    noise_detectors,
    sampler_detectors,
    staleness_detectors,
)
from nemo_geomask.tools.diagnose.locate import group_detector
from nemo_geomask.tools.diagnose.locate.location_detectors import detect_range
from nemo_geomask.tools.diagnose.locate.run_evidence import Detector

__all__ = [
    "CAUSES",
    "DISTRIBUTION_CAUSES",
    "LOCATION_CAUSES",
    "NOISE_CAUSES",
    "WITHIN_SEQUENCE_CAUSES",
    "Cause",
]


@dataclass(frozen=True)
class Cause:
    """One possible cause of a mismatch.

    Attributes:
        id: identifier for programs.
        name: noun phrase that completes the verdict's sentence.
        is_bug: True if the cause is a fault that makes the run broken however small the mismatch is.
        threshold: the cause is shown if the value that ``detect`` measures exceeds this.
        rationale: meaning of the threshold, and its source.
        action: what to do about the cause.
        detect: function that looks for the cause.
    """

    id: str
    name: str
    is_bug: bool
    threshold: float
    rationale: str
    action: str
    detect: Detector


_SOURCE = "our threshold, measured on planted causes"
_PART_RATIONALE = f"the part's share of the mismatch minus its share of the expected mismatch; {_SOURCE}"
CAUSES: tuple[Cause, ...] = (
    Cause(
        "filtered",
        "log-probs renormalised by top-p or top-k in the generation engine only",
        is_bug=True,
        threshold=0.005,
        rationale=(
            "1 minus the mean of exp(Δ), which is the share of the probability that is cut off; the mean must be below "
            f"1 in every bin of probability, and tokens of 2 nats of surprise or more are needed; {_SOURCE}"
        ),
        action=(
            "sample with top_p: 1.0 and top_k: null, or have the training engine filter its logits as the sampler "
            "does, which NeMo-RL does for policy.generation.top_p and top_k"
        ),
        detect=sampler_detectors.detect_filter,
    ),
    Cause(
        "zero_logprobs",
        "log-probs of exactly 0 from one engine where the other engine is unsure",
        is_bug=True,
        threshold=1e-3,
        rationale=(
            "share of the unsure tokens, or of the sequences; in float32 only the log-prob of a nearly sure token "
            f"rounds to 0; {_SOURCE}"
        ),
        action=(
            "have the generation engine return log-probs for every sampled token (logprobs, tool turns, aborted "
            "requests); if the zeros come from the training engine and the recipe uses top-p or top-k, they are tokens "
            "outside the trainer's own filter, which NeMo-RL sets to 0: sample with top_p: 1.0 and top_k: null"
        ),
        detect=logprob_detectors.detect_zeros,
    ),
    Cause(
        "nonfinite",
        "log-probs that are NaN or infinite",
        is_bug=True,
        threshold=0.0,
        rationale="share of tokens; none is expected",
        action="find the overflow; loss_fn.nonfinite decides what the loss does with such sequences",
        detect=logprob_detectors.detect_nonfinite,
    ),
    Cause(
        "positive_logprobs",
        "log-probs above 0, which no distribution has",
        is_bug=True,
        threshold=0.01,
        rationale="share of tokens with a log-prob above 1e-3, as for the metric geomask/positive_logprobs",
        action="check logprobs_mode of the generation engine: it must return processed or raw log-probs, not logits",
        detect=logprob_detectors.detect_positive,
    ),
    Cause(
        "shifted",
        "log-probs shifted by one token against the other engine's",
        is_bug=True,
        threshold=0.0,
        rationale=(
            "share of sequences in which four of five log-probs fit the next or the previous token three times "
            f"better; {logprob_detectors.MIN_SHIFTED_IN_ONE_STEP:.0%} if only one step shows it; {_SOURCE}"
        ),
        action=(
            "align prev_logprobs and generation_logprobs: column t of both must hold token t (padding, BOS, packing)"
        ),
        detect=logprob_detectors.detect_shift,
    ),
    Cause(
        "temperature",
        "different temperatures in the two engines",
        is_bug=True,
        threshold=0.03,
        rationale=(
            "share of the variance of Δ/(1 − p), clipped to ±0.1, that is a tilt between bins of probability: "
            f"positive in some, negative in others; {_SOURCE}"
        ),
        action=(
            "the training engine must divide its logits by policy.generation.temperature, and vLLM must return "
            "log-probs after temperature (logprobs_mode: processed_logprobs)"
        ),
        detect=sampler_detectors.detect_temperature,
    ),
    Cause(
        "biased_weight",
        "log-probs that are not of the distribution that was sampled from",
        is_bug=True,
        threshold=0.05,
        rationale=(
            "distance of the mean of exp(Δ) from 1, which it is for log-probs of the sampler, whatever the training "
            f"engine computes; {_SOURCE}"
        ),
        action=(
            "have both engines return normalised log-probs of the sampler's distribution (logprobs_mode: "
            "processed_logprobs): a mean above 1 means that prev_logprobs are too high, or generation_logprobs too low"
        ),
        detect=sampler_detectors.detect_biased_weight,
    ),
    Cause(
        "stale_engine",
        "a generation engine that no longer gets the new weights",
        is_bug=True,
        threshold=3.0,
        rationale=(
            "standard errors of the correlation of Δ with the advantage, in a mismatch that grows; half of that if k3 "
            "has grown more than 4 times since; left open if the recorded staleness rose with the mismatch; "
            f"{_SOURCE}"
        ),
        action=(
            "check the refit: every rank of the generation engine must take every update, for all layers and experts"
        ),
        detect=staleness_detectors.detect_stale_engine,
    ),
    Cause(
        "staleness",
        "stale samples",
        is_bug=False,
        threshold=0.1,
        rationale=_PART_RATIONALE,
        action=(
            "lower grpo.async_grpo.max_trajectory_age_steps, or correct for it (ratio_anchor: gen, "
            "is_correction_level); if the mismatch is larger than the age explains, check the refit"
        ),
        detect=staleness_detectors.detect_staleness,
    ),
    Cause(
        "low_probability",
        "numerics at low-probability tokens",
        is_bug=False,
        threshold=0.1,
        rationale=_PART_RATIONALE,
        action=(
            "compute logits and their softmax in float32 (lm_head); nemo-geomask sweep says what masks and weights "
            "would do about the rest"
        ),
        detect=detect_range("probability", upper_only=True),
    ),
    Cause(
        "tool_calls",
        "tokens after tool calls",
        is_bug=False,
        threshold=0.1,
        rationale=_PART_RATIONALE,
        action=(
            "the training engine must see exactly the tokens that the generation engine saw: check the chat template, "
            "and whether turns are tokenised again"
        ),
        detect=detect_range("turn", upper_only=True),
    ),
    Cause(
        "position",
        "tokens late in the response",
        is_bug=False,
        threshold=0.1,
        rationale=_PART_RATIONALE,
        action=(
            "check what depends on the position: RoPE scaling, sliding windows, context parallelism, chunked prefill; "
            "nemo-geomask probe tries them one by one"
        ),
        detect=detect_range("position", upper_only=True),
    ),
    Cause(
        "length",
        "responses in one range of lengths",
        is_bug=False,
        threshold=0.1,
        rationale=_PART_RATIONALE,
        action="check what depends on the length: sequence packing, dynamic batching, cascade attention",
        detect=detect_range("length", upper_only=False),
    ),
    Cause(
        "group",
        "one prompt group",
        is_bug=False,
        threshold=0.1,
        rationale=(
            f"{_PART_RATIONALE}; median over steps. The group must also have {group_detector.MIN_GROUP_LIFT:g} "
            "times the mismatch of the other prompts, or "
            f"{group_detector.MIN_GROUP_LIFT * group_detector.FEW_STEPS_FACTOR:g} times over fewer than "
            f"{group_detector.FEW_STEPS} steps"
        ),
        action=(
            "read the prompt: look for tokens that the two engines treat differently (special tokens, images, script)"
        ),
        detect=group_detector.detect_group,
    ),
    Cause(
        "routing",
        "expert routing",
        is_bug=False,
        threshold=1.5,
        rationale=(
            "factor by which the tokens with more than 8, 16, 32 or 64 times the median noise have increased; the "
            f"additional ones must account for {noise_detectors.MIN_EXPLAINED_SHARE:.0%} of k3 or of |Δ|; {_SOURCE}"
        ),
        action=(
            "replay the routing of the generation engine in training (policy.router_replay), or keep the router in "
            "float32; nemo-geomask probe shows which layers choose other experts"
        ),
        detect=noise_detectors.detect_routing,
    ),
    Cause(
        "precision",
        "numerics of the engines on all tokens",
        is_bug=False,
        threshold=1.5,
        rationale=(
            "factor by which the median of |Δ|/(1 − p) has grown; for bfloat16 against float32 that median is "
            f"{noise_detectors.TYPICAL_NOISE.median:g}; {_SOURCE}"
        ),
        action=(
            "use the same precision in both engines (FP8 or bfloat16 against float32), and batch-invariant kernels; "
            "nemo-geomask probe says which of the recipe's settings matter"
        ),
        detect=noise_detectors.detect_precision,
    ),
)
"""All causes; of two that account for equal shares of the mismatch, the first is named."""
DISTRIBUTION_CAUSES = ("filtered", "temperature", "biased_weight", "stale_engine")
"""Causes that change the log-probs of all tokens, of some more than of others."""
NOISE_CAUSES = ("routing", "precision")
"""Causes without a sign of their own: they account for what no other cause does."""
LOCATION_CAUSES = ("staleness", "low_probability", "tool_calls", "position", "length", "group")
WITHIN_SEQUENCE_CAUSES = ("low_probability", "tool_calls", "position")
"""Location causes that distinguish the tokens of one sequence."""
