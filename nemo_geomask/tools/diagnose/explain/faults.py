"""Detectors of faulty log-probs: missing, non-finite, positive, or belonging to another token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from nemo_geomask.tools.diagnose.explain.evidence import Detection, Evidence, MismatchSums, fault_mismatch
from nemo_geomask.tools.diagnose.measure.step_sums import StepSums, ratio_or_nan

MIN_SHIFTED_IN_ONE_STEP = 0.05
"""Share of a step's sequences that must be shifted if no other step has shifted sequences."""
MIN_COMPARED = 16
"""Number of sequences of a step from which some must be of its first update, and so have the same curr and prev."""


def _detect_in_steps(
    evidence: Evidence,
    share: Callable[[StepSums], float],
    threshold: float,
    description: str,
    explained: MismatchSums | None,
) -> Detection:
    """Judge each step by a share of its tokens or sequences, NaN where it can't be judged; describe the largest."""
    shares = {step: share(sums) for step, sums in sorted(evidence.statistics.steps.items())}
    judged = {step: value for step, value in shares.items() if math.isfinite(value)}
    if not judged:
        return Detection(math.nan, "no sequence can be judged", needs="sequences with log-probs of both engines")
    steps = tuple(step for step, value in judged.items() if value > threshold)
    highest = max(judged.values())
    return Detection(highest, description.format(highest), bool(steps), steps, explained=explained)


def detect_zeros(evidence: Evidence, threshold: float) -> Detection:
    """Look for log-probs that one engine reports as exactly 0 while the other engine is unsure."""

    def share(sums: StepSums) -> float:
        # Sequences without any prev are no fault: the trainer may skip π_old for all sequences, or for those outside
        # the sample of audit_fraction.
        without_gen = sums.mean("sequences_without_gen", "all_sequences")
        zeros = ratio_or_nan(max(sums["zero_gen"], sums["zero_prev"]), sums["unsure_tokens"])
        return without_gen if math.isnan(zeros) else max(without_gen, zeros)

    explained = fault_mismatch(evidence.sums_after, "zero").plus(fault_mismatch(evidence.sums_after, "missing"))
    steps = evidence.statistics.steps.values()
    engines = {"zero_gen": "the generation engine", "zero_prev": "the training engine"}
    engines = {name: engine for name, engine in engines.items() if any(sums[name] for sums in steps)}
    description = "{:.2%} of the unsure tokens have a log-prob of exactly 0"
    description += f" from {' or '.join(engines.values())}" if engines else ""
    return _detect_in_steps(evidence, share, threshold, description, explained)


def detect_nonfinite(evidence: Evidence, threshold: float) -> Detection:
    """Look for log-probs that are NaN or infinite."""
    description = "{:.2%} of the log-probs are NaN or infinite"
    return _detect_in_steps(evidence, lambda sums: sums.mean("nonfinite", "all_tokens"), threshold, description, None)


def detect_positive(evidence: Evidence, threshold: float) -> Detection:
    """Look for log-probs above 0."""
    explained = fault_mismatch(evidence.sums_after, "positive")
    description = "{:.2%} of the log-probs are above 0"
    return _detect_in_steps(
        evidence, lambda sums: sums.mean("positive_logprobs", "all_tokens"), threshold, description, explained
    )


def detect_shift(evidence: Evidence, threshold: float) -> Detection:
    """Look for sequences whose log-probs belong to the token before or after."""

    def share(sums: StepSums) -> float:
        return ratio_or_nan(sums["shifted_later"] + sums["shifted_earlier"], sums["sequences_checked_for_shift"])

    description = "the log-probs of {:.2%} of the sequences fit a neighbouring token better"
    explained = fault_mismatch(evidence.sums_after, "shifted")
    detection = _detect_in_steps(evidence, share, threshold, description, explained)
    # If the engines differ a lot, a few sequences of a single step fit a neighbouring token better by chance.
    is_one_of_several_steps = len(detection.steps) == 1 < len(evidence.statistics.steps)
    if is_one_of_several_steps and detection.value < MIN_SHIFTED_IN_ONE_STEP:
        return replace(detection, is_shown=False, steps=())
    return detection


def detect_current_policy(evidence: Evidence, threshold: float) -> Detection:
    """Look for a ``curr`` that differs from ``prev`` where no weight has changed, or belongs to another token."""

    def share(sums: StepSums) -> float:
        if sums["curr_sequences"] < MIN_COMPARED:
            return math.nan
        same, shifted = (sums.mean(name, "curr_sequences") for name in ("curr_same", "curr_shifted"))
        return max(1 - same, float(shifted > MIN_SHIFTED_IN_ONE_STEP))

    total = evidence.statistics.total().mean("curr_shifted", "curr_sequences")
    if math.isnan(total):
        return Detection(math.nan, "no curr to compare with prev", needs="curr and prev of updates (loss_fn.record)")
    description = "up to {:.0%} of a step's sequences differ from prev by more than numerical noise"
    if total > 0:
        description = f"curr of {total:.0%} of the sequences fits a neighbouring token's prev better"
    return _detect_in_steps(evidence, share, threshold, description, None)
