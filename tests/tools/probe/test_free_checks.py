"""Checks without a start: each finds its fault and finds none in healthy scores."""

import numpy
import pytest

from nemo_geomask.tools.probe.free_checks import free_checks
from nemo_geomask.tools.probe.scored_arms import FrozenTokens


def scores(noise=0.01):
    generator = numpy.random.default_rng(5)
    lengths = [20] * 10
    sampled = [(-generator.exponential(2.0, length)).tolist() for length in lengths]
    frozen = {
        "sequences": [[1, 2, *generator.integers(3, 99, 20).tolist()] for _ in lengths],
        "prompt_lengths": [2] * 10,
        "prompts": [index // 2 for index in range(10)],
        "sampled": sampled,
        "by_trainer": [index % 2 == 1 for index in range(10)],
    }
    tokens = FrozenTokens.from_frozen(frozen)
    difference = noise * generator.standard_normal(len(tokens.sampled))
    decode = tokens.sampled + tokens.by_trainer * difference
    trainer = tokens.sampled + ~tokens.by_trainer * difference
    return tokens, decode, decode.copy(), trainer


def outcomes(tokens, decode, prefill, trainer, **options):
    healthy = {"trainer_again": trainer, "is_training": False, "weights": (), "is_neutral": True}
    return {check.name: check for check in free_checks(tokens, decode, prefill, trainer, **healthy | options)}


def faults(checks):
    return [name for name, check in checks.items() if check.outcome == "fault"]


def test_healthy_scores_have_no_fault():
    checks = outcomes(*scores())
    assert {check.outcome for check in checks.values()} == {"fine"}


@pytest.mark.parametrize("shift", [1, -1])
def test_shifted_tokens_are_found(shift):
    tokens, decode, prefill, trainer = scores()
    checks = outcomes(tokens, decode, prefill, numpy.roll(trainer, shift))
    assert faults(checks) == ["shift"]
    assert f"token {'before' if shift > 0 else 'after'}" in checks["shift"].message


def test_dropout_that_is_left_on_is_found():
    tokens, decode, prefill, trainer = scores()
    again = trainer + 0.1 * numpy.random.default_rng(6).standard_normal(len(trainer))
    checks = outcomes(tokens, decode, prefill, trainer, trainer_again=again, is_training=True)
    assert faults(checks) == ["evaluation mode"]
    # Neither is a fault alone: training mode without dropout, and kernels that are not deterministic.
    assert faults(outcomes(tokens, decode, prefill, trainer, is_training=True)) == []
    checks = outcomes(tokens, decode, prefill, trainer, trainer_again=again)
    assert checks["evaluation mode"].outcome == "noted"
    assert faults(checks) == []


def test_layers_with_other_weights_are_named():
    checks = outcomes(*scores(), weights=("layers.2", "layers.3"))
    assert faults(checks) == ["weights after the refit"]
    assert "layers.2, layers.3" in checks["weights after the refit"].message


def test_adapters_that_a_refit_does_not_deliver_are_a_fault():
    checks = outcomes(*scores(), adapters={"count": 14, "is_delivered": False})
    assert faults(checks) == ["adapters"]
    assert "14 adapters" in checks["adapters"].message
    assert outcomes(*scores(), adapters={"count": 14, "is_delivered": True})["adapters"].outcome == "fine"
    assert "adapters" not in outcomes(*scores(), adapters={"count": 0, "is_delivered": True})


def test_weights_that_were_not_compared_are_not_judged():
    assert outcomes(*scores(), weights=None)["weights after the refit"].outcome == "not judged"


def test_a_decode_that_prefill_and_trainer_disagree_with_is_named():
    tokens, decode, prefill, trainer = scores()
    decode = decode + 0.2 * numpy.random.default_rng(1).standard_normal(len(decode))
    checks = outcomes(tokens, decode, prefill, trainer)
    noted = [name for name, check in checks.items() if check.outcome == "noted"]
    assert noted == ["decode repeats the samples", "decode and prefill"]
    assert faults(checks) == []


def test_a_trainer_that_scores_its_own_samples_differently_is_noted():
    tokens, decode, prefill, trainer = scores()
    checks = outcomes(tokens, decode, prefill, trainer + 0.1 * tokens.by_trainer)
    assert checks["trainer repeats the samples"].outcome == "noted"
    assert checks["decode repeats the samples"].outcome == "fine"


def test_the_origin_of_the_tokens_is_named():
    assert outcomes(*scores())["origin of the tokens"].message == "100 sampled by the engine, 100 by the trainer"
    checks = outcomes(*scores(), trainer_error="NotImplementedError: packed rows")
    assert checks["origin of the tokens"].outcome == "noted"
    assert "NotImplementedError: packed rows" in checks["origin of the tokens"].message


def test_prefill_is_not_judged_under_a_temperature():
    tokens, decode, prefill, trainer = scores()
    checks = outcomes(tokens, decode, prefill + 0.5, trainer, is_neutral=False)
    assert checks["decode and prefill"].outcome == "not judged"


def test_few_tokens_are_not_judged():
    few = FrozenTokens.from_frozen(
        {
            "sequences": [[1, 2, 3]],
            "prompt_lengths": [1],
            "prompts": [0],
            "sampled": [[-1.0, -2.0]],
            "by_trainer": [False],
        }
    )
    checks = outcomes(few, few.sampled, few.sampled, few.sampled)
    assert checks["shift"].outcome == checks["decode and prefill"].outcome == "not judged"
