"""Conditions of a rehearsal, each on a run that meets it and on one that does not."""

from __future__ import annotations

import math

import pytest

from nemo_geomask.tools.rehearse.gate import unmet_conditions
from nemo_geomask.tools.rehearse.healthy_limits import healthy_limits
from nemo_geomask.tools.rehearse.mismatch_check import NONFINITE, Mismatch
from nemo_geomask.tools.rehearse.run_outcome import RunResult
from tests.tools.rehearse.made_records import OURS, proof, refit, write_record

LIMITS = healthy_limits("bfloat16", "bfloat16", experts=False)


HEALTHY = [refit(1), refit(2), refit(3), *map(proof, range(4))]


def unmet(*, metrics=None, **run):
    trained = {step: {"loss": 0.1, "grad_norm": 1.0, "geomask/kept_tokens": 1.0} for step in (1, 2, 3)}
    for step, values in (metrics or {}).items():
        trained[step] |= values
    run = {"events": HEALTHY, "loss_name": "gspo", **run}
    return unmet_conditions(RunResult((), None, trained, steps=(1, 2, 3), **run))


def errors(**run):
    return [failure.error for failure in unmet(**run)]


def test_a_run_that_trained_meets_all_conditions(tmp_path):
    for step in (1, 2, 3):
        write_record(tmp_path, step)
    assert unmet(records=tmp_path, mismatch=Mismatch(LIMITS)) == ()


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([], "no worker reported which loss it called"),
        ([proof(0)], "no worker reported which loss it called"),
        ([proof(step, calls={}) for step in range(4)], "no loss was called in the workers in step 1, and gspo was"),
        ([proof(0), proof(1), proof(2, calls={OURS: 4})], "no loss was called in the workers in step 2, and gspo was"),
        ([proof(0), proof(1, calls={"nemo_rl.ClippedPGLossFn": 4})], "the workers called the loss nemo_rl.ClippedPG"),
        (
            [proof(0), proof(1, calls={OURS: 4, "PolicyLoss(name='gmpo')": 4})],
            "called the loss PolicyLoss(name='gmpo')",
        ),
    ],
)
def test_another_loss_or_none(events, error):
    (first, *_) = errors(events=events)
    assert error in first


def test_nemo_rls_own_loss_where_it_was_asked_for():
    events = [proof(step, calls={"nemo_rl.ClippedPGLossFn": 4 * step}) for step in range(4)]
    assert unmet(events=events, loss_name=None) == ()
    assert "and NeMo-RL's own was asked for" in errors(loss_name=None)[0]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_nan_in_a_step(name):
    assert errors(metrics={2: {name: math.nan}, 3: {name: math.nan}}) == [f"{name} of step 2 is nan"]
    assert errors(metrics={2: {"grad_norm": math.inf}}) == []


def test_what_follows_nan_is_not_reported():
    after = Mismatch(LIMITS, cause=NONFINITE, since=2)
    events = [*HEALTHY[:4], *(proof(step, weights=[math.nan, math.nan]) for step in (1, 2, 3))]
    metrics = {1: {"loss": math.nan}, 2: {"geomask/kept_tokens": 0.0}}
    (found,) = unmet(metrics=metrics, events=events, mismatch=after)
    assert found.error == "loss of step 1 is nan"
    assert "the log-probs are finite" in str(found.fix)
    (caused, also) = unmet(metrics=metrics, mismatch=Mismatch(LIMITS, cause=NONFINITE, since=1))
    assert caused.error == "loss of step 1 is nan: log-probs are NaN or infinite"
    assert NONFINITE in also.error


def test_nan_that_a_plugin_made():
    events = [proof(step, calls={"PolicyLoss(name='mine:NAN')": step}) for step in range(4)]
    plugin = {"events": events, "loss_name": "mine:NAN", "mismatch": Mismatch(LIMITS)}
    (found,) = unmet(metrics={1: {"loss": math.nan}}, **plugin)
    assert found.error == "loss of step 1 is nan: the log-probs are finite, so the plugin mine:NAN computed it"
    assert found.setting == "loss_fn.name"


def test_vetoed_steps():
    (one,) = unmet(metrics={2: {"geomask/batch_vetoed": 1.0, "geomask/batch_kl": 0.7, "geomask/kept_tokens": 0.0}})
    assert one.error.startswith("step 2 was vetoed and not trained: its mismatch KL, 0.7,")
    assert one.setting == "loss_fn.batch_veto.max"
    assert errors(metrics={key: {"geomask/batch_vetoed": 1.0} for key in (1, 2, 3)})[0].startswith(
        "every step was vetoed"
    )


