"""Planted causes: changes of a synthetic step's logits or log-probs that imitate faults of real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nemo_geomask.tools.diagnose.record_reader import Array

__all__ = [
    "PLANTED_CAUSES",
    "ROUTING_FLIP_NOISE",
    "ROUTING_FLIP_SHARE",
    "STRENGTHS",
    "USUAL_NOISE",
    "PlantedCause",
    "SyntheticStep",
    "log_softmax",
]

USUAL_NOISE = 0.02
"""Standard deviation of the noise on the training engine's logits, as with bfloat16 in the lab."""
ROUTING_FLIP_NOISE, ROUTING_FLIP_SHARE = 0.3, 0.015
"""Standard deviation of the noise at tokens where the choice of experts flips, and the share of such tokens."""
STRENGTHS = ("weak", "middle", "strong")


@dataclass
class SyntheticStep:
    """One step of a synthetic run, with N response tokens, V vocabulary entries and S sequences.

    Attributes:
        random: random number generator of the step.
        steps_since_onset: number of steps since the cause began; 1 in the first step of the cause.
        sequence: [N], the row of each token.
        position: [N], position of each token in the response.
        turn: [N], number of earlier turns.
        target: [N], index of the sampled token in the vocabulary.
        logits: [N, V], of the generation engine.
        trained_logits: [N, V], of the training engine.
        gen, prev: [N], log-probs of the sampled tokens.
        columns: ``length`` of the response, ``group``, ``staleness`` and ``advantage``, each [S].
    """

    random: np.random.Generator
    steps_since_onset: int
    sequence: Array
    position: Array
    turn: Array
    target: Array
    logits: Array
    trained_logits: Array
    gen: Array
    prev: Array
    columns: dict[str, Array]

    def per_token(self, name: str) -> Array:
        """Return [N], for each token the value of its sequence in a column."""
        values: Array = self.columns[name][self.sequence]
        return values

    def add_noise(self, tokens: Array, scale: Array | float) -> None:
        """Add normal noise to the training engine's logits.

        Args:
            tokens: bool [N], the tokens that get noise.
            scale: standard deviation of the noise, a number or [N].
        """
        token_scale = np.broadcast_to(scale, tokens.shape)[tokens][:, None]
        noise = self.random.standard_normal((int(tokens.sum()), self.trained_logits.shape[1]))
        self.trained_logits[tokens] += token_scale * noise

    def choose_sequences(self, share: float) -> Array:
        """Return the rows of a random share of the sequences, at least one."""
        count = len(self.columns["length"])
        return self.random.permutation(count)[: max(1, round(share * count))]


CauseEffect = Callable[[SyntheticStep, float], None]
"""Function that changes a synthetic step as a cause of some strength would."""


def log_softmax(logits: Array) -> Array:
    """Return the log-softmax over the last axis."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logprobs


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


def _plant_stale_engine(step: SyntheticStep, strength: float) -> None:
    """Let the policy move a little further at each step, with a slight preference for rewarded tokens."""
    count, scale = len(step.target), strength * step.steps_since_onset
    move = scale * (step.random.standard_normal(count) + 0.03 * step.per_token("advantage"))
    step.trained_logits[np.arange(count), step.target] += move
    step.trained_logits += 0.5 * scale * step.random.standard_normal(step.trained_logits.shape)


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


def _noise_at(select: Callable[[SyntheticStep], Array]) -> CauseEffect:
    """Return an effect that adds noise at the tokens that ``select`` marks."""

    def plant(step: SyntheticStep, strength: float) -> None:
        step.add_noise(select(step), strength * USUAL_NOISE)

    return plant


@dataclass(frozen=True)
class PlantedCause:
    """A cause that can be planted in a synthetic run.

    Attributes:
        effect: changes a step as the cause would.
        strengths: the three strengths that are measured.
        unit: unit of the strengths.
        is_detectable_from_start: True if the cause can be detected in a run that has it from the first step on.
        changes_logprobs: True if the effect changes the sampled tokens' log-probs, False if it changes logits.
    """

    effect: CauseEffect
    strengths: tuple[float, float, float]
    unit: str
    is_detectable_from_start: bool = True
    changes_logprobs: bool = False


_NOISE_UNIT = "times the usual noise on the logits there"
PLANTED_CAUSES: dict[str, PlantedCause] = {
    "filtered": PlantedCause(_plant_filter, (0.02, 0.1, 0.3), "of the probability is cut off"),
    "zero_logprobs": PlantedCause(
        _plant_zeros, (0.02, 0.1, 1.0), "share of the sequences without log-probs", changes_logprobs=True
    ),
    "shifted": PlantedCause(_plant_shift, (0.02, 0.1, 1.0), "share of the sequences shifted", changes_logprobs=True),
    "temperature": PlantedCause(_plant_temperature, (0.01, 0.05, 0.3), "relative difference of the temperatures"),
    "stale_engine": PlantedCause(
        _plant_stale_engine, (0.02, 0.1, 0.4), "a step's change of the logits, nats", is_detectable_from_start=False
    ),
    "staleness": PlantedCause(_plant_staleness, (1.0, 3.0, 10.0), f"{_NOISE_UNIT}, for each step of staleness"),
    "low_probability": PlantedCause(
        _plant_low_probability, (5.0, 20.0, 50.0), "times the usual noise, on logits 3.5 below the largest"
    ),
    "tool_calls": PlantedCause(_noise_at(lambda step: step.turn > 0), (2.0, 5.0, 20.0), _NOISE_UNIT),
    "length": PlantedCause(
        _noise_at(lambda step: (step.per_token("length") > 128) & (step.per_token("length") < 256)),
        (2.0, 5.0, 20.0),
        _NOISE_UNIT,
    ),
    "position": PlantedCause(_noise_at(lambda step: step.position > 200), (2.0, 6.0, 20.0), _NOISE_UNIT),
    "group": PlantedCause(_noise_at(lambda step: step.per_token("group") == 3), (4.0, 12.0, 40.0), _NOISE_UNIT),
    "routing": PlantedCause(
        _plant_routing, (1.0, 4.0, 10.0), "times as many flips on top of the usual ones", is_detectable_from_start=False
    ),
    "precision": PlantedCause(
        _noise_at(lambda step: np.ones(len(step.target), bool)),
        (1.0, 4.0, 15.0),
        _NOISE_UNIT,
        is_detectable_from_start=False,
    ),
}
"""Planted causes by the id of the cause that a diagnosis should name."""
