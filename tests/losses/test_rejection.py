"""Rejection masks: bounds, direction, and what a mask must leave alone."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from math import exp
from typing import Any, get_args

import pytest
import torch

from nemo_geomask import LossConfig, build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.functional import BinaryStatistic, binary_statistic, token_statistic
from tests.helpers import batches
from tests.helpers.batches import MASKS, VARIANTS, Batch

NO_KL = {"reference_policy_kl_penalty": 0.0}


def log(rho: float) -> float:
    """Logarithm as float32 holds it."""
    return torch.tensor(math.log(rho), dtype=torch.float32).item()


def row(mismatch: list[float], *, policy: list[float] | None = None, advantage: Any = 1.0, pad: int = 0) -> Batch:
    """One sequence with these log(prev/gen) and log(curr/prev). prev is 0, so that both are exact in float32."""
    zero = torch.zeros(len(mismatch))
    gen = -torch.tensor(mismatch)
    curr = torch.tensor(policy) if policy is not None else zero
    return batches.one_row(curr=curr, prev=zero, gen=gen, advantage=advantage, pad=pad)


def kept(mask: dict[str, Any] | list[dict[str, Any]], batch: Batch, **config: Any) -> list[bool]:
    """Which tokens of a single sequence still train: REINFORCE's gradient is −A wherever they do."""
    masks = mask if isinstance(mask, list) else [mask]
    result = batches.evaluate({**NO_KL, "disable_ppo_ratio": True, "masks": masks, **config}, batch)
    trained = batch.data["token_mask"][:, 1:].bool()
    return (result.grad != 0)[trained].tolist()


def removed(mask: dict[str, Any], batch: Batch, side: str = "") -> float:
    metrics = batches.evaluate({**NO_KL, "masks": [{**mask, "label": "m"}]}, batch).metrics
    return metrics[f"geomask/mask/m/removed{side}"]


# -------------------------------------------------------------------------------------------- bounds, direction

INTERVALS = [
    {"preset": "geometric"},
    {"preset": "product"},
    {"preset": "icepop"},
    {"preset": "veto"},
    *({"log_ratio": ratio, "level": level} for ratio in ("mismatch",) for level in ("token", "sequence_max")),
]


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [(0.5, 5.0), (0.999, 1.002), (0.8, 1.2)], ids=str)
@pytest.mark.parametrize("mask", INTERVALS, ids=str)
def test_bounds_are_inclusive_and_not_swapped(mask, bounds):
    low, high = bounds
    mask = {**mask, "min": low, "max": high}
    up, down = (torch.nextafter(torch.tensor(log(b)), torch.tensor(s * math.inf)) for b, s in ((high, 1), (low, -1)))
    for x, inside in (
        (log(low), True),
        (log(high), True),
        (0.0, True),
        (down.item(), False),
        (up.item(), False),
    ):
        batch = row([x])
        assert kept(mask, batch) == [inside]
        assert removed(mask, batch, "_low") == float(x == down.item())
        assert removed(mask, batch, "_high") == float(x == up.item())


@pytest.mark.parametrize("mask", INTERVALS[:4], ids=str)
def test_ratio_is_train_over_sampler(mask):
    # ρ = π_old/μ = 4 lies in [0.5, 5] and its inverse does not, and the other way round for 0.25.
    mask = {**mask, "min": 0.5, "max": 5.0}
    assert kept(mask, row([math.log(4.0)])) == [True]
    assert kept(mask, row([math.log(0.25)])) == [False]
    assert removed(mask, row([math.log(0.25)]), "_low") == 1
    assert removed(mask, row([math.log(6.0)]), "_high") == 1


@pytest.mark.parametrize("log_ratio", ["mismatch", "policy", "total"])
def test_each_log_ratio_is_the_one_that_it_names(log_ratio):
    # log(prev/gen) = 1, log(curr/prev) = -3, so log(curr/gen) = -2.
    batch = row([1.0, 1.0], policy=[-3.0, -3.0])
    center = {"mismatch": 1.0, "policy": -3.0, "total": -2.0}[log_ratio]
    for level, count in (("token", 1), ("sequence_mean", 1), ("sequence_max", 1), ("sequence", 2)):
        for shift, inside in ((0.0, True), (0.3, False), (-0.3, False)):
            middle = count * (center + shift)
            bounds = {"min": math.exp(middle - 0.1), "max": math.exp(middle + 0.1)}
            assert kept({"log_ratio": log_ratio, "level": level, **bounds}, batch) == [inside] * 2


