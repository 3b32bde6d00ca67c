"""Planted causes: changes of a synthetic step's logits or log-probs that imitate what goes wrong in real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nemo_geomask.tools.diagnose.record_reader import Array

__all__ = [
    "PLANTS",
    "ROUTING_FLIP_NOISE",
    "ROUTING_FLIP_SHARE",
    "STRENGTHS",
    "USUAL_NOISE",
    "Draft",
    "Plant",
    "log_softmax",
]

USUAL_NOISE = 0.02
"""Standard deviation of the noise on the training engine's logits, as with bfloat16 in the lab."""
ROUTING_FLIP_NOISE, ROUTING_FLIP_SHARE = 0.3, 0.015
"""Noise at tokens where an expert's routing flips, and the share of such tokens."""
STRENGTHS = ("weak", "middle", "strong")


@dataclass
class Draft:
    """One synthetic step with N response tokens, V vocabulary entries and S sequences.

    Attributes:
        random: source of all randomness.
        steps_since_onset: number of steps since the cause began, from 1.
        sequence: [N], the row of each token.
        position: [N], position of each token in the response.
        turn: [N], number of earlier turns.
        target: [N], index of the sampled token in the vocabulary.
        logits: [N, V], of the generation engine.
        trained_logits: [N, V], of the training engine.
        gen, prev: [N], log-probs of the sampled tokens.
        columns: [S] each: ``length`` of the response, ``group``, ``staleness``, ``advantage``.
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
        """Return [N], the value of each token's sequence in a column."""
        values: Array = self.columns[name][self.sequence]
        return values

    def add_noise(self, tokens: Array, scale: Array | float) -> None:
        """Add normal noise to the training engine's logits at some tokens; ``scale`` is its standard deviation."""
        chosen_scale = np.broadcast_to(scale, tokens.shape)[tokens][:, None]
        noise = self.random.standard_normal((int(tokens.sum()), self.trained_logits.shape[1]))
        self.trained_logits[tokens] += chosen_scale * noise

    def choose_sequences(self, share: float) -> Array:
        """Return the rows of a random share of the sequences, at least one."""
        count = len(self.columns["length"])
        return self.random.permutation(count)[: max(1, round(share * count))]


PlantedEffect = Callable[[Draft, float], None]
"""Function that plants a cause of the given strength in a draft."""


def log_softmax(logits: Array) -> Array:
    """Return the log-softmax over the last axis."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logprobs


def _plant_zeros(draft: Draft, strength: float) -> None:
    """Let the generation engine return no log-probs for a share of the sequences."""
    draft.gen[np.isin(draft.sequence, draft.choose_sequences(strength))] = 0


def _plant_shift(draft: Draft, strength: float) -> None:
    """Shift the log-probs of a share of the sequences by one column; the first token of a turn gets a 0."""
    for row in draft.choose_sequences(strength):
        tokens = draft.sequence == row
        begins_turn = np.diff(draft.turn[tokens], prepend=-1) != 0
        draft.gen[tokens] = np.where(begins_turn, 0.0, np.concatenate([[0.0], draft.gen[tokens][:-1]]))


def _plant_filter(draft: Draft, strength: float) -> None:
    """Sample by top-p, cutting off a share of the probability, and renormalise the log-probs over the kept tokens."""
    logprobs = log_softmax(draft.logits)
    order = np.argsort(-logprobs, axis=1)
    ranked = np.take_along_axis(np.exp(logprobs), order, axis=1)
    is_cut_ranked = np.cumsum(ranked, axis=1) - ranked >= 1 - strength
    is_cut = np.take_along_axis(is_cut_ranked, np.argsort(order, axis=1), axis=1)
    kept = np.where(is_cut, -np.inf, logprobs)
    draft.target = (kept + draft.random.gumbel(size=kept.shape)).argmax(axis=1)
    draft.gen = log_softmax(kept)[np.arange(len(kept)), draft.target]


def _plant_temperature(draft: Draft, strength: float) -> None:
    """Divide the training engine's logits by another temperature."""
    draft.trained_logits *= 1 + strength


