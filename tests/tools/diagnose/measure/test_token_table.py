"""The table of tokens against plain loops, and its sampling."""

import numpy as np
import pytest

from nemo_geomask.tools.diagnose.measure import token_table
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_survey import survey_block
from tests.evidence.diagnose.planted_causes import planted_step
from tests.evidence.diagnose.planted_logs import RunShape

SHAPE = RunShape(prompts=3, samples=2, length=40)


def table_of(*blocks):
    statistics = RunStatistics()
    for block in blocks:
        statistics.add(survey_block(block))
    return statistics.tokens


def test_every_column_is_that_of_plain_loops():
    block = planted_step(0, 4, None, 0.0, shape=SHAPE)
    table = table_of(block)
    mask, place = block.tokens["mask"], 0
    for row, (start, end) in enumerate(zip(block.offsets[:-1], block.offsets[1:], strict=True)):
        turn, was_trained = -1, False
        for index in range(start, end):
            if mask[index]:
                turn += not was_trained
                gen, prev = (np.float32(block.tokens[name][index]) for name in ("gen", "prev"))
                assert table.sequence[place] == row
                assert table.position[place] == index - start - block.sequences["prompt_length"][row]
                assert table.from_end[place] == mask[index + 1 : end].sum()
                assert (table.turn[place], table.begins_turn[place]) == (turn, not was_trained)
                assert table.token[place] == block.tokens["tokens"][index]
                assert table.gen[place] == gen
                assert table.delta[place] == pytest.approx(float(prev) - float(gen), abs=1e-7)
                place += 1
            was_trained = mask[index]
        assert table.numbers["response"][row] == mask[start:end].sum()
        assert table.numbers["length"][row] == end - start
    assert place == len(table)
    assert (table.weight == 1).all()
    assert set(table.step.tolist()) == {4}


def test_a_sample_is_unbiased_and_the_same_in_any_order(monkeypatch):
    blocks = [planted_step(1, step, "tool_calls", 20.0, shape=RunShape(prompts=6, samples=4)) for step in range(1, 7)]
    whole = table_of(*blocks)
    monkeypatch.setattr(token_table, "MAX_TOKENS", 4000)
    sample, reversed_sample = table_of(*blocks), table_of(*blocks[::-1])
    assert len(sample) <= 4000 < len(whole)
    for name in ("delta", "weight", "position"):
        assert sorted(getattr(sample, name).tolist()) == sorted(getattr(reversed_sample, name).tolist())
    for value in ("capped_abs", "one_minus_p"):
        estimate, truth = (float((part.weight * getattr(part, value)).sum()) for part in (sample, whole))
        assert estimate == pytest.approx(truth, rel=0.05)


def test_sums_have_the_replicates_of_whole_sequences():
    table = table_of(*(planted_step(2, step, None, 0.0, shape=SHAPE) for step in (1, 2)))
    sums = token_table.sum_with_replicates(table, np.stack([table.capped_abs, np.ones(len(table))], axis=1))
    assert sums[0] == pytest.approx([table.capped_abs.sum(), len(table)])
    for replicate in (0, token_table.REPLICATES - 1):
        expected = 0.0
        for index in range(len(table)):
            owner = table.sequence[index]
            expected += float(table.sequences.draws[replicate, owner]) * table.capped_abs[index]
        assert sums[1 + replicate, 0] == pytest.approx(expected)