def test_levels_pool_what_they_name():
    # Log-ratios 0.2, 0.4, -0.3: sum 0.3, mean 0.1, extremes -0.3 and 0.4.
    batch = row([0.2, 0.4, -0.3])
    for level, low, high in (("sequence", 0.29, 0.31), ("sequence_mean", 0.09, 0.11), ("sequence_max", -0.31, 0.41)):
        mask = {"log_ratio": "mismatch", "level": level, "min": math.exp(low), "max": math.exp(high)}
        assert kept(mask, batch) == [True] * 3
        for tighter in ({"min": math.exp(low + 0.02)}, {"max": math.exp(high - 0.02)}):
            assert kept({**mask, **tighter}, batch) == [False] * 3
    token = {"log_ratio": "mismatch", "level": "token", "min": math.exp(-0.25), "max": math.exp(0.3)}
    assert kept(token, batch) == [True, False, False]


def test_prefix_levels_judge_each_token_by_what_came_before_and_itself():
    # Log-ratios 0.2, 0.4, -0.9, 0.1: sums 0.2, 0.6, -0.3, -0.2; means 0.2, 0.3, -0.1, -0.05;
    # minima 0.2, 0.2, -0.9, -0.9; maxima 0.2, 0.4, 0.4, 0.4.
    batch = row([0.2, 0.4, -0.9, 0.1], pad=2)
    for level, low, high, expected in (
        ("prefix_sum", -0.25, 0.5, [True, False, False, True]),
        ("prefix_mean", -0.06, 0.25, [True, False, False, True]),
        ("prefix_min", -0.5, 0.15, [False, False, False, False]),
        ("prefix_min", -0.5, 0.5, [True, True, False, False]),
        ("prefix_max", -0.5, 0.3, [True, False, False, False]),
    ):
        mask = {"log_ratio": "mismatch", "level": level, "min": math.exp(low), "max": math.exp(high)}
        assert kept(mask, batch) == expected, level
        assert removed(mask, batch) == 1 - sum(expected) / 4
    # Tokens that don't train take no part: without the second the sums are 0.2, -0.7, -0.6.
    holed = batch.with_data(token_mask=batch.data["token_mask"].clone())
    holed.data["token_mask"][0, 2] = 0
    mask = {"log_ratio": "mismatch", "level": "prefix_sum", "min": math.exp(-0.65)}
    assert kept(mask, holed) == [True, False, True]
    mask = {"log_ratio": "mismatch", "level": "prefix_mean", "min": math.exp(-0.25), "max": math.exp(-0.15)}
    assert kept(mask, holed) == [False, False, True]


def test_prefix_rules_push_by_the_tokens_own_advantage():
    batch = row([0.5, 0.5, -3.0, 0.0], advantage=torch.tensor([1.0, 1.0, -1.0, 1.0]))
    mask = {
        "log_ratio": "mismatch",
        "level": "prefix_sum",
        "min": math.exp(-1),
        "max": math.exp(0.7),
        "when": "pushing",
    }
    assert kept(mask, batch) == [True, False, False, True]
    assert (removed(mask, batch, "_low"), removed(mask, batch, "_high")) == (0.25, 0.25)


