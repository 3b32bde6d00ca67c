"""What the context tells of the advantage, against plain loops, and the harm that follows from it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from nemo_geomask.tools.diagnose.measure.context import explained_advantage
from nemo_geomask.tools.diagnose.measure.step_sums import StepSums
from nemo_geomask.tools.diagnose.measure.step_survey import survey_block
from nemo_geomask.tools.diagnose.measure.thresholds import MAX_PULL, QUANTITIES
from nemo_geomask.tools.diagnose.read.record_reader import RecordBlock
from nemo_geomask.tools.diagnose.report.correction_sweep import padded_batch, replay
from nemo_geomask.tools.diagnose.report.sweep_candidates import CANDIDATES
from nemo_geomask.tools.diagnose.report.sweep_command import deciding_measure, recommend
from nemo_geomask.tools.diagnose.report.sweep_tables import explain_harm, may_do_harm

NUMBERS = {number.name: number for number in QUANTITIES}
CALL, REPLY, ANSWER = 2, 3, 20
"""Tokens of the call, of the tool's reply (which do not train) and of the answer."""


def tool_run(seed=0, luck=1.0, noise=0.3, responses=512):
    """Records of one step: a call, a reply of 7 or 8, an answer; the advantage is ±1 by the reply with this weight."""
    random = np.random.default_rng(seed)
    found = random.random(responses) < 0.5
    advantage = luck * np.where(found, 1.0, -1.0) + random.standard_normal(responses)
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


