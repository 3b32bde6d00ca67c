"""Jobs of one session: which of them start workers, and what ends them."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.rehearse import hosted_job
from nemo_geomask.tools.rehearse.hosted_job import JobOutcome, JobSession


class Driver:
    """In place of ``run_job``: answers jobs as a driver would, until it is ended."""

    def __init__(self):
        self.starts, self.ended, self.jobs, self.error, self.silent = [], 0, [], None, False

    def __call__(self, recipe, overrides, function, file, *, folder, settings, ranks, timeout, every_tick):
        self.starts.append(dict(settings))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "events.jsonl").write_text(json.dumps({"kind": "model"}) + "\n")
        if isinstance(self.error, Exception):
            raise self.error
        if self.error:
            return JobOutcome(self.error, False, ())
        next_file = file
        try:
            while True:
                every_tick()
                if not self.silent and next_file.is_file():
                    content = json.loads(next_file.read_text())
                    self.jobs.append(content["number"])
                    Path(content["out"]).write_text("{}")
                    next_file = Path(content["more"])
                time.sleep(0.01)
        finally:
            self.ended += 1


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(hosted_job, "run_job", driver)
    return driver


@pytest.fixture
def session(driver, tmp_path):
    session = JobSession("recipe.yaml", [], "module:function", folder=tmp_path / "work", timeout=20)
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
    assert (outcome.error, outcome.is_timeout) == ("ValueError: no such engine", False)
    driver.error = None
    assert ask(session, tmp_path, 1, is_fresh=False).error == ""
    assert len(driver.starts) == 2


def test_a_recipe_that_cannot_be_run_is_an_error_of_the_session(session, driver, tmp_path):
    driver.error = ConfigError("there is no NeMo-RL")
    with pytest.raises(ConfigError, match="there is no NeMo-RL"):
        ask(session, tmp_path, 0)


def test_a_job_that_is_not_answered_ends_the_workers(driver, tmp_path):
    driver.silent = True
    session = JobSession("recipe.yaml", [], "module:function", folder=tmp_path / "work", timeout=0.3)
    outcome = ask(session, tmp_path, 0)
    assert (outcome.is_timeout, driver.ended) == (True, 1)
    assert "not done after" in outcome.error


def test_ctrl_c_ends_the_workers(session, driver, tmp_path, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    driver.silent = True
    monkeypatch.setattr(hosted_job, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupted))
    with pytest.raises(KeyboardInterrupt):
        ask(session, tmp_path, 0)
    assert driver.ended == len(driver.starts) == 1
