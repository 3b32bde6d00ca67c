"""A job in place of training, what settings it runs with, and sessions of jobs: what starts and ends workers."""

import json
import sys
import time
import types
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.tools.rehearse import hosted_job
from nemo_geomask.tools.rehearse.driver import in_place_of_training
from tests.tools.rehearse.base_recipe import BASE


@pytest.fixture
def made_nemo_rl(monkeypatch):
    """A module in the place of NeMo-RL's, with a training function that must not run."""

    def grpo_train(policy, policy_generation, master_config):
        raise AssertionError("trained")

    grpo = types.ModuleType("nemo_rl.algorithms.grpo")
    grpo.grpo_train = grpo.async_grpo_train = grpo_train
    grpo.__spec__ = types.SimpleNamespace()
    for name in ("nemo_rl", "nemo_rl.algorithms"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.grpo", grpo)
    job = types.ModuleType("made_job")
    job.calls = []
    job.run = lambda **arguments: job.calls.append(arguments)
    monkeypatch.setitem(sys.modules, "made_job", job)
    return grpo, job


def test_the_job_gets_the_arguments_of_the_training_function_by_name(made_nemo_rl):
    grpo, job = made_nemo_rl
    patches = list(in_place_of_training("made_job:run", "/there/job.json"))
    patch.apply_all(patches)
    try:
        grpo.grpo_train(1, 2, master_config=3)
    finally:
        for each in patches:
            each.undo()
    assert job.calls == [{"policy": 1, "policy_generation": 2, "master_config": 3, "file": Path("/there/job.json")}]


def test_a_key_is_read_if_the_code_has_it_as_a_string_or_a_field(tmp_path, monkeypatch):
    models = tmp_path / "nemo_rl" / "models"
    models.mkdir(parents=True)
    (models / "worker.py").write_text('cfg["vllm_cfg"].get("precision")\nrun(logprobs_mode="processed")\n')
    (models / "config.py").write_text("class VllmConfig:\n    vllm_kwargs: dict\n    kv_cache_dtype: str\n")
    monkeypatch.setattr(hosted_job, "nemo_rl_checkout", lambda: tmp_path)
    prefix = "policy.generation."
    assert hosted_job.reads_key(f"{prefix}vllm_cfg.precision")
    assert hosted_job.reads_key(f"{prefix}vllm_cfg.kv_cache_dtype")
    assert hosted_job.reads_key(f"{prefix}vllm_kwargs.hf_overrides.head_dtype")
    assert not hosted_job.reads_key(f"{prefix}vllm_cfg.logprobs_mode")


def test_settings_of_a_job_are_in_force_and_a_mapping_replaces_the_one_there(tmp_path, monkeypatch):
    pytest.importorskip("hydra", reason="overrides are Hydra's")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(BASE, encoding="utf-8")
    starts = []
    monkeypatch.setattr(hosted_job, "nemo_rl_checkout", lambda: tmp_path)
    monkeypatch.setattr(hosted_job, "driver", lambda *arguments, **how: starts.append(arguments) or nullcontext())
    settings = {"policy.precision": "float32", "policy.optimizer.kwargs": {}, "policy.generation.vllm_kwargs": {}}
    with hosted_job.hosted_job(recipe, [], "m:f", tmp_path / "job", folder=tmp_path / "work", settings=settings):
        pass
    ((planned, more),) = starts
    last = ["++policy.precision=float32", "~policy.optimizer.kwargs", "++policy.optimizer.kwargs={}"]
    assert more == [*last, "++policy.generation.vllm_kwargs={}"]
    assert planned.folder == tmp_path / "work"


RAY = """ray.exceptions.RayTaskError(AssertionError): \x1b[36mray::Worker.get_logprobs()\x1b[39m (pid=28906)
  File "/there/nemo_rl/models/megatron/data.py", line 1290, in pack
    assert factor % minimum == 0, (
AssertionError: make_sequence_length_divisible_by (1) is not a multiple of minimum_pad_factor (4).
Please set policy.make_sequence_length_divisible_by to a multiple of 4.
"""
ERROR = {"kind": "error", "type": "RayTaskError(AssertionError)", "message": RAY, "traceback": RAY}


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([ERROR], "AssertionError: make_sequence_length_divisible_by (1) is not a multiple of minimum_pad_factor (4)."),
        ([], "the driver ended with status 3, and left no error"),
    ],
)
def test_an_error_of_a_worker_is_one_line(events, error):
    assert hosted_job.last_error(events, 3) == error