class TestCppo:
    """arXiv:2606.10968: Z_t = w_t·|p − q| within δ, and S_t within δ + b·W_{t−1}."""

    def differences(self, *differences: float, advantage: Any = 1.0, pad: int = 0) -> Batch:
        """One sequence with these p − q, where q is 0.4."""
        q = torch.full((len(differences),), 0.4)
        curr = (q + torch.tensor(differences)).log()
        return batches.one_row(curr=curr, prev=q.log(), gen=q.log(), advantage=advantage, pad=pad)

    def mask(self, **settings: Any) -> dict[str, Any]:
        # All weights 1 and, by a quantile that is clamped, a budget of 0.01 a token.
        plain = {"weight_min": 1.0, "budget_min": 0.01, "budget_quantile": 0.0, "budget_scale": 1e-9}
        return {"preset": "cppo", "delta": 0.1, **plain, **settings}

    def test_prefix_uses_up_what_it_is_given(self):
        # S: 0.06, 0.10, 0.15, 0.16, 0.17. Allowed: 0.10, 0.11, 0.12, 0.13, 0.14, whether or not a token was dropped.
        batch = self.differences(0.06, 0.04, 0.05, 0.01, 0.01)
        assert kept(self.mask(), batch) == [True, True, False, False, False]
        # Time heals: two quiet tokens more, and one moves back in.
        batch = self.differences(0.06, 0.04, 0.05, 0.0, 0.0, 0.0, 0.001)
        assert kept(self.mask(), batch)[-1]

    def test_padding_is_no_response(self):
        batch, padded = (self.differences(0.09, 0.09, 0.09, pad=pad) for pad in (0, 40))
        mask = self.mask(weight_min=0.1, budget_min=1.0)
        # The weights 1, 0.55 and 0.1 are those of three tokens.
        assert kept({**mask, "delta": 0.05}, batch) == kept({**mask, "delta": 0.05}, padded) == [False, True, True]

    def test_only_what_pushes_further_goes(self):
        batch = self.differences(0.2, -0.2, 0.2, -0.2, advantage=torch.tensor([-1.0, 1.0, 1.0, -1.0]))
        assert kept(self.mask(), batch) == [True, True, False, False]

    def test_budget_is_the_responses_own_quantile(self):
        # The median difference of 0.03, clamped to [0.01, 0.05]: allowed 0.1, 0.13, 0.16; used 0.09, 0.12, 0.15.
        batch = self.differences(0.09, 0.03, 0.03)
        mask = self.mask(budget_quantile=0.5, budget_scale=1.0)
        assert kept(mask, batch) == [True, True, True]
        assert kept({**mask, "budget_scale": 0.3}, batch) == [True, False, False]
        # A hundred times the median is clamped to five times 0.002: allowed 0.1, 0.11, 0.12.
        assert kept({**mask, "budget_scale": 100.0, "budget_min": 0.002}, batch) == [True, False, False]

    def test_a_single_token_weighs_1(self):
        assert kept(self.mask(weight_min=0.5), self.differences(0.11)) == [False]
        assert kept(self.mask(weight_min=0.5), self.differences(0.09)) == [True]


def test_one_bound_alone_leaves_the_other_side_open():
    far = row([5.0, -5.0])
    assert kept({"preset": "icepop", "max": 2.0}, far) == [False, True]
    assert kept({"preset": "icepop", "min": 0.5}, far) == [True, False]


# ------------------------------------------------------------------------------------------------ padding, rows


def test_maximum_is_over_tokens_that_train():
    # Every ratio is below 1/2; a log-ratio of 0 anywhere else would make the maximum 1.
    batch = row([-1.0, -1.2, -0.9], pad=5)
    assert kept({"preset": "veto", "max": 0.5}, batch) == [True] * 3
    assert kept({"log_ratio": "mismatch", "level": "sequence_max", "statistic": "k2", "min": 0.4}, batch) == [True] * 3


def test_minimum_is_over_tokens_that_train():
    # Every ratio is above 2; a zero anywhere else would make the minimum 1 or 0.
    batch = row([1.0, 1.2, 0.9], pad=5)
    assert kept({"preset": "veto", "min": 2.0}, batch) == [True] * 3
    assert kept({"preset": "product", "min": math.exp(3.0)}, batch) == [True] * 3
    prompt = replace(batch, data={**batch.data, "token_mask": batch.data["token_mask"].clone()})
    prompt.data["token_mask"][0, 1] = 0
    assert kept({"preset": "product", "min": math.exp(2.05), "max": math.exp(2.15)}, prompt) == [True] * 2


def test_rows_are_judged_one_by_one():
    batch = batches.stack(row([0.5, 0.5]), row([0.0, 0.1]), row([-0.5, -0.5]))
    assert kept({"preset": "geometric", "min": 0.9, "max": 1.2}, batch) == [False] * 2 + [True] * 2 + [False] * 2
    # Pooled over rows the mean would be 0.017.


def test_empty_response_is_not_reported_as_removed():
    # It has no ratio: none of these bounds, which leave out 1, speaks of it.
    empty = row([0.0, 0.0])
    empty = empty.with_data(token_mask=torch.zeros_like(empty.data["token_mask"]))
    batch = batches.stack(row([0.2, 0.2]), empty)
    for mask in (*({**mask, "min": 1.1, "max": 1.9} for mask in INTERVALS), MASKS["opsm"]):
        assert removed(mask, batch) == 0
    truncation = {"type": "seq-mask-tis", "ratio_min": 1.1, "ratio": 1.9}
    config = {f"truncated_importance_sampling_{key}": value for key, value in truncation.items()}
    config["use_importance_sampling_correction"] = True
    assert batches.evaluate(config, batch).metrics["is_oob_ratio"] == 0


