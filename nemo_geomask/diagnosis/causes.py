"""What may be behind a mismatch: a table of causes, each with a function that says how far the records show it.

Those that are bugs come first: they explain everything else that is found. Of those that say *where* the mismatch is,
the one that accounts for most of it is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nemo_geomask.diagnosis import signs
from nemo_geomask.diagnosis.signs import Evidence, Found

__all__ = ["CAUSES", "LOCAL", "WITHIN_SEQUENCES", "Cause"]


@dataclass(frozen=True)
class Cause:
    """One cause.

    Attributes:
        id: for programs.
        name: for the sentence of the verdict.
        bug: whether something is broken, however small the mismatch.
        threshold: of what ``measure`` returns.
        why: what the threshold means and where it is from.
        action: what to do.
        measure: looks for it.
    """

    id: str
    name: str
    bug: bool
    threshold: float
    why: str
    action: str
    measure: Callable[[Evidence, float], Found]


_OURS = "this package; measured on planted causes, see docs/diagnose.md"
_OF_PART = f"share of the mismatch less the share expected, of the part where it is highest. {_OURS}"
CAUSES: tuple[Cause, ...] = (
    Cause(
        "filtered",
        "log-probs of what top-p or top-k left, against those of all tokens",
        True,
        0.9,
        "share of tokens with Δ < 0, in the bin of probability where it is lowest; half is expected. NaN without "
        f"tokens of 2 nats and more. Before the next, since a token that is left alone has a log-prob of 0. {_OURS}",
        "sample with top_p: 1.0 and top_k: null, or have the training engine filter its logits as the sampler does, "
        "which NeMo-RL does for policy.generation.top_p and top_k",
        signs.filtered,
    ),
    Cause(
        "zero_logprobs",
        "log-probs of exactly 0 where the other engine's are not",
        True,
        1e-3,
        f"share of tokens, or of sequences; in float32 only a sure token's log-prob is 0. {_OURS}",
        "have the generation engine return log-probs for every sampled token (logprobs, tool turns, aborted requests)",
        signs.zeros,
    ),
    Cause(
        "nonfinite",
        "log-probs that are NaN or infinite",
        True,
        0.0,
        "share of tokens; none is expected",
        "find the overflow; loss_fn.nonfinite says what becomes of such sequences",
        signs.nonfinite,
    ),
    Cause(
        "positive_logprobs",
        "log-probs above 0, which no distribution has",
        True,
        0.01,
        "share of tokens above 1e-3; as geomask/positive_logprobs",
        "check logprobs_mode of the generation engine: processed or raw log-probs, not logits",
        signs.positive,
    ),
    Cause(
        "shifted",
        "log-probs shifted by a token against the other engine's",
        True,
        0.0,
        "share of sequences whose log-probs fit those of the token after, or before, three times better, four in five; "
        f"of one step alone, {signs.OF_ONE_STEP:.0%}. {_OURS}",
        "align prev_logprobs and generation_logprobs: both speak of token t in column t (padding, BOS, packing)",
        signs.shifted,
    ),
    Cause(
        "temperature",
        "different temperatures in the two engines",
        True,
        0.03,
        f"share of the variance of the winsorised Δ/(1 − p) between bins of probability, of both signs. {_OURS}",
        "the training engine must divide logits by policy.generation.temperature, and the log-probs that vLLM returns "
        "must be those after temperature (logprobs_mode: processed_logprobs)",
        signs.temperature,
    ),
    Cause(
        "stale_engine",
        "a generation engine that no longer gets the new weights",
        True,
        3.0,
        "standard errors of the correlation of Δ with the advantage, in a mismatch that grows; half of that where k3 "
        f"has grown more than 4 times since. {_OURS}",
        "check the refit: that every rank of the generation engine takes every update, for all layers and experts",
        signs.stale_engine,
    ),
    Cause(
        "staleness",
        "stale samples",
        False,
        0.1,
        _OF_PART,
        "lower grpo.async_grpo.max_trajectory_age_steps, or correct for it (ratio_anchor: gen, is_correction_level)",
        signs.staleness,
    ),
    Cause(
        "low_probability",
        "numerics at low-probability tokens",
        False,
        0.1,
        _OF_PART,
        "compute logits and their softmax in float32 (lm_head), or mask what is left: dppo_tv, icepop",
        signs.where("probability", suffix=True),
    ),
    Cause(
        "tool_calls",
        "what comes after tool calls",
        False,
        0.1,
        _OF_PART,
        "the training engine must see the very tokens that the generation engine saw: check re-tokenised turns and the "
        "chat template",
        signs.where("turn", suffix=True),
    ),
    Cause(
        "position",
        "tokens late in the response",
        False,
        0.1,
        _OF_PART,
        "check what depends on the position: RoPE scaling, sliding windows, context parallelism, chunked prefill",
        signs.where("position", suffix=True),
    ),
    Cause(
        "length",
        "responses of one range of lengths",
        False,
        0.1,
        _OF_PART,
        "check what depends on the length: sequence packing, dynamic batching, cascade attention",
        signs.where("length", suffix=False),
    ),
    Cause(
        "group",
        "one prompt group",
        False,
        0.1,
        f"{_OF_PART}; median over steps, at {signs.GROUP_LIFT:g} times the mismatch of the other prompts, "
        f"{signs.GROUP_LIFT * signs.OF_FEW:g} times over fewer than {signs.FEW_STEPS} steps",
        "read the prompt: tokens that the two engines treat differently (special tokens, images, an odd script)",
        signs.one_group,
    ),
    Cause(
        "routing",
        "expert routing",
        False,
        1.5,
        f"by how many times the tokens beyond 8 times the usual noise have become more. {_OURS}",
        "replay the routing of the generation engine in training (policy.router_replay), or keep the router in float32",
        signs.routing,
    ),
    Cause(
        "precision",
        "numerics of the engines everywhere",
        False,
        1.5,
        f"by how many times the median of |Δ|/(1 − p) has grown; {signs.TYPICAL:g} is bfloat16 against float32. "
        f"{_OURS}",
        "use the same precision in both engines (FP8 or bfloat16 against float32), and batch-invariant kernels",
        signs.precision,
    ),
)
"""In the order in which they are taken, but for those that say where the mismatch is: see ``LOCAL``."""
LOCAL = ("staleness", "low_probability", "tool_calls", "position", "length", "group")
WITHIN_SEQUENCES = ("low_probability", "tool_calls", "position")
