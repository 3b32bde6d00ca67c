"""Held-out planted logs: synthetic runs on which no threshold of the diagnosis was chosen.

They differ from :mod:`nemo_geomask.tools.diagnose.planted_logs` in the distributions of tokens, the kind of noise, the
lengths, the sizes of the runs and the strengths. ``python -m tests.evidence.diagnose.held_out_logs --out FILE``
diagnoses them and writes the figures, which are in ``docs/diagnose/held_out.json``.

Each run is drawn twice with the same randomness, with and without its cause. The difference of the two mismatches is
the share that the cause truly accounts for.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_geomask.tools.diagnose.explain.verdict import RunDiagnosis, diagnose
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_survey import survey_block
from nemo_geomask.tools.diagnose.read.record_reader import Array, RecordBlock

STRENGTHS = ("weak", "middle", "strong")
VARIANTS = ("raw", "rounded")
"""Log-probs as computed, or rounded to three decimals with zeros from the sampler at most of the nearly sure tokens."""
ONSET = 6
STEPS = 11
PROMPTS, SAMPLES = 10, 8
VOCABULARY = 20
NOISE = 0.012
"""Scale of the Laplace noise on the training engine's logits."""


@dataclass
class Draft:
    """One step while it is drawn: N tokens of S sequences; the names are those of the flight recorder's columns."""

    random: np.random.Generator
    age: int
    row: Array
    position: Array
    turn: Array
    length: Array
    group: Array
    staleness: Array
    advantage: Array
    logits: Array
    trained: Array
    target: Array
    gen: Array
    prev: Array

    def disturb(self, tokens: Array, scale: Array | float) -> None:
        """Add Laplace noise to the training engine's logits at some tokens."""
        size = np.broadcast_to(scale, tokens.shape)[tokens][:, None]
        self.trained[tokens] += size * self.random.laplace(size=(int(tokens.sum()), VOCABULARY))


Effect = Callable[[Draft, float], None]


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def tokens_of_sequences(draft: Draft, share: float) -> Array:
    chosen = draft.random.permutation(len(draft.length))[: max(1, round(share * len(draft.length)))]
    return np.isin(draft.row, chosen)


def no_logprobs(draft: Draft, strength: float) -> None:
    """The sampler returns 0 for single tokens, as after an aborted request that is resumed."""
    draft.gen[draft.random.random(len(draft.gen)) < strength] = 0


def raw_logits(draft: Draft, strength: float) -> None:
    """The sampler returns logits for a share of its sequences."""
    logits = draft.logits[np.arange(len(draft.target)), draft.target]
    draft.gen = np.where(tokens_of_sequences(draft, strength), logits, draft.gen)


def shifted(draft: Draft, strength: float) -> None:
    """The training engine's log-probs are those of the token before."""
    tokens = tokens_of_sequences(draft, strength)
    previous = np.concatenate([[0.0], draft.prev[:-1]])
    previous[np.diff(draft.row, prepend=-1) != 0] = 0.0
    draft.prev = np.where(tokens, previous, draft.prev)


def top_k(draft: Draft, strength: float) -> None:
    """The sampler keeps the ``VOCABULARY - strength`` likeliest tokens, and renormalises."""
    logprobs = log_softmax(draft.logits)
    limit = np.sort(logprobs, axis=1)[:, int(strength)][:, None]
    kept = np.where(logprobs < limit, -np.inf, logprobs)
    draft.target = (kept + draft.random.gumbel(size=kept.shape)).argmax(axis=1)
    draft.gen = log_softmax(kept)[np.arange(len(kept)), draft.target]


def other_temperature(draft: Draft, strength: float) -> None:
    draft.trained /= 1 + strength


def frozen_engine(draft: Draft, strength: float) -> None:
    """The policy follows its rewards: sampled tokens become likelier with their advantage, all others drift."""
    scale = strength * draft.age
    count = len(draft.target)
    draft.trained[np.arange(count), draft.target] += 0.1 * scale * draft.advantage[draft.row]
    draft.trained += scale * draft.random.standard_normal(draft.trained.shape)


def old_samples(draft: Draft, strength: float) -> None:
    draft.disturb(draft.staleness[draft.row] > 0, strength * NOISE * np.sqrt(draft.staleness[draft.row]))


def unlikely_tokens(draft: Draft, strength: float) -> None:
    behind = draft.logits.max(axis=1, keepdims=True) - draft.logits
    draft.trained += strength * NOISE * np.where(behind > 4, draft.random.laplace(size=draft.trained.shape), 0)


