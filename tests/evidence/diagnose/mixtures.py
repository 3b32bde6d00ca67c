"""Synthetic runs with one fault among healthy data: mixtures of two sizes of noise, and log-probs of another kind.

Every fault says where it is, as the factor whose levels hold it, and which causes may be named for it. Several faults
imitate each other on purpose: late tokens and long responses, the first token and short responses, one environment and
its prompts, a replica that is not recorded and one that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from nemo_geomask.tools.diagnose.read.record_reader import Array, RecordBlock
from tests.evidence.diagnose.planted_causes import PLANTED_CAUSES
from tests.evidence.diagnose.planted_logs import (
    ROUTING_FLIP_NOISE,
    ROUTING_FLIP_SHARE,
    TOOL_TOKENS,
    USUAL_NOISE,
    VOCABULARY_SIZE,
    SyntheticStep,
    lay_out_turns,
    log_softmax,
    noise_at,
)

ENVIRONMENTS = ("code", "math", "search")


@dataclass
class Step(SyntheticStep):
    """A synthetic step with what these faults select tokens by; arrays are [N]."""

    number: int
    from_end: Array
    begins_turn: Array
    token: Array


Plant = Callable[[Step, float], None]


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        plant: changes logits (or log-probs, if ``on_logprobs``).
        strengths: three strengths.
        places: ids of the factors that are a right answer to where the fault is; "all" and "few" if it is everywhere.
        causes: ids of the causes that may be named first; none: the cause is not known.
        onset: first step with the fault.
        on_logprobs: whether ``plant`` changes log-probs.
        options: what is recorded: ``environments``, ``replicas``, ``ages``, ``single_turn``, ``experts``.
    """

    plant: Plant
    strengths: tuple[float, float, float]
    places: tuple[str, ...]
    causes: tuple[str, ...] = ()
    onset: int = 1
    on_logprobs: bool = False
    options: dict[str, bool] = field(default_factory=dict)


def _shift_prev(select: Callable[[Step], Array]) -> Plant:
    def plant(step: Step, strength: float) -> None:
        step.prev = np.where(select(step), step.prev - strength, step.prev)

    return plant


def _random_token(step: Step) -> Array:
    count = np.bincount(step.sequence)
    chosen = np.floor(step.random.random(len(count)) * count).astype(int)
    start = np.concatenate([[0], np.cumsum(count)[:-1]])
    flags = np.zeros(len(step.sequence), bool)
    flags[start + chosen] = True
    return flags


def _share_of_sequences(share: float) -> Callable[[Step], Array]:
    def select(step: Step) -> Array:
        chosen = step.random.random(len(step.columns["length"])) < share
        flags: Array = chosen[step.sequence]
        return flags

    return select


def _top_k(step: Step, strength: float) -> None:
    logprobs = log_softmax(step.logits)
    rank = np.argsort(np.argsort(-logprobs, axis=1), axis=1)
    kept = np.where(rank >= int(strength), -np.inf, logprobs)
    step.target = (kept + step.random.gumbel(size=kept.shape)).argmax(axis=1)
    step.gen = log_softmax(kept)[np.arange(len(kept)), step.target]


def _scale(step: Step, strength: float) -> None:
    step.prev = step.prev * (1 + strength)


def _large_flips(step: Step, strength: float) -> None:
    step.add_noise(step.random.random(len(step.target)) < strength * ROUTING_FLIP_SHARE, 5 * ROUTING_FLIP_NOISE)


def _growing(select: Callable[[Step], Array]) -> Plant:
    """Return noise that grows with the number of the step, from the first one on."""

    def plant(step: Step, strength: float) -> None:
        step.add_noise(select(step), strength * USUAL_NOISE * step.number)

    return plant


def _two_faults(step: Step, strength: float) -> None:
    """Late tokens since step 6, tokens after tool calls since step 7."""
    step.add_noise((step.position >= 128) & (step.number >= 6), strength * USUAL_NOISE)
    step.add_noise((step.turn > 0) & (step.number >= 7), strength * USUAL_NOISE)


def _smooth(step: Step, strength: float) -> None:
    step.prev = np.log((1 - strength) * np.exp(step.prev) + strength / VOCABULARY_SIZE)


