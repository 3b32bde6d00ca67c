"""Records of made-up runs, with and without a planted cause: what the detectors are measured on.

Each token is drawn from a distribution over a small vocabulary whose sharpness differs from token to token. The
training engine's logits are the generation engine's with noise of the size that bfloat16 makes in the lab, and with
more of it at the few tokens where an expert's routing flips. A cause changes logits or log-probs, as in a real run.

``python -m nemo_geomask.diagnosis.planted DIR --cause tool_calls --strength 5`` writes one, to try the commands on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_geomask.diagnosis.read import Array, RecordBlock
from nemo_geomask.diagnosis.statistics import Statistics
from nemo_geomask.diagnosis.survey import survey
from nemo_geomask.records.schema import COLUMNS, arrow_schema, file_name, require_arrow

__all__ = ["PLANTS", "STRENGTHS", "RunShape", "planted_run", "planted_step", "write_step"]

VOCABULARY = 12
NOISE, FLIPPED, FLIPS = 0.02, 0.3, 0.015
STRENGTHS = ("weak", "middle", "strong")


@dataclass(frozen=True)
class RunShape:
    """Sizes of a made-up run."""

    steps: int = 12
    prompts: int = 12
    samples: int = 8
    length: float = 100.0


@dataclass
class Draft:
    """One step being made.

    Attributes:
        random: source of all randomness.
        since: steps since the cause began, from 1.
        sequence, position, turn, target: [N] of each response token; its row, place, turn and index in the vocabulary.
        logits: [N, VOCABULARY] of the generation engine.
        trained: the same of the training engine.
        gen, prev: [N] log-probs.
        rows: [S] facts of the sequences: ``length`` of the response, ``group``, ``staleness``, ``advantage``.
    """

    random: np.random.Generator
    since: int
    sequence: Array
    position: Array
    turn: Array
    target: Array
    logits: Array
    trained: Array
    gen: Array
    prev: Array
    rows: dict[str, Array]

    @property
    def surprise(self) -> Array:
        """−log p of the sampled tokens in the generation engine."""
        return -self.gen

    def add_noise(self, where: Array, scale: Array | float) -> None:
        """Noise on the training engine's logits at some tokens."""
        count = int(where.sum())
        spread = np.broadcast_to(scale, where.shape)[where][:, None]
        self.trained[where] += spread * self.random.standard_normal((count, VOCABULARY))


Effect = Callable[[Draft, float], None]


def _zeros(draft: Draft, strength: float) -> None:
    """The engine returns no log-probs for some sequences."""
    chosen = draft.random.permutation(len(draft.rows["length"]))[: max(1, round(strength * len(draft.rows["length"])))]
    draft.gen[np.isin(draft.sequence, chosen)] = 0


def _shifted(draft: Draft, strength: float) -> None:
    """Some sequences' log-probs are those of the column before; what precedes a turn has none: a 0."""
    chosen = draft.random.permutation(len(draft.rows["length"]))[: max(1, round(strength * len(draft.rows["length"])))]
    for row in chosen:
        mine = draft.sequence == row
        begins = np.diff(draft.turn[mine], prepend=-1) != 0
        draft.gen[mine] = np.where(begins, 0.0, np.concatenate([[0.0], draft.gen[mine][:-1]]))


def _filtered(draft: Draft, strength: float) -> None:
    """The engine samples from the likeliest tokens that hold a share of the probability, and says how likely they are
    among these."""
    log_gen = _log_softmax(draft.logits)
    order = np.argsort(-log_gen, axis=1)
    ranked = np.take_along_axis(np.exp(log_gen), order, axis=1)
    cut = np.cumsum(ranked, axis=1) - ranked >= 1 - strength
    left = np.where(np.take_along_axis(cut, np.argsort(order, axis=1), axis=1), -np.inf, log_gen)
    draft.target = (left + draft.random.gumbel(size=left.shape)).argmax(axis=1)
    draft.gen = _log_softmax(left)[np.arange(len(left)), draft.target]


def _temperature(draft: Draft, strength: float) -> None:
    """The training engine divides by another temperature."""
    draft.trained *= 1 + strength


def _stale_engine(draft: Draft, strength: float) -> None:
    """The policy moves on, a little towards what was rewarded."""
    move = strength * draft.since * (draft.random.standard_normal(len(draft.target)) + 0.03 * _of(draft, "advantage"))
    draft.trained[np.arange(len(draft.target)), draft.target] += move
    noise = draft.random.standard_normal(draft.trained.shape)
    draft.trained += 0.5 * strength * draft.since * noise


def _of(draft: Draft, name: str) -> Array:
    values: Array = draft.rows[name][draft.sequence]
    return values


