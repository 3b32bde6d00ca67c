"""Metrics of a run have the same names and values wherever they were logged."""

import json
import math
import random
import sys
from types import SimpleNamespace

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_geomask.cli import main
from nemo_geomask.cli.schema import json_schema
from nemo_geomask.errors import DataError, MissingDependencyError
from nemo_geomask.tools.diagnose.explain.logged_verdict import judge_logged
from nemo_geomask.tools.diagnose.read.logged_metrics import read_logged


def metrics(step, error=1.01):
    values = {"reward": 0.1 * step, "token_mult_prob_error": error, "geomask/mismatch_k3": 1e-3 / 3, "loss": -1e-7}
    return {**values, "skipped_update": 0}


def write_metrics(folder, entries):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def test_lines_of_metrics(tmp_path):
    folder = write_metrics(tmp_path / "run", ({"step": step, **metrics(step), "note": None} for step in (1, 2)))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # being written
    series = read_logged(folder)
    assert set(series) == set(metrics(1))
    assert series["reward"] == {1: 0.1, 2: 0.2}
    assert read_logged(tmp_path) == {}
    (folder / "metrics.jsonl").write_text('{"reward": 1}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:1: not an object with a step"):
        read_logged(folder)


def test_a_metric_has_one_name_wherever_it_is_from(tmp_path):
    folder = write_metrics(
        tmp_path / "run", ({"step": 1, **{f"train/{name}": value for name, value in metrics(1).items()}} for _ in "1")
    )
    assert set(read_logged(folder)) == set(metrics(1))


def test_metrics_of_several_runs_are_no_one_runs(tmp_path, monkeypatch):
    events = SimpleNamespace(
        Reload=lambda: None,
        Tags=lambda: {"scalars": ["train/reward"]},
        Scalars=lambda name: [SimpleNamespace(step=1, value=0.5)],
    )
    module = SimpleNamespace(EventAccumulator=lambda path, size_guidance: events)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", module)
    for part in ("a/tensorboard", "a/tensorboard/hyperparameters", "b/tensorboard"):
        (tmp_path / part).mkdir(parents=True)
        (tmp_path / part / "events.out.tfevents.1.host").touch()
    assert read_logged(tmp_path / "a") == {"reward": {1: 0.5}}
    with pytest.raises(DataError, match="several runs: a/tensorboard, b/tensorboard; name one"):
        read_logged(tmp_path)


def test_event_files_hold_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="event files are tensorboard's")
    numpy = pytest.importorskip("numpy")
    from torch.utils.tensorboard import SummaryWriter

    steps = range(1, 30)
    lines = read_logged(write_metrics(tmp_path / "lines", ({"step": step, **metrics(step)} for step in steps)))
    logs = tmp_path / "events"
    for part in (range(1, 20), range(15, 30)):  # the second resumes the first
        writer = SummaryWriter(log_dir=str(logs / "tensorboard"))
        for step in part:
            for name, value in metrics(step).items():
                writer.add_scalar(f"train/{name}", value if step in range(1, 15) or part[0] == 15 else 7.0, step)
        writer.close()
    events = read_logged(logs)
    assert {name: list(values) for name, values in events.items()} == {name: [*steps] for name in metrics(1)}
    for name, values in lines.items():
        assert events[name] == {step: float(numpy.float32(value)) for step, value in values.items()}, name


