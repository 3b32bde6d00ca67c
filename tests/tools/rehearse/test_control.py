from __future__ import annotations

import math

import pytest
import torch

from nemo_geomask.recipe import read_recipe
from nemo_geomask.tools.check import RecipeFacts
from nemo_geomask.tools.rehearse.control_run import compare, control_overrides, settings_of_ours_alone

pytest.importorskip("hydra", reason="overrides are Hydra's")


@pytest.fixture
def facts(tmp_path):
    path = tmp_path / "recipe.yaml"

    def make(block, *overrides):
        path.write_text(f"loss_fn: {block}\n", encoding="utf-8")
        return RecipeFacts.from_recipe(read_recipe(path, overrides))

    make.path = path
    return make


CORRECTED = "name: gspo, token_level_loss: false, use_importance_sampling_correction: true"


@pytest.mark.parametrize(
    ("block", "found"),
    [
        ("{name: clipped_pg, ratio_clip_c: 3.0}", ()),
        ("{name: clipped_pg, logprob_backend: geomask, compile: true}", ()),
        ("{name: gspo, token_level_loss: false, reference_policy_kl_penalty: 0.0}", ()),
        (f"{{{CORRECTED}, is_correction_level: sequence}}", ()),
        (f"{{{CORRECTED}, is_correction_level: sequence_mean}}", ("loss_fn.is_correction_level: sequence_mean",)),
        ("{name: clipped_pg, nonfinite: drop_token, metrics: nemo_rl}", ()),
        ("{name: gmpo}", ("loss_fn.name: gmpo",)),
        ("{name: clipped_pg, reference_policy_kl_type: k4}", ("loss_fn.reference_policy_kl_type: k4",)),
        ("{ratio_clip_min: 0.1}", ("loss_fn.name: null, so NeMo-RL's own loss trains",)),
    ],
)
def test_what_their_loss_has_not(facts, block, found):
    assert settings_of_ours_alone(facts(block)) == found


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ("", ("loss_fn.reference_policy_kl_gradient: null (this NeMo-RL's is k3)",)),
        (", reference_policy_kl_gradient: k3", ()),
        (", reference_policy_kl_gradient: k2", ("loss_fn.reference_policy_kl_gradient: k2 (this NeMo-RL's is k3)",)),
        (", reference_policy_kl_penalty: 0.0", ()),
    ],
)
def test_a_kl_gradient_without_score_function(facts, settings, found):
    assert settings_of_ours_alone(facts(f"{{name: clipped_pg{settings}}}"), score_function=False) == found


def test_masks_are_named(facts):
    (found,) = settings_of_ours_alone(facts("{name: clipped_pg, masks: [{preset: opsm, delta: 0.5}]}"))
    assert found.startswith("loss_fn.masks: ")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("{name: clipped_pg, logprob_backend: geomask, ratio_clip_c: 3.0}", {"ratio_clip_c": 3.0}),
        (
            "{name: gspo, token_level_loss: false}",
            {"token_level_loss": False, "sequence_level_importance_ratios": True},
        ),
        ("{name: cispo}", {"use_cispo": True}),
    ],
)
def test_their_loss_gets_what_is_in_force(facts, block, expected):
    first = facts(block)
    after = RecipeFacts.from_recipe(read_recipe(facts.path, control_overrides(first)))
    assert after.trains_nemo_rl_loss
    assert {key: after.get(f"loss_fn.{key}") for key in expected} == expected
    assert "logprob_backend" not in after.get("loss_fn")


def step(loss, reward=0.5):
    return {"loss": loss, "reward": reward, "grad_norm": 1.0}


def test_runs_are_compared_as_long_as_they_sampled_alike():
    ours = {1: step(1.0), 2: step(2.0), 3: step(3.0, reward=0.6), 4: step(1.0)}
    # Another order of the rows rounds their mean otherwise.
    theirs = {1: step(1.0 + 1e-6), 2: step(2.1, reward=0.5 + 6e-8), 3: step(3.5, reward=0.7), 4: step(9.0)}
    found = {(each.step, each.name): each for each in compare(ours, theirs)}
    assert found[1, "loss"].equal
    assert not found[2, "loss"].equal
    assert found[2, "loss"].sampled_alike
    # Once apart, always apart.
    assert not found[3, "loss"].sampled_alike
    assert not found[4, "loss"].sampled_alike
    assert found[4, "grad_norm"].difference == 0.0


@pytest.mark.parametrize(
    ("theirs", "alike"),
    [
        ([[5, 6], [-1.0, -2.0 + 1e-6]], True),
        ([[5, 6], [-1.0, -2.01]], False),
        ([[5, 7], [-1.0, -2.0]], False),
        ([[5], [-1.0]], False),
        ([], True),
    ],
)
def test_steps_are_alike_only_if_the_samplers_log_probs_are(theirs, alike):
    runs = {1: step(1.0), 2: step(1.0)}
    (first, *_, last) = compare(runs, runs, ({1: [[5, 6], [-1.0, -2.0]]}, {1: theirs}))
    assert (first.sampled_alike, last.sampled_alike) == (alike, alike)


def test_a_nan_equals_only_another():
    (one, *_) = compare({1: step(math.nan)}, {1: step(math.nan)})
    (other, *_) = compare({1: step(math.nan)}, {1: step(1.0)})
    assert one.equal
    assert not other.equal


def test_a_difference_of_numbers_near_1_is_known_to_their_rounding():
    """float32 keeps e^x - 1 - x to half a unit in the last place of 1, whatever is left of it."""
    x = torch.full((64,), 1e-3).exp() - 1 - 1e-3
    exact = math.expm1(1e-3) - 1e-3
    there = float(x.mean())
    assert abs(there - exact) / exact > 1e-5
    (one,) = compare({1: {"gen_kl_error": exact}}, {1: {"gen_kl_error": there}})
    assert one.equal
    (far,) = compare({1: {"gen_kl_error": exact}}, {1: {"gen_kl_error": exact + 1e-7}})
    (norm,) = compare({1: {"grad_norm": exact}}, {1: {"grad_norm": there}})
    assert not far.equal
    assert not norm.equal


@pytest.mark.parametrize(("theirs", "equal"), [(-3.06937844e-4, True), (-3.07e-4, False)])
def test_a_loss_near_zero_is_known_to_the_rounding_of_its_terms(theirs, equal):
    (one,) = compare({2: {"loss": -3.06922942e-4}}, {2: {"loss": theirs}})
    assert one.difference > 1e-5
    assert one.equal is equal
