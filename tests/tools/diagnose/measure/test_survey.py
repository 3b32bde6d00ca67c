"""The sums equal those of plain loops, whether a step is read at once or in parts."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from nemo_geomask.tools.diagnose.measure.dimensions import (
    BIN_SUMS,
    DIMENSIONS,
    DIMENSIONS_BY_NAME,
    sum_environments,
    sum_parts,
)
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_survey import survey_block, trainer_column
from nemo_geomask.tools.diagnose.measure.thresholds import QUANTITIES
from nemo_geomask.tools.diagnose.read.record_reader import RecordBlock, read_blocks
from tests.evidence.diagnose.planted_causes import planted_step
from tests.evidence.diagnose.planted_logs import RunShape, write_step

SHAPE = RunShape(steps=1, prompts=4, samples=3, length=40)


def part(block, first, last):
    """Return the block of the sequences ``first`` to ``last - 1``."""
    here = slice(block.offsets[first], block.offsets[last])
    return RecordBlock(
        {name: values[first:last] for name, values in block.sequences.items()},
        {name: values[here] for name, values in block.tokens.items()},
        block.offsets[first : last + 1] - block.offsets[first],
        {name: values[here] for name, values in block.removed.items()},
    )


@pytest.fixture
def block():
    made = planted_step(3, 5, None, 0.0, shape=SHAPE)
    made.sequences["sample_mask"][[2, 7]] = 0
    removed = np.random.default_rng(0).random(len(made.tokens["mask"])) < 0.1
    return RecordBlock(made.sequences, made.tokens, made.offsets, {"veto": removed & made.tokens["mask"]})


def test_sums_are_those_of_plain_loops(block):
    expected = dict.fromkeys(("tokens", "k3", "k3_reverse", "prob_error", "weight", "weight_squared", "delta"), 0.0)
    weights, lengths, removed = [], 0, [0, 0.0]
    for row in range(len(block)):
        total = count = 0
        if block.sequences["sample_mask"][row] == 0:
            continue
        for place in range(block.offsets[row], block.offsets[row + 1]):
            if not block.tokens["mask"][place]:
                continue
            delta = float(block.tokens["prev"][place]) - float(block.tokens["gen"][place])
            for name, value in {
                "tokens": 1,
                "k3": math.exp(delta) - 1 - delta,
                "k3_reverse": math.exp(-delta) - 1 + delta,
                "prob_error": math.exp(abs(delta)),
                "weight": math.exp(delta),
                "weight_squared": math.exp(2 * delta),
                "delta": delta,
            }.items():
                expected[name] += value
            total, count = total + delta, count + 1
            if block.removed["veto"][place]:
                removed = [removed[0] + 1, removed[1] + min(abs(delta), 1)]
        weights.append((math.exp(total), math.exp(total / count)))
        lengths += int(block.sequences["length"][row] - block.sequences["prompt_length"][row])
    sums = survey_block(block).steps[5]
    for name, value in expected.items():
        assert sums[name] == pytest.approx(value, rel=1e-12), name
    assert sums["sequence_weight"] == pytest.approx(sum(one for one, _ in weights), rel=1e-12)
    assert sums["mean_weight_squared"] == pytest.approx(sum(one**2 for _, one in weights), rel=1e-12)
    assert (sums["sequences"], sums["masked_out_sequences"], sums["response_tokens"]) == (10, 2, lengths)
    assert sums.removed["veto"] == pytest.approx(removed, rel=1e-12)
    assert sums.removed_share("veto", "capped_abs") == pytest.approx(removed[1] / sums["capped_abs"], rel=1e-12)


def test_every_dimension_holds_every_token_once(block):
    statistics = survey_block(block)
    for one in DIMENSIONS:
        tokens = sum_parts(statistics.tokens, [one.name])[:, BIN_SUMS.index("tokens")].sum()
        assert tokens == (0 if one.name == "entropy" else statistics.steps[5]["tokens"]), one.name
    assert len(statistics.tokens) == statistics.steps[5]["tokens"]


def test_two_dimensions_at_once_are_those_of_plain_loops(block):
    block.tokens["entropy"] = np.where(np.arange(len(block.tokens["mask"])) % 7, block.tokens["gen"] ** 2, np.nan)
    statistics = survey_block(block)
    cells = sum_parts(statistics.tokens, ["entropy", "advantage"])
    edges, signs = DIMENSIONS_BY_NAME["entropy"].edges, DIMENSIONS_BY_NAME["advantage"].edges
    expected = np.zeros((len(edges) + 1, len(signs) + 1, 2))
    for row in range(len(block)):
        for place in range(block.offsets[row], block.offsets[row + 1]):
            entropy = block.tokens["entropy"][place]
            if block.tokens["mask"][place] and block.sequences["sample_mask"][row] and not math.isnan(entropy):
                delta = float(block.tokens["prev"][place]) - float(block.tokens["gen"][place])
                sign = sum(float(block.tokens["advantages"][place]) >= edge for edge in signs)
                expected[sum(entropy >= edge for edge in edges), sign] += 1, delta > 0
    np.testing.assert_array_equal(cells[:, [0, BIN_SUMS.index("delta_positive")]], expected.reshape(-1, 2))
    for pair, axis, name in (
        (("entropy", "advantage"), 1, "entropy"),
        (("turn", "probability"), 1, "turn"),
        (("turn", "entropy"), 0, "entropy"),
    ):
        grid = sum_parts(statistics.tokens, pair).reshape(DIMENSIONS_BY_NAME[pair[0]].bin_count, -1, len(BIN_SUMS))
        whole = sum_parts(statistics.tokens, [name])
        np.testing.assert_allclose(grid.sum(axis=axis)[:, :-3], whole[:, :-3], rtol=1e-9, atol=1e-12)  # no products
    assert statistics.steps[5]["tokens_with_entropy"] == sum_parts(statistics.tokens, ["entropy"])[:, 0].sum()


def with_environments(block, names):
    """Name the environments of a block's prompts, in turn; a new block."""
    groups = block.sequences["group"] % len(names)
    return replace(block, sequences={**block.sequences, "environment": np.array(names, dtype=object)[groups]})


