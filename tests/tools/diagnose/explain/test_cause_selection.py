"""Which of the causes that are shown are named, and in which order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nemo_geomask.tools.diagnose.explain.cause_selection import rank_causes
from nemo_geomask.tools.diagnose.explain.evidence import Detection, Evidence, MismatchSums
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_sums import BOOTSTRAP_SUMS, StepSums
from nemo_geomask.tools.diagnose.measure.step_survey import survey_block
from nemo_geomask.tools.diagnose.measure.token_table import REPLICATES
from tests.evidence.diagnose.planted_causes import planted_step
from tests.evidence.diagnose.planted_logs import RunShape

TOKENS = survey_block(planted_step(0, 5, None, 0.0, shape=RunShape(prompts=1, samples=1, length=8))).tokens
NO_TOKENS = TOKENS.select(np.zeros(len(TOKENS), bool))


def evidence(*, k3=10.0, capped_abs=20.0, first_step=5, nonfinite=0.0, all_tokens=100.0, before=None):
    """Steps 4 to 6, the judged ones of which hold this mismatch."""
    statistics = RunStatistics(tables=[NO_TOKENS])
    for step in (4, 5, 6):
        sums = StepSums()
        sums["tokens"], sums["all_tokens"], sums["nonfinite"] = 100.0, all_tokens, nonfinite
        for name, value in (("k3", k3), ("capped_abs", capped_abs)):
            sums[name] = value / 2
            sums.bootstrap[:, BOOTSTRAP_SUMS.index(name)] = value / 2
        sums["one_minus_p"] = sums["one_minus_p_squared"] = 50.0
        statistics.steps[step] = sums
    against = None if before is None else RunStatistics(steps={1: before}, tables=[NO_TOKENS])
    return Evidence(statistics, None, first_step, True, against=against)


def shown(k3=None, capped_abs=None, **more):
    """A cause that is shown, and accounts for these sums."""
    explained = None
    if k3 is not None:
        explained = MismatchSums(*(np.full(1 + REPLICATES, value) for value in (k3, capped_abs)))
    return Detection(more.pop("value", 1.0), "", is_shown=True, explained=explained, **more)


def names(detections, **more):
    return [ranked.cause.id for ranked in rank_causes(detections, evidence(**more))]


def test_a_share_is_that_of_the_mismatch():
    found = {"temperature": shown(5.0, 4.0)}
    (ranked,) = rank_causes(found, evidence())
    assert ranked.detection is found["temperature"]
    assert (ranked.share.k3.value, ranked.share.capped_abs.value) == pytest.approx((0.5, 0.2))
    assert ranked.share.k3[1:] == pytest.approx((0.5, 0.5))
    assert ranked.share.text == "50 % (50 to 50) of k3 and 20 % (20 to 20) of |Δ|"
    (ranked,) = rank_causes({"temperature": shown(30.0, 0.8)}, evidence())
    assert ranked.share.k3.value == 1.0  # no more than all of it
    (tiny,) = rank_causes({"temperature": shown(5e-9, 4e-9)}, evidence(k3=1e-8, capped_abs=2e-8))
    assert (tiny.share.k3.value, tiny.share.capped_abs.value) == pytest.approx((0.5, 0.2))
    (less,) = rank_causes({"temperature": shown(-1.0, 4.0)}, evidence())
    assert less.share.k3 == (0.0, 0.0, 0.0)
    assert "and 4 % (4 to 4) of |Δ|" in ranked.share.text


def test_the_interval_of_a_share_is_that_of_its_replicates():
    explained = np.linspace(0.0, 10.0, 1 + REPLICATES)
    detection = dataclasses.replace(shown(), explained=MismatchSums(explained, explained))
    (ranked,) = rank_causes({"temperature": detection}, evidence())
    low, high = np.quantile(explained[1:] / 10.0, (0.025, 0.975))
    assert ranked.share.k3 == pytest.approx((0.0, low, high))


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0"), (0.004, "0.4"), (0.0845, "8"), (0.095, "10"), (0.0949, "9"), (1.0, "100")]
)
def test_a_share_has_as_many_digits_as_it_needs(share, text):
    (ranked,) = rank_causes({"temperature": shown(10 * share, 20 * share)}, evidence())
    assert ranked.share.text == f"{text} % ({text} to {text}) of k3 and {text} % ({text} to {text}) of |Δ|"


def test_the_cause_that_accounts_for_most_comes_first():
    # The mean of the shares of k3 and of |Δ|: 0.35, against 0.4 and 0.3.
    assert names({"temperature": shown(5.0, 4.0), "routing": shown(2.0, 12.0)}) == ["routing", "temperature"]
    assert names({"temperature": shown(5.0, 4.0), "routing": shown(2.0, 8.0)}) == ["temperature", "routing"]


def test_a_cause_without_a_measured_share_counts_as_all_of_the_mismatch():
    # Equal ranks keep the order of the table, in which filtered comes first and stale_engine last of these.
    found = names({"filtered": shown(10.0, 20.0), "shifted": shown(), "stale_engine": shown(9.9, 20.0)})
    assert found == ["filtered", "shifted", "stale_engine"]


def test_log_probs_that_are_not_finite_count_by_their_share_of_the_tokens():
    causes = {"temperature": shown(2.9, 5.8), "routing": shown(3.1, 6.2), "nonfinite": shown()}
    assert names(causes, nonfinite=30.0) == ["routing", "nonfinite", "temperature"]
    # Where no token is left to compare, they count as all of them.
    causes = {"temperature": shown(9.9, 19.8), "nonfinite": shown()}
    assert names(causes, all_tokens=0.0) == ["temperature", "nonfinite"]


def test_noise_accounts_for_what_the_others_leave():
    detections = {"temperature": shown(5.0, 4.0), "position": shown(4.0, 10.0), "routing": shown(9.0, 19.0)}
    shares = {ranked.cause.id: ranked.share for ranked in rank_causes(detections, evidence())}
    values = {id_: (share.k3.value, share.capped_abs.value) for id_, share in shares.items()}
    assert values["temperature"] == pytest.approx((0.5, 0.2))
    assert values["position"] == pytest.approx((0.4, 0.5))
    # What the largest of the others, by k3, leaves.
    assert values["routing"] == pytest.approx((0.5, 0.8))


def test_noise_accounts_for_no_mismatch_that_was_there_before():
    before = StepSums()
    before["k3"], before["capped_abs"] = 4.0, 6.0
    before["one_minus_p"] = before["one_minus_p_squared"] = 100.0  # as many as in the judged steps
    detections = {"routing": shown(9.0, 19.0)}
    (ranked,) = rank_causes(detections, evidence(before=before))
    assert (ranked.share.k3.value, ranked.share.capped_abs.value) == pytest.approx((0.6, 0.7))
    (ranked,) = rank_causes(detections, evidence())
    assert (ranked.share.k3.value, ranked.share.capped_abs.value) == pytest.approx((0.9, 0.95))


def test_of_several_causes_the_one_with_most_k3_is_taken_from_the_others():
    least = shown(3.0, 4.0)
    least.explained.k3[1:] = 9.0  # in its replicates alone
    detections = {"filtered": shown(5.0, 5.0), "temperature": least, "routing": shown(9.0, 19.0)}
    shares = {ranked.cause.id: ranked.share for ranked in rank_causes(detections, evidence())}
    assert (shares["routing"].k3.value, shares["routing"].capped_abs.value) == pytest.approx((0.5, 0.75))


def test_expert_routing_replaces_the_few_tokens_whose_experts_differ():
    assert names({"few_tokens": shown(5.0, 8.0)}) == ["few_tokens"]
    assert names({"few_tokens": shown(5.0, 8.0), "routing": shown(5.0, 8.0)}) == ["routing"]


def test_a_cause_within_a_place_leaves_the_place_its_share():
    detections = {"temperature": shown(6.0, 12.0, place="replica 3"), "replica": shown(8.0, 16.0, place="replica 3")}
    shares = {ranked.cause.id: ranked.share.k3.value for ranked in rank_causes(detections, evidence())}
    assert shares == pytest.approx({"temperature": 0.6, "replica": 0.8})


def test_a_cause_of_almost_nothing_is_not_named_unless_it_is_a_bug():
    assert names({"tool_calls": shown(0.4, 0.9)}) == []
    assert names({"tool_calls": shown(0.4, 1.0)}) == ["tool_calls"]
    assert names({"tool_calls": shown(0.5, 0.9)}) == ["tool_calls"]
    # Noise of all tokens must surely be a part of the mismatch.
    assert names({"precision": shown(2.0, 4.0)}) == []
    assert names({"precision": shown(2.6, 4.0)}) == ["precision"]
    unsure = shown(7.0, 4.0)
    unsure.explained.k3[1:6] = 0.2
    assert names({"precision": unsure}) == []
    assert names({"temperature": shown(0.0, 0.0)}) == ["temperature"]


def test_what_follows_from_another_cause_is_not_named():
    assert names({"zero_logprobs": shown()}) == ["zero_logprobs"]
    assert names({"zero_logprobs": shown(), "filtered": shown()}) == ["filtered"]
    assert names({"biased_weight": shown()}) == ["biased_weight"]
    for cause in ("filtered", "temperature", "stale_engine"):
        assert names({"biased_weight": shown(), cause: shown()}) == [cause]


def test_only_what_is_shown_in_the_judged_steps_is_named():
    assert names({"filtered": Detection(1.0, "", is_shown=False)}) == []
    assert names({"filtered": shown(steps=(4,))}) == []
    assert names({"filtered": shown(steps=(4, 5))}) == ["filtered"]
    assert names({"filtered": shown()}) == ["filtered"]
