"""What the context tells of the advantage, against plain loops, and the harm that follows from it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from nemo_geomask.tools.diagnose.measure.context import MIN_RESPONSES, expect_advantages
from nemo_geomask.tools.diagnose.measure.step_survey import survey_block
from nemo_geomask.tools.diagnose.measure.thresholds import QUANTITIES
from nemo_geomask.tools.diagnose.read.record_reader import RecordBlock
from nemo_geomask.tools.diagnose.report.correction_sweep import padded_batch, replay
from nemo_geomask.tools.diagnose.report.sweep_candidates import CANDIDATES

NUMBERS = {number.name: number for number in QUANTITIES}
CALL, REPLY, ANSWER = 2, 3, 20
"""Tokens of the call, of the tool's reply (which do not train) and of the answer."""


def tool_run(seed=0, luck=1.0, noise=0.3, responses=256):
    """Records of one step: a call, a reply of 7 or 8, an answer; the advantage is ±1 by the reply with this weight."""
    random = np.random.default_rng(seed)
    found = random.random(responses) < 0.5
    advantage = luck * np.where(found, 1.0, -1.0) + random.standard_normal(responses)
    advantage -= advantage.mean()
    length = 4 + CALL + REPLY + ANSWER
    ids = random.integers(10, 500, (responses, length)).astype(np.int32)
    ids[:, :4] = 1
    ids[:, 4 + CALL : 4 + CALL + REPLY] = np.where(found, 7, 8)[:, None]
    mask = np.ones((responses, length), bool)
    mask[:, :4] = mask[:, 4 + CALL : 4 + CALL + REPLY] = False
    logits = random.standard_normal((responses, length, 6)) * 2
    moved = logits + noise * random.standard_normal(logits.shape)
    logprobs, trained = (x - np.log(np.exp(x).sum(axis=2, keepdims=True)) for x in (logits, moved))
    target = (logprobs + random.gumbel(size=logprobs.shape)).argmax(axis=2)[..., None]
    gen, prev = (np.take_along_axis(values, target, axis=2)[..., 0] for values in (logprobs, trained))
    tokens = {
        "tokens": ids.ravel(),
        "mask": mask.ravel(),
        "gen": gen.ravel().astype(np.float32),
        "prev": prev.ravel().astype(np.float32),
        "advantages": np.repeat(advantage, length).astype(np.float32),
    }
    sequences = {
        "step": np.ones(responses, int),
        "row": np.arange(responses),
        "group": np.arange(responses) // 8,
        "reward": found.astype(np.float32),
        "length": np.full(responses, length),
        "prompt_length": np.full(responses, 4),
        "turns": np.full(responses, 2),
        "sample_mask": np.ones(responses, np.float32),
    }
    return RecordBlock(sequences, tokens, np.arange(responses + 1) * length)


def measure(block):
    sums = survey_block(block).steps[1]
    return {name: number.value(sums) for name, number in NUMBERS.items()}


def test_the_expected_advantage_is_the_mean_after_each_reply():
    block = tool_run()
    context = expect_advantages(block, block.tokens["mask"])
    expected = {}
    for row in range(len(block)):
        begin = block.offsets[row]
        reply = int(block.tokens["tokens"][begin + 4 + CALL])
        expected.setdefault(reply, []).append(float(block.tokens["advantages"][begin]))
    for row in range(len(block)):
        begin = block.offsets[row]
        mean = np.mean(expected[int(block.tokens["tokens"][begin + 4 + CALL])])
        assert context.expected[begin + 4] == 0  # all prompts are the same, and their mean advantage is 0
        assert context.expected[begin + 4 + CALL + REPLY] == pytest.approx(mean, rel=1e-5)
        assert context.expected[begin] == 0  # the prompt does not train
    share = context.explained / context.square
    assert share == pytest.approx(ANSWER / (CALL + ANSWER) / 2, abs=0.1)


def test_luck_without_a_weight_explains_nothing():
    numbers = [measure(tool_run(seed, luck=0.0)) for seed in range(10)]
    assert np.mean([number["advantage explained"] for number in numbers]) < 0.01
    assert np.mean([number["pull"] for number in numbers]) < 0.02
    few = tool_run(responses=MIN_RESPONSES - 1)
    assert not expect_advantages(few, few.tokens["mask"]).expected.any()


def test_wrong_tokens_are_the_distance_of_the_engines():
    block = tool_run()
    wrong, signed = 0.0, 0.0
    for gen, prev, is_trained, advantage in zip(
        *(block.tokens[name] for name in ("gen", "prev", "mask", "advantages")), strict=True
    ):
        if is_trained:
            missing = max(1 - math.exp(float(prev) - float(gen)), 0.0)
            wrong, signed = wrong + missing, signed + missing * (advantage > 0)
    numbers = measure(block)
    assert numbers["wrong tokens"] == pytest.approx(wrong / len(block), rel=1e-9)
    assert numbers["A > 0, wrong"] == pytest.approx(signed / wrong, rel=1e-9)
    without = {name: values for name, values in block.tokens.items() if name != "advantages"}
    assert math.isnan(measure(replace(block, tokens=without))["wrong tokens"])


def test_the_pull_ranks_engines_tasks_and_corrections():
    """Harm only where engines differ and the context predicts the advantage, and only a weight of tokens mends it."""
    pulls = {}
    for name, options in {
        "large": {"noise": 0.5},
        "small": {"noise": 0.1},
        "no luck": {"noise": 0.5, "luck": 0.0},
        "equal": {"noise": 0.0},
    }.items():
        outcomes = replay([(1, padded_batch([tool_run(3, **options)])[0])], CANDIDATES)
        pulls[name] = {outcome.candidate.name: outcome.value("pull") for outcome in outcomes}
    none = {name: values["nothing"] for name, values in pulls.items()}
    assert none["large"] > 3 * none["small"] > 10 * max(none["no luck"], none["equal"], 1e-4)
    large = pulls["large"]
    assert large["weight token tis [0, 2]"] < 0.3 * none["large"]
    assert large["weight sequence_mean"] > 0.8 * none["large"]
    assert large["mask geometric 0.99 1.01"] > 0.6 * none["large"]
    assert none["large"] == pytest.approx(measure(tool_run(3, noise=0.5))["pull"], rel=0.1)