def flipped_experts(draft: Draft, strength: float) -> None:
    draft.disturb(draft.random.random(len(draft.target)) < 0.01 * strength, 0.4)


def noise_at(select: Callable[[Draft], Array]) -> Effect:
    return lambda draft, strength: draft.disturb(select(draft), strength * NOISE)


AFTER_LOGPROBS = (no_logprobs, raw_logits, shifted)
KINDS: dict[str, tuple[Effect, tuple[float, float, float], bool]] = {
    # Cause: effect, strengths, and whether it can show in a run that has it from the first step on.
    "zero_logprobs": (no_logprobs, (0.005, 0.05, 0.3), True),
    "positive_logprobs": (raw_logits, (0.03, 0.1, 0.6), True),
    "shifted": (shifted, (0.04, 0.15, 0.8), True),
    "filtered": (top_k, (12, 16, 18), True),
    "temperature": (other_temperature, (0.015, 0.06, 0.25), True),
    "stale_engine": (frozen_engine, (0.03, 0.08, 0.3), False),
    "staleness": (old_samples, (2.0, 5.0, 15.0), True),
    "low_probability": (unlikely_tokens, (6.0, 20.0, 60.0), True),
    "tool_calls": (noise_at(lambda draft: draft.turn > 0), (2.0, 6.0, 25.0), True),
    "position": (noise_at(lambda draft: draft.position > 150), (3.0, 8.0, 25.0), True),
    "group": (noise_at(lambda draft: draft.group[draft.row] == 7), (6.0, 15.0, 50.0), True),
    "routing": (flipped_experts, (2.0, 5.0, 15.0), False),
    "precision": (noise_at(lambda draft: np.ones(len(draft.row), bool)), (1.5, 5.0, 20.0), False),
}


def draw_step(seed: int, step: int, cause: str | None, strength: float, age: int, *, is_rounded: bool) -> RecordBlock:
    random = np.random.default_rng([977, seed, step])
    count = PROMPTS * SAMPLES
    length = np.clip(random.gamma(2.0, 70.0, count), 16, 900).astype(np.int64)
    prompt_length = np.repeat(random.integers(5, 60, PROMPTS), SAMPLES)
    turns = 1 + random.binomial(2, 0.35, count)
    masks, turn_parts, offsets = [], [], [0]
    for row in range(count):
        parts = [np.zeros(prompt_length[row], bool)]
        for turn, size in enumerate(np.diff(np.linspace(0, length[row], turns[row] + 1).astype(int))):
            parts += [np.zeros(22 if turn else 0, bool), np.ones(size, bool)]
            turn_parts.append(np.full(size, turn))
        masks.append(np.concatenate(parts))
        offsets.append(offsets[-1] + len(masks[-1]))
    mask, row = np.concatenate(masks), np.repeat(np.arange(count), length)
    position = np.flatnonzero(mask) - np.array(offsets[:-1])[row] - prompt_length[row]
    group = np.repeat(np.arange(PROMPTS), SAMPLES)
    reward = (random.random(count) < 0.55).astype(np.float32)
    spread = reward.reshape(PROMPTS, SAMPLES)
    advantage = ((spread - spread.mean(axis=1, keepdims=True)) / (spread.std(axis=1, keepdims=True) + 1e-6)).ravel()
    size = len(row)
    logits = random.gumbel(size=(size, VOCABULARY)) * random.choice([0.8, 1.5, 3.0], size)[:, None]
    logits[np.arange(size), 0] += random.exponential(5.0, size)
    random_effect = np.random.default_rng([978, seed, step])
    draft = Draft(
        random_effect,
        age,
        row,
        position,
        np.concatenate(turn_parts),
        length,
        group,
        random.choice([0, 1, 2, 5], count),
        advantage,
        logits,
        logits.copy(),
        np.zeros(0),
        np.zeros(0),
        np.zeros(0),
    )
    every = np.arange(size)
    logprobs = log_softmax(logits)
    draft.target = (logprobs + random.gumbel(size=logprobs.shape)).argmax(axis=1)
    draft.gen = logprobs[every, draft.target]
    is_flipped = random.random(size) < 0.01
    draft.trained += np.where(is_flipped, 0.4, NOISE)[:, None] * random.laplace(size=logits.shape)
    effect = KINDS[cause][0] if cause is not None else None
    if effect is not None and effect not in AFTER_LOGPROBS:
        effect(draft, strength)
    draft.prev = log_softmax(draft.trained)[every, draft.target]
    if effect in AFTER_LOGPROBS and effect is not None:
        effect(draft, strength)
    if is_rounded:
        draft.gen, draft.prev = np.round(draft.gen, 3), np.round(draft.prev, 3)
        draft.gen[(draft.gen > -0.04) & (random.random(size) < 0.7)] = 0
    columns = {"tokens": random.integers(0, 500, len(mask)).astype(np.int32), "mask": mask}
    for name, values in (("gen", draft.gen), ("prev", draft.prev), ("advantages", advantage[row])):
        columns[name] = np.zeros(len(mask), np.float32)
        columns[name][mask] = values
    sequences = {
        "row": np.arange(count),
        "group": group,
        "reward": reward,
        "length": np.diff(offsets),
        "prompt_length": prompt_length,
        "turns": turns,
        "staleness": draft.staleness.astype(float),
        "sample_mask": np.ones(count, np.float32),
        "step": np.full(count, step),
    }
    return RecordBlock(sequences, columns, np.array(offsets))