def test_one_bad_token_vetoes_its_whole_sequence_and_no_other():
    batch = batches.stack(row([0.0, 3.0, 0.0]), row([0.0, 0.1, 0.2]))
    assert kept({"preset": "veto", "max": 10.0}, batch) == [False] * 3 + [True] * 3
    assert kept({"preset": "icepop", "max": 10.0}, batch) == [True, False, True] + [True] * 3
    assert removed({"preset": "veto", "max": 10.0}, batch) == 0.5
    assert removed({"preset": "icepop", "max": 10.0}, batch) == pytest.approx(1 / 6)


# --------------------------------------------------------------------------------------------- single presets


def test_mean_of_zero_hides_what_k2_and_k3_see():
    # ρ = 1/4, 1, 4: geometric mean 1 and product 1.
    batch = row([-math.log(4), 0.0, math.log(4)])
    assert kept({"preset": "geometric", "min": 0.999, "max": 1.002}, batch) == [True] * 3
    assert kept({"preset": "product", "min": 0.999, "max": 1.002}, batch) == [True] * 3
    # k2: log(4)²/2 = 0.961 at the ends, mean 0.641. k3 = ρ − 1 − log ρ: 0.636, 0, 1.614, mean 0.750.
    for statistic, mean, worst in (("k2", 0.6406, 0.9609), ("k3", 0.75, 1.6137)):
        for level, value in (("sequence_mean", mean), ("sequence_max", worst)):
            mask = {"preset": "trust_region", "statistic": statistic, "level": level}
            assert kept({**mask, "max": value - 0.001}, batch) == [False] * 3
            assert kept({**mask, "max": value + 0.001}, batch) == [True] * 3


def test_k3_of_a_small_log_ratio_keeps_its_digits_in_float32():
    assert token_statistic(torch.tensor([1e-4]), "k3").item() == pytest.approx(5e-9, rel=1e-3)  # x²/2


def test_distances_of_extreme_probabilities():
    log_p = torch.tensor([0.0, 0.0, -100.0, -1e-6, -80.0, 1e-7])
    log_q = torch.tensor([-100.0, -1e-6, 0.0, -2e-6, -100.0, 0.0])
    # Both certain, or both next to impossible, is no distance, whatever the ratio.
    assert binary_statistic(log_p, log_q, "prob_diff").tolist() == pytest.approx([1, 1e-6, -1, 1e-6, 0, 0], rel=1e-5)
    forward = binary_statistic(log_p, log_q, "binary_kl").tolist()
    # A certain token under p leaves 1e-6 for all that q does else; as sure under both; 2e-6·log 2 − 1e-6; nothing.
    assert forward == pytest.approx([log(1e6), 0.0, -100.0, 2e-6 * log(2.0) - 1e-6, 0.0, 0.0], rel=1e-2, abs=1e-9)
    assert binary_statistic(log_p, log_q, "binary_kl_reverse").tolist()[0] == pytest.approx(100.0, rel=1e-4)
    assert not any(binary_statistic(log_p, log_q, name).isnan().any() for name in get_args(BinaryStatistic))
    # Two engines that are sure of a token, one of them up to rounding.
    sure = torch.tensor([0.0, 0.0, -1.2e-7, -2.4e-7]), torch.tensor([-1.2e-7, -2.4e-7, 0.0, 0.0])
    for name in ("binary_kl", "binary_kl_reverse", "binary_kl_max"):
        assert binary_statistic(*sure, name).abs().tolist() == [0.0] * 4
    # 1e-4 of a probability of 1/2 keeps its digits.
    near = binary_statistic(torch.tensor([log(0.5) + 1e-4]), torch.tensor([log(0.5)]), "prob_diff")
    assert near.item() == pytest.approx(0.5 * (exp(1e-4) - 1), rel=2e-3)


