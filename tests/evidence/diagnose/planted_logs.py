"""Synthetic records of runs with and without a planted cause, on which the detectors are tested and measured.

Each token is drawn from a distribution over a small vocabulary whose sharpness varies from token to token. The training
engine's logits are those of the generation engine plus noise as large as that of bfloat16 in the lab, with more noise
at the few tokens where the choice of experts flips. A planted cause changes logits or log-probs as in a real run.

``python -m tests.evidence.diagnose.planted_logs DIR --cause tool_calls --strength 5`` writes the records of such a
run, to try the commands on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_geomask.records.record_schema import COLUMNS, RecordOrigin, arrow_schema, file_name, require_arrow
from nemo_geomask.records.stored_files import open_folder, store_record
from nemo_geomask.tools.diagnose.read.record_reader import Array, RecordBlock

EXPERTS = 64
"""Experts of the synthetic model."""
USUAL_NOISE = 0.02
"""Standard deviation of the noise on the training engine's logits, as with bfloat16 in the lab."""
ROUTING_FLIP_NOISE, ROUTING_FLIP_SHARE = 0.3, 0.015
"""Standard deviation of the noise at tokens where the choice of experts flips, and the share of such tokens."""
VOCABULARY_SIZE = 12
TOOL_TOKENS = 15
"""Untrained tokens of tool output between two turns."""


@dataclass(frozen=True)
class RunShape:
    """Sizes of a synthetic run; ``length`` is the median number of response tokens."""

    steps: int = 12
    prompts: int = 12
    samples: int = 8
    length: float = 100.0


@dataclass
class SyntheticStep:
    """One step of a synthetic run, with N response tokens, V vocabulary entries and S sequences.

    Attributes:
        gen, prev: [N], log-probs of the sampled tokens.
    """

    random: np.random.Generator  # random number generator of the step
    steps_since_onset: int  # number of steps since the cause began; 1 in the first step of the cause
    sequence: Array  # [N], the row of each token
    position: Array  # [N], position of each token in the response
    turn: Array  # [N], number of earlier turns
    target: Array  # [N], index of the sampled token in the vocabulary
    logits: Array  # [N, V], of the generation engine
    trained_logits: Array  # [N, V], of the training engine
    gen: Array
    prev: Array
    columns: dict[str, Array]  # ``length`` of the response, ``group``, ``staleness`` and ``advantage``, each [S]

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


def _plant_stale_engine(step: SyntheticStep, strength: float) -> None:
    """Let the policy move a little further at each step, with a slight preference for rewarded tokens."""
    count, scale = len(step.target), strength * step.steps_since_onset
    move = scale * (step.random.standard_normal(count) + 0.03 * step.per_token("advantage"))
    step.trained_logits[np.arange(count), step.target] += move
    step.trained_logits += 0.5 * scale * step.random.standard_normal(step.trained_logits.shape)


def noise_at(select: Callable[[SyntheticStep], Array]) -> CauseEffect:
    """Return an effect that adds noise at the tokens that ``select`` marks."""

    def plant(step: SyntheticStep, strength: float) -> None:
        step.add_noise(select(step), strength * USUAL_NOISE)

    return plant


@dataclass(frozen=True)
class PlantedCause:
    """A cause that can be planted in a synthetic run.

    Attributes:
        is_detectable_from_start: True if the cause can be detected in a run that has it from the first step on.
        changes_logprobs: True if the effect changes the sampled tokens' log-probs, False if it changes logits.
    """

    effect: CauseEffect  # changes a step as the cause would
    strengths: tuple[float, float, float]  # the three strengths that are measured
    unit: str  # unit of the strengths
    is_detectable_from_start: bool = True
    changes_logprobs: bool = False