def draw_run(seed: int, cause: str | None, strength: float, onset: int, *, is_rounded: bool) -> RunStatistics:
    statistics = RunStatistics()
    for step in range(1, STEPS + 1):
        planted = cause if step >= onset else None
        block = draw_step(seed, step, planted, strength, step - onset + 1, is_rounded=is_rounded)
        statistics.add(survey_block(block))
    return statistics


@functools.cache
def clean_k3(seed: int, onset: int, *, is_rounded: bool) -> float:
    """Return the sum of k3 since a step of the run without any cause."""
    return draw_run(seed, None, 0.0, onset, is_rounded=is_rounded).total(range(onset, STEPS + 1))["k3"]


def true_share(run: RunStatistics, seed: int, onset: int, *, is_rounded: bool) -> float:
    """Return the share of k3 that the cause accounts for: what is there beyond the same run without it."""
    total = run.total(range(onset, STEPS + 1))
    k3 = total["k3"] + total["missing_k3"]
    return max(0.0, 1 - clean_k3(seed, onset, is_rounded=is_rounded) / k3) if k3 else 1.0


def outcome(diagnosis: RunDiagnosis, cause: str) -> str:
    """Return ``right``, the name of another cause, ``healthy``, or how the verdict leaves the cause open."""
    if diagnosis.unjudged_reason:
        return "not testable" if "not testable" in diagnosis.unjudged_reason else "too short"
    if diagnosis.cause is not None:
        return "right" if diagnosis.cause.id == cause else diagnosis.cause.id
    if diagnosis.detections[cause].state == "not testable":
        return f"{diagnosis.health}, but not testable"
    return diagnosis.health


def measure(first_seed: int, seeds: int, clean_runs: int, kinds: list[str]) -> dict[str, object]:
    major: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    minor: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for kind in kinds:
        _, strengths, is_detectable_from_start = KINDS[kind]
        for number, strength in enumerate(strengths):
            for is_rounded in (False, True):
                for seed in range(first_seed, first_seed + seeds):
                    onset = 1 if is_detectable_from_start and (seed + number) % 2 else ONSET
                    run = draw_run(seed, kind, strength, onset, is_rounded=is_rounded)
                    share = true_share(run, seed, onset, is_rounded=is_rounded)
                    (major if share > 0.5 else minor)[kind][outcome(diagnose(run), kind)] += 1
        print(kind, dict(major[kind]), "share below a half:", dict(minor[kind]), flush=True)
    alarms = []
    for seed in range(clean_runs):
        diagnosis = diagnose(draw_run(5000 + first_seed + seed, None, 0.0, 1, is_rounded=seed % 2 == 1))
        if diagnosis.unjudged_reason or diagnosis.health != "healthy":
            alarms.append(diagnosis.sentence)
    print(len(alarms), "false alarms", alarms, flush=True)
    return {
        "first_seed": first_seed,
        "seeds": seeds,
        "major": {kind: dict(counts) for kind, counts in major.items()},
        "minor": {kind: dict(counts) for kind, counts in minor.items()},
        "clean": clean_runs,
        "false_alarms": alarms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="runs for each kind, strength and variant")
    parser.add_argument("--first-seed", type=int, default=0, help="first of the seeds (default: 0)")
    parser.add_argument("--clean", type=int, default=60, help="clean runs")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--out", type=Path, default=None, help="file of the figures")
    arguments = parser.parse_args()
    figures = measure(arguments.first_seed, arguments.seeds, arguments.clean, arguments.only)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
