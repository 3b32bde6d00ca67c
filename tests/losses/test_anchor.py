"""``ratio_anchor: gen``: the ratio is taken against the generation engine, and ``prev_logprobs`` are not needed."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError, MissingDataError
from tests.helpers import batches
from tests.helpers.agreement import NORMALIZATIONS, agree, merged
from tests.helpers.batches import MASKS, VARIANTS, packed_rows

GEN = {"ratio_anchor": "gen"}
ON_RATIOS = [name for name in VARIANTS if name not in ("no_ratio", "reinforce", "on_policy")]
every_variant = pytest.mark.parametrize("variant", ON_RATIOS)
OF_TOTAL = {
    "opsm": MASKS["opsm"],
    "dppo_tv": MASKS["dppo_tv"],
    "worst": {"log_ratio": "total", "level": "sequence_max", "statistic": "k3", "max": 0.4},
}
ON_PREV = [name for name in MASKS if build_loss({"masks": [MASKS[name]]}).config.mask_rules[0].log_ratio != "total"]
NO_PREV_METRICS = {"geomask/total_k1", "geomask/total_k3", "geomask/total_abs"}


def without_prev(batch):
    return batches.Batch(
        batch.curr, {key: value for key, value in batch.data.items() if key != "prev_logprobs"}, batch.seqs, batch.toks
    )


@every_variant
def test_every_ratio_against_gen_equals_the_oracle(variant):
    for part in ({}, {"masks": list(OF_TOTAL.values())}, {"reference_policy_kl_penalty": 0.0}):
        expected = agree(merged(variant, GEN, part), without_prev(batches.rollouts(1)))
        assert not {name for name in expected.metrics if "mismatch" in name or "policy_" in name} - {"policy_kl_error"}
        assert set(expected.metrics) >= NO_PREV_METRICS


@pytest.mark.slow
@pytest.mark.parametrize("mask", ON_PREV)
@pytest.mark.parametrize("variant", ["ppo", "gspo"])
def test_masks_on_prev_read_it(variant, mask):
    config = merged(variant, GEN, {"masks": [MASKS[mask]]})
    expected = agree(config, batches.rollouts(1))
    assert {"geomask/mismatch_k3", "geomask/policy_k3", "geomask/weight_mean"} <= set(expected.metrics)
    with pytest.raises(MissingDataError, match="prev_logprobs"):
        batches.evaluate(config, without_prev(batches.rollouts(1)))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("gradient", [None, "k1", "k4"])
def test_normalizations_and_kl(normalization, gradient):
    for kind in ("k3", "k4"):
        kl = {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": kind}
        config = merged("ppo", GEN, NORMALIZATIONS[normalization], kl, {"reference_policy_kl_gradient": gradient})
        agree({**config, "positive_example_nll_weight": 0.1}, without_prev(batches.rollouts(5)))


@every_variant
def test_it_is_the_ratio_to_prev_where_prev_is_gen(variant):
    batch = batches.rollouts(2)
    anchored = batches.evaluate({**VARIANTS[variant], **GEN}, without_prev(batch))
    same = batch.with_data(prev_logprobs=batch.data["generation_logprobs"])
    plain = batches.evaluate({**VARIANTS[variant], "ratio_anchor": "prev"}, same)
    assert torch.equal(anchored.loss, plain.loss)
    assert torch.equal(anchored.grad, plain.grad)


@every_variant
def test_prev_is_not_looked_at(variant):
    batch, config = batches.rollouts(3), {**VARIANTS[variant], **GEN}
    broken = batch.with_data(prev_logprobs=torch.full_like(batch.data["prev_logprobs"], torch.nan))
    one, other = batches.evaluate(config, without_prev(batch)), batches.evaluate(config, broken)
    assert torch.equal(one.loss, other.loss)
    assert torch.equal(one.grad, other.grad)
    assert dict(one.metrics) == dict(other.metrics)


@every_variant
def test_packed_is_padded(variant):
    batch = without_prev(batches.rollouts(4))
    loss = build_loss({**VARIANTS[variant], **GEN, "masks": [MASKS["opsm"]]})
    whole = batches.evaluate(loss, batch)
    logprobs, data, segments = packed_rows(batch)
    value, metrics = loss.packed(logprobs, data, segments, batch.seqs, batch.toks)
    torch.testing.assert_close(value, whole.loss, rtol=2e-6, atol=1e-7)
    assert dict(metrics) == pytest.approx(dict(whole.metrics), rel=1e-5, abs=1e-7)


@every_variant
@pytest.mark.parametrize("gap", [-100.0, 100.0])
def test_a_gap_of_e100_stays_finite(variant, gap):
    batch = batches.one_row(curr=[-1.0, -0.5], prev=[0.0, 0.0], gen=[-1.0 - gap, -0.5], ref=[-1.0, -0.5])
    result = batches.evaluate({**VARIANTS[variant], **GEN}, without_prev(batch))
    assert torch.isfinite(result.loss)
    assert torch.isfinite(result.grad).all()


def test_names_that_nemo_rl_reads_are_there():
    metrics = batches.evaluate(GEN, without_prev(batches.rollouts(1))).metrics
    assert {"loss", "gen_kl_error", "token_mult_prob_error", "probs_ratio_min"} <= set(metrics)
    # Before the first update the current policy is the one of the rollouts, and these speak of the mismatch.
    batch = batches.rollouts(1)
    still = batches.Batch(batch.data["prev_logprobs"][:, 1:], batch.data, batch.seqs, batch.toks)
    ours = batches.evaluate(GEN, still).metrics
    theirs = batches.evaluate({}, still).metrics
    for name in ("gen_kl_error", "token_mult_prob_error", "js_divergence_error", "policy_kl_error"):
        assert ours[name] == theirs[name]


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, False),
        ({"masks": list(OF_TOTAL.values())}, False),
        ({"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k4"}, False),
        ({"masks": [MASKS["geometric"]]}, True),
        ({"masks": [MASKS["opsm_policy"]]}, True),
        ({"masks": [MASKS["geometric"]], "denominator": "kept"}, True),
        ({"batch_veto": {"max": 0.1}}, True),
        ({"use_kl_in_reward": True}, True),
        ({"ratio_anchor": "prev"}, True),
        ({"ratio_anchor": "prev", "force_on_policy_ratio": True}, False),
    ],
)
def test_who_needs_prev(settings, needs):
    assert build_loss({**GEN, **settings}).config.needs_prev is needs


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"disable_ppo_ratio": True}, "disable_ppo_ratio: true removes the ratio; unset one of them"),
        ({"force_on_policy_ratio": True}, "force_on_policy_ratio: true sets the ratio to 1; unset one of them"),
        (
            {"is_correction_level": "token", "use_importance_sampling_correction": True},
            "set is_correction_level: null, or",
        ),
        ({"is_correction_level": "token"}, "set is_correction_level: null, or ratio_anchor: prev"),
        (
            {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0},
            "truncated_importance_sampling_ratio: null, or ratio_anchor: prev",
        ),
    ],
)
def test_a_weight_of_1_takes_no_shape(settings, found):
    with pytest.raises(ConfigError) as caught:
        build_loss({**GEN, **settings})
    assert found in str(caught.value)
    assert len(caught.value.problems) == 1


def test_nemo_rls_switch_multiplies_nothing():
    # NeMo-RL's asynchronous trainers ask for it; the ratio holds what it stands for.
    batch = without_prev(batches.rollouts(6))
    on = batches.evaluate({**GEN, "use_importance_sampling_correction": True}, batch)
    off = batches.evaluate(GEN, batch)
    assert torch.equal(on.loss, off.loss)
    assert torch.equal(on.grad, off.grad)
    # With a mask on the mismatch, Δ's weight is known, and reported as one that is not applied.
    masked = {**GEN, "masks": [MASKS["veto"]]}
    agree({**masked, "use_importance_sampling_correction": True}, batches.rollouts(6))


AUDIT = {**GEN, "audit_fraction": 0.3}


def audited(batch):
    """Two rows scored, the others not; and in one of those a token that does not count."""
    prev = torch.full_like(batch.data["prev_logprobs"], torch.nan)
    prev[[0, 3]] = batch.data["prev_logprobs"][[0, 3]]
    prev[3, 0] = torch.nan
    return batch.with_data(prev_logprobs=prev)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_an_audit_is_of_the_rows_that_were_scored(form):
    batch = batches.rollouts(1)
    sample = audited(batch)
    plain, loss = batches.evaluate(GEN, without_prev(batch)), build_loss(AUDIT)
    if form == "padded":
        result = batches.evaluate(loss, sample)
        assert torch.equal(result.loss, plain.loss)
        assert torch.equal(result.grad, plain.grad)
        metrics = result.metrics
    else:
        logprobs, data, segments = packed_rows(sample)
        metrics = loss.packed(logprobs, data, segments, batch.seqs, batch.toks)[1]
    expected = dict.fromkeys(
        ("tokens", "mismatch_abs_sum", "mismatch_k1_sum", "mismatch_k3_sum", "policy_abs_sum", "policy_k3_sum"), 0.0
    )
    for row in (0, 3):
        for t in range(batch.curr.shape[1]):
            if batch.data["token_mask"][row, t + 1] and batch.data["sample_mask"][row]:
                prev, gen = (float(batch.data[f"{name}_logprobs"][row, t + 1]) for name in ("prev", "generation"))
                x, d = prev - gen, float(batch.curr[row, t]) - prev
                expected["tokens"] += 1
                expected["mismatch_abs_sum"] += abs(x)
                expected["mismatch_k1_sum"] -= x
                expected["mismatch_k3_sum"] += math.exp(x) - 1 - x
                expected["policy_abs_sum"] += abs(d)
                expected["policy_k3_sum"] += math.exp(d) - 1 - d
    found = {name.removeprefix("geomask/audit/"): value for name, value in metrics.items() if "/audit/" in name}
    assert found == pytest.approx(expected, rel=1e-5)
    assert set(metrics) - set(plain.metrics) == {f"geomask/audit/{name}" for name in expected}
    kinds = loss.metric_normalizations
    assert all(kinds[f"geomask/audit/{name}"].value == "none" for name in expected)


def test_an_audit_adds_up_over_microbatches():
    batch = audited(batches.rollouts(2))
    whole = batches.evaluate(AUDIT, batch).metrics
    parts = [batches.evaluate(AUDIT, batch.rows(part)).metrics for part in (slice(0, 2), slice(2, None))]
    for name in (name for name in whole if "/audit/" in name):
        assert sum(part[name] for part in parts) == pytest.approx(whole[name], rel=1e-5, abs=1e-6)


def test_without_a_sample_nothing_is_said_of_one():
    assert not {
        name for name in batches.evaluate(AUDIT, without_prev(batches.rollouts(1))).metrics if "/audit/" in name
    }


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"audit_fraction": 0.1}, "has them computed for all sequences anyway; set audit_fraction: 0"),
        ({"audit_fraction": 0.1, "force_on_policy_ratio": True}, "leaves them out; set audit_fraction: 0"),
        ({**AUDIT, "masks": [MASKS["veto"]]}, "has them computed for all sequences anyway; set audit_fraction: 0"),
        ({**GEN, "audit_fraction": 1.5}, "audit_fraction"),
        ({**AUDIT, "metrics": "nemo_rl"}, "that metrics: nemo_rl leaves out; set metrics: full, or audit_fraction: 0"),
    ],
)
def test_an_audit_of_what_is_known_is_an_error(settings, found):
    with pytest.raises(ConfigError, match=found):
        build_loss(settings)