def test_a_veto_of_every_step_is_not_a_loss_that_nobody_called():
    events = [proof(step, calls={}, refits=step) for step in range(4)]
    skipped = {key: {"geomask/batch_vetoed": 1.0, "geomask/batch_kl": 2.0} for key in (1, 2, 3)}
    first, *_ = errors(events=events, metrics=skipped)
    assert first.startswith("every step was vetoed")
    assert not any("no loss" in error for error in errors(events=events, metrics=skipped))
    emptied = {key: {"geomask/batch_emptied": 1.0} for key in (1, 2, 3)}
    assert errors(events=events, metrics=emptied)[0].startswith("nothing was kept of any step")


def test_the_advice_for_an_empty_mask_is_that_of_check():
    forecast = "mask product is expected to keep only 0.0% of responses; use preset: geometric"
    (found,) = unmet(metrics={1: {"geomask/kept_tokens": 0.0}}, forecasts=[forecast])
    assert found.fix == forecast
    assert "widen" in str(unmet(metrics={1: {"geomask/kept_tokens": 0.0}})[0].fix)


@pytest.mark.parametrize("values", [{"probs_ratio": 1.3}, {"probs_ratio": 1.0, "geomask/policy_k3": 0.2}])
def test_a_policy_that_differs_at_the_first_update(values):
    unchanged = {"update": Mismatch(LIMITS), "metrics": {2: values}}
    (found,) = unmet(**unchanged)
    assert "the workers' own probs_ratio of step 2" in found.error
    assert errors(**unchanged, updates=2) == []  # the second update has another policy
    assert errors(metrics={2: values}) == []
    assert errors(update=Mismatch(LIMITS, unjudged="no prev"), metrics={2: values}) == []
    shifted = Mismatch(LIMITS, cause="curr is shifted", details="12 %", setting="a", fix="b")
    assert [each.error for each in unmet(update=shifted)] == ["curr is shifted (12 %)"]


def test_a_loss_of_other_rows():
    assert errors(replayed={1: (0.1 + 1e-6, 0.5), 2: (0.1, 0.5)}) == []
    (found,) = unmet(replayed={1: (0.1, 0.5), 2: (0.3, 0.5), 3: (0.2, 0.5)})
    assert found.error.startswith("the loss of step 2 is 0.1, and that of its recorded batch is 0.3")


def ranks(*losses):
    """Counts of a step from workers of (data-parallel rank, sum of their losses)."""
    calls = {OURS: 4}
    each = [{**proof(1, calls=calls)["workers"][0], "replica": [0, rank], "losses": [s, 2.0]} for rank, s in losses]
    counted = {**proof(1), "workers": [*each, {**each[0], "calls": {}, "losses": [0.0, 0.0]}]}
    return [refit(1), proof(0), counted]


def test_ranks_with_other_losses_of_the_same_rows():
    """The logged loss and the record are of the first rank; a stage that calls no loss doesn't count."""
    assert errors(events=ranks((0, 0.5), (0, 0.5 + 1e-5), (1, 0.9))) == []
    (found,) = unmet(events=ranks((0, 0.5), (0, 0.5), (1, 0.9), (1, 0.8)))
    assert found.error.startswith("the 2 workers of data-parallel rank 1 train the same rows, and their losses up to")
    assert "add up to 0.8 in one and 0.9 in another" in found.error


def test_steps_of_which_nothing_was_kept():
    (two,) = unmet(metrics={1: {"geomask/kept_tokens": 0.0}, 3: {"geomask/batch_emptied": 1.0}})
    assert two.error.startswith("nothing was kept of step 1, 3")
    assert two.setting == "loss_fn.masks"


def test_weights_that_never_change():
    events = [proof(step, weights=[1.0, 9.0]) for step in range(4)]
    assert errors(events=events) == ["no weight of the trainer has changed in 3 steps"]


def test_an_engine_that_keeps_old_weights():
    events = [refit(1), refit(2, "layers.0", "layers.1"), refit(3, "layers.0"), *map(proof, range(4))]
    (stale,) = unmet(events=events)
    assert stale.stage == "refit"
    assert (
        "after refit 2 the engine does not hold the trainer's weights: 2 of 5 groups differ (layers.0, layers.1)"
        in (stale.error)
    )
    assert "the same after 1 refit before" in stale.error