NOISE_UNIT = "times the usual noise on the logits there"
PLANTED_CAUSES: dict[str, PlantedCause] = {
    "stale_engine": PlantedCause(
        _plant_stale_engine, (0.02, 0.1, 0.4), "a step's change of the logits, nats", is_detectable_from_start=False
    ),
    "tool_calls": PlantedCause(noise_at(lambda step: step.turn > 0), (2.0, 5.0, 20.0), NOISE_UNIT),
    "precision": PlantedCause(
        noise_at(lambda step: np.ones(len(step.target), bool)),
        (1.0, 4.0, 15.0),
        NOISE_UNIT,
        is_detectable_from_start=False,
    ),
}
"""Planted causes by the id of the cause that a diagnosis should name."""


def planted_step(
    seed: int,
    step: int,
    cause: PlantedCause | None,
    strength: float = 0.0,
    *,
    steps_since_onset: int = 1,
    shape: RunShape | None = None,
) -> RecordBlock:
    """Return the records of one step of a synthetic run; ``steps_since_onset`` is 1 in the first step of the cause."""
    random = np.random.default_rng([seed, step])
    synthetic, mask, sequences = _make_synthetic_step(random, shape or RunShape(), steps_since_onset)
    tokens = np.arange(len(synthetic.sequence))
    logprobs = log_softmax(synthetic.logits)
    synthetic.target = (logprobs + random.gumbel(size=logprobs.shape)).argmax(axis=1)
    synthetic.gen = logprobs[tokens, synthetic.target]
    noise = np.where(random.random(len(tokens)) < ROUTING_FLIP_SHARE, ROUTING_FLIP_NOISE, USUAL_NOISE)
    synthetic.add_noise(np.ones(len(tokens), bool), noise)
    if cause is not None and not cause.changes_logprobs:
        cause.effect(synthetic, strength)
    synthetic.prev = log_softmax(synthetic.trained_logits)[tokens, synthetic.target]
    if cause is not None and cause.changes_logprobs:
        cause.effect(synthetic, strength)
    columns = {"tokens": random.integers(0, 1000, len(mask)).astype(np.int32), "mask": mask}
    advantages = synthetic.per_token("advantage")
    for name, values in (("gen", synthetic.gen), ("prev", synthetic.prev), ("advantages", advantages)):
        columns[name] = np.zeros(len(mask), np.float32)
        columns[name][mask] = values
    offsets = np.concatenate([[0], sequences["length"].cumsum()])
    return RecordBlock({**sequences, "step": np.full(len(sequences["length"]), step)}, columns, offsets)


def _make_synthetic_step(
    random: np.random.Generator, shape: RunShape, steps_since_onset: int
) -> tuple[SyntheticStep, Array, dict[str, Array]]:
    """Return the step before its tokens are sampled, the mask of all tokens, and the sequences' recorded columns.

    The mask also covers the tokens of prompts and of tool output, for which it is False.
    """
    count = shape.prompts * shape.samples
    group = np.repeat(np.arange(shape.prompts), shape.samples)
    response_length = np.clip(random.lognormal(np.log(shape.length), 0.7, count), 24, 8 * shape.length).astype(np.int64)
    prompt_length = random.integers(10, 40, shape.prompts)[group]
    turns = np.where(random.random(count) < 0.5, 1, random.integers(2, 4, count))
    mask, turn = lay_out_turns(prompt_length, response_length, turns)
    sequence = np.repeat(np.arange(count), response_length)
    lengths = prompt_length + response_length + (turns - 1) * TOOL_TOKENS
    response_starts = np.concatenate([[0], lengths.cumsum()])[:-1] + prompt_length
    position = np.flatnonzero(mask) - np.repeat(response_starts, response_length)
    reward = (random.random(count) < 0.4).astype(np.float32)
    mean_reward = np.bincount(group, weights=reward) / shape.samples
    # Most tokens are nearly sure, as a language model's are.
    size = len(sequence)
    sharpness = np.where(random.random(size) < 0.6, 9.0, random.uniform(1.0, 5.0, size))
    logits = random.standard_normal((size, VOCABULARY_SIZE))
    logits[np.arange(size), random.integers(0, VOCABULARY_SIZE, size)] += sharpness
    columns = {
        "length": response_length,
        "group": group,
        "staleness": random.integers(0, 4, count),
        "advantage": (reward - mean_reward[group]) / 0.5,
    }
    synthetic = SyntheticStep(
        random=random,
        steps_since_onset=steps_since_onset,
        sequence=sequence,
        position=position,
        turn=turn,
        target=np.zeros(0),
        logits=logits,
        trained_logits=logits.copy(),
        gen=np.zeros(0),
        prev=np.zeros(0),
        columns=columns,
    )
    sequences = {
        "row": np.arange(count),
        "group": group,
        "reward": reward,
        "length": lengths,
        "prompt_length": prompt_length,
        "turns": turns,
        "staleness": columns["staleness"].astype(float),
        "sample_mask": np.ones(count, np.float32),
    }
    return synthetic, mask, sequences