def _penalise(step: Step, strength: float) -> None:
    """Make tokens that occurred before in the response less likely in the sampler, and new ones likelier."""
    _, first = np.unique(step.sequence * 1000 + step.token, return_index=True)
    is_new = np.zeros(len(step.token), bool)
    is_new[first] = True
    step.prev = step.prev + strength * np.where(is_new, -0.3, 1.0) * (1 - np.exp(step.gen))


def _half_of_the_ends(step: Step) -> Array:
    chosen = step.random.random(len(step.columns["length"])) < 0.5
    flags: Array = (step.from_end == 0) & chosen[step.sequence]
    return flags


_AGES, _FLIPS = PLANTED_CAUSES["staleness"].effect, PLANTED_CAUSES["routing"].effect
_HIDDEN = {"ages": False}
_NOISES = (8.0, 20.0, 60.0)
_GROWTHS = (2.0, 8.0, 30.0)
FAULTS: dict[str, Fault] = {
    "replica_recorded": Fault(noise_at(lambda s: s.per_token("replica") == 3), _NOISES, ("replica",)),
    "replica_unrecorded": Fault(
        noise_at(lambda s: s.per_token("replica") == 3), _NOISES, ("sequence",), options={"replicas": False}
    ),
    "replicas_two": Fault(noise_at(lambda s: np.isin(s.per_token("replica"), (1, 5))), _NOISES, ("replica",)),
    "random_sequences": Fault(noise_at(_share_of_sequences(0.1)), _NOISES, ("sequence",)),
    "few_sequences": Fault(noise_at(_share_of_sequences(0.03)), (20.0, 40.0, 80.0), ("sequence",)),
    "environment": Fault(noise_at(lambda s: s.per_token("environment") == 1), _NOISES, ("environment",)),
    "environment_unrecorded": Fault(
        noise_at(lambda s: s.per_token("environment") == 1),
        _NOISES,
        ("group", "sequence"),
        options={"environments": False},
    ),
    "every_fourth_step": Fault(noise_at(lambda s: np.full(len(s.target), s.number % 4 == 0)), _NOISES, ("step",)),
    "one_step": Fault(noise_at(lambda s: np.full(len(s.target), s.number == 8)), (20.0, 40.0, 80.0), ("step",)),
    "three_steps": Fault(noise_at(lambda s: np.full(len(s.target), s.number in (3, 4, 9))), _NOISES, ("step",)),
    "ages_recorded": Fault(_AGES, (5.0, 10.0, 30.0), ("staleness",), ("staleness",)),
    "ages_unrecorded": Fault(_AGES, (5.0, 10.0, 30.0), ("sequence",), options=_HIDDEN),
    "first_token": Fault(noise_at(lambda s: s.position == 0), (40.0, 80.0, 200.0), ("position", "first_of_turn")),
    "first_token_single_turn": Fault(
        noise_at(lambda s: s.position == 0),
        (40.0, 80.0, 200.0),
        ("position", "first_of_turn"),
        options={"single_turn": True},
    ),
    "first_token_shift": Fault(
        _shift_prev(lambda s: s.position == 0), (1.0, 3.0, 6.0), ("position", "first_of_turn"), on_logprobs=True
    ),
    "first_eight": Fault(noise_at(lambda s: s.position < 8), (20.0, 40.0, 80.0), ("position",)),
    "early_tokens": Fault(noise_at(lambda s: s.position < 32), _NOISES, ("position",)),
    "first_of_turns": Fault(noise_at(lambda s: s.begins_turn), (40.0, 80.0, 200.0), ("first_of_turn", "position")),
    "last_token": Fault(_shift_prev(lambda s: s.from_end == 0), (1.0, 3.0, 8.0), ("from_end",), on_logprobs=True),
    "last_token_noise": Fault(noise_at(lambda s: s.from_end == 0), (40.0, 80.0, 200.0), ("from_end",)),
    "last_four": Fault(noise_at(lambda s: s.from_end < 4), (30.0, 60.0, 120.0), ("from_end",)),
    "late_tokens": Fault(noise_at(lambda s: s.position >= 128), _NOISES, ("position",), ("position",)),
    "long_responses": Fault(noise_at(lambda s: s.per_token("length") >= 160), _NOISES, ("response",), ("length",)),
    "short_responses": Fault(noise_at(lambda s: s.per_token("length") < 64), _NOISES, ("response",), ("length",)),
    "long_sequences": Fault(noise_at(lambda s: s.per_token("span") >= 200), _NOISES, ("length",), ("length",)),
    "tool_calls": Fault(PLANTED_CAUSES["tool_calls"].effect, _NOISES, ("turn",), ("tool_calls",)),
    "prompt_group": Fault(noise_at(lambda s: s.per_token("group") == 5), (20.0, 40.0, 80.0), ("group",), ("group",)),
    "prompt_groups_two": Fault(
        noise_at(lambda s: np.isin(s.per_token("group"), (2, 9))), (20.0, 40.0, 80.0), ("group",), ("group",)
    ),
    "low_probability": Fault(
        PLANTED_CAUSES["low_probability"].effect, (15.0, 25.0, 50.0), ("probability",), ("low_probability",)
    ),
    "token_id": Fault(noise_at(lambda s: np.isin(s.token, (7, 8))), (40.0, 80.0, 200.0), ("token_id",)),
    "random_token": Fault(_shift_prev(_random_token), (3.0, 5.0, 8.0), ("few",), on_logprobs=True),
    "environment_first_token": Fault(
        noise_at(lambda s: (s.per_token("environment") == 1) & (s.position < 4)),
        (60.0, 120.0, 300.0),
        ("environment", "position"),
    ),
    "replica_late": Fault(
        noise_at(lambda s: (s.per_token("replica") == 3) & (s.position >= 64)),
        (20.0, 40.0, 80.0),
        ("replica", "position"),
    ),
    "top_p": Fault(PLANTED_CAUSES["filtered"].effect, (0.05, 0.1, 0.3), ("all",), ("filtered",)),
    "top_k": Fault(_top_k, (4.0, 3.0, 2.0), ("all",), ("filtered",)),
    "temperature": Fault(PLANTED_CAUSES["temperature"].effect, (0.05, 0.1, 0.3), ("all",), ("temperature",)),
    "scaled": Fault(_scale, (0.02, 0.05, 0.2), ("all",), ("scaled",), on_logprobs=True),
    "scaled_down": Fault(_scale, (-0.02, -0.05, -0.2), ("all",), ("scaled",), on_logprobs=True),
    "flips_of_experts": Fault(_FLIPS, (6.0, 10.0, 20.0), ("few",), ("routing",), onset=7, options={"experts": True}),
    "flips_of_unknown": Fault(_FLIPS, (6.0, 10.0, 20.0), ("few",), onset=7),
    "flips_from_start": Fault(_large_flips, (2.0, 4.0, 8.0), ("few",)),
    "precision": Fault(PLANTED_CAUSES["precision"].effect, (4.0, 8.0, 15.0), ("all",), ("precision",), onset=7),
    "stale_engine": Fault(
        PLANTED_CAUSES["stale_engine"].effect, (0.05, 0.1, 0.4), ("all",), ("stale_engine",), onset=7
    ),
    "growing_noise": Fault(_growing(lambda s: np.ones(len(s.target), bool)), _GROWTHS, ("all",), ("precision",)),
    "growing_environment": Fault(_growing(lambda s: s.per_token("environment") == 1), _GROWTHS, ("environment",)),
    "growing_tool_calls": Fault(_growing(lambda s: s.turn > 0), _GROWTHS, ("turn",)),
    "two_faults": Fault(_two_faults, _NOISES, ("position", "turn")),
    "label_smoothing": Fault(_smooth, (0.02, 0.05, 0.1), ("all",), ("smoothed",), on_logprobs=True),
    "repetition_penalty": Fault(_penalise, (0.05, 0.2, 0.5), ("all",), ("penalty",), on_logprobs=True),
    "missing_end": Fault(
        _shift_prev(_half_of_the_ends), (3.0, 5.0, 8.0), ("from_end",), on_logprobs=True, options={"experts": True}
    ),
}
"""Faults by name."""
CLEAN: dict[str, dict[str, bool]] = {
    "synchronous": {"ages": False},
    "asynchronous": {"two_ages": True},
    "single_turn": {"ages": False, "single_turn": True, "environments": False, "replicas": False},
    "experts": {"experts": True},
}
"""Options of clean runs by name."""


