"""What trained, judged by records: π_θ at first updates, and the loss recomputed in one piece."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_geomask.losses import build_loss
from nemo_geomask.tools.rehearse.healthy_limits import update_limits
from nemo_geomask.tools.rehearse.update_check import check_update, replay_losses
from tests.tools.rehearse.made_records import PROMPT, RESPONSE, write_record

parquet = pytest.importorskip("pyarrow.parquet", reason="records are Parquet files")

LIMITS = update_limits("bfloat16", experts=False)


def judged(folder, update="moved", rows=4):
    for step in (1, 2):
        write_record(folder, step, update=update)
    return check_update(folder, LIMITS, rows=rows)


def test_only_the_first_updates_rows_must_be_unchanged(tmp_path):
    found = judged(tmp_path)
    assert (found.cause, found.unjudged, found.gap.tokens) == ("", "", 2 * 4 * RESPONSE)
    assert found.gap.noise < 0.01
    assert "differs from prev at a first update" in check_update(tmp_path, LIMITS, rows=8).cause


@pytest.mark.parametrize(
    ("update", "cause", "setting"),
    [
        ("shift", "curr is shifted by a token against prev", "logprob_backend"),
        ("rows", "curr of a sequence is prev of another", "sequence_packing"),
        ("temperature", "another temperature in the training pass", "policy.generation.temperature"),
        ("noise", "not the one that computed prev_logprobs", "dropout"),
    ],
)
def test_each_fault_by_its_name(tmp_path, update, cause, setting):
    found = judged(tmp_path, update)
    assert cause in found.cause
    assert setting in found.setting
    assert found.details
    assert found.fix


def test_without_old_log_probs_nothing_is_judged(tmp_path):
    found = judged(tmp_path, "no prev")
    assert "only 0 tokens have π_old and π_θ" in found.unjudged
    assert not found.cause
    assert check_update(tmp_path / "none", LIMITS, rows=4).unjudged


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "clipped_pg"},
        {"name": "gspo", "token_level_loss": False, "ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4},
        {"name": "clipped_pg", "masks": [{"preset": "icepop", "min": 0.99, "max": 1.01}], "denominator": "kept"},
        {"name": "clipped_pg", "use_importance_sampling_correction": True, "is_correction_level": "token"},
    ],
)
def test_a_replayed_loss_is_the_mean_over_its_updates(tmp_path, settings):
    write_record(tmp_path, 1, update="moved")
    loss = build_loss({**settings, "reference_policy_kl_penalty": 0.0})
    ((step, value, size),) = replay_losses(tmp_path, loss.config, rows=4)
    rows = parquet.read_table(next(tmp_path.glob("*.parquet"))).to_pylist()
    expected = 0.0
    for update in (rows[:4], rows[4:]):
        expected += plain_loss(update, settings) / 2
    assert (step, value) == (1, pytest.approx(expected, rel=1e-4, abs=1e-6))
    assert size >= abs(value) * 0.1


def plain_loss(rows, settings):
    """The losses above in plain loops over float64."""
    total, kept_tokens = 0.0, 0
    for row in rows:
        places = range(PROMPT, PROMPT + RESPONSE)
        delta = [row["curr"][t] - row["prev"][t] for t in places]
        mean = sum(delta) / len(delta)
        gap = [row["prev"][t] - row["gen"][t] for t in places]
        for position, t in enumerate(places):
            ratio = math.exp(mean if settings["name"] == "gspo" else delta[position])
            low, high = 1 - CLIP[settings["name"]][0], 1 + CLIP[settings["name"]][1]
            advantage = row["advantages"][t]
            term = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
            if "masks" in settings and not math.log(0.99) <= gap[position] <= math.log(1.01):
                continue
            if settings.get("use_importance_sampling_correction"):
                term *= math.exp(gap[position])
            kept_tokens += 1
            total += term
    return total / max(kept_tokens, 1)


CLIP = {"clipped_pg": (0.2, 0.2), "gspo": (3e-4, 4e-4)}


def test_steps_that_cannot_be_replayed_are_left_out(tmp_path):
    config = build_loss({"name": "clipped_pg", "reference_policy_kl_penalty": 0.0}).config
    assert not list(replay_losses(tmp_path / "none", config, rows=4))
    write_record(tmp_path, 1)
    veto = build_loss(
        {"name": "clipped_pg", "reference_policy_kl_penalty": 0.0, "batch_veto": {"estimator": "k3", "max": 1e-9}}
    )
    assert not list(replay_losses(tmp_path, veto.config, rows=4))
    assert torch.is_grad_enabled()
