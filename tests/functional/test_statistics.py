"""Statistics, weights, budgets and coefficients, one number at a time in Python's own arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_geomask import functional as F
from nemo_geomask.errors import ArgumentError
from tests.helpers import oracle

LIMIT = 40.0
X = [-50.0, -3.0, -0.5, -1e-4, 0.0, 1e-4, 0.5, 3.0, 39.0, 41.0]
LOG_PROBS = [-12.0, -3.0, -0.7, -0.3, -0.01, -1e-7, 0.0]


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: torch.Tensor, expected: list[float], rel: float = 1e-9) -> None:
    assert found.tolist() == pytest.approx(expected, rel=rel, abs=1e-15)


# --------------------------------------------------------------------------- log-ratios


def test_a_bound_of_0_or_less_is_no_lower_bound():
    assert F.log_bound(None, default=3.5) == 3.5
    assert F.log_bound(0.0, default=3.5) == -math.inf
    assert F.log_bound(-1.0, default=3.5) == -math.inf
    assert F.log_bound(1.0, default=3.5) == 0.0
    assert F.log_bound(0.25, default=3.5) == math.log(0.25)


def test_both_ends_belong_to_the_interval():
    outside = F.filter_weight(doubles(-1.0, math.log(0.5), 0.0, math.log(2.0), 2.5), min=0.5, max=2.0).outside
    assert outside.tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("statistic", ["ratio", "k2", "k3"])
def test_token_statistics_equal_pythons_arithmetic(statistic):
    def expected(x: float) -> float:
        bounded = min(x, LIMIT)
        return {"ratio": x, "k2": x * x / 2, "k3": math.expm1(bounded) - bounded}[statistic]

    close(F.token_statistic(doubles(*X), statistic), [expected(x) for x in X])


@pytest.mark.parametrize("statistic", ["prob_diff", "binary_kl", "binary_kl_reverse", "binary_kl_max"])
def test_binary_statistics_equal_pythons_arithmetic(statistic):
    pairs = [(p, q) for p in LOG_PROBS for q in LOG_PROBS]
    log_p, log_q = (doubles(*side) for side in zip(*pairs, strict=True))
    found = F.binary_statistic(log_p, log_q, statistic)
    expected = [oracle.binary(statistic, math.exp(p), math.exp(q)) for p, q in pairs]
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_a_binary_kl_is_not_negative_by_rounding():
    log_p = torch.full((1000,), -0.6931) + 1e-7 * torch.arange(1000)
    for statistic in ("binary_kl", "binary_kl_reverse", "binary_kl_max"):
        distance = F.binary_statistic(log_p, log_p.flip(0), statistic)
        assert (distance * torch.sign(log_p - log_p.flip(0)) >= 0).all()


# --------------------------------------------------------------------------- weights


@pytest.mark.parametrize(("low", "high"), [(None, None), (0.5, None), (None, 2.0), (0.5, 3.0), (0.0, 2.0)])
def test_weights_are_clamped_or_filtered_and_say_where(low, high):
    at_bounds = [math.log(bound) for bound in (low, high) if bound]
    values = [*X, *at_bounds]
    ratios = [math.exp(min(x, LIMIT)) for x in values]
    lowest, highest = (-math.inf if not low else math.log(low)), (math.inf if high is None else math.log(high))
    is_outside = [not lowest <= x <= highest for x in values]
    clamped = F.clamp_weight(doubles(*values), min=low, max=high)
    close(clamped.value, [min(max(ratio, low or 0.0), math.inf if high is None else high) for ratio in ratios])
    assert clamped.outside.tolist() == is_outside
    filtered = F.filter_weight(doubles(*values), min=low, max=high)
    close(filtered.value, [0.0 if out else ratio for ratio, out in zip(ratios, is_outside, strict=True)])
    assert filtered.outside.tolist() == is_outside


# --------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("share", "removed"), [(0.0, 0), (0.19, 0), (0.2, 1), (0.39, 1), (0.4, 2), (0.6, 3), (0.99, 4), (1.0, 5)]
)
def test_a_share_of_the_values_is_removed(share, removed):
    sizes = doubles(3.0, 1.0, 5.0, 2.0, 4.0)
    bound = F.bound_by_share(sizes, share)
    assert int((sizes > bound).sum()) == removed
    expected = {0: math.inf, 5: -1.0}.get(removed, 5.5 - removed)
    assert bound == expected


def test_equal_values_at_the_limit_of_a_share_are_kept():
    sizes = doubles(1.0, 2.0, 2.0, 2.0, 3.0)
    assert F.bound_by_share(sizes, 0.4) == 2.5  # one of two: the three equal ones stay together
    assert F.bound_by_share(doubles(2.0, 2.0, 2.0), 0.5) == math.inf
    # 0.29 · 100 is 28.999999999999996 and 0.07 · 100 is 7.000000000000001.
    for share, count in ((0.29, 29), (0.07, 7), (0.5, 50), (0.995, 99)):
        assert int((torch.arange(100.0) > F.bound_by_share(torch.arange(100.0), share)).sum()) == count


@pytest.mark.parametrize(
    ("mean", "kept", "bound"), [(0.5, 0, -1.0), (1.0, 1, 1.5), (1.5, 2, 2.5), (2.9, 4, 4.5), (3.0, 5, math.inf)]
)
def test_as_many_values_are_kept_as_the_mean_allows(mean, kept, bound):
    sizes = doubles(3.0, 1.0, 5.0, 2.0, 4.0)
    assert F.bound_by_mean(sizes, mean) == bound
    assert int((sizes <= bound).sum()) == kept


def test_equal_values_at_the_limit_of_a_mean_go_together():
    # The mean of 0, 3 is 1.5 and allowed; that of 0, 3, 3 is 2 and not.
    assert F.bound_by_mean(doubles(0.0, 3.0, 3.0), 1.5) == 1.5
    # So close that float32's middle is not between them: the largest kept one is the bound.
    first = 1.0 + 2**-30
    assert F.bound_by_mean(doubles(1.0, first, 9.0), 1.0) == 1.0
    assert F.bound_by_mean(torch.tensor([1.0, math.inf]), 1.0) == 1.0


def test_no_values_set_no_bound():
    assert F.bound_by_share(torch.zeros(0), 0.5) == F.bound_by_mean(torch.zeros(0), 0.5) == math.inf


@pytest.mark.parametrize("length", [1, 2, 7])
def test_weights_fall_linearly_with_the_position(length):
    lowest = 0.3
    weights = [1.0 - (1.0 - lowest) * (t - 1) / max(length - 1, 1) for t in range(1, length + 1)]
    before = [sum(weights[:t]) for t in range(length)]
    position = torch.arange(1.0, length + 1.0, dtype=torch.float64)
    found, sums = F.position_weights(position, torch.full_like(position, length), lowest)
    close(found, weights)
    close(sums, before)


# --------------------------------------------------------------------------- coefficients


@pytest.mark.parametrize("normalization", ["tokens", "sequences", "documents", "constant"])
def test_coefficients_of_each_normalization(normalization):
    mask, lengths, seqs, toks, constant = [1.0, 0.5, 0.0], [4.0, 2.0, 0.0], 3.0, 11.0, 8.0
    expected = {
        "tokens": [m / toks for m in mask],
        "sequences": [m / ((n or 1e-8) * seqs) for m, n in zip(mask, lengths, strict=True)],
        "documents": [m / seqs for m in mask],
        "constant": [m / (seqs * constant) for m in mask],
    }[normalization]
    found = F.token_coefficients(
        normalization,
        mask=doubles(*mask),
        tokens_of_sequence=doubles(*lengths),
        global_seqs=torch.tensor(seqs, dtype=torch.float64),
        global_toks=torch.tensor(toks, dtype=torch.float64),
        constant=constant,
    )
    close(found, expected, rel=2e-8)  # NeMo-RL adds 1e-8 to a count


def test_a_mean_over_sequences_needs_their_lengths():
    counts = {"global_seqs": torch.ones(()), "global_toks": torch.ones(())}
    with pytest.raises(ArgumentError, match="'sequences' needs tokens_of_sequence"):
        F.token_coefficients("sequences", mask=torch.ones(2), tokens_of_sequence=None, **counts)
    assert F.inverse_count(torch.zeros(())).item() == pytest.approx(1e8)