class TestDppo:
    """arXiv:2602.04879: drop where the probability is off by more than δ and the update pushes it further."""

    # Probabilities under the policy 1/2; under the engine 0.2, 0.4, 0.6, 0.9.
    BATCH = batches.one_row(curr=[log(0.5)] * 4, prev=[log(0.5)] * 4, gen=[log(q) for q in (0.2, 0.4, 0.6, 0.9)])

    @pytest.mark.parametrize(
        ("advantage", "low", "high"), [(1.0, 0.0, 1.0), (-1.0, 1.0, 0.0), (0.0, 0.0, 0.0)], ids=["up", "down", "none"]
    )
    @pytest.mark.parametrize("preset", [{"preset": "dppo_tv", "delta": 0.25}, {"preset": "dppo_kl", "delta": 0.1}])
    def test_only_what_is_pushed_further(self, preset, advantage, low, high):
        batch = self.BATCH.with_data(advantages=torch.full_like(self.BATCH.data["advantages"], advantage))
        found = batches.evaluate({"masks": [preset]}, batch).metrics
        name = f"geomask/mask/{preset['preset']}/removed"
        assert found[f"{name}_low"] == pytest.approx(low / 4)  # 0.9: the policy is far below the engine
        assert found[f"{name}_high"] == pytest.approx(high / 4)  # 0.2: far above

    def test_each_side_has_its_own_bound(self):
        batch = self.BATCH.with_data(advantages=torch.full_like(self.BATCH.data["advantages"], -1.0))
        mask = {"preset": "dppo_tv", "delta": 0.25, "delta_low": 0.05}
        assert batches.evaluate({"masks": [mask]}, batch).metrics["geomask/mask/dppo_tv/removed"] == pytest.approx(0.5)

    def test_kpop_minds_neither_direction_nor_advantage(self):
        found = batches.evaluate({"masks": [{"preset": "kpop", "max": 0.1}]}, self.BATCH).metrics
        assert (found["geomask/mask/kpop/removed_low"], found["geomask/mask/kpop/removed_high"]) == (0.25, 0.25)


class TestVaco:
    """arXiv:2603.01365: where a sequence is too far off on average, drop the tokens that the update pushes further."""

    # p - q is 0.3, -0.1, 0 and 0.2: the mean size is 0.15.
    Q = torch.tensor([0.2, 0.6, 0.5, 0.3])
    P = torch.tensor([0.5, 0.5, 0.5, 0.5])

    def batch(self, advantage: Any = 1.0, pad: int = 0) -> Batch:
        return batches.one_row(curr=self.P.log(), prev=self.P.log(), gen=self.Q.log(), advantage=advantage, pad=pad)

    def mask(self, delta: float, **settings: Any) -> dict[str, Any]:
        return {"preset": "vaco", "statistic": "prob_diff", "delta": delta, **settings}

    @pytest.mark.parametrize("pad", [0, 30])
    def test_the_mean_decides_and_the_direction_selects(self, pad):
        for advantage, dropped in ((1.0, [0, 3]), (-1.0, [1])):
            batch = self.batch(advantage, pad)
            assert kept(self.mask(0.149), batch) == [k not in dropped for k in range(4)]
            assert kept(self.mask(0.151), batch) == [True] * 4
        # A single token may be much further off than delta.
        assert kept({"preset": "dppo_tv", "delta": 0.151, "log_ratio": "total"}, self.batch()) == [
            False,
            True,
            True,
            False,
        ]

    def test_each_token_has_its_own_advantage(self):
        advantage = torch.tensor([-1.0, -1.0, 1.0, 1.0])
        assert kept(self.mask(0.1), self.batch(advantage)) == [True, False, True, False]
        found = [removed(self.mask(0.1), self.batch(advantage), side) for side in ("", "_low", "_high")]
        assert found == [0.5, 0.25, 0.25]

    def test_sequences_are_judged_one_by_one(self):
        quiet = batches.one_row(curr=self.P.log(), prev=self.P.log(), gen=self.P.log() - 0.01)
        both = batches.stack(self.batch(), quiet)
        assert kept(self.mask(0.1), both) == [False, True, True, False] + [True] * 4

    def test_each_statistic_has_its_own_scale(self):
        # |p/q - 1|: 1.5, 1/6, 0, 2/3; KL(q, p) of the pairs: 0.19274, 0.02014, 0, 0.08228.
        for statistic, mean in (("ratio_diff", 7 / 12), ("binary_kl", 0.073790)):
            for delta, dropped in ((mean * 0.999, [0, 3]), (mean * 1.001, [])):
                mask = self.mask(delta, statistic=statistic)
                assert kept(mask, self.batch()) == [k not in dropped for k in range(4)]

    def test_the_bound_is_inclusive(self):
        batch = batches.one_row(curr=[log(0.75)], prev=[log(0.75)], gen=[log(0.75) - math.log(2.0)])
        value = torch.expm1(batch.data["prev_logprobs"] - batch.data["generation_logprobs"])[0, 1].item()
        below = torch.nextafter(torch.tensor(value), torch.tensor(0.0)).item()
        assert kept(self.mask(value, statistic="ratio_diff"), batch) == [True]
        assert kept(self.mask(below, statistic="ratio_diff"), batch) == [False]

    def test_a_distance_that_nothing_exceeds_is_refused(self):
        with pytest.raises(ConfigError, match="a delta of 1 on prob_diff, which is at most 1, removes nothing"):
            build_loss({"masks": [self.mask(1.0)]})
        build_loss({"masks": [self.mask(2.0, statistic="ratio_diff")]})