def test_the_share_is_that_of_plain_loops():
    block = tool_run(responses=64)
    share = explained_advantage(block, block.tokens["mask"])
    advantage = block.tokens["advantages"][block.offsets[:-1]].astype(float)
    reply = block.tokens["tokens"][block.offsets[:-1] + 4 + CALL]
    square = np.square(advantage).mean()
    for row in range(len(block)):
        begin = block.offsets[row]
        others = [other for other in range(len(block)) if other // 8 != row // 8]
        for place, members in (
            (begin + 4, others),
            (begin + 4 + CALL + REPLY, [other for other in others if reply[other] == reply[row]]),
        ):
            expected = advantage[row] * np.mean([advantage[other] for other in members]) / square
            assert share[place] == pytest.approx(expected, rel=1e-5)
        assert share[begin] == share[begin + 4 + CALL] == 0  # the prompt and the reply do not train
    whole = tool_run(responses=2048)
    mean = explained_advantage(whole, whole.tokens["mask"]).sum() / whole.tokens["mask"].sum()
    assert mean == pytest.approx(ANSWER / (CALL + ANSWER) / 2, abs=0.03)


@pytest.mark.parametrize("is_normalised", [False, True])
def test_luck_without_a_weight_explains_nothing(is_normalised):
    """Also if advantages add up to 0 over the responses of a prompt."""
    shares = []
    for seed in range(40):
        block = tool_run(seed, luck=0.0, responses=64)
        if is_normalised:
            rows = np.repeat(np.arange(64), np.diff(block.offsets))
            first = block.tokens["advantages"][block.offsets[:-1]].reshape(8, 8)
            block.tokens["advantages"] = (first - first.mean(axis=1, keepdims=True)).ravel()[rows]
        shares.append(explained_advantage(block, block.tokens["mask"]).sum() / block.tokens["mask"].sum())
    assert abs(np.mean(shares)) < 3 * np.std(shares) / np.sqrt(len(shares))
    few = tool_run(responses=8)  # all of one prompt
    assert explained_advantage(few, few.tokens["mask"]) is None


def with_replies(block, change):
    """The same with the replies [responses, REPLY] that ``change`` makes of the old ones and whether they are rare."""
    ids = block.tokens["tokens"].reshape(len(block), -1).copy()
    place = slice(4 + CALL, 4 + CALL + REPLY)
    ids[:, place] = change(ids[:, place], np.arange(1000, 1000 + REPLY * len(block)).reshape(-1, REPLY))
    return replace(block, tokens={**block.tokens, "tokens": ids.ravel()})


def test_unique_replies_are_not_testable_and_do_not_turn_the_recommendation():
    block = tool_run(3, noise=0.5)
    unique = with_replies(block, lambda old, new: new)
    assert explained_advantage(unique, unique.tokens["mask"]) is None
    assert math.isnan(measure(unique)["pull"])
    assert measure(unique)["wrong tokens"] == measure(block)["wrong tokens"]
    best = {}
    for name, each in {"shared": block, "unique": unique}.items():
        outcomes = replay([(1, padded_batch([each])[0])], CANDIDATES)
        best[name] = recommend(outcomes)[0].candidate.name
    assert math.isnan(outcomes[0].value("pull"))
    assert best["unique"].startswith("weight token")
    assert best["shared"].startswith("weight token")


def test_partly_unique_replies_explain_as_much_as_shared_ones():
    block = tool_run(3)
    changed = with_replies(block, lambda old, new: np.where(old == 7, new, old))
    expected = explained_advantage(block, block.tokens["mask"]).sum()
    assert explained_advantage(changed, block.tokens["mask"]).sum() == pytest.approx(expected, rel=0.05)
    unique = with_replies(block, lambda old, new: new)  # their length tells a failure from a result
    mask = unique.tokens["mask"].reshape(len(block), -1)
    mask[np.flatnonzero(block.sequences["reward"] == 0)[:, None], 4 + CALL + REPLY + np.arange(6)] = False
    assert explained_advantage(unique, mask.ravel()).sum() == pytest.approx(expected, rel=0.3)


@pytest.mark.parametrize("luck", [0.0, 1.0])
def test_replies_that_few_others_share_tell_luck_from_none(luck):
    """About four responses of a step have the same reply, as with lookups; none is shared by eight."""
    sums = StepSums()
    random = np.random.default_rng(0)
    for seed in range(8):
        number = random.permutation(np.arange(512) // 4)

        def reply(old, new, number=number):
            return np.stack([old[:, 0] * 1000 + number, *old.T[1:]], axis=1)

        sums.add(survey_block(with_replies(tool_run(seed, luck=luck, noise=0.5), reply)).steps[1])
    explained, pull = sums.advantage_explained(), sums.pull()
    expected = luck * ANSWER / (CALL + ANSWER) / 2
    assert explained.low < expected < explained.high
    assert explained.high - explained.low < 0.2
    text = explain_harm(sums, pull)
    assert ("No luck is seen in the replies" in text) == (luck == 0)
    assert (pull.low > MAX_PULL) == (luck > 0) == (f"above {MAX_PULL}, to the sampler's errors" in text)
    assert may_do_harm(sums)  # the pull is not surely small


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
        block = tool_run(3, **options)
        outcomes = replay([(1, padded_batch([block])[0])], CANDIDATES)
        # One number, with one interval, in the sentence and in the decision.
        assert outcomes[0].pull() == pytest.approx(survey_block(block).steps[1].pull(), rel=1e-4, abs=1e-12)
        assert deciding_measure(outcomes) == ("pull" if name in ("large", "small") else "bias")
        pulls[name] = {outcome.candidate.name: outcome.value("pull") for outcome in outcomes}
    none = {name: values["nothing"] for name, values in pulls.items()}
    assert none["large"] > 3 * none["small"] > 10 * none["equal"]
    assert none["large"] > 10 * none["no luck"]
    large = pulls["large"]
    assert large["weight token tis [0, 2]"] < 0.3 * none["large"]
    assert large["weight sequence_mean"] > 0.8 * none["large"]
    assert large["mask geometric 0.99 1.01"] > 0.5 * none["large"]  # of the few responses that it keeps


def test_no_luck_gives_no_pull_under_any_correction():
    """The noise of a few responses averages out, as absolute values of it would not."""
    names = "nothing", "weight token tis [0, 2]", "weight sequence_mean", "mask geometric 0.99 1.01"
    candidates = [candidate for candidate in CANDIDATES if candidate.name in names]
    batches = (padded_batch([tool_run(seed, luck=0.0, noise=0.5, responses=64)])[0] for seed in range(30))
    pulls = np.array([[outcome.value("pull") for outcome in replay([(1, batch)], candidates)] for batch in batches])
    assert pulls.shape == (30, len(names))
    assert (np.abs(pulls.mean(axis=0)) < 3 * pulls.std(axis=0) / np.sqrt(len(pulls))).all()
