"""The library in float32 against the float64 oracle: loss, gradient and every metric.

float32 carries 24 bits, 6e-8 relative. Sums of some tens of terms of either sign lose about two digits of that, and a
sequence-level exponent up to 3 loses another factor 3, so 1e-4 relative with 1e-6 absolute is an order of magnitude
above what rounding explains and far below any wrong formula. ``margin`` shows that no clip, mask or truncation is
decided within rounding of its bound.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from nemo_geomask import build_loss
from tests.helpers import batches, oracle
from tests.helpers.agreement import NORMALIZATIONS, agree, merged
from tests.helpers.batches import MASKS, VARIANTS

LEVELS = {
    "uncorrected": {},
    "derived": {"use_importance_sampling_correction": True},
    **{
        level: {"use_importance_sampling_correction": True, "is_correction_level": level}
        for level in ("token", "turn", "turn_mean", "sequence", "sequence_mean")
    },
}


def truncation(kind: str, low: float | None, high: float) -> dict[str, Any]:
    keys = ("type", "ratio_min", "ratio")
    return {f"truncated_importance_sampling_{key}": value for key, value in zip(keys, (kind, low, high), strict=True)}


TRUNCATIONS = {
    "none": {},
    "tis": truncation("tis", None, 1.2),
    "tis_two_sided": truncation("tis", 0.8, 1.2),
    "icepop": truncation("icepop", 0.8, 1.25),
    "icepop_not_reciprocal": truncation("icepop", 0.9, 5.0),
    "seq_mask": truncation("seq-mask-tis", 0.85, 1.2),
}


def _pairs(settings: Iterable[str], variants: Iterable[str] = VARIANTS) -> list[Any]:
    """Every variant with every setting; for a quick look each variant with two, and so that each setting is there."""
    settings, variants = list(settings), list(variants)
    return [
        pytest.param(variant, setting, marks=() if (index - place) % len(settings) < 2 else pytest.mark.slow)
        for place, variant in enumerate(variants)
        for index, setting in enumerate(settings)
    ]


@pytest.mark.parametrize(("variant", "level"), _pairs(LEVELS))
def test_variant_by_level(variant, level):
    agree(merged(variant, LEVELS[level]), batches.rollouts(1))


@pytest.mark.parametrize(("variant", "mask"), _pairs(MASKS))
def test_variant_by_mask(variant, mask):
    agree(merged(variant, {"masks": [MASKS[mask]]}), batches.rollouts(1))


@pytest.mark.parametrize(
    ("variant", "normalization"), _pairs(NORMALIZATIONS, [name for name in VARIANTS if name != "cispo_flag"])
)
def test_variant_by_normalization(variant, normalization):
    agree(merged(variant, NORMALIZATIONS[normalization]), batches.rollouts(1))


@pytest.mark.parametrize("variant", ["gspo", "gspo_token", "gmpo", "sapo"])
def test_normalization_alone_overrides_the_variants_default(variant):
    # Nobody who writes loss_normalization: tokens wrote the variant's default token_level_loss: false.
    agree({**VARIANTS[variant], "loss_normalization": "tokens"}, batches.rollouts(1))


def _truncated() -> list[tuple[str, str, str]]:
    """Variant, level and truncation, without the two combinations that the configuration refuses: a truncation of no
    weight, and seq-mask-tis on sequence weights."""
    combinations = itertools.product(["ppo", "sequence_ratio", "gspo"], LEVELS, TRUNCATIONS)
    return [
        (variant, level, kind)
        for variant, level, kind in combinations
        if kind == "none"
        or (level != "uncorrected" and kind != "seq_mask")
        or (level == "token" or (level == "derived" and variant == "ppo"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "level", "kind"), _truncated())
def test_level_by_truncation(variant, level, kind):
    expected = agree(merged(variant, LEVELS[level], TRUNCATIONS[kind]), batches.rollouts(1))
    if kind != "none":
        # The bounds bind for some and not for all.
        assert 0 < expected.metrics["is_oob_ratio"] < 0.8


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("forced", [True, False])
def test_reinforce_by_name_may_be_weighted_by_the_policy_as_it_is(level, forced):
    config = merged("reinforce", LEVELS[level])
    agree({**config, "force_on_policy_ratio": forced}, batches.rollouts(1))


UNCLIPPED = ("no_ratio", "reinforce", "on_policy", "sapo", "ipo", "vespo", "topr", "dro")


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in UNCLIPPED])
def test_clips_decide_on_both_sides(variant):
    expected = agree(merged(variant), batches.rollouts(1))
    # CISPO without a lower bound has one side, and so has DPPO's cap.
    low = variant not in ("cispo", "dppo")
    assert (expected.metrics["geomask/clip_fraction_low"] > 0) == low
    assert 0 < expected.metrics["geomask/clip_fraction_high"] < 1
    if "dual" in variant:
        assert 0 < expected.metrics["geomask/dual_clip_fraction"] < 1


RAW_BOUNDS = {
    ("ratio", "token"): (0.7, 1.6),
    ("ratio", "sequence"): (0.2, 3.0),
    ("ratio", "sequence_mean"): (0.85, 1.2),
    ("ratio", "sequence_max"): (0.59, 1.9),
    ("k2", "token"): (0.002, 0.1),
    ("k2", "sequence"): (0.15, 0.6),
    ("k2", "sequence_mean"): (0.02, 0.08),
    ("k2", "sequence_max"): (0.0001, 0.3),
    ("k3", "token"): (0.002, 0.1),
    ("k3", "sequence"): (0.15, 0.6),
    ("k3", "sequence_mean"): (0.02, 0.08),
    ("k3", "sequence_max"): (0.0001, 0.35),
    ("prob_diff", "token"): (-0.03, 0.04),
    ("prob_diff", "sequence_max"): (-0.15, 0.1),
    ("binary_kl", "token"): (-0.004, 0.003),
    ("binary_kl", "sequence_max"): (-0.1, 0.02),
    ("binary_kl_reverse", "token"): (-0.004, 0.003),
    ("binary_kl_reverse", "sequence_max"): (-0.1, 0.02),
    ("binary_kl_max", "token"): (-0.004, 0.003),
    ("binary_kl_max", "sequence_max"): (-0.1, 0.02),
}


def raw(log_ratio: str, level: str, statistic: str, when: str = "always") -> dict[str, Any]:
    low, high = RAW_BOUNDS[statistic, level]
    rule = {"log_ratio": log_ratio, "level": level, "statistic": statistic, "when": when}
    return {**rule, "min": low, "max": high}


WHEN = ["always", "negative_advantage", "positive_advantage", "pushing"]
# k2 and k3 have no direction to push in.
RAW = [(*key, when) for key in RAW_BOUNDS for when in WHEN if when != "pushing" or key[0] not in ("k2", "k3")]


@pytest.mark.slow
@pytest.mark.parametrize(("statistic", "level", "when"), RAW)
@pytest.mark.parametrize("log_ratio", ["mismatch", "policy", "total"])
def test_raw_rule(log_ratio, level, statistic, when):
    agree({"masks": [raw(log_ratio, level, statistic, when)]}, batches.rollouts(3))


@pytest.mark.parametrize(("statistic", "level"), RAW_BOUNDS)
def test_raw_rule_removes_on_both_sides(statistic, level):
    expected = agree({"masks": [raw("mismatch", level, statistic)]}, batches.rollouts(3))
    assert expected.metrics["geomask/mask/mask/removed_low"] > 0
    assert expected.metrics["geomask/mask/mask/removed_high"] > 0
    assert expected.metrics["geomask/kept_tokens"] > 0


@pytest.mark.parametrize("mask", MASKS)
def test_preset_removes_some(mask):
    expected = agree({"masks": [{**MASKS[mask], "label": "m"}]}, batches.rollouts(1))
    assert expected.metrics["geomask/mask/m/removed"] > 0
    assert expected.metrics["geomask/kept_tokens"] > 0
    if mask in ("geometric", "product", "icepop", "veto"):
        assert expected.metrics["geomask/mask/m/removed_low"] > 0
        assert expected.metrics["geomask/mask/m/removed_high"] > 0


def test_all_masks_together():
    agree({"masks": list(MASKS.values())}, batches.rollouts(1))


CLAMPS = {
    "unclamped": {"kl_input_clamp_value": None, "kl_output_clamp_value": None},
    "nemo_rl": {},
    "tight": {"kl_input_clamp_value": 0.5, "kl_output_clamp_value": 0.15},
}


@pytest.mark.slow
@pytest.mark.parametrize("clamps", CLAMPS)
@pytest.mark.parametrize("importance", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("gradient", [None, "k1", "k2", "k3", "k4"])
@pytest.mark.parametrize("value", ["k1", "k2", "k3", "k4"])
def test_kl_value_by_gradient(value, gradient, importance, clamps):
    config = {
        "reference_policy_kl_penalty": 0.3,
        "reference_policy_kl_type": value,
        "reference_policy_kl_gradient": gradient,
        "use_on_policy_kl_approximation": importance,
        **CLAMPS[clamps],
    }
    agree(config, batches.rollouts(5))
    agree(config | NORMALIZATIONS["sequences"], batches.rollouts(6))


@pytest.mark.parametrize("tokens", ["trained", "kept"])
@pytest.mark.parametrize("anchor", ["gen", "prev"])
@pytest.mark.parametrize("part", [{}, {"ratio_anchor": "gen"}, {"reference_policy_kl_gradient": "k3"}], ids=str)
def test_kl_times_the_ratio_on_all_tokens_or_on_those_kept(part, anchor, tokens):
    weight = {"reference_policy_kl_penalty": 0.3, "use_on_policy_kl_approximation": True, "kl_ratio_anchor": anchor}
    expected = agree({**weight, **part, "kl_tokens": tokens, "masks": [MASKS["turn"]]}, batches.rollouts(5))
    assert 0 < expected.metrics["geomask/mask/mask/removed"] < 1


@pytest.mark.parametrize("level", ["token", "turn", "sequence_mean"])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "on_policy"])
def test_the_proximal_policy_interpolated(variant, level):
    batch = batches.rollouts(5)
    part = {"proximal_policy": "interpolated", **LEVELS[level], "masks": [MASKS["geometric"], MASKS["opsm_policy"]]}
    expected = agree(merged(variant, part), batch.with_data(prev_logprobs=torch.full_like(batch.data["advantages"], 9)))
    assert expected.metrics["geomask/mismatch_abs"] > 0 < expected.metrics["geomask/policy_abs"]
    agree(merged(variant, part), batch.with_data(training_weight_version=batch.data["training_weight_version"] + 2))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_with_kl_and_without(variant):
    for part in ({"reference_policy_kl_penalty": 0.0}, {"use_kl_in_reward": True}):
        agree(merged(variant, part), batches.rollouts(7))


@pytest.mark.parametrize("importance", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("gradient", [None, "k1", "k2", "k3", "k4"])
def test_unfiltered_log_probs_serve_the_kl_alone(gradient, importance):
    batch = batches.rollouts(5)
    unfiltered = batch.curr - 0.3 * torch.rand(batch.curr.shape, generator=torch.Generator().manual_seed(2))
    loss_fn = build_loss({"reference_policy_kl_gradient": gradient, "use_on_policy_kl_approximation": importance})
    curr, other = (x.clone().requires_grad_() for x in (batch.curr, unfiltered))
    data = {**batch.data, "curr_logprobs_unfiltered": other}
    loss, metrics = loss_fn(curr, data, torch.tensor(batch.seqs), torch.tensor(batch.toks))
    loss.backward()
    data["curr_logprobs_unfiltered"] = unfiltered
    expected = oracle.evaluate(loss_fn.config, batch.curr, data, batch.seqs, batch.toks)
    close = {"rel": 1e-4, "abs": 1e-6}
    assert loss.item() == pytest.approx(expected.loss, **close)
    assert metrics["kl_penalty"] == pytest.approx(expected.metrics["kl_penalty"], **close)
    assert curr.grad.tolist() == [pytest.approx(row, **close) for row in expected.grad]
    assert other.grad.tolist() == [pytest.approx(row, **close) for row in expected.grad_unfiltered]
    assert other.grad.abs().max() > 1e-5


@pytest.mark.parametrize("normalization", ["microbatch", "loss"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_positive_nll(variant, normalization):
    part = {"positive_example_nll_weight": 0.3, "positive_example_nll_normalization": normalization}
    expected = agree(merged(variant, part), batches.rollouts(1))
    assert expected.metrics["positive_nll_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("nonfinite", ["drop_sequence", "drop_token"])
@pytest.mark.parametrize("key", ["generation_logprobs", "prev_logprobs", "reference_policy_logprobs"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_nonfinite_input(variant, key, nonfinite):
    batch = batches.rollouts(1)
    broken = batch.data[key].clone()
    row = batch.data["token_mask"][1].nonzero().flatten()
    broken[1, row[1]], broken[1, row[2]], broken[3, 4] = float("nan"), float("-inf"), float("inf")
    config = merged(
        variant,
        LEVELS["derived"],
        {"nonfinite": nonfinite, "positive_example_nll_weight": 0.1, "masks": [MASKS["geometric"]]},
    )
    expected = agree(config, batch.with_data(**{key: broken}))
    if not (variant == "on_policy" and key == "prev_logprobs"):
        counts = [value for name, value in expected.metrics.items() if name.startswith("geomask/nonfinite_")]
        assert sum(counts) == 3
        assert expected.metrics["geomask/dropped_sequences"] == (2 if nonfinite == "drop_sequence" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("variant", [name for name, config in VARIANTS.items() if "name" not in config])
def test_fractional_sample_mask(variant, level):
    batch = batches.rollouts(1)
    sample_mask = batch.data["sample_mask"] * torch.tensor([0.5, 1.0, 0.25, 1.0, 0.75, 1.0, 0.5, 1.0])
    for part in ({}, NORMALIZATIONS["sequences"] if variant != "cispo_flag" else {}):
        agree(merged(variant, LEVELS[level], part), batch.with_data(sample_mask=sample_mask))


def _random_config(draw: random.Random) -> dict[str, Any]:
    variant = draw.choice(list(VARIANTS))
    level = draw.choice(list(LEVELS))
    parts = [LEVELS[level]]
    if level != "uncorrected":
        parts.append(TRUNCATIONS[draw.choice([k for k in TRUNCATIONS if level == "token" or k != "seq_mask"])])
    if variant != "cispo_flag":
        parts.append(NORMALIZATIONS[draw.choice(list(NORMALIZATIONS))])
    masks = [MASKS[name] for name in draw.sample(list(MASKS), draw.randint(0, 3))]
    log_ratio, when = (
        draw.choice(["mismatch", "policy", "total"]),
        draw.choice(["always", "negative_advantage", "pushing"]),
    )
    statistic, at = draw.choice([key for key in RAW_BOUNDS if when != "pushing" or key[0] not in ("k2", "k3")])
    masks.append(raw(log_ratio, at, statistic, when))
    parts.append({"masks": masks, "reference_policy_kl_penalty": draw.choice([0.0, 0.05, 0.5])})
    if parts[-1]["reference_policy_kl_penalty"]:
        parts.append({"reference_policy_kl_gradient": draw.choice([None, "k2", "k4"])})
        parts.append({"reference_policy_kl_type": draw.choice(["k1", "k2", "k3", "k4"])})
        parts.append(CLAMPS[draw.choice(list(CLAMPS))])
    if draw.random() < 0.3:
        parts.append({"positive_example_nll_weight": 0.1, "positive_example_nll_normalization": "loss"})
    return merged(variant, *parts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_everything_at_once(seed):
    draw = random.Random(seed)
    config = _random_config(draw)
    for attempt in itertools.count():
        # One draw in some hundred puts a number on an edge; take the next batch then.
        batch = batches.rollouts(1000 * attempt + seed, width=draw.choice([9, 14, 19]))
        loss_fn = build_loss(config)
        expected = oracle.evaluate(
            loss_fn.config, batch.curr, batch.data, batch.seqs, batch.toks, loss_fn.options.model_dump()
        )
        if expected.margin > 1e-5:
            break
    agree(config, batch)
