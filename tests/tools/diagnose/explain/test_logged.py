"""Metrics of a run have the same names and values wherever they were logged."""

import json
import math
import sys
import time
from types import SimpleNamespace

import pytest

from nemo_geomask.cli import main
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


def test_the_lab_has_a_table_of_each_run_beside_its_folder(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "steps").mkdir()
    for place, run in enumerate(("gspo-none-abc-seed1", "gspo-sequence_mean+geometric-def-seed1")):
        columns = {"step": [1, 2], "seed": [1, 1], "variant": [run, run], "reward": [float(place), None]}
        parquet.write_table(arrow.table(columns), tmp_path / "steps" / f"{run}.parquet")
        assert read_logged(tmp_path / run) == {"reward": {1: float(place)}}


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
    assert "token_mult_prob_error NaN or infinite in 1 steps" in judge_logged(series([1.0, math.nan])).sentence
    assert judge_logged({"reward": {1: 0.0}}) is None
    kl = judge_logged({"gen_kl_error": dict.fromkeys(range(1, 9), 0.25)})
    assert (kl.health, kl.values) == ("broken", {"gen_kl_error": 0.25})


@pytest.mark.parametrize(
    ("overflows", "since"), [([8], 8), ([9, 10], 9), (range(7, 11), 7), (range(1, 11), None)], ids=str
)
def test_an_overflow_is_beyond_any_limit(overflows, since):
    verdict = judge_logged(series([math.inf if step in overflows else 1.01 for step in range(1, 11)]))
    assert (verdict.health, verdict.since, verdict.values) == ("broken", since, {"token_mult_prob_error": math.inf})
    assert f"token_mult_prob_error inf, token_mult_prob_error NaN or infinite in {len(overflows)} " in verdict.sentence


def test_one_overflow_long_ago_is_no_change():
    errors = [math.inf if step == 20 else 1.01 + 0.001 * (step % 3) for step in range(60)]
    assert (judge_logged(series(errors)).health, judge_logged(series(errors)).since) == ("healthy", None)


def test_what_has_become_nan_is_not_healthy(tmp_path, capsys):
    errors = [1.01] * 20 + [math.nan] * 10
    with pytest.raises(DataError, match="NaN in most of the last third of the steps: token_mult_prob_error; "):
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
    assert main(["diagnose", str(folder), "--html", str(tmp_path / "x.html")]) == 2
    assert "none of these folders has any" in capsys.readouterr().err


def test_a_mean_that_is_no_number_is_not_healthy():
    values = {step: 1.7e308 if step % 4 in (1, 2) else -1.7e308 for step in range(1, 25)}
    with pytest.raises(DataError, match="the mean of gen_kl_error is NaN"):
        judge_logged({"gen_kl_error": values})


def test_a_long_run_of_many_metrics_is_read(tmp_path):
    names = [f"metric_{index}" for index in range(150)]
    folder = write_metrics(
        tmp_path / "run",
        ({"step": step, "gen_kl_error": 1e-3, **dict.fromkeys(names, 0.5)} for step in range(1, 7001)),
    )
    assert len(read_logged(folder)["gen_kl_error"]) == 7000


def test_the_time_of_a_verdict_is_not_quadratic_in_the_steps():
    # Every third value is NaN, so that the values of the last third of the steps are looked up in a long series.
    errors = [math.nan if step % 3 == 0 else 1.01 + 0.001 * (step % 5) for step in range(100_000)]
    before = time.process_time()
    assert judge_logged(series(errors)).health == "healthy"
    assert time.process_time() - before < 5  # 1 s on the machine of the tests