def sums_by_environment(blocks):
    """Return tokens, Σ k3, Σ of capped |Δ| and its squares over sequences of each environment, by plain loops."""
    expected = {}
    for block in blocks:
        for row in range(len(block)):
            name, capped = block.sequences["environment"][row], 0.0
            if name is None or block.sequences["sample_mask"][row] == 0:
                continue
            sums = expected.setdefault(name, np.zeros(4))
            for place in range(block.offsets[row], block.offsets[row + 1]):
                if block.tokens["mask"][place]:
                    delta = float(block.tokens["prev"][place]) - float(block.tokens["gen"][place])
                    capped += min(abs(delta), 1.0)
                    sums[:2] += 1, math.exp(delta) - 1 - delta
            sums[2:] += capped, capped**2
    return expected


ENVIRONMENT_COLUMNS = [BIN_SUMS.index(name) for name in ("tokens", "k3", "capped_abs", "capped_abs_squared")]


def test_sums_by_environment_are_those_of_plain_loops(block):
    named = with_environments(block, ["math", None, "code"])
    table = survey_block(named).tokens
    expected = sums_by_environment([named])
    assert expected.keys() == {"math", "code"}
    measured = sum_environments(table, ["code", "math"])[:, ENVIRONMENT_COLUMNS]
    np.testing.assert_allclose(measured[:2], [expected["code"], expected["math"]], rtol=1e-6)
    assert not measured[2].any()
    others = sum_environments(table, ["math"])[:, ENVIRONMENT_COLUMNS]
    np.testing.assert_allclose(others, [expected["math"], expected["code"]], rtol=1e-6)
    # Neither a run without names nor one with an older record's columns has any.
    assert not sum_environments(survey_block(with_environments(block, [None])).tokens, ["math"]).any()
    assert not sum_environments(survey_block(block).tokens, ["math"]).any()