def _staleness(draft: Draft, strength: float) -> None:
    draft.add_noise(np.ones(len(draft.target), bool), strength * NOISE * _of(draft, "staleness"))


def _at(where: Callable[[Draft], Array]) -> Effect:
    def effect(draft: Draft, strength: float) -> None:
        draft.add_noise(where(draft), strength * NOISE)

    return effect


def _low_probability(draft: Draft, strength: float) -> None:
    """Rounding of the logits far below the largest."""
    behind = draft.logits.max(axis=1, keepdims=True) - draft.logits
    noise = draft.random.standard_normal(draft.trained.shape)
    draft.trained += strength * NOISE * np.where(behind > 3.5, noise, 0)


def _routing(draft: Draft, strength: float) -> None:
    flips = draft.random.random(len(draft.target)) < strength * FLIPS
    draft.add_noise(flips, FLIPPED)


@dataclass(frozen=True)
class Plant:
    """A planted cause: what it does, at three strengths, and what the strength is."""

    effect: Effect
    strengths: tuple[float, float, float]
    unit: str
    from_start: bool = True


_NOISE_UNIT = "times the usual noise on the logits there"
PLANTS: dict[str, Plant] = {
    "filtered": Plant(_filtered, (0.02, 0.1, 0.3), "of the probability is cut off"),
    "zero_logprobs": Plant(_zeros, (0.02, 0.1, 1.0), "share of the sequences without log-probs"),
    "shifted": Plant(_shifted, (0.02, 0.1, 1.0), "share of the sequences shifted"),
    "temperature": Plant(_temperature, (0.01, 0.05, 0.3), "relative difference of the temperatures"),
    "stale_engine": Plant(_stale_engine, (0.02, 0.1, 0.4), "a step's change of the logits, nats", from_start=False),
    "staleness": Plant(_staleness, (1.0, 3.0, 10.0), f"{_NOISE_UNIT}, for each step of staleness"),
    "low_probability": Plant(
        _low_probability, (5.0, 20.0, 50.0), "times the usual noise, on logits 3.5 below the largest"
    ),
    "tool_calls": Plant(_at(lambda draft: draft.turn > 0), (2.0, 5.0, 20.0), _NOISE_UNIT),
    "length": Plant(
        _at(lambda draft: (_of(draft, "length") > 128) & (_of(draft, "length") < 256)), (2.0, 5.0, 20.0), _NOISE_UNIT
    ),
    "position": Plant(_at(lambda draft: draft.position > 200), (2.0, 6.0, 20.0), _NOISE_UNIT),
    "group": Plant(_at(lambda draft: _of(draft, "group") == 3), (4.0, 12.0, 40.0), _NOISE_UNIT),
    "routing": Plant(_routing, (1.0, 4.0, 10.0), "times as many flips on top of the usual ones", from_start=False),
    "precision": Plant(
        _at(lambda draft: np.ones(len(draft.target), bool)), (1.0, 4.0, 15.0), _NOISE_UNIT, from_start=False
    ),
}
"""By the id of the cause that is to be named."""


def planted_run(
    seed: int, cause: str | None = None, strength: float = 0.0, *, onset: int = 1, shape: RunShape | None = None
) -> Statistics:
    """Statistics of a made-up run.

    Args:
        seed: of everything.
        cause: key of ``PLANTS``; None: nothing is wrong.
        strength: in the plant's unit.
        onset: first step of it, counted from 1.
        shape: sizes.
    """
    shape = shape or RunShape()
    found = Statistics()
    for step in range(1, shape.steps + 1):
        planted = cause if step >= onset else None
        found.add(survey(planted_step(seed, step, planted, strength, since=step - onset + 1, shape=shape)))
    return found


def planted_step(
    seed: int, step: int, cause: str | None, strength: float, *, since: int = 1, shape: RunShape | None = None
) -> RecordBlock:
    """One step of such a run, as records."""
    shape = shape or RunShape()
    random = np.random.default_rng([seed, step])
    draft, whole = _draft(random, shape, since)
    log_gen = _log_softmax(draft.logits)
    index = np.arange(len(draft.sequence))
    draft.target = (log_gen + random.gumbel(size=log_gen.shape)).argmax(axis=1)
    draft.gen = log_gen[index, draft.target]
    usual = np.where(random.random(len(index)) < FLIPS, FLIPPED, NOISE)
    draft.add_noise(np.ones(len(index), bool), usual)
    late = cause in ("zero_logprobs", "shifted")
    if cause is not None and not late:
        PLANTS[cause].effect(draft, strength)
    draft.prev = _log_softmax(draft.trained)[index, draft.target]
    if cause is not None and late:
        PLANTS[cause].effect(draft, strength)
    tokens = {
        "tokens": random.integers(0, 1000, len(whole["mask"])).astype(np.int32),
        "mask": whole["mask"],
        **{name: np.zeros(len(whole["mask"]), np.float32) for name in ("gen", "prev", "advantages")},
    }
    for name, value in (("gen", draft.gen), ("prev", draft.prev), ("advantages", _of(draft, "advantage"))):
        tokens[name][whole["mask"]] = value
    return RecordBlock(
        {**whole["sequences"], "step": np.full(len(whole["offsets"]) - 1, step)}, tokens, whole["offsets"]
    )