@pytest.mark.parametrize("level", ["sequence_mean", "sequence_max"])
def test_divergence_bounds_are_inclusive(level):
    # k2 of log-ratio 1 is exactly 1/2.
    mask = {"preset": "trust_region", "statistic": "k2", "level": level, "max": 0.5}
    above = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    for x, inside in ((1.0, True), (-1.0, True), (above, False), (-above, False)):
        assert kept(mask, row([x])) == [inside]
        assert removed(mask, row([x]), "_high") == float(not inside)


class TestOpsm:
    """DeepSeek-V3.2 eq. 9: drop a sequence if its advantage is negative and mean log(μ/π) > δ."""

    def test_only_negative_advantages(self):
        far = row([0.0, 0.0], policy=[-0.6, -0.6])
        away = far.with_data(advantages=-far.data["advantages"])
        still = far.with_data(advantages=torch.zeros_like(far.data["advantages"]))
        mask = {"preset": "opsm", "delta": 0.5}
        assert kept(mask, far) == [True, True]
        assert kept(mask, away) == [False, False]
        assert removed(mask, away, "_low") == 1
        assert removed(mask, still) == 0

    def test_only_in_the_direction_of_a_less_likely_sequence(self):
        mask = {"preset": "opsm", "delta": 0.5}
        assert kept(mask, row([0.0], policy=[0.6], advantage=-1.0)) == [True]
        assert kept(mask, row([0.0], policy=[-0.6], advantage=-1.0)) == [False]

    def test_bound_is_inclusive(self):
        for delta in (0.5, 0.1, 1e-4):
            x = -torch.tensor(delta, dtype=torch.float32)
            beyond = torch.nextafter(x, torch.tensor(-1.0)).item()
            mask = {"preset": "opsm", "delta": delta}
            assert kept(mask, row([0.0], policy=[x.item()], advantage=-1.0)) == [True]
            assert kept(mask, row([0.0], policy=[beyond], advantage=-1.0)) == [False]

    def test_total_counts_the_mismatch_and_policy_does_not(self):
        # log(prev/gen) = -0.4, log(curr/prev) = -0.3: total -0.7.
        batch = row([-0.4, -0.4], policy=[-0.3, -0.3], advantage=-1.0)
        assert kept({"preset": "opsm", "delta": 0.5}, batch) == [False, False]
        assert kept({"preset": "opsm", "delta": 0.5, "log_ratio": "total"}, batch) == [False, False]
        assert kept({"preset": "opsm", "delta": 0.5, "log_ratio": "policy"}, batch) == [True, True]
        assert kept({"preset": "opsm", "delta": 0.2, "log_ratio": "policy"}, batch) == [False, False]
        assert kept({"preset": "opsm", "delta": 0.8}, batch) == [True, True]

    def test_decides_on_the_sequences_means(self):
        # One token's advantage is positive and one's log-ratio is fine; the means are -0.5 and -0.6.
        batch = row([0.0, 0.0], policy=[-1.2, 0.0], advantage=torch.tensor([1.0, -2.0]))
        assert kept({"preset": "opsm", "delta": 0.5}, batch) == [False, False]
        # Mean advantage +0.5: kept, although one token's is negative.
        batch = row([0.0, 0.0], policy=[-1.2, 0.0], advantage=torch.tensor([2.0, -1.0]))
        assert kept({"preset": "opsm", "delta": 0.5}, batch) == [True, True]

    def test_current_policy_carries_no_gradient(self):
        # The verdict moves with the policy but is not differentiated: kept or not, a token's gradient is −A.
        batch = row([0.0, 0.0], policy=[-0.4, -0.4], advantage=-1.0)
        config = {**NO_KL, "disable_ppo_ratio": True, "masks": [{"preset": "opsm", "delta": 0.5}]}
        assert batches.evaluate(config, batch).grad.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("always", [False, False, False]),
        ("negative_advantage", [True, False, True]),
        ("positive_advantage", [False, True, True]),
    ],
)
def test_token_rule_asks_for_the_tokens_own_advantage(when, expected):
    batch = row([1.0, 1.0, 1.0], advantage=torch.tensor([2.0, -0.5, 0.0]))
    mask = {"log_ratio": "mismatch", "level": "token", "max": 2.0, "when": when}
    # The third token has no gradient anyway: ask the metric.
    assert removed(mask, batch) == pytest.approx((3 - sum(expected)) / 3)
    assert kept(mask, batch)[:2] == expected[:2]