def make_run(
    seed: int,
    name: str | None,
    strength: float = 0.0,
    *,
    options: dict[str, bool] | None = None,
    steps: int = 12,
    prompts: int = 12,
    samples: int = 8,
    length: float = 100.0,
) -> list[RecordBlock]:
    """Return the records of each step of a run with a fault of ``FAULTS``, or a clean one for None."""
    fault = None if name is None else FAULTS[name]
    chosen = dict(options or {}) if fault is None else {**fault.options, **(options or {})}
    return [
        _make_step(seed, number, fault, strength, chosen, prompts, samples, length) for number in range(1, steps + 1)
    ]


def _make_step(
    seed: int,
    number: int,
    fault: Fault | None,
    strength: float,
    options: dict[str, bool],
    prompts: int,
    samples: int,
    length: float,
) -> RecordBlock:
    random = np.random.default_rng([seed, number])
    count = prompts * samples
    group = np.repeat(np.arange(prompts), samples)
    response = np.clip(random.lognormal(np.log(length), 0.7, count), 24, 8 * length).astype(np.int64)
    prompt = random.integers(10, 40, prompts)[group]
    turns = np.where(random.random(count) < 0.5, 1, random.integers(2, 4, count))
    if options.get("single_turn"):
        turns[:] = 1
    mask, turn = lay_out_turns(prompt, response, turns)
    sequence = np.repeat(np.arange(count), response)
    lengths = prompt + response + (turns - 1) * TOOL_TOKENS
    offsets = np.concatenate([[0], lengths.cumsum()])
    position = np.flatnonzero(mask) - np.repeat(offsets[:-1] + prompt, response)
    order = np.arange(len(sequence)) - np.repeat(np.cumsum(response) - response, response)
    from_end = response[sequence] - 1 - order
    begins_turn = np.concatenate([[True], (np.diff(sequence) != 0) | (np.diff(turn) != 0)])
    reward = (random.random(count) < 0.4).astype(np.float32)
    mean_reward = np.bincount(group, weights=reward) / samples
    size = len(sequence)
    sharpness = np.where(random.random(size) < 0.6, 9.0, random.uniform(1.0, 5.0, size))
    logits = random.standard_normal((size, VOCABULARY_SIZE))
    logits[np.arange(size), random.integers(0, VOCABULARY_SIZE, size)] += sharpness
    logprobs = log_softmax(logits)
    target = (logprobs + random.gumbel(size=logprobs.shape)).argmax(axis=1)
    step = Step(
        random=random,
        steps_since_onset=1 if fault is None else number - fault.onset + 1,
        number=number,
        sequence=sequence,
        position=position,
        turn=turn,
        from_end=from_end,
        begins_turn=begins_turn,
        logits=logits,
        trained_logits=logits.copy(),
        target=target,
        token=random.integers(0, 300, size).astype(np.int32),
        gen=logprobs[np.arange(size), target],
        prev=np.zeros(size),
        columns={
            "length": response,
            "span": lengths,
            "group": group,
            "environment": group % 3,
            "replica": np.arange(count) % 8,
            "staleness": random.integers(0, 2 if options.get("two_ages") else 4, count),
            "advantage": (reward - mean_reward[group]) / 0.5,
        },
    )
    noise = np.where(random.random(size) < ROUTING_FLIP_SHARE, ROUTING_FLIP_NOISE, USUAL_NOISE)
    step.add_noise(np.ones(size, bool), noise)
    fault = fault if fault is not None and number >= fault.onset else None
    if fault is not None and not fault.on_logprobs:
        fault.plant(step, strength)
    step.prev = log_softmax(step.trained_logits)[np.arange(size), step.target]
    if fault is not None and fault.on_logprobs:
        fault.plant(step, strength)
    tokens = {"tokens": random.integers(0, 300, len(mask)).astype(np.int32), "mask": mask}
    tokens["tokens"][mask] = step.token
    for name, values in (
        ("gen", step.gen),
        ("prev", np.minimum(step.prev, 0)),
        ("advantages", step.per_token("advantage")),
    ):
        tokens[name] = np.zeros(len(mask), np.float32)
        tokens[name][mask] = values
    sequences = {
        "step": np.full(count, number),
        "row": np.arange(count),
        "group": group,
        "reward": reward,
        "length": lengths,
        "prompt_length": prompt,
        "turns": turns,
        "sample_mask": np.ones(count, np.float32),
    }
    if options.get("ages", True):
        sequences["staleness"] = step.columns["staleness"].astype(float)
    if options.get("environments", True):
        sequences["environment"] = np.array(ENVIRONMENTS, dtype=object)[step.columns["environment"]]
    if options.get("replicas", True):
        sequences["replica"] = np.array([f"{value}" for value in step.columns["replica"]], dtype=object)
    return RecordBlock(sequences, tokens, offsets)
