"""Synthetic records of runs with and without a planted cause, on which the detectors are tested and measured.

Each token is drawn from a distribution over a small vocabulary whose sharpness varies from token to token. The training
engine's logits are those of the generation engine plus noise as large as that of bfloat16 in the lab, with more noise
at the few tokens where the choice of experts flips. A planted cause changes logits or log-probs as in a real run.

``python -m nemo_geomask.tools.diagnose.planted_logs DIR --cause tool_calls --strength 5`` writes the records of such a
run, to try the commands on.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_geomask.records.record_schema import COLUMNS, RecordOrigin, arrow_schema, file_name, require_arrow
from nemo_geomask.records.stored_files import open_folder, store_record
from nemo_geomask.tools.diagnose.planted_causes import (
    PLANTED_CAUSES,
    ROUTING_FLIP_NOISE,
    ROUTING_FLIP_SHARE,
    STRENGTHS,
    USUAL_NOISE,
    SyntheticStep,
    log_softmax,
)
from nemo_geomask.tools.diagnose.record_reader import Array, RecordBlock
from nemo_geomask.tools.diagnose.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.step_survey import survey_block

__all__ = ["PLANTED_CAUSES", "STRENGTHS", "RunShape", "planted_run", "planted_step", "write_step"]

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
    statistics = RunStatistics()
    for step in range(1, shape.steps + 1):
        step_cause = cause if step >= onset else None
        block = planted_step(seed, step, step_cause, strength, steps_since_onset=step - onset + 1, shape=shape)
        statistics.add(survey_block(block))
    return statistics


def planted_step(
    seed: int,
    step: int,
    cause: str | None,
    strength: float,
    *,
    steps_since_onset: int = 1,
    shape: RunShape | None = None,
) -> RecordBlock:
    """Return the records of one step of a synthetic run; ``steps_since_onset`` is 1 in the first step of the cause."""
    random = np.random.default_rng([seed, step])
    synthetic, mask, sequences = _make_synthetic_step(random, shape or RunShape(), steps_since_onset)
    planted = None if cause is None else PLANTED_CAUSES[cause]
    tokens = np.arange(len(synthetic.sequence))
    logprobs = log_softmax(synthetic.logits)
    synthetic.target = (logprobs + random.gumbel(size=logprobs.shape)).argmax(axis=1)
    synthetic.gen = logprobs[tokens, synthetic.target]
    noise = np.where(random.random(len(tokens)) < ROUTING_FLIP_SHARE, ROUTING_FLIP_NOISE, USUAL_NOISE)
    synthetic.add_noise(np.ones(len(tokens), bool), noise)
    if planted is not None and not planted.changes_logprobs:
        planted.effect(synthetic, strength)
    synthetic.prev = log_softmax(synthetic.trained_logits)[tokens, synthetic.target]
    if planted is not None and planted.changes_logprobs:
        planted.effect(synthetic, strength)
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
    mask, turn = _lay_out_turns(prompt_length, response_length, turns)
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


def _lay_out_turns(prompt_length: Array, response_length: Array, turns: Array) -> tuple[Array, Array]:
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


def write_step(directory: Path, block: RecordBlock) -> Path:
    """Write the records of one step as the flight recorder would, and return the file.

    Raises: MissingDependencyError: pyarrow is missing.
    """
    arrow = require_arrow()
    schema, offsets = arrow_schema(), arrow.array(block.offsets, arrow.int32())
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
        "--strength", type=float, default=1.0, help="in the unit of the cause, see docs/background/verdict.md"
    )
    parser.add_argument("--onset", type=int, default=1, help="first step of the cause")
    parser.add_argument("--steps", type=int, default=RunShape.steps)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if any(arguments.directory.glob("*.parquet")):
        parser.error(f"{arguments.directory} holds a log already; name another folder")
    for step in range(1, arguments.steps + 1):
        steps_since_onset = step - arguments.onset + 1
        cause = arguments.cause if steps_since_onset > 0 else None
        block = planted_step(arguments.seed, step, cause, arguments.strength, steps_since_onset=steps_since_onset)
        write_step(arguments.directory, block)
    print(
        f"{arguments.directory}: {arguments.steps} steps, "
        + (f"with {arguments.cause} from step {arguments.onset} on" if arguments.cause else "without a cause")
    )


if __name__ == "__main__":
    _main()