def _plant_stale_engine(draft: Draft, strength: float) -> None:
    """Let the policy move a little further at each step, with a slight preference for rewarded tokens."""
    count, scale = len(draft.target), strength * draft.steps_since_onset
    move = scale * (draft.random.standard_normal(count) + 0.03 * draft.per_token("advantage"))
    draft.trained_logits[np.arange(count), draft.target] += move
    draft.trained_logits += 0.5 * scale * draft.random.standard_normal(draft.trained_logits.shape)


def _plant_staleness(draft: Draft, strength: float) -> None:
    """Add noise that grows with the staleness of a sequence."""
    draft.add_noise(np.ones(len(draft.target), bool), strength * USUAL_NOISE * draft.per_token("staleness"))


def _plant_low_probability(draft: Draft, strength: float) -> None:
    """Add rounding noise to logits far below the largest one."""
    below_largest = draft.logits.max(axis=1, keepdims=True) - draft.logits
    noise = draft.random.standard_normal(draft.trained_logits.shape)
    draft.trained_logits += strength * USUAL_NOISE * np.where(below_largest > 3.5, noise, 0)


def _plant_routing(draft: Draft, strength: float) -> None:
    """Flip the expert routing of more tokens."""
    is_flipped = draft.random.random(len(draft.target)) < strength * ROUTING_FLIP_SHARE
    draft.add_noise(is_flipped, ROUTING_FLIP_NOISE)


def _noise_at(select: Callable[[Draft], Array]) -> PlantedEffect:
    """Return an effect that adds noise at the tokens that ``select`` marks."""

    def plant(draft: Draft, strength: float) -> None:
        draft.add_noise(select(draft), strength * USUAL_NOISE)

    return plant


@dataclass(frozen=True)
class Plant:
    """One planted cause.

    Attributes:
        effect: plants it.
        strengths: its three strengths.
        unit: unit of the strengths.
        from_start: True if the cause can be recognised when it is there from the first step on.
        after_sampling: True if it changes the log-probs and not the logits.
    """

    effect: PlantedEffect
    strengths: tuple[float, float, float]
    unit: str
    from_start: bool = True
    after_sampling: bool = False


_NOISE_UNIT = "times the usual noise on the logits there"
PLANTS: dict[str, Plant] = {
    "filtered": Plant(_plant_filter, (0.02, 0.1, 0.3), "of the probability is cut off"),
    "zero_logprobs": Plant(
        _plant_zeros, (0.02, 0.1, 1.0), "share of the sequences without log-probs", after_sampling=True
    ),
    "shifted": Plant(_plant_shift, (0.02, 0.1, 1.0), "share of the sequences shifted", after_sampling=True),
    "temperature": Plant(_plant_temperature, (0.01, 0.05, 0.3), "relative difference of the temperatures"),
    "stale_engine": Plant(
        _plant_stale_engine, (0.02, 0.1, 0.4), "a step's change of the logits, nats", from_start=False
    ),
    "staleness": Plant(_plant_staleness, (1.0, 3.0, 10.0), f"{_NOISE_UNIT}, for each step of staleness"),
    "low_probability": Plant(
        _plant_low_probability, (5.0, 20.0, 50.0), "times the usual noise, on logits 3.5 below the largest"
    ),
    "tool_calls": Plant(_noise_at(lambda draft: draft.turn > 0), (2.0, 5.0, 20.0), _NOISE_UNIT),
    "length": Plant(
        _noise_at(lambda draft: (draft.per_token("length") > 128) & (draft.per_token("length") < 256)),
        (2.0, 5.0, 20.0),
        _NOISE_UNIT,
    ),
    "position": Plant(_noise_at(lambda draft: draft.position > 200), (2.0, 6.0, 20.0), _NOISE_UNIT),
    "group": Plant(_noise_at(lambda draft: draft.per_token("group") == 3), (4.0, 12.0, 40.0), _NOISE_UNIT),
    "routing": Plant(
        _plant_routing, (1.0, 4.0, 10.0), "times as many flips on top of the usual ones", from_start=False
    ),
    "precision": Plant(
        _noise_at(lambda draft: np.ones(len(draft.target), bool)), (1.0, 4.0, 15.0), _NOISE_UNIT, from_start=False
    ),
}
"""Planted causes by the id of the cause that a diagnosis should name."""