def test_event_files_without_tensorboard_say_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.1.host").touch()
    with pytest.raises(MissingDependencyError, match="pip install tensorboard"):
        read_logged(tmp_path)
    assert main(["diagnose", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "holds neither records" in error
    assert "pip install tensorboard" in error


def series(errors):
    return {"token_mult_prob_error": dict(enumerate(errors, 1))}


def test_a_verdict_by_metrics_alone():
    healthy = judge_logged(series([1.01 + 0.001 * (step % 3) for step in range(30)]))
    assert (healthy.health, healthy.since) == ("healthy", None)
    risen = judge_logged(
        series([1.01 + 0.001 * (step % 3) + (0.3 + 0.01 * (step % 2)) * (step >= 20) for step in range(30)])
    )
    assert (risen.health, risen.since) == ("drifting", 21)
    assert risen.sentence.startswith("drifting since step 21, by logged metrics alone: token_mult_prob_error 1.3")
    broken = judge_logged(series([2.0 + 0.001 * (step % 3) for step in range(30)]))
    assert (broken.health, broken.since) == ("broken", None)
    assert judge_logged(series([1.2])).health == "drifting"
    assert judge_logged(series([math.nan, -math.inf])) is None
    assert "token_mult_prob_error is NaN or infinite in 1 of 2 steps" in judge_logged(series([1.0, math.nan])).sentence
    assert judge_logged({"reward": {1: 0.0}}) is None
    kl = judge_logged({"gen_kl_error": dict.fromkeys(range(1, 9), 0.25)})
    assert kl.sentence.startswith("broken, by logged metrics alone: gen_kl_error 0.25 ")


@pytest.mark.parametrize(("overflows", "since"), [([9, 10], 9), (range(7, 11), 7), (range(1, 11), None)], ids=str)
def test_an_overflow_is_beyond_any_limit(overflows, since):
    verdict = judge_logged(series([math.inf if step in overflows else 1.01 for step in range(1, 11)]))
    assert (verdict.health, verdict.since) == ("broken", since)
    assert "token_mult_prob_error inf (broken; limits 1.05, 1.5)" in verdict.sentence
    assert f"token_mult_prob_error is NaN or infinite in {len(overflows)} of 10 steps" in verdict.sentence


@pytest.mark.parametrize("spike", [1.5, 1e30, math.inf])
@pytest.mark.parametrize("place", [0, 1, 20, 36, 37, 38, 39])
def test_one_spike_is_a_spike_wherever_it_stands(place, spike):
    errors = [spike if step == place else 1.012 + 1e-4 * (step % 3) for step in range(40)]
    verdict = judge_logged(series(errors))
    assert (verdict.health, verdict.since) == ("healthy", None)
    assert f"beyond its limit in 1 of 40 steps only (step {place + 1}: {spike:.4g})" in verdict.sentence


def test_what_has_become_nan_is_not_healthy(tmp_path, capsys):
    errors = [1.01] * 20 + [math.nan] * 10
    with pytest.raises(DataError, match="NaN in most of the last third of the steps: token_mult_prob_error "):
        judge_logged(series(errors))
    assert judge_logged({**series(errors), "gen_kl_error": dict.fromkeys(range(1, 31), 0.2)}).health == "broken"
    assert judge_logged(series([1.01] * 20 + [1.6, 1.6] + [math.nan] * 8)).since == 21
    folder = write_metrics(
        tmp_path / "run", ({"step": step, "token_mult_prob_error": error} for step, error in enumerate(errors, 1))
    )
    assert main(["diagnose", str(folder), "--brief"]) == 2
    assert "NaN in most of the last third of the steps: token_mult_prob_error" in capsys.readouterr().err


def test_a_run_without_records_is_judged_by_its_metrics(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    folder = write_metrics(tmp_path / "run", ({"step": step, **metrics(step, 1.2)} for step in range(1, 9)))
    assert main(["diagnose", str(folder), "--brief"]) == 1
    assert capsys.readouterr().out.startswith(f"{folder}: drifting, by logged metrics alone: token_mult_prob_error 1.2")
    assert main(["diagnose", str(folder), "--json"]) == 1
    (output,) = json.loads(capsys.readouterr().out)
    assert (output["run"], output["health"]) == (str(folder), "drifting")
    jsonschema.validate([output], json_schema("diagnose"))
    assert main(["diagnose", str(folder), "--html", str(tmp_path / "x.html")]) == 2
    assert "none of these folders has any" in capsys.readouterr().err


def test_values_whose_sum_is_no_number_are_judged():
    values = {step: 1.7e308 if step % 4 in (1, 2) else -1.7e308 for step in range(1, 25)}
    assert judge_logged({"gen_kl_error": values}).health == "broken"


ORDER = ("healthy", "drifting", "broken")
ERRORS = st.one_of(st.sampled_from([1.0, 1.01, 1.04, 1.0500001, 1.2, 1.6, 50.0, 1e30, math.inf]), st.floats(1.0, 3.0))


@given(st.lists(ERRORS, min_size=1, max_size=40), st.data())
def test_no_worse_step_improves_a_verdict(errors, data):
    place = data.draw(st.integers(0, len(errors) - 1))
    worse = data.draw(ERRORS.filter(lambda value: value >= errors[place]))
    before = judge_logged(series(errors)).health
    after = judge_logged(series([*errors[:place], worse, *errors[place + 1 :]])).health
    assert ORDER.index(after) >= ORDER.index(before)


WEIGHTS = st.floats(1e-4, 1.0)


@given(st.lists(WEIGHTS, min_size=1, max_size=30), st.data())
def test_no_smaller_weight_improves_a_verdict(weights, data):
    place = data.draw(st.integers(0, len(weights) - 1))
    worse = weights[place] * data.draw(st.floats(0.0, 1.0))
    before, after = (
        judge_logged({"sampling_importance_ratio": dict(enumerate(values))}).health
        for values in (weights, [*weights[:place], worse, *weights[place + 1 :]])
    )
    assert ORDER.index(after) >= ORDER.index(before)


@given(st.lists(st.one_of(ERRORS, st.just(math.nan)), min_size=3, max_size=30), st.data())
def test_a_step_that_becomes_nan_makes_no_run_healthy(errors, data):
    def health(values):
        try:
            verdict = judge_logged(series(values))
        except DataError:
            return "unknown"
        return "unknown" if verdict is None else verdict.health

    place = data.draw(st.integers(0, len(errors) - 1))
    if health(errors) != "healthy":
        assert health([*errors[:place], math.nan, *errors[place + 1 :]]) != "healthy"


def test_one_worse_step_leaves_a_sick_run_sick():
    errors = [1.3 + 0.01 * (step % 5) for step in range(60)]
    assert judge_logged(series(errors)).health == "drifting"
    assert judge_logged(series([*errors[:-1], 120.0])).health == "drifting"
    tail = random.Random(0)
    heavy = judge_logged(series([1 + tail.lognormvariate(10.5, 2.0) for _ in range(109)]))
    assert heavy.health == "broken"


def test_a_metric_that_is_half_bad_says_in_which_steps():
    verdict = judge_logged(series([1.3 if step % 3 == 0 else 1.01 for step in range(60)]))
    assert verdict.health == "drifting"
    assert "1.01 (drifting, beyond its limit in 6 of 20 steps: every third step (" in verdict.sentence
    assert "beyond its limit in" not in judge_logged(series([1.3] * 60)).sentence


def test_runs_that_agree_to_the_bit_are_healthy_however_they_move():
    kl = {step: 1e-12 if step < 20 else 1e-9 for step in range(40)}
    verdict = judge_logged({"gen_kl_error": kl, **series([1 + 1e-9 * step for step in range(40)])})
    assert (verdict.health, verdict.since) == ("healthy", None)
    assert verdict.sentence.count("; ") == 1


def test_a_rise_within_the_limits_is_a_remark():
    verdict = judge_logged({"gen_kl_error": {step: 1e-3 if step < 20 else 5e-3 for step in range(40)}})
    assert (verdict.health, verdict.since) == ("healthy", None)
    assert "gen_kl_error is 5 times as far from agreement since step 20, within its limit" in verdict.sentence


@pytest.mark.parametrize(
    ("metrics", "health", "words"),
    [
        ({"token_mult_prob_error": [0.0] * 40, "gen_kl_error": [0.0] * 40}, "unknown", "impossible in 40 of 40 steps"),
        ({"token_mult_prob_error": [1.02] * 20 + [0.51] * 20}, "unknown", "impossible in 20 of 40 steps, down to 0.51"),
        ({"gen_kl_error": [-0.5] * 40}, "broken", "gen_kl_error -0.5 (broken; limits ±0.01, ±0.1)"),
        ({"geomask/mismatch_k3": [-0.005] * 40}, "unknown", "impossible in 40 of 40 steps, down to -0.005"),
        (
            {"token_mult_prob_error": [0.5, 1.02, 1.02, 1.02] * 10, "gen_kl_error": [5e-4, 1e-3, 1e-3, 1e-3] * 10},
            "healthy",
            "token_mult_prob_error 1.02, gen_kl_error 0.001; token_mult_prob_error is impossible in 10 of 40 steps",
        ),
        ({"sampling_importance_ratio": [-1.0] * 9}, "unknown", "a weight can't be below 0"),
        ({"rollout_corr/rollout_is_eff_sample_size": [1.7] * 9}, "unknown", "between 0 and 1"),
        ({"rollout_corr/chi2_token": [-3.0] * 9}, "unknown", "a mean of squares minus 1"),
        ({"train_rollout_logprob_abs_diff": [-0.2] * 9}, "unknown", "can't be below 0"),
    ],
)
def test_impossible_values_are_named_and_not_averaged(metrics, health, words):
    logged = {name: dict(enumerate(values, 1)) for name, values in metrics.items()}
    if health == "unknown":
        with pytest.raises(DataError, match=words):
            judge_logged(logged)
    else:
        verdict = judge_logged(logged)
        assert verdict.health == health
        assert words in verdict.sentence


def test_vanished_sequence_weights_are_named_with_the_setting():
    values = {"sampling_importance_ratio": 0.06, "token_mult_prob_error": 1.024, "gen_kl_error": 0.0027}
    verdict = judge_logged({name: dict.fromkeys(range(1, 31), value) for name, value in values.items()})
    assert verdict.health == "broken"
    assert "sampling_importance_ratio 0.06 (broken; limits 0.5 to 2, 0.1 to 10)" in verdict.sentence
    assert "the weights of the correction have vanished" in verdict.sentence
    assert "loss_fn.name: clipped_pg with is_correction_level: token" in verdict.sentence


@pytest.mark.parametrize(
    ("name", "healthy", "drifting", "broken"),
    [
        ("rollout_corr/k3_kl", 1e-3, 0.03, 0.3),
        ("actor/rollout_corr/kl", -1e-3, 0.03, -0.3),
        ("rollout_corr/chi2_token", 0.01, 0.5, 3.0),
        ("rollout_corr/rollout_is_eff_sample_size", 0.9, 0.2, 0.05),
        ("rollout_corr/rollout_is_mean", 0.99, 0.4, 0.05),
        ("sampling/sampling_logp_difference/mean", 0.02, 0.1, 0.6),
        ("sampling/importance_sampling_ratio/mean", 1.0, 2.5, 20.0),
        ("train/train_rollout_logprob_abs_diff", 0.02, 0.1, 0.6),
        ("policy/rollout_train_logprobs_abs_diff_mean", 0.015, 0.1, 1.3),
        ("mismatch_kl/mean", 1e-3, 0.03, 0.3),
        ("mismatch_kl/all/mean", 1e-3, 0.03, 0.3),
        ("ppo_actor/update/behave_imp_weight/avg", 1.0, 0.3, 0.01),
        ("ppo_actor/update/behave_approx_kl/avg", 1e-3, -0.03, 0.3),
    ],
)
def test_other_systems_metrics_are_judged_under_their_names(tmp_path, name, healthy, drifting, broken):
    for health, value in (("healthy", healthy), ("drifting", drifting), ("broken", broken)):
        folder = write_metrics(tmp_path / health, ({"step": step, name: value} for step in range(1, 13)))
        assert judge_logged(read_logged(folder)).health == health


def test_lines_of_verls_file_logger_are_read(tmp_path):
    lines = ({"step": step, "data": {"rollout_corr/k3_kl": 0.3, "reward": 1.0}} for step in range(1, 13))
    assert judge_logged(read_logged(write_metrics(tmp_path, lines))).health == "broken"


def test_metrics_of_a_validation_are_not_judged():
    assert judge_logged({"validation/gen_kl_error": dict.fromkeys(range(9), 0.5)}) is None


@pytest.mark.parametrize(
    ("metrics", "named"),
    [({"loss": 0.1, "reward": 0.2}, "loss, reward"), ({"token_mult_prob_error": "1.2"}, "no number")],
)
def test_a_file_without_a_known_metric_names_the_expected_ones(tmp_path, capsys, metrics, named):
    folder = write_metrics(tmp_path / "run", ({"step": step, **metrics} for step in range(9)))
    assert main(["diagnose", str(folder)]) == 2
    error = capsys.readouterr().err
    expected = f"its logged metrics ({named}) hold none that tells the mismatch; expected one of NeMo-RL: token_mult"
    assert expected in error
    for name in ("gen_kl_error", "rollout_corr/k3_kl", "sampling/sampling_logp_difference/mean", "mismatch_kl/mean"):
        assert name in error


def test_a_long_run_of_many_metrics_is_read(tmp_path):
    names = [f"metric_{index}" for index in range(150)]
    folder = write_metrics(
        tmp_path / "run",
        ({"step": step, "gen_kl_error": 1e-3, **dict.fromkeys(names, 0.5)} for step in range(1, 7001)),
    )
    assert len(read_logged(folder)["gen_kl_error"]) == 7000
