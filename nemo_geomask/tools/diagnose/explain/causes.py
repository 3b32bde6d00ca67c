"""Table of what a run's mismatch may be due to: causes, each with a signature of its own, and places.

A place is a part of the data that holds the excess mismatch. It is no cause: several may lead to it, and the table
lists the likely ones with what tells them apart. :mod:`~nemo_geomask.tools.diagnose.explain.cause_selection` ranks what
a run shows by the share of the mismatch that each accounts for.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_geomask.tools.diagnose.explain import faults, noise, places, signatures, stale_engine
from nemo_geomask.tools.diagnose.explain.evidence import Detector


@dataclass(frozen=True)
class Cause:
    """One possible cause of a mismatch, or a place."""

    id: str  # identifier for programs
    name: str  # noun phrase that completes the verdict's sentence
    is_bug: bool  # True if the cause is a fault that makes the run broken however small the mismatch is
    threshold: float  # the cause is shown if the value that ``detect`` measures exceeds this
    rationale: str  # meaning of the threshold, and its source
    action: str  # what to do about the cause; of a place, what tells its causes apart
    detect: Detector  # function that looks for the cause
    likely: tuple[str, ...] = ()  # the likeliest causes of a place; empty for a cause

    @property
    def is_place(self) -> bool:
        """True if this is a part of the data, whose cause is not known."""
        return bool(self.likely)


_SOURCE = "our threshold, measured on planted causes"
_PART_RATIONALE = (
    "share of the mismatch that the part has beyond the rate of the other tokens, measured on the half of the "
    f"sequences that did not choose it; {_SOURCE}"
)


def _place(id_: str, name: str, factors: tuple[str, ...], *likely: str, tell: str, is_early: bool = False) -> Cause:
    return Cause(
        id_,
        name,
        is_bug=False,
        threshold=0.1,
        rationale=_PART_RATIONALE,
        action=tell,
        detect=places.detect_place(*factors, is_early=is_early),
        likely=likely,
    )


CAUSES: tuple[Cause, ...] = (
    Cause(
        "filtered",
        "log-probs normalised over fewer tokens in the generation engine (top-p, top-k, min-p)",
        is_bug=True,
        threshold=0.005,
        rationale=(
            "1 minus the mean of exp(Δ), which is the share of the probability that is cut off; the mean must be below "
            f"1 in every bin of probability, and tokens of 2 nats of surprise or more are needed; {_SOURCE}"
        ),
        action=(
            "sample with top_p: 1.0 and top_k: null, without min_p and bad words, or have the training engine filter "
            "its logits as the sampler does, which NeMo-RL does for policy.generation.top_p and top_k; if the sampler "
            "has no filter, see that the trainer's softmax leaves out padded rows of the vocabulary"
        ),
        detect=signatures.detect_filter,
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
        detect=faults.detect_zeros,
    ),
    Cause(
        "nonfinite",
        "log-probs that are NaN or infinite",
        is_bug=True,
        threshold=0.0,
        rationale="share of tokens; none is expected",
        action="find the overflow; loss_fn.nonfinite decides what the loss does with such sequences",
        detect=faults.detect_nonfinite,
    ),
    Cause(
        "positive_logprobs",
        "log-probs above 0, which no distribution has",
        is_bug=True,
        threshold=0.01,
        rationale="share of tokens with a log-prob above 1e-3, as for the metric geomask/positive_logprobs",
        action="check logprobs_mode of the generation engine: it must return processed or raw log-probs, not logits",
        detect=faults.detect_positive,
    ),
    Cause(
        "shifted",
        "log-probs shifted by one token against the other engine's",
        is_bug=True,
        threshold=0.0,
        rationale=(
            "share of sequences in which four of five log-probs fit the next or the previous token three times "
            f"better; {faults.MIN_SHIFTED_IN_ONE_STEP:.0%} if only one step shows it; {_SOURCE}"
        ),
        action=(
            "align prev_logprobs and generation_logprobs: column t of both must hold token t (padding, BOS, packing)"
        ),
        detect=faults.detect_shift,
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
        detect=signatures.detect_temperature,
    ),
    Cause(
        "scaled",
        "log-probs that one engine multiplied by a factor",
        is_bug=True,
        threshold=0.005,
        rationale=(
            "distance of the factor from 1; the typical Δ must be in proportion to the surprise in every bin of "
            f"probability, over a range of {signatures.MIN_RANGE_OF_FACTOR:g}; {_SOURCE}"
        ),
        action=(
            "have both engines return log-probs in nats, of the same temperature, and not divided or multiplied "
            "afterwards (a temperature that is applied to log-probs instead of logits, a rescaled loss)"
        ),
        detect=signatures.detect_scaled,
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
        detect=signatures.detect_biased_weight,
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
            "check the refit: every rank of the generation engine must take every update, for all layers and experts; "
            "caches from before it look the same: reset vLLM's prefix cache after each refit "
            "(grpo.async_grpo.recompute_kv_cache_after_weight_updates: true)"
        ),
        detect=stale_engine.detect_stale_engine,
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
        detect=places.detect_staleness,
    ),
    _place(
        "low_probability",
        "low-probability tokens",
        ("probability",),
        "logits or their softmax in bfloat16 (lm_head in float32 would mend it)",
        "a filter or penalty of the sampler on unlikely tokens (min_p, repetition_penalty)",
        "another temperature in one engine",
        tell="nemo-geomask probe tries lm_head in float32; nemo-geomask sweep says what masks and weights would do",
    ),
    _place(
        "tool_calls",
        "tokens after tool calls",
        ("turn",),
        "turns that are tokenised again for training",
        "a chat template that one engine applies otherwise",
        "a prefix cache from before a refit",
        tell="compare the tokens of a later turn with the engine's prompt_token_ids; probe without prefix caching",
    ),
    _place(
        "first_tokens",
        "the first token of each turn",
        ("first_of_turn",),
        "log-probs shifted or missing at the boundary of a turn",
        "a chat template whose generation prompt differs",
        "the first decode step after prefill, with other kernels",
        tell="compare the token before each turn in both engines' inputs; nemo-geomask probe replays a response",
    ),
    _place(
        "early_tokens",
        "the first tokens of the response",
        ("position",),
        "log-probs shifted or made up at the boundary of prompt and response",
        "kernels of the prefill against those of the decoding",
        "a chat template whose generation prompt differs",
        tell="compare the last tokens of the prompt in both engines' inputs; nemo-geomask probe tries the kernels",
        is_early=True,
    ),
    _place(
        "position",
        "one range of positions",
        ("position",),
        "what depends on the position: RoPE scaling, sliding windows, chunked prefill",
        "context parallelism or packing in the training engine",
        "a cache in lower precision, whose errors add up",
        tell="nemo-geomask probe tries these one by one; --by position,length tells long responses from late tokens",
    ),
    _place(
        "end",
        "the last tokens of the response",
        ("from_end",),
        "an end-of-sequence token that was appended and not sampled, with a log-prob that was made up",
        "a stop string whose tokens the engine drops or adds",
        "a shift by one at the end of the response",
        tell="look at the last token's id and gen; compare responses that ended with those that were cut off",
    ),
    _place(
        "token_id",
        "a few token ids",
        ("token_id",),
        "tokens that the engines treat differently: special tokens, added vocabulary, images",
        "rows of the vocabulary that are padded or not updated at a refit",
        "logit_bias, bad words or a grammar in the sampler",
        tell="decode the ids (--tokenizer); compare these rows of embeddings and lm_head in both engines",
    ),
    _place(
        "length",
        "responses in one range of lengths",
        ("response", "length"),
        "what depends on the length: sequence packing, dynamic batching, cascade attention, padding",
        "in long ones: cut-off or chunked responses",
        "in short ones: one token of each response",
        tell="train a step without packing (policy.sequence_packing.enabled: false); nemo-geomask probe tries kernels",
    ),
    _place(
        "group",
        "some prompts",
        ("group", "prompt"),
        "tokens of these prompts that the two engines treat differently (special tokens, images, script)",
        "one shard of the batch, if the group has the same number in each step",
        "an environment, a dataset or a chat template that only they have",
        tell="read the prompts; record their environment",
    ),
    _place(
        "environment",
        "one environment",
        ("environment",),
        "its prompts or tool outputs are tokenised again for training",
        "sampling parameters of its own (temperature, top_p, stop strings)",
        "its responses have other lengths or turns",
        tell="compare the recorded tokens with what the environment sent; look at its sampling parameters",
    ),
    _place(
        "replica",
        "one replica of the generation engine",
        ("replica",),
        "a replica that did not get the last refit",
        "another GPU, driver or kernel on its node",
        "a replica in another precision or parallel layout",
        tell="compare the weights' checksums of all replicas after a refit; nemo-geomask probe on its node",
    ),
    _place(
        "steps",
        "some steps",
        ("step",),
        "what happens at these steps: a refit, an evaluation, a checkpoint, a restart",
        "samples of another age in these steps",
        "another precision or batch size of one engine in them",
        tell="compare with the log of refits, evaluations and checkpoints; record weight versions (loss_fn.record)",
    ),
    _place(
        "advantage",
        "responses by the sign of their advantage",
        ("advantage",),
        "weights that moved along the advantage since the samples: an engine that is behind",
        "lengths or turns that go with the reward",
        "log-probs that were computed after an update",
        tell="record weight versions (loss_fn.record); --by advantage,length",
    ),
    _place(
        "sequences",
        "some sequences",
        ("sequence",),
        "one replica or rank of either engine",
        "samples of several ages",
        "some environments or kinds of prompts",
        tell=(
            "what these sequences have in common: record weight versions and environments (loss_fn.record), and the "
            "replica that generated each; nemo-geomask probe on each node"
        ),
    ),
    Cause(
        "few_tokens",
        "a few tokens everywhere",
        is_bug=False,
        threshold=1.5,
        rationale=(
            "factor by which the tokens with more than 8, 16, 32 or 64 times the median noise have increased; the "
            f"additional ones must account for {noise.MIN_EXPLAINED_SHARE:.0%} of k3 or of |Δ|; {_SOURCE}"
        ),
        action=(
            "say whether the model has experts (--experts); nemo-geomask probe compares layer by layer; look at the "
            "worst tokens of the report"
        ),
        detect=noise.detect_few_tokens,
        likely=(
            "expert routing, if the model has experts",
            "single log-probs that are wrong, at random places or of tokens that were not sampled",
            "an overflow or a cache in low precision at some tokens",
        ),
    ),
    Cause(
        "routing",
        "expert routing",
        is_bug=False,
        threshold=1.5,
        rationale=(
            "as for a few tokens everywhere, in a model with experts; the tokens must be spread over sequences, "
            f"positions and probabilities, and their Δ must have no sign; {_SOURCE}"
        ),
        action=(
            "replay the routing of the generation engine in training (policy.router_replay), or keep the router in "
            "float32; nemo-geomask probe shows which layers choose other experts"
        ),
        detect=noise.detect_routing,
    ),
    Cause(
        "precision",
        "numerics of the engines on all tokens",
        is_bug=False,
        threshold=1.5,
        rationale=(
            "factor by which the median of |Δ|/(1 − p) has grown; for bfloat16 against float32 that median is "
            f"{noise.TYPICAL_NOISE.median:g}; {_SOURCE}"
        ),
        action=(
            "use the same precision in both engines (FP8 or bfloat16 against float32), and batch-invariant kernels; "
            "nemo-geomask probe says which of the recipe's settings matter"
        ),
        detect=noise.detect_precision,
    ),
)
"""All causes; of two that account for equal shares of the mismatch, the first is named."""
DISTRIBUTION_CAUSES = ("filtered", "temperature", "scaled", "biased_weight", "stale_engine")
"""Causes that change the log-probs of all tokens, of some more than of others."""
NOISE_CAUSES = ("few_tokens", "routing", "precision")
"""Causes without a place or a shape of their own: they account for what no other cause does."""
PLACES = (*(cause.id for cause in CAUSES if cause.is_place and cause.id not in NOISE_CAUSES), "staleness")
"""Parts of the data, and samples of old weights, which are one as well."""