# --------------------------------------------------------------------------- masks together, and what stays


@pytest.mark.slow
@pytest.mark.parametrize("names", [*itertools.pairwise([*MASKS, next(iter(MASKS))])], ids="-".join)
def test_no_mask_sees_what_another_removed(names):
    # Each mask's own metrics are those that it has alone, in either order, and the verdicts are joined by AND.
    batch = batches.rollouts(1)
    alone = {
        name: batches.evaluate({**NO_KL, "disable_ppo_ratio": True, "masks": [{**MASKS[name], "label": name}]}, batch)
        for name in names
    }
    both = None
    for order in (names, names[::-1]):
        masks = [{**MASKS[name], "label": name} for name in order]
        together = batches.evaluate({**NO_KL, "disable_ppo_ratio": True, "masks": masks}, batch)
        for name in names:
            for side in ("", "_low", "_high"):
                key = f"geomask/mask/{name}/removed{side}"
                assert together.metrics[key] == alone[name].metrics[key]
        joined = (alone[names[0]].grad != 0) & (alone[names[1]].grad != 0)
        assert torch.equal(together.grad != 0, joined)
        assert both is None or torch.equal(together.grad, both)
        both = together.grad


@pytest.mark.parametrize("normalization", ["tokens", "sequences", "documents"])
def test_survivors_weigh_what_they_weighed_before(normalization):
    # Survivors weigh what they weighed before: their gradient does not change by a bit. No clip is in a mask's way.
    config = {**NO_KL, "loss_normalization": normalization, "ratio_clip_min": 1.0, "ratio_clip_max": 1e6}
    batch = batches.rollouts(1)
    before = batches.evaluate(config, batch)
    for mask in MASKS.values():
        after = batches.evaluate({**config, "masks": [mask]}, batch)
        survivors = after.grad != 0
        assert torch.equal(after.grad[survivors], before.grad[survivors])
        assert survivors.sum() < (before.grad != 0).sum()


@pytest.mark.parametrize("name", VARIANTS)
def test_masks_leave_the_kl_and_the_other_metrics_alone(name):
    batch = batches.rollouts(1)
    config = {**VARIANTS[name], "reference_policy_kl_penalty": 0.3, "use_importance_sampling_correction": True}
    free, masked = (
        batches.evaluate({**config, "masks": masks}, batch) for masks in ([], [{"preset": "icepop", "max": 1e-6}])
    )
    changed = {key for key, value in free.metrics.items() if masked.metrics[key] != value}
    assert changed == {"loss", "geomask/kept_tokens"}


ALL_GONE = [{"preset": "product", "max": 1e-6}, {"preset": "icepop", "max": 1e-6}]


# Objectives with a gradient where the advantage is 0.
PULLS = ("ipo", "dro")


@pytest.mark.parametrize("mask", ALL_GONE, ids=str)
def test_a_penalty_is_of_all_tokens_whatever_is_rejected(mask):
    batch = batches.rollouts(1)
    options = {"eps": 0.9, "kl_tau": 0.3}
    for weighted in ({}, {"use_importance_sampling_correction": True}):
        config = {"name": "ipo", "ratio_anchor": "prev", "options": options, **NO_KL, **weighted, "masks": [mask]}
        result = batches.evaluate(config, batch)
        x = batch.curr - batch.data["prev_logprobs"][:, 1:]
        weight = batch.data["token_mask"][:, 1:] * batch.data["sample_mask"].unsqueeze(-1)
        assert result.loss.item() == pytest.approx(0.3 * float((weight * x**2).sum()) / batch.toks, rel=1e-5)


@pytest.mark.parametrize("mask", ALL_GONE, ids=str)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in PULLS])
def test_all_rejected_is_an_exact_zero_surrogate(name, mask):
    batch = batches.rollouts(1)
    # The empty response stays, but has no token.
    result = batches.evaluate({**VARIANTS[name], **NO_KL, "masks": [mask]}, batch)
    assert result.loss.item() == 0.0
    assert torch.equal(result.grad, torch.zeros_like(result.grad))
    assert result.metrics["geomask/kept_tokens"] == 0
    # With a KL term exactly that term is left.
    kl = {"reference_policy_kl_penalty": 0.3}
    result = batches.evaluate({**VARIANTS[name], **kl, "masks": [mask]}, batch)
    assert result.loss.item() == pytest.approx(0.3 * result.metrics["kl_penalty"], rel=1e-6)
    still = batch.with_data(advantages=torch.zeros_like(batch.data["advantages"]))
    only_kl = batches.evaluate({**VARIANTS[name], **kl}, still)
    torch.testing.assert_close(result.grad, only_kl.grad, rtol=1e-6, atol=1e-9)
    assert result.grad.abs().max() > 1e-4


