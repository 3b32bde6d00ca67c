"""Jobs of one session: which of them start workers, and what ends them."""

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.rehearse import hosted_job
from nemo_geomask.tools.rehearse.hosted_job import JobSession


class Driver:
    """In place of ``hosted_job``: answers jobs as a driver would, whenever somebody looks whether it runs."""

    def __init__(self):
        self.starts, self.ended, self.jobs, self.error, self.silent = [], 0, [], None, False

    @contextlib.contextmanager
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
