"""The first steps of a run are judged, and then nothing of the preflight is left."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl import launch, patch
from nemo_geomask.recipe import read_recipe
from nemo_geomask.tools.check import RecipeFacts
from nemo_geomask.tools.rehearse import event_hooks, preflight
from nemo_geomask.tools.rehearse.healthy_limits import usual_limits
from nemo_geomask.tools.shared.usual_mismatch import USUAL
from tests.tools.rehearse.base_recipe import BASE
from tests.tools.rehearse.made_records import proof, refit, write_record

pytest.importorskip("hydra", reason="overrides are Hydra's")
pytest.importorskip("pyarrow.parquet", reason="records are Parquet files")


class Host:
    """What the run calls at the end of each step."""

    @staticmethod
    def log():
        return "logged"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE, encoding="utf-8")
    return str(path)


@pytest.fixture
def begun(recipe, tmp_path, monkeypatch):
    """``begun(...)``: a preflight of a run whose steps ``step(number, …)`` logs; ``stopped`` has the workers' calls."""
    stopped = []
    monkeypatch.setattr(event_hooks, "stop_workers", lambda: stopped.append("workers") or ["policy"])
    monkeypatch.setattr(preflight, "stop_recording", stopped.append)

    def make(*arguments, steps=2, always_stops=False, overrides=(), **how):
        def patches(events, *, after_step):
            make.events, make.after_step = events, after_step
            yield patch.attribute(Host, "log", lambda original: staticmethod(lambda: "observed"))

        monkeypatch.setattr(event_hooks, "patches", patches)
        own = [
            "policy.tokenizer.name=/no/such/tokenizer",
            "grpo.num_prompts_per_step=2",
            "grpo.num_generations_per_prompt=4",
            "policy.train_global_batch_size=8",
        ]
        made = preflight.Preflight(
            ["--config", recipe, *own, *overrides],
            steps=steps,
            always_stops=always_stops,
            folder=tmp_path / "out",
            **how,
        )
        made.begin()
        make.events("worker_counts", **{key: value for key, value in proof(0).items() if key != "kind"})
        make.records, make.stopped = tmp_path / "out" / "records", stopped
        return made

    def step(number, fault="", update="", groups=()):
        write_record(make.records, number, fault, update=update)
        for event in (refit(number, *groups), proof(number, calls={"PolicyLoss(name='gspo')": number})):
            kind = event.pop("kind")
            for worker in event.get("workers", ()):
                worker |= {"pid": 1, "host": "h", "python": "p", "file": "f"}
            make.events(kind, **event)
        make.events("metrics", step=number, prefix="train", values={"loss": 0.1, "grad_norm": 1.0, "probs_ratio": 1.0})
        make.after_step()

    make.step = step
    yield make
    patch.undo_all()


def test_a_healthy_run_goes_on_without_a_trace(begun, capsys):
    begun()
    assert Host.log() == "observed"
    begun.step(1)
    assert (Host.log(), begun.stopped) == ("observed", [])
    begun.step(2)
    assert (Host.log(), begun.stopped) == ("logged", ["workers", "policy"])
    out = capsys.readouterr().out
    assert "preflight passed; the run goes on, and nothing of it is left in it" in out
    assert "weights: trainer and engine agree after 2 of 2 refits" in out
    assert "issue 2971" not in out
    assert (begun.records.parent / "report.txt").read_text(encoding="utf-8") == out


def test_it_may_stop_in_any_case(begun):
    begun(steps=1, always_stops=True)
    with pytest.raises(SystemExit) as end:
        begun.step(1)
    assert end.value.code == 0


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        ({"groups": ["layers.3"]}, "the engine does not hold the trainer's weights: 1 of 5 groups differ (layers.3)"),
        ({"update": "shift"}, "curr is shifted by a token against prev"),
        ({"update": "temperature"}, "another temperature in the training pass"),
        ({"fault": "temperature"}, "another temperature in the sampler than in the trainer"),
        ({"fault": "nan"}, "NaN or infinite"),
    ],
)
def test_a_fault_stops_the_run_with_its_reason(begun, capsys, planted, reason):
    begun(steps=1)
    with pytest.raises(SystemExit) as end:
        begun.step(1, **planted)
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert reason in out
    assert "preflight FAILED; stopped" in out
    assert "log.txt" not in out  # the user's launcher has the output
    assert Host.log() == "logged"