class Driver:
    """In place of ``hosted_job``: answers jobs as a driver would, whenever somebody looks whether it runs."""

    def __init__(self):
        self.starts, self.ended, self.jobs, self.error, self.silent = [], 0, [], None, False

    @contextmanager
    def __call__(self, recipe, overrides, function, file, *, folder, settings, ranks):
        self.starts.append(dict(settings))
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self.error, Exception):
            raise self.error
        error = {"kind": "error", "type": "E", "message": "", "traceback": self.error}
        (folder / "events.jsonl").write_text(json.dumps(error if self.error else {"kind": "model"}) + "\n")
        self.next_file = file
        try:
            yield self
        finally:
            self.ended += 1

    def poll(self):
        if not self.error and not self.silent and self.next_file.is_file():
            content = json.loads(self.next_file.read_text())
            self.jobs.append(content["number"])
            Path(content["out"]).write_text("{}")
            self.next_file = Path(content["more"])
        return 1 if self.error else None


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(hosted_job, "hosted_job", driver)
    return driver


@pytest.fixture
def session(driver, tmp_path):
    session = hosted_job.JobSession("recipe.yaml", [], "module:function", folder=tmp_path / "work", timeout=20)
    yield session
    session.close()


def ask(session, tmp_path, number, **options):
    job = {"number": number, "out": str(tmp_path / f"{number}.out")}
    return session(job, name="one", settings=options.pop("settings", {}), **options)


def test_jobs_share_workers_unless_they_ask_for_fresh_ones_or_have_other_settings(session, driver, tmp_path):
    outcomes = [
        ask(session, tmp_path, 0),
        ask(session, tmp_path, 1, is_fresh=False),
        ask(session, tmp_path, 2, is_fresh=True),
        ask(session, tmp_path, 3, is_fresh=False, settings={"a": 1}),
    ]
    assert [outcome.error for outcome in outcomes] == [""] * 4
    assert outcomes[0].events == ({"kind": "model"},)
    assert driver.jobs == [0, 1, 2, 3]
    assert driver.starts == [{}, {}, {"a": 1}]
    assert (driver.ended, session.workers_started) == (2, 3)
    session.close()
    assert driver.ended == 3


def test_an_error_of_the_driver_is_the_outcome_and_the_next_job_starts_another(session, driver, tmp_path):
    driver.error = "ValueError: no such engine"
    outcome = ask(session, tmp_path, 0)
    assert outcome.error == f"ValueError: no such engine; the log is {tmp_path / 'work' / 'one' / 'log.txt'}"
    assert not outcome.is_timeout
    driver.error = None
    assert ask(session, tmp_path, 1, is_fresh=False).error == ""
    assert len(driver.starts) == 2


def test_a_recipe_that_cannot_be_run_is_an_error_of_the_session(session, driver, tmp_path):
    driver.error = ConfigError("there is no NeMo-RL")
    with pytest.raises(ConfigError, match="there is no NeMo-RL"):
        ask(session, tmp_path, 0)


def test_a_job_that_is_not_answered_ends_the_workers(driver, tmp_path):
    driver.silent = True
    session = hosted_job.JobSession("recipe.yaml", [], "module:function", folder=tmp_path / "work", timeout=0.3)
    outcome = ask(session, tmp_path, 0)
    assert (outcome.is_timeout, driver.ended) == (True, 1)
    assert "not done after" in outcome.error


def test_ctrl_c_ends_the_workers(session, driver, tmp_path, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    driver.silent = True
    monkeypatch.setattr(hosted_job, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=interrupted))
    with pytest.raises(KeyboardInterrupt):
        ask(session, tmp_path, 0)
    assert driver.ended == len(driver.starts) == 1