def lay_out_turns(prompt_length: Array, response_length: Array, turns: Array) -> tuple[Array, Array]:
    """Return the mask of all tokens and the turn of each response token; tool output separates successive turns."""
    masks: list[Array] = []
    turn_numbers: list[Array] = []
    for row in range(len(turns)):
        bounds = np.linspace(0, response_length[row], turns[row] + 1).astype(int)
        masks.append(np.zeros(prompt_length[row], bool))
        for turn, turn_length in enumerate(np.diff(bounds)):
            masks += [np.zeros(TOOL_TOKENS if turn else 0, bool), np.ones(turn_length, bool)]
            turn_numbers.append(np.full(turn_length, turn))
    return np.concatenate(masks), np.concatenate(turn_numbers)


def write_step(directory: Path, block: RecordBlock, **facts: Any) -> Path:
    """Write the records of one step as the flight recorder would, and return the file.

    Raises: MissingDependencyError: pyarrow is missing.
    """
    arrow = require_arrow()
    schema, offsets = arrow_schema(facts={"experts": EXPERTS, **facts}), arrow.array(block.offsets, arrow.int32())
    table = {}
    for column in COLUMNS:
        column_type = schema.field(column.name).type
        if column.is_per_token and column.name in block.tokens:
            values = arrow.array(block.tokens[column.name], column_type.value_type)
            table[column.name] = arrow.ListArray.from_arrays(offsets, values)
        elif column.name in block.sequences:
            table[column.name] = arrow.array(block.sequences[column.name]).cast(column_type)
        else:
            table[column.name] = arrow.nulls(len(block), column_type)
    name = file_name(int(block.sequences["step"][0]), "planted")
    with open_folder(directory) as folder:
        tables = [arrow.table(table, schema)]
        store_record(folder, name, schema, tables, origin=RecordOrigin("planted"), may_replace=lambda identity: True)
    return directory / name


def _main() -> None:
    parser = argparse.ArgumentParser(description="Write the records of a synthetic run with a planted cause.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cause", choices=list(PLANTED_CAUSES))
    parser.add_argument(
        "--strength", type=float, default=1.0, help="in the unit of the cause, see docs/evidence/diagnosis.md"
    )
    parser.add_argument("--onset", type=int, default=1, help="first step of the cause")
    parser.add_argument("--steps", type=int, default=RunShape.steps)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if any(arguments.directory.glob("*.parquet")):
        parser.error(f"{arguments.directory} holds a log already; name another folder")
    for step in range(1, arguments.steps + 1):
        steps_since_onset = step - arguments.onset + 1
        cause = PLANTED_CAUSES[arguments.cause] if arguments.cause and steps_since_onset > 0 else None
        block = planted_step(arguments.seed, step, cause, arguments.strength, steps_since_onset=steps_since_onset)
        write_step(arguments.directory, block)
    print(
        f"{arguments.directory}: {arguments.steps} steps, "
        + (f"with {arguments.cause} from step {arguments.onset} on" if arguments.cause else "without a cause")
    )


if __name__ == "__main__":
    _main()