def test_records_of_the_recipe_go_on(begun, tmp_path):
    made = begun(steps=1, overrides=[f"++loss_fn.record={{dir:'{tmp_path / 'out' / 'records'}'}}"])
    assert made.overrides == ()
    begun.step(1)
    assert begun.stopped == ["workers"]


def test_fixed_prompts_are_read_in_order(begun, recipe, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "a", "output": "b"}\n' * 4, encoding="utf-8")
    own = "++data.train={dataset_name:'OpenMathInstruct-2',processor:'math',prompt_file:null,split:'train'}"
    overrides = begun(always_stops=True, prompts=prompts, overrides=[own]).overrides
    data = RecipeFacts.from_recipe(read_recipe(recipe, overrides))
    assert (data.get("data.train.data_path"), data.get("data.shuffle")) == (str(prompts), False)
    assert (data.get("data.train.processor"), data.get("data.train.split")) == ("math", None)
    assert "prompt_file" in data.get("data.train")
    assert data.get("data.default.env_name") == "math"
    with pytest.raises(ConfigError, match="takes --preflight-only"):
        begun(prompts=prompts)
    with pytest.raises(ConfigError, match="has 4 prompts, and the preflight's steps take 6"):
        begun(always_stops=True, prompts=prompts, steps=3)
    prompts.write_text('{"input": "a", "output": "b"}\n"a"', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2 of .* must be a JSON object with input and output"):
        begun(always_stops=True, prompts=prompts)


def test_a_run_that_ends_too_early_is_not_judged(begun, capsys):
    made = begun()
    begun.step(1)
    with pytest.raises(SystemExit):
        made.require_verdict()
    assert "NOT JUDGED: the run ended before step 2" in capsys.readouterr().out
    begun.step(2)
    made.require_verdict()


def test_a_run_that_can_not_be_judged_is_refused(recipe, tmp_path):
    arguments = ["loss_fn.name=null"]
    with pytest.raises(ConfigError, match="set loss_fn.name: clipped_pg"):
        preflight.Preflight(["--config", recipe, *arguments], steps=1, always_stops=True, folder=tmp_path / "out")
    with pytest.raises(ConfigError, match="--config"):
        preflight.Preflight(arguments, steps=1, always_stops=True, folder=tmp_path / "out")


def test_a_folder_of_something_else_is_left_alone(begun, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no preflight"):
        begun()
    assert (tmp_path / "out" / "thesis").is_file()


def test_the_command_takes_its_options_after_the_script(recipe, tmp_path, monkeypatch):
    calls = []

    def launched(script, arguments, *, accept, before_start=None):
        calls.append(SimpleNamespace(script=script, arguments=arguments, begins=before_start is not None))

    monkeypatch.setattr(launch, "launch", launched)
    script = ["run", "run_grpo.py", "--config", recipe, "grpo.seed=1"]
    monkeypatch.setattr(preflight.Preflight, "require_verdict", lambda self: None)
    assert main(script) == main([*script, "--preflight", "--out", str(tmp_path / "out")]) == 0
    assert [call.begins for call in calls] == [False, True]
    assert calls[0].arguments == script[2:]
    assert calls[1].arguments[:3] == script[2:]
    assert calls[1].arguments[3].startswith("++loss_fn.record=")
    with pytest.raises(SystemExit):
        main([*script, "--preflight", "0"])


@pytest.mark.parametrize(
    ("overrides", "experts", "k3", "source"),
    [
        ([], True, 3.2e-3, "issue 2971"),
        ([], False, 1e-3, "docs/guides/grpo.md"),
        (["++policy.generation.vllm_cfg.precision=fp8"], True, 1.06e-2, "issue 2971"),
        (["++policy.generation.quant_cfg=NVFP4"], True, 3.2e-3, "quantization-aware-rl.md"),
    ],
)
def test_the_mismatch_is_held_against_what_is_usual(recipe, overrides, experts, k3, source):
    limits = usual_limits(RecipeFacts.from_recipe(read_recipe(recipe, overrides)), experts=experts)
    assert limits.k3 == pytest.approx(3 * k3)
    assert source in limits.of
    assert json.dumps(USUAL["fp8", True][0]) == "0.0106"