def write_step(directory: Path, block: RecordBlock) -> Path:
    """Write one step's block as a record.

    Raises: MissingDependencyError: there is no pyarrow.
    """
    arrow, parquet = require_arrow(), require_arrow("pyarrow.parquet")
    schema, offsets, count = arrow_schema(), arrow.array(block.offsets, arrow.int32()), len(block)
    table = {}
    for column in COLUMNS:
        kind = schema.field(column.name).type
        if column.by_token and column.name in block.tokens:
            values = arrow.array(block.tokens[column.name], kind.value_type)
            table[column.name] = arrow.ListArray.from_arrays(offsets, values)
        elif column.name in block.sequences:
            table[column.name] = arrow.array(block.sequences[column.name]).cast(kind)
        else:
            table[column.name] = arrow.nulls(count, kind)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / file_name(int(block.sequences["step"][0]), "planted")
    parquet.write_table(arrow.table(table, schema), path)
    return path


def _draft(random: np.random.Generator, shape: RunShape, since: int) -> tuple[Draft, dict[str, Any]]:
    count = shape.prompts * shape.samples
    group = np.repeat(np.arange(shape.prompts), shape.samples)
    response = np.clip(random.lognormal(np.log(shape.length), 0.7, count), 24, 8 * shape.length).astype(np.int64)
    prompt = random.integers(10, 40, shape.prompts)[group]
    turns = np.where(random.random(count) < 0.5, 1, random.integers(2, 4, count))
    tool = 15
    lengths = prompt + response + (turns - 1) * tool
    offsets = np.concatenate([[0], lengths.cumsum()])
    masks: list[Array] = []
    turn_of: list[Array] = []
    for row in range(count):
        ends = np.linspace(0, response[row], turns[row] + 1).astype(int)
        parts = [np.zeros(prompt[row], bool)]
        for turn in range(turns[row]):
            parts += [np.zeros(tool if turn else 0, bool), np.ones(ends[turn + 1] - ends[turn], bool)]
            turn_of.append(np.full(ends[turn + 1] - ends[turn], turn))
        masks.append(np.concatenate(parts))
    mask = np.concatenate(masks)
    sequence = np.repeat(np.arange(count), response)
    position = np.flatnonzero(mask) - np.repeat(offsets[:-1] + prompt, response)
    reward = (random.random(count) < 0.4).astype(np.float32)
    mean = np.bincount(group, weights=reward) / shape.samples
    advantage = (reward - mean[group]) / 0.5
    size = len(sequence)
    # Most tokens are nearly sure, as a language model's.
    sharpness = np.where(random.random(size) < 0.6, 9.0, random.uniform(1.0, 5.0, size))
    logits = random.standard_normal((size, VOCABULARY))
    logits[np.arange(size), random.integers(0, VOCABULARY, size)] += sharpness
    none = np.zeros(0)
    rows = {"length": response, "group": group, "staleness": random.integers(0, 4, count), "advantage": advantage}
    draft = Draft(
        random, since, sequence, position, np.concatenate(turn_of), none, logits, logits.copy(), none, none, rows
    )
    sequences = {
        "row": np.arange(count),
        "group": group,
        "reward": reward,
        "length": lengths,
        "prompt_length": prompt,
        "turns": turns,
        "staleness": rows["staleness"].astype(float),
        "sample_mask": np.ones(count, np.float32),
    }
    return draft, {"mask": mask, "offsets": offsets, "sequences": sequences}


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _main() -> None:
    parser = argparse.ArgumentParser(description="Write the records of a made-up run with a planted cause.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cause", choices=list(PLANTS))
    parser.add_argument("--strength", type=float, default=1.0, help="in the plant's unit, see docs/diagnose.md")
    parser.add_argument("--onset", type=int, default=1, help="first step of it")
    parser.add_argument("--steps", type=int, default=RunShape.steps)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for step in range(1, arguments.steps + 1):
        since = step - arguments.onset + 1
        cause = arguments.cause if since > 0 else None
        block = planted_step(arguments.seed, step, cause, arguments.strength, since=since)
        write_step(arguments.directory, block)


if __name__ == "__main__":
    _main()
