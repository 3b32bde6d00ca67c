"""Planted causes and runs with them: changes of a synthetic step's logits or log-probs that imitate real faults."""

from __future__ import annotations

import numpy as np

from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_survey import survey_block
from nemo_geomask.tools.diagnose.read.record_reader import RecordBlock
from tests.evidence.diagnose.planted_logs import (
    NOISE_UNIT,
    ROUTING_FLIP_NOISE,
    ROUTING_FLIP_SHARE,
    USUAL_NOISE,
    PlantedCause,
    RunShape,
    SyntheticStep,
    log_softmax,
    noise_at,
)
from tests.evidence.diagnose.planted_logs import PLANTED_CAUSES as SHIPPED_CAUSES
from tests.evidence.diagnose.planted_logs import planted_step as planted_effect_step

STRENGTHS = ("weak", "middle", "strong")


def _plant_zeros(step: SyntheticStep, strength: float) -> None:
    """Let the generation engine return no log-probs for a share of the sequences."""
    step.gen[np.isin(step.sequence, step.choose_sequences(strength))] = 0


def _plant_shift(step: SyntheticStep, strength: float) -> None:
    """Shift the log-probs of a share of the sequences by one token; the first token of each turn gets a 0."""
    for row in step.choose_sequences(strength):
        tokens = step.sequence == row
        begins_turn = np.diff(step.turn[tokens], prepend=-1) != 0
        step.gen[tokens] = np.where(begins_turn, 0.0, np.concatenate([[0.0], step.gen[tokens][:-1]]))


def _plant_filter(step: SyntheticStep, strength: float) -> None:
    """Sample by top-p, cutting off a share of the probability, and renormalise the log-probs over the kept tokens."""
    logprobs = log_softmax(step.logits)
    order = np.argsort(-logprobs, axis=1)
    ranked = np.take_along_axis(np.exp(logprobs), order, axis=1)
    is_cut_ranked = np.cumsum(ranked, axis=1) - ranked >= 1 - strength
    is_cut = np.take_along_axis(is_cut_ranked, np.argsort(order, axis=1), axis=1)
    kept = np.where(is_cut, -np.inf, logprobs)
    step.target = (kept + step.random.gumbel(size=kept.shape)).argmax(axis=1)
    step.gen = log_softmax(kept)[np.arange(len(kept)), step.target]


def _plant_temperature(step: SyntheticStep, strength: float) -> None:
    """Divide the training engine's logits by another temperature."""
    step.trained_logits *= 1 + strength


def _plant_staleness(step: SyntheticStep, strength: float) -> None:
    """Add noise that grows with the staleness of a sequence."""
    step.add_noise(np.ones(len(step.target), bool), strength * USUAL_NOISE * step.per_token("staleness"))


def _plant_low_probability(step: SyntheticStep, strength: float) -> None:
    """Add rounding noise to logits far below the largest one."""
    below_largest = step.logits.max(axis=1, keepdims=True) - step.logits
    noise = step.random.standard_normal(step.trained_logits.shape)
    step.trained_logits += strength * USUAL_NOISE * np.where(below_largest > 3.5, noise, 0)


def _plant_routing(step: SyntheticStep, strength: float) -> None:
    """Flip the expert routing of more tokens."""
    is_flipped = step.random.random(len(step.target)) < strength * ROUTING_FLIP_SHARE
    step.add_noise(is_flipped, ROUTING_FLIP_NOISE)


PLANTED_CAUSES: dict[str, PlantedCause] = {
    "filtered": PlantedCause(_plant_filter, (0.02, 0.1, 0.3), "of the probability is cut off"),
    "zero_logprobs": PlantedCause(
        _plant_zeros, (0.02, 0.1, 1.0), "share of the sequences without log-probs", changes_logprobs=True
    ),
    "shifted": PlantedCause(_plant_shift, (0.02, 0.1, 1.0), "share of the sequences shifted", changes_logprobs=True),
    "temperature": PlantedCause(_plant_temperature, (0.01, 0.05, 0.3), "relative difference of the temperatures"),
    "stale_engine": SHIPPED_CAUSES["stale_engine"],
    "staleness": PlantedCause(_plant_staleness, (1.0, 3.0, 10.0), f"{NOISE_UNIT}, for each step of staleness"),
    "low_probability": PlantedCause(
        _plant_low_probability, (5.0, 20.0, 50.0), "times the usual noise, on logits 3.5 below the largest"
    ),
    "tool_calls": SHIPPED_CAUSES["tool_calls"],
    "length": PlantedCause(
        noise_at(lambda step: (step.per_token("length") > 128) & (step.per_token("length") < 256)),
        (2.0, 5.0, 20.0),
        NOISE_UNIT,
    ),
    "position": PlantedCause(noise_at(lambda step: step.position > 200), (2.0, 6.0, 20.0), NOISE_UNIT),
    "group": PlantedCause(noise_at(lambda step: step.per_token("group") == 3), (4.0, 12.0, 40.0), NOISE_UNIT),
    "routing": PlantedCause(
        _plant_routing, (1.0, 4.0, 10.0), "times as many flips on top of the usual ones", is_detectable_from_start=False
    ),
    "precision": SHIPPED_CAUSES["precision"],
}
"""Planted causes by the id of the cause that a diagnosis should name."""


def planted_step(
    seed: int,
    step: int,
    cause: str | None = None,
    strength: float = 0.0,
    *,
    steps_since_onset: int = 1,
    shape: RunShape | None = None,
) -> RecordBlock:
    """Return the records of one step of a synthetic run; ``cause`` is a key of ``PLANTED_CAUSES``, or None."""
    planted = None if cause is None else PLANTED_CAUSES[cause]
    return planted_effect_step(seed, step, planted, strength, steps_since_onset=steps_since_onset, shape=shape)


def planted_run(
    seed: int, cause: str | None = None, strength: float = 0.0, *, onset: int = 1, shape: RunShape | None = None
) -> RunStatistics:
    """Return the statistics of a synthetic run.

    Args:
        seed: seed of all randomness.
        cause: key of ``PLANTED_CAUSES``; None for a run without any.
        strength: strength of the cause, in the unit of :attr:`PlantedCause.unit`.
        onset: first step of the cause, counted from 1.
        shape: sizes of the run.
    """
    shape = shape or RunShape()
    statistics = RunStatistics(experts=64)
    for step in range(1, shape.steps + 1):
        step_cause = cause if step >= onset else None
        block = planted_step(seed, step, step_cause, strength, steps_since_onset=step - onset + 1, shape=shape)
        statistics.add(survey_block(block))
    return statistics
