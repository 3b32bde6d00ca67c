"""``nemo-geomask rehearse`` up to the point where NeMo-RL is started, and from where it has ended."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_geomask.cli import main
from nemo_geomask.tools.rehearse import rehearsal as rehearsing
from nemo_geomask.tools.rehearse import rehearsed_run
from nemo_geomask.tools.rehearse.event_log import Events
from tests.tools.rehearse.base_recipe import BASE
from tests.tools.rehearse.made_records import write_record

pytest.importorskip("hydra", reason="overrides are Hydra's")

RECIPE = BASE.replace("context_parallel_size: 2", "context_parallel_size: 1")  # packed rows have none
RECIPE_FILE = "recipe.yaml"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    root = tmp_path / "RL"
    (root / "examples" / "configs").mkdir(parents=True)
    (root / "nemo_rl").mkdir()
    (root / "examples" / "run_grpo.py").write_text("", encoding="utf-8")
    monkeypatch.setenv("NEMO_RL_ROOT", str(root))
    monkeypatch.setattr(rehearsing, "has_gpus", lambda: False)
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return root


@pytest.fixture
def made():
    """What a run is like: gradient norms that are not 1, steps kept, and arguments of :func:`write_record`."""
    return SimpleNamespace(norms={}, kept={1, 2}, validates=True, recorded={})


@pytest.fixture
def runs(checkout, made, monkeypatch):
    """Stands in for the processes: what they are started with, and a run as a driver would have written it down."""
    seen = []

    @contextlib.contextmanager
    def supervised(command, *, log, environment, folder):
        events = Events(log.parent / "events.jsonl")
        events("end", stage="start")
        worker = {"pid": 7, "host": "h", "python": "p", "file": "f"}
        name = next((word.partition("=")[2] for word in command if word.startswith("loss_fn.name=")), "gspo")
        ours = f"PolicyLoss(name={name!r})"
        loss = ours if any(word.startswith("++loss_fn.record") for word in command) else "ClippedPGLossFn"
        events("worker_counts", step=0, workers=[{**worker, "calls": {}, "refits": 0, "weights": [0.0, 1.0]}])
        checkpoints = log.parent / "checkpoints"
        first = 2 if (checkpoints / "step_1").is_dir() else 1
        for step in range(first, 3):
            if step in made.kept:
                (checkpoints / f"step_{step}").mkdir(parents=True, exist_ok=True)
            events("begin", stage="step", label="policy_training")
            events("end", stage="step", label="policy_training")
            if "++grpo.val_period=1" in command and made.validates:
                events("begin", stage="val", label="total_validation_time")
                events("end", stage="val", label="total_validation_time")
            values = {"loss": 0.25 * step, "grad_norm": made.norms.get(step, 1.0), "reward": 0.5}
            events("metrics", step=step, prefix="train", values=values)
            counts = {"calls": {loss: 4 * step}, "refits": step, "weights": [0.1 * step, 1.0]}
            events("worker_counts", step=step, workers=[{**worker, **counts}])
            if loss == ours:
                write_record(log.parent / "records", step, **made.recorded)
        log.write_text("", encoding="utf-8")
        seen.append((command, environment, sorted(Path(environment["PYTHONPATH"].split(":")[0]).iterdir())))
        yield

    monkeypatch.setattr(rehearsed_run, "supervised", supervised)
    monkeypatch.setattr(rehearsed_run, "wait_for", lambda process, timeout, every_tick: every_tick() or 0)
    return seen


def test_a_run_is_reported(runs, checkout, tmp_path, capsys):
    assert main(["rehearse", "recipe.yaml", "loss_fn.ratio_clip_max=0.4", "--steps", "2", "--json", "found.json"]) == 0
    ((command, environment, site),) = runs
    assert command[1:4] == ["-m", "nemo_geomask.tools.rehearse.driver", str(checkout / "examples" / "run_grpo.py")]
    assert "loss_fn.ratio_clip_max=0.4" in command
    assert "++grpo.max_num_steps=2" in command
    assert environment["NEMO_RL_ROOT"] == str(checkout)
    assert [path.name for path in site] == ["sitecustomize.py"]
    out, err = capsys.readouterr()
    assert "the loss that trained, by the workers: PolicyLoss(name='gspo'), called 8 times" in out
    assert "rehearse: step 2 of 2: loss 0.5\n" in err
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["ok"] is True
    assert found["metrics"]["2"]["loss"] == 0.5
    assert {change["key"] for change in found["changes"]} >= {"grpo.max_num_steps", "policy.model_name"}
    # Ray's folder is gone, whatever it held.
    settings = json.loads((tmp_path / "results/rehearsal/recipe/settings.json").read_text(encoding="utf-8"))
    assert not Path(settings["ray"]).exists()
    # Libraries leave nothing in the home folder or in /tmp.
    assert Path(environment["TMPDIR"]).parent == Path(settings["ray"])
    for name in ("HF_HOME", "NRL_MEGATRON_CHECKPOINT_DIR", "VLLM_CACHE_ROOT"):
        assert Path(environment[name]).parent == tmp_path / "results" / "rehearsal" / "recipe"


def test_the_time_of_the_other_steps_is_estimated(runs, monkeypatch, capsys):
    seconds = itertools.count(0.0, 7.0)
    monkeypatch.setattr("nemo_geomask.tools.rehearse.event_log.time.time", lambda: next(seconds))
    assert main(["rehearse", "recipe.yaml", "--steps", "3"]) == 1  # the stand-in trains two
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rehearse: step 2 of 3")]
    events = [json.loads(line) for line in Path("results/rehearsal/recipe/events.jsonl").read_text().splitlines()]
    first, second = (event["at"] for event in events if event["kind"] == "metrics")
    assert lines[0] == f"rehearse: step 2 of 3: loss 0.5, about {second - first:.0f} s of training left in this run"
    assert second - first > 10


@pytest.mark.parametrize(
    ("records", "overrides"),
    [
        ({"fault": "zero_prev"}, ["policy.generation.top_p=0.95"]),
        ({"noise": 0.12}, ["policy.generation.temperature=0.5"]),
    ],
)
def test_the_sampling_settings_decide_what_is_healthy(runs, made, records, overrides):
    made.recorded.update(records)
    assert main(["rehearse", "recipe.yaml", "--steps", "2"]) == 1
    assert main(["rehearse", "recipe.yaml", "--steps", "2", *(f"++{words}" for words in overrides)]) == 0


def test_accepted_apis_reach_every_run(runs):
    assert main(["rehearse", "recipe.yaml", "--steps", "2", "--control", "--accept", "a.b", "--accept=c.d"]) == 0
    assert len(runs) == 2
    for _, environment, *_ in runs:
        assert environment["NEMO_GEOMASK_ACCEPT"] == "a.b,c.d"


def test_on_gpus_python_is_started_as_it_is(runs, monkeypatch):
    monkeypatch.setattr(rehearsing, "has_gpus", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for name in ("GLOO_SOCKET_IFNAME", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["rehearse", "recipe.yaml", "--steps", "2"]) == 0
    ((_, environment, there),) = runs
    assert "sitecustomize.py" not in {path.name for path in there}
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert not {"GLOO_SOCKET_IFNAME", "VLLM_CPU_KVCACHE_SPACE"} & set(environment)


def test_own_prompts_may_be_fetched_and_built_in_ones_need_nothing(runs, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for environment in ("builtin", "own"):
        assert main(["rehearse", "recipe.yaml", "--steps", "2", "--env", environment]) == 0
    offline = ["HF_HUB_OFFLINE" in environment for _, environment, *_ in runs]
    assert offline == [True, False]


def test_the_control_is_a_second_run_without_our_keys(runs, capsys):
    assert main(["rehearse", "recipe.yaml", "--steps", "2", "--control", "loss_fn.name=gmpo"]) == 0
    assert "no control: NeMo-RL's own loss does not have loss_fn.name: gmpo" in capsys.readouterr().out
    runs.clear()
    assert main(["rehearse", "recipe.yaml", "--steps", "2", "--control"]) == 0
    (first, *_), (second, *_) = runs
    assert "~loss_fn.name" in second
    assert "~loss_fn.name" not in first
    assert "step 2 loss" in capsys.readouterr().out


def test_a_recipe_with_errors_is_not_run(runs, tmp_path, capsys):
    assert main(["rehearse", "recipe.yaml", "loss_fn.ratio_clip_max=-1", "--json", "found.json"]) == 1
    assert runs == []
    assert "loss_fn.ratio_clip_max" in capsys.readouterr().out
    (stage,) = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["stages"]
    assert (stage["name"], stage["state"]) == ("validation", "failed")


def test_a_gradient_of_nan_has_failed_and_json_has_null_for_it(runs, made, tmp_path, capsys):
    made.norms[2] = float("nan")
    assert main(["rehearse", "recipe.yaml", "--steps", "2", "--json", "found.json"]) == 1
    assert "failed in step: grad_norm of step 2 is nan" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert [values["grad_norm"] for values in found["metrics"].values()] == [1.0, None]


def test_a_folder_of_something_else_is_left_alone(runs, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work", encoding="utf-8")
    for out in ("mine", "recipe.yaml", "recipe.yaml/below"):
        assert main(["rehearse", "recipe.yaml", "--steps", "2", "--out", out]) == 2
        assert f"--out: {tmp_path / out.removesuffix('/below')} " in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").read_text(encoding="utf-8") == "years of work"
    assert runs == []


def test_an_earlier_rehearsal_is_replaced_once_this_one_is_planned(runs, tmp_path):
    command = ["rehearse", "recipe.yaml", "--steps", "2", "--out", "out"]
    (tmp_path / "out").mkdir()
    assert main(command) == 0
    (tmp_path / "out" / "mark").touch()
    assert main([*command, "policy.model_name=acme/one"]) == 2
    assert (tmp_path / "out" / "mark").exists()
    assert main(command) == 0
    assert not (tmp_path / "out" / "mark").exists()
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([RECIPE_FILE, "policy.model_name=acme/one"], 2, "policy.model_name: acme/one is no folder with a config.json"),
        ([RECIPE_FILE, "grpo.seeed=1"], 2, "grpo.seeed"),
        ([RECIPE_FILE, "checkpointing.enabled=false", "--resume"], 2, "--resume needs a checkpoint"),
        (["--resume", RECIPE_FILE], 2, "'recipe.yaml' is not key.path=value; a recipe comes before --resume"),
        ([RECIPE_FILE, "--resume", "loss_fn.ratio_clip_max=-1"], 1, "loss_fn.ratio_clip_max"),
        ([RECIPE_FILE, "--steps", "0"], 2, "above 0"),
        ([RECIPE_FILE, "--timeout", "nan"], 2, "above 0"),
    ],
)
def test_a_mistake_is_named_and_nothing_runs(runs, capsys, arguments, status, message):
    try:
        ended = main(["rehearse", *arguments])
    except SystemExit as end:
        ended = end.code
    assert ended == status
    assert message in "".join(capsys.readouterr())
    assert runs == []


def test_without_nemo_rl(checkout, monkeypatch, capsys):
    monkeypatch.setenv("NEMO_RL_ROOT", "/nowhere/RL")
    assert main(["rehearse", "recipe.yaml"]) == 2
    assert "NEMO_RL_ROOT is /nowhere/RL, which has no examples/run_grpo.py" in capsys.readouterr().err
    monkeypatch.delenv("NEMO_RL_ROOT")
    monkeypatch.setattr(rehearsing, "nemo_rl_root", lambda: None)
    assert main(["rehearse", "recipe.yaml"]) == 2
    assert "NEMO_RL_ROOT is not set" in capsys.readouterr().err


def test_the_last_step_is_resumed_from_the_one_before_with_its_samples(runs, tmp_path, capsys):
    asked = ["recipe.yaml", "--steps", "2", "--resume", "--json", "found.json"]
    assert main(["rehearse", *asked]) == 0
    assert len(runs) == 2
    for command, *_ in runs:
        assert "++checkpointing.save_period=1" in command
        assert "++grpo.max_num_steps=2" in command
    out = tmp_path / "results" / "rehearsal" / "recipe"
    seeds = [
        json.loads((folder / "settings.json").read_text(encoding="utf-8"))["first_seed"]
        for folder in (out, out / "resumed")
    ]
    assert seeds == [0, 1]
    compared = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["resumed"]["comparisons"]
    assert {(each["step"], each["name"], each["equal"]) for each in compared} == {
        (2, "loss", True),
        (2, "grad_norm", True),
    }
    assert "resumed from the checkpoint before it" in capsys.readouterr().out


def test_a_checkpoint_that_was_not_kept_leaves_the_report(runs, made, capsys):
    made.kept.remove(1)
    assert main(["rehearse", "recipe.yaml", "--steps", "2", "--resume"]) == 1
    assert len(runs) == 1
    out = capsys.readouterr().out
    assert "the loss that trained" in out
    assert "resuming from the checkpoint failed in checkpoint" in out
    assert "checkpoints/step_1 is not there" in out


def test_it_is_resumed_under_another_loss(runs, tmp_path, capsys):
    changed = ["--resume", "loss_fn.name=clipped_pg", "--json", "found.json"]
    assert main(["rehearse", "recipe.yaml", "--steps", "2", *changed]) == 0
    (first, *_), (resumed, *_) = runs
    assert "loss_fn.name=clipped_pg" not in first
    assert "loss_fn.name=clipped_pg" in resumed
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["resumed"]
    assert list(found["loss"]) == ["PolicyLoss(name='clipped_pg')"]
    assert "resumed from the checkpoint before it under loss_fn.name=clipped_pg:" in capsys.readouterr().out


def test_a_dry_run_prints_the_plan_and_touches_nothing(runs, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert main(["rehearse", "recipe.yaml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "for 3 steps" in out
    assert "settings of sizes, folders and prompts" in out
    assert "nothing was run or written" in out
    assert max(map(len, out.splitlines())) < 400
    assert main(["rehearse", "recipe.yaml", "--dry-run", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"key": "grpo.num_prompts_per_step", "was": 64, "value": 4, "why": None} in report["changes"]
    assert "++grpo.max_num_steps=3" in report["command"]
    assert "nemo_geomask.tools.rehearse.driver" in report["command"]
    assert runs == []
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["rehearse", "recipe.yaml", "--dry-run", "loss_fn.ratio_clip_max=-1"]) == 1


def test_records_stay_in_the_rehearsals_folders(runs, tmp_path):
    record = "++loss_fn.record={dir: /data/production/records, every: 10}"
    command = ["rehearse", "recipe.yaml", record, "--steps", "2", "--resume"]
    assert main(command) == 0
    out = tmp_path / "results" / "rehearsal" / "recipe"
    for (arguments, *_), folder in zip(runs, (out, out / "resumed"), strict=True):
        assert f'++loss_fn.record.dir="{folder / "records"}"' in arguments
        assert "++loss_fn.record.every=1" in arguments
    assert sorted(path.name for path in (out / "records").glob("*.parquet")) == [
        "step-0000001-driver.parquet",
        "step-0000002-driver.parquet",
    ]


def test_ctrl_c_says_where_it_was(runs, monkeypatch, capsys):
    def interrupted(process, timeout, every_tick):
        Events(Path("results/rehearsal/recipe/events.jsonl"))("begin", stage="sampling", label="generation")
        every_tick()
        raise KeyboardInterrupt

    monkeypatch.setattr(rehearsed_run, "wait_for", interrupted)
    assert main(["rehearse", "recipe.yaml"]) == 130
    error = capsys.readouterr().err
    assert "interrupted by Ctrl-C in sampling (generation); nothing is judged." in error
    assert "results/rehearsal/recipe" in error


def test_validation_and_tensorboard_on_request(runs, made, capsys):
    enabled = ["++logger.tensorboard_enabled=true", "++logger.wandb_enabled=true", "++grpo.val_period=10"]
    assert main(["rehearse", "recipe.yaml", *enabled, "--steps", "2", "--validate"]) == 0
    ((command, *_),) = runs
    assert "++grpo.val_period=1" in command
    assert "++logger.wandb_enabled=false" in command
    assert not any(word.startswith("++logger.tensorboard_enabled=false") for word in command)
    assert any(word.startswith("++data.validation={") and "prompts.jsonl" in word for word in command)
    assert "val         ran" in capsys.readouterr().out
    made.validates = False
    assert main(["rehearse", "recipe.yaml", *enabled, "--steps", "2", "--validate"]) == 1
    assert "failed in val: NeMo-RL has not validated" in capsys.readouterr().out
    assert main(["rehearse", "recipe.yaml", *enabled, "--steps", "2"]) == 0