def test_a_cache_from_before_a_refit():
    grown = Mismatch(LIMITS, noise_by_step={1: 0.0183, 2: 0.0594})
    (found,) = unmet(mismatch=grown)
    assert found.error.startswith(
        "the noise of the worst sequences of step 2, 0.059, is 3 times that of step 1's, though the"
    )
    assert errors(mismatch=Mismatch(LIMITS, noise_by_step={1: 0.0183, 2: 0.0206, 3: 0.0225})) == []
    assert errors(mismatch=Mismatch(LIMITS, noise_by_step={1: 1e-6, 2: 1e-4})) == []
    stale = [refit(1), refit(2, "layers.0"), *map(proof, range(4))]
    assert not any("still uses" in error for error in errors(mismatch=grown, events=stale))


def with_precision(*groups, trainer=None, engine=None):
    nothing = {"quantised": {}, "rounded": {}, "routers": {}}
    precision = {"trainer": nothing | (trainer or {}), "engine": nothing | (engine or {})}
    return [refit(1, *groups) | {"precision": precision}, refit(2), refit(3), *map(proof, range(4))]


ROUTERS = {"layers.0.mlp.gate": "bfloat16", "layers.1.mlp.gate": "bfloat16", "layers.2.mlp.gate": "float16"}


@pytest.mark.parametrize(
    ("differing", "side", "kind", "groups", "reason"),
    [
        ("layers.1.mlp.gate", "engine", "rounded", {"layers.1.mlp.gate": "8 bits"}, "rounded to 8 bits in the engine"),
        ("layers.1", "trainer", "rounded", {"layers.1.mlp.up": "4 bits"}, "4 bits in the trainer alone, layers.1.mlp"),
        (None, "engine", "quantised", {"layers.0.mlp": "float8_e4m3fn"}, "engine has quantised layers.0.mlp (float8_"),
        (None, "trainer", "quantised", {"layers.0": "fp8"}, "trainer has quantised layers.0 (fp8), and the recipe"),
        (None, "engine", "routers", ROUTERS, "engine has the routers layers.2.mlp.gate in another precision, float16"),
    ],
)
def test_what_one_side_alone_has_in_another_precision(differing, side, kind, groups, reason):
    (found,) = errors(events=with_precision(*filter(None, [differing]), **{side: {kind: groups}}))
    assert reason in found


def test_what_is_asked_for_is_noted_and_a_larger_mismatch_names_it():
    sides = {"engine": {"quantised": {"layers.0.mlp": "float8_e4m3fn"}, "routers": {"layers.0.mlp.gate": "bfloat16"}}}
    events = with_precision(trainer={"routers": {"layers.0.mlp.router": "float64"}}, **sides)
    asked = {"events": events, "precisions": ("bfloat16", "fp8")}
    assert errors(**asked) == []
    (found,) = unmet(**asked, mismatch=Mismatch(LIMITS, cause="a larger mismatch", fix="b"))
    assert "quantised in the engine only: layers.0.mlp (float8_e4m3fn)" in found.fix
    assert "routers compute in float64 in the trainer; in the engine: bfloat16" in found.fix


def test_a_refit_that_is_left_out():
    events = [proof(step, refits=min(step, 1)) for step in range(4)]
    (skipped,) = errors(events=events)
    assert skipped == "the weights of step 1 were not sent to the engine before the end of the next step"
    # Nothing has to be sent where nothing has changed, as while only a critic trains.
    events = [proof(0), proof(1, weights=[0.0, 9.0]), proof(2, refits=1), proof(3, refits=2)]
    assert errors(events=events) == []


def test_lost_records(tmp_path):
    write_record(tmp_path, 1)
    write_record(tmp_path, 3)
    log = "x\n[driver] records: step 2 lost (1 so far) on the way to /x: OSError: No space left on device\n"
    (lost,) = unmet(records=tmp_path, log=log)
    assert lost.error == "the record of step 2 was lost: OSError: No space left on device"
    assert "loss_fn.record.dir" in str(lost.setting)
    assert "has no file of it" in errors(records=tmp_path)[0]
    write_record(tmp_path, 2)
    assert (
        "the log-probs that trained (curr): TimeoutError: x"
        in errors(records=tmp_path, log="records: step 3 is without curr: TimeoutError: x\n")[0]
    )


def test_log_probs_that_disagree():
    (tempered,) = unmet(mismatch=Mismatch(LIMITS, cause="another temperature", details="k3 1", setting="a", fix="b"))
    assert (tempered.error, tempered.setting, tempered.fix) == ("another temperature (k3 1)", "a", "b")