@pytest.mark.parametrize(
    ("name", "place", "label"),
    [
        *(("advantage", place, label) for place, label in enumerate(["below 0", "0", "above 0"])),
        *(("turn", place, label) for place, label in enumerate(["0", "1", "2", "3", "4 to 5", "6 to 7", "8 and more"])),
        *(("reward", 2, "above 0 to 0.25"), ("entropy", 0, "below 0.01"), ("position", 0, "below 16")),
    ],
)
def test_labels_of_bins(name, place, label):
    assert DIMENSIONS_BY_NAME[name].label(place, place) == label


def test_parts_add_up_to_the_whole_in_any_order(block):
    whole = survey_block(block)
    for cuts in ((0, 5, 12), (0, 1, 8, 12)):
        parts = [survey_block(part(block, first, last)) for first, last in itertools.pairwise(cuts)]
        merged = RunStatistics()
        for one in reversed(parts):
            merged.add(one)
        np.testing.assert_allclose(merged.steps[5].sums, whole.steps[5].sums, rtol=1e-12)
        np.testing.assert_allclose(merged.steps[5].bootstrap, whole.steps[5].bootstrap, rtol=1e-12)
        for label, sums in whole.steps[5].removed.items():
            assert merged.steps[5].removed[label] == pytest.approx(sums, rel=1e-12), label
        for one in DIMENSIONS:
            parts_of_run = [sum_parts(statistics.tokens, [one.name]) for statistics in (merged, whole)]
            np.testing.assert_allclose(*parts_of_run, rtol=1e-9, atol=1e-12)
        assert merged.worst_tokens == whole.worst_tokens
        assert merged.worst_sequences == whole.worst_sequences


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e6])
def test_values_of_untrained_tokens_have_no_effect(block, value):
    before = survey_block(block)
    for name in ("gen", "prev", "advantages"):
        block.tokens[name][~block.tokens["mask"]] = value
    after = survey_block(block)
    assert after.steps[5].sums.tobytes() == before.steps[5].sums.tobytes()
    assert after.steps[5].bootstrap.tobytes() == before.steps[5].bootstrap.tobytes()
    for one in DIMENSIONS:
        assert sum_parts(after.tokens, [one.name]).tobytes() == sum_parts(before.tokens, [one.name]).tobytes()


def test_log_ratios_of_a_hundred_saturate(block):
    trained = np.flatnonzero(block.tokens["mask"])
    block.tokens["prev"][trained[::2]] += 100
    block.tokens["prev"][trained[1::2]] -= 100
    assert np.isfinite(survey_block(block).steps[5].sums).all()


@pytest.mark.parametrize("total", [-360.0, -150.0, -60.0, 0.0, 250.0])
def test_the_effective_sample_size_of_long_sequences_depends_on_ratios_of_weights(block, total):
    """The sums of the sequences' log-ratios differ by up to 11, and are far from 0."""
    rows, trained = np.repeat(np.arange(12), np.diff(block.offsets)), block.tokens["mask"]
    sums = total + np.arange(12.0)
    block.tokens["prev"] = block.tokens["gen"] + (sums / np.bincount(rows, weights=trained))[rows]
    block.sequences["sample_mask"][:] = 1
    weights = np.exp(sums - total)
    (share,) = (number.value for number in QUANTITIES if number.name == "ESS, sequences")
    assert share(survey_block(block).steps[5]) == pytest.approx(
        weights.sum() ** 2 / (12 * (weights**2).sum()), rel=1e-3
    )


