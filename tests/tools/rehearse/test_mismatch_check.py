"""Diagnosis of a rehearsal's records: healthy ones, and each fault by its name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from nemo_geomask.tools.rehearse.healthy_limits import healthy_limits
from nemo_geomask.tools.rehearse.mismatch_check import check_mismatch
from tests.tools.rehearse.made_records import write_record

parquet = pytest.importorskip("pyarrow.parquet", reason="records are Parquet files")

DENSE = healthy_limits("bfloat16", "bfloat16", experts=False)
EXACT = healthy_limits("float32", "float32", experts=False)


def diagnosed(folder, fault="", limits=DENSE, *, is_filtered=False, **how):
    for step in (1, 2, 3):
        write_record(folder, step, fault, **how)
    return check_mismatch(folder, limits, is_filtered=is_filtered)


def test_healthy_records(tmp_path):
    found = diagnosed(tmp_path)
    assert (found.cause, found.unjudged) == ("", "")
    assert found.gap.tokens == 3 * 8 * 14
    assert 0.003 < found.gap.noise < 0.03
    assert found.sentence.startswith("healthy: noise of a typical token 0.0")


@pytest.mark.parametrize(
    ("fault", "cause", "setting"),
    [
        ("temperature", "another temperature in the sampler", "policy.generation.temperature"),
        ("other model", "a larger mismatch between sampler and trainer", "policy.precision, policy.generation"),
        ("top_p", "renormalised by top-p or top-k in the sampler only", "policy.generation.top_p"),
        ("shift", "shifted by one token", "policy.generation"),
        ("nan", "NaN or infinite", "policy.precision"),
    ],
)
def test_each_fault_by_its_name(tmp_path, fault, cause, setting):
    found = diagnosed(tmp_path, fault)
    assert cause in found.cause
    assert setting in found.setting
    assert found.details
    assert found.fix


def test_k3_counts_where_it_is_beyond_by_more_than_luck_and_says_so(tmp_path):
    gap = diagnosed(tmp_path).gap
    by_luck, beyond = (replace(DENSE, k3=gap.k3 - errors * gap.k3_error) for errors in (1, 3))
    healthy = check_mismatch(tmp_path, by_luck)
    assert healthy.cause == ""
    assert f"(up to {by_luck.k3:.2g}, give or take two standard errors of {gap.k3_error:.1g})" in healthy.sentence
    assert "larger mismatch" in check_mismatch(tmp_path, beyond).cause


def test_a_trainer_that_filters_sets_what_it_removes_to_0(tmp_path):
    assert "of exactly 0" in diagnosed(tmp_path, "zero_prev").cause
    for fault in ("zero_prev", "zero_gen"):
        found = diagnosed(tmp_path, fault, is_filtered=True)
        assert found.cause == ""
        assert found.outside == pytest.approx(1 / (8 * 14))
        assert "the top-p or top-k of one engine alone leaves out 0.89% of the sampled tokens" in found.sentence
        # The other measures are without them.
        assert found.gap.far == 0.0
        assert found.gap.k3 < 1e-3
    assert "leaves out" not in diagnosed(tmp_path, is_filtered=True).sentence


def test_filters_that_keep_other_tokens_are_a_fault(tmp_path):
    found = diagnosed(tmp_path, "zeros_prev", is_filtered=True)
    assert found.cause == "top-p or top-k leaves out other tokens in the trainer than in the sampler"
    assert "top_p" in found.setting


def test_a_mismatch_of_bfloat16_is_none_of_float32(tmp_path):
    found = diagnosed(tmp_path, limits=EXACT)
    assert "larger mismatch" in found.cause
    assert diagnosed(tmp_path, limits=EXACT, noise=1e-5).cause == ""


def test_float32_limits_hold_only_where_both_engines_are_exact():
    assert healthy_limits("float32", "bfloat16", experts=True) == healthy_limits("bfloat16", "bfloat16", experts=True)
    assert EXACT.noise < DENSE.noise


def test_an_fp8_cache_has_limits_of_its_own(tmp_path):
    cache = healthy_limits("float32", "fp8", experts=False, fp8_cache=True)
    assert diagnosed(tmp_path, limits=cache, noise=0.12).cause == ""
    assert "larger mismatch" in diagnosed(tmp_path, limits=cache, noise=0.5).cause
    assert healthy_limits("bfloat16", "fp8", experts=False) == DENSE  # fp8 weights, on a GPU: not measured


def test_what_few_sequences_have_shows_in_the_noise_of_a_step(tmp_path):
    """Such as those whose prompt was cached before the refit: the median of all tokens may hardly move."""
    for step, fault in ((1, ""), (2, "stale prompt"), (3, "")):
        write_record(tmp_path, step, fault)
    noise = check_mismatch(tmp_path, DENSE).noise_by_step
    assert noise[2] > 10 * noise[1]
    assert noise[3] < 2 * noise[1]


def test_noise_on_the_logits_is_divided_by_the_temperature(tmp_path):
    tempered = healthy_limits("bfloat16", "bfloat16", experts=False, temperature=0.5)
    assert (tempered.noise, tempered.far, tempered.far_noise) == (2 * DENSE.noise, DENSE.far, 2 * DENSE.far_noise)
    assert healthy_limits("bfloat16", "bfloat16", experts=False, temperature=2.0).noise == DENSE.noise / 2
    assert healthy_limits("bfloat16", "bfloat16", experts=False, temperature=0.0) == DENSE
    assert "larger mismatch" in diagnosed(tmp_path, noise=0.12).cause
    assert diagnosed(tmp_path, limits=tempered, noise=0.12).cause == ""
    # At 0.1 the noise of a healthy model exceeds what is far at 1.
    cold = healthy_limits("bfloat16", "bfloat16", experts=False, temperature=0.1)
    assert diagnosed(tmp_path, limits=cold, noise=0.4).cause == ""


def test_nothing_to_judge_by(tmp_path):
    assert "no such folder" in check_mismatch(tmp_path / "none", DENSE).sentence
    write_record(tmp_path, 1, sequences=1)
    assert "only 14 trained tokens" in check_mismatch(tmp_path, DENSE).unjudged


@pytest.mark.parametrize("fault", ["", "temperature"])
def test_nemo_rls_own_logs_say_the_same(tmp_path, fault):
    recorded = diagnosed(tmp_path / "records", fault)
    for path in sorted((tmp_path / "records").glob("*.parquet")):
        rows = parquet.read_table(path).to_pylist()
        step = int(path.name.split("-")[1])
        with (tmp_path / f"train_data_step{step}.jsonl").open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows):
                fields = {"token_ids": row["tokens"], "token_loss_mask": [int(flag) for flag in row["mask"]]}
                fields |= {"generation_logprobs": row["gen"], "prev_logprobs": row["prev"]}
                fields |= {"advantages": row["advantages"], "rewards": row["reward"], "sample_loss_mask": 1.0}
                lists = {name: [value] for name, value in fields.items()}
                file.write(json.dumps({**lists, "input_lengths": [row["length"]], "idx": number}) + "\n")
    shutil.rmtree(tmp_path / "records")
    logged = check_mismatch(tmp_path, DENSE)
    assert (logged.cause, logged.gap.tokens) == (recorded.cause, recorded.gap.tokens)
    assert logged.gap.noise == pytest.approx(recorded.gap.noise)