def test_rejected_tokens_stay_in_the_sequences_statistics():
    # IcePop removes the second token, but GSPO's ratio and the geometric weight are those of the whole sequence.
    batch = row([0.0, 1.0], policy=[0.02, 0.04])
    config = {
        "name": "gspo",
        **NO_KL,
        "ratio_clip_min": 0.5,
        "ratio_clip_max": 0.5,
        "use_importance_sampling_correction": True,
        "is_correction_level": "sequence_mean",
        "masks": [{"preset": "icepop", "max": 2.0}],
    }
    result = batches.evaluate(config, batch)
    # Half of the tokens of exp(0.5)·exp(0.03).
    assert result.loss.item() == pytest.approx(-math.exp(0.53) / 2, rel=1e-6)
    # The removed token still moves the sequence's ratio.
    assert result.grad[0, 1].item() == pytest.approx(-math.exp(0.53) / 4, rel=1e-5)


def test_labels_of_repeated_presets_are_numbered():
    masks = [{"preset": "icepop", "max": high} for high in (2.0, 3.0, 4.0)]
    metrics = batches.evaluate({"masks": masks}, batches.rollouts(1)).metrics
    for label in ("icepop", "icepop_2", "icepop_3"):
        assert f"geomask/mask/{label}/removed" in metrics


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ({"name": "dppo"}, {"preset": "dppo_tv", "delta": 0.15}),
        ({"name": "dppo", "options": {"divergence": "kl"}}, {"preset": "dppo_kl", "delta": 0.05}),
        (
            {"name": "dppo", "options": {"delta": 0.2, "delta_low": 0.1}},
            {"preset": "dppo_tv", "delta": 0.2, "delta_low": 0.1},
        ),
        (
            {"name": "ipo"},
            {"log_ratio": "total", "level": "token", "statistic": "prob_diff", "min": -0.3, "max": 0.3, "label": "ipo"},
        ),
    ],
    ids=["tv", "kl", "both", "ipo"],
)
def test_an_objective_brings_masks(settings, own):
    mine = build_loss(settings).config
    assert mine.masks == build_loss({"masks": [own]}).config.masks
    # A recipe's own come on top, and none comes twice.
    more = build_loss({**settings, "masks": [MASKS["opsm"]]}).config
    assert more.masks == (*mine.masks, *build_loss({"masks": [MASKS["opsm"]]}).config.masks)
    assert build_loss(more).config == more
    assert build_loss(more.model_dump()).config.masks == more.masks
    kept = {"denominator": "kept", "masks": [MASKS["geometric"]]}  # looks at the rules early
    keys = [rule.key for rule in build_loss({**settings, **kept}).config.mask_rules]
    assert keys == ["loss_fn.name", "loss_fn.masks[0]"]


def test_a_copy_with_other_settings_is_as_given_and_strict():
    built = build_loss({"name": "dppo", "masks": [MASKS["opsm"]]}).config
    other = built.model_copy(update={"options": {"delta": 0.3}})
    assert other.mask_rules == LossConfig(masks=[MASKS["opsm"]]).mask_rules  # what a name brings, building adds
    fresh = build_loss({"name": "dppo", "options": {"delta": 0.3}, "masks": [MASKS["opsm"]]}).config
    assert build_loss(other).config == fresh
    assert [rule.high for rule in fresh.mask_rules if rule.label == "dppo_tv"] == [0.3]
    # Nor does the next objective get the bounds of the last, nor a copy without changes lose anything.
    gspo = build_loss({"name": "gspo"}).config
    assert build_loss(gspo.model_copy(update={"name": "cispo"})).config == build_loss({"name": "cispo"}).config
    assert built.model_copy() == built
    with pytest.raises(ConfigError, match=r"loss_fn\.options: "):
        built.model_copy(update={"options": 3})


def test_masks_of_an_objective_are_held_to_the_same():
    with pytest.raises(ConfigError, match=r"loss_fn\.options\.masks\[0\].*delta"):
        build_loss({"name": "dppo", "options": {"delta": 1.5}})