def test_the_effective_sample_size_of_vanishing_weights_is_nan(block):
    block.tokens["prev"] = block.tokens["gen"] - 100.0
    (share,) = (number.value for number in QUANTITIES if number.name == "ESS, sequences")
    assert math.isnan(share(survey_block(block).steps[5]))


def test_current_log_probs_replace_skipped_ones_of_the_old_policy(block):
    expected = survey_block(block).steps[5]["k3"]
    for skipped in (0.0, math.nan):
        tokens = {**block.tokens, "curr": block.tokens["prev"], "prev": np.full_like(block.tokens["prev"], skipped)}
        assert survey_block(RecordBlock(block.sequences, tokens, block.offsets)).steps[5]["k3"] == expected
    tokens.pop("curr")
    sums = survey_block(RecordBlock(block.sequences, tokens, block.offsets)).steps[5]
    assert (sums["tokens"], sums["sequences_without_prev"], sums["zero_prev"], sums["nonfinite"]) == (0, 12, 0, 0)


@pytest.mark.parametrize("audited", [11, 0, None])
def test_all_row_groups_of_a_step_use_the_same_column(tmp_path, block, audited):
    """π_old is computed for a few sequences, which are in one of the row groups, or for none."""
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = np.repeat(np.arange(12), np.diff(block.offsets))
    block.tokens["curr"] = block.tokens["prev"] + np.float32(0.01)
    block.tokens["prev"] = np.where(rows == audited, block.tokens["prev"], np.float32(math.nan))
    path = write_step(tmp_path, block)
    parquet.write_table(parquet.read_table(path), path, row_group_size=4)
    statistics = RunStatistics()
    for part in read_blocks(path):
        assert trainer_column(part) == ("curr" if audited is None else "prev")
        statistics.add(survey_block(part))
    assert statistics.steps[5]["sequences"] == (10 if audited is None else 1)


def test_intervals_contain_the_true_mean_as_often_as_stated():
    """About 5 % of the intervals of 60 steps miss the mean over all of them."""
    shape = RunShape(prompts=20, samples=4, length=40)
    steps = [survey_block(planted_step(1, step, None, 0.0, shape=shape)).steps[step] for step in range(60)]
    truth = sum(one["abs_delta"] for one in steps) / sum(one["tokens"] for one in steps)
    missed = sum(not low <= truth <= high for low, high in (one.interval("abs_delta") for one in steps))
    assert 0 < missed <= 10


def test_bins_of_a_sampled_table_are_unbiased():
    """A run of more tokens than the table holds."""
    statistics, tokens, size = RunStatistics(), np.zeros(11), np.zeros(11)
    for step in range(1, 61):
        part_of_run = survey_block(planted_step(0, step, None, 0.0, shape=RunShape(prompts=6, samples=4)))
        sums = sum_parts(part_of_run.tokens, ["probability"])
        tokens, size = tokens + sums[:, 0], size + sums[:, BIN_SUMS.index("capped_abs")]
        statistics.add(part_of_run)
    assert len(statistics.tokens) < 0.6 * tokens.sum()
    sampled = sum_parts(statistics.tokens, ["probability"])
    is_large = size > 0.02 * size.sum()
    np.testing.assert_allclose(sampled[is_large, BIN_SUMS.index("capped_abs")], size[is_large], rtol=0.05)
    assert sampled[:, 0].sum() == pytest.approx(tokens.sum(), rel=0.05)


def test_a_written_synthetic_step_is_read_unchanged(tmp_path):
    pytest.importorskip("pyarrow")
    made = planted_step(3, 5, "tool_calls", 5.0, shape=SHAPE)
    (read,) = read_blocks(write_step(tmp_path, made))
    np.testing.assert_array_equal(read.offsets, made.offsets)
    for name, values in made.tokens.items():
        np.testing.assert_array_equal(read.tokens[name], values)
    assert survey_block(read).steps[5].sums.tobytes() == survey_block(made).steps[5].sums.tobytes()
