from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nemo_geomask.errors import ConfigError
from tests.evidence.hosts import case_matrix
from tests.evidence.hosts.case_matrix import HOSTS, read_cases, result_table

ROOT = Path(__file__).parents[3]


def test_every_case_names_a_recipe_and_every_result_a_case():
    cases = {case.name: case for case in read_cases(HOSTS / "cases.yaml")}
    ours = [case.recipe for case in cases.values() if not case.recipe.startswith("$NEMO_RL_ROOT/")]
    assert all((ROOT / recipe).is_file() for recipe in ours)
    for path in HOSTS.glob("*.json"):
        results = json.loads(path.read_text(encoding="utf-8"))["cases"]
        assert set(results) <= set(cases), path.name
        assert not any(cases[name].why_not(path.stem) for name in results), path.name


@pytest.fixture
def hosts(tmp_path):
    (tmp_path / "cases.yaml").write_text(
        "- {name: a, recipe: x}\n- {name: b, recipe: x}\n"
        "- {name: c, recipe: x, not_run: {0.7.0: too old, all: no card}}\n"
        "- {name: d, recipe: x, not_run: {all: no card}}\n- {name: e, recipe: x, mistake: k.ey}\n"
        "- {name: f, recipe: x, mistake: k.ey}\n",
        encoding="utf-8",
    )
    trained = {"outcome": "trained", "seconds": 90, "where": "CPUs", "control": 2e-7, "metrics": {"1": {}, "2": {}}}
    failed = {"outcome": "failed", "seconds": 9, "error": "step: ValueError: a|b", "setting": "k", "metrics": {}}
    results = {"a": trained, "b": failed, "e": {**failed, "setting": "k.ey"}, "f": failed}
    host = {"version": "0.7.0", "commit": "0123456789abcdef", "cases": results}
    (tmp_path / "0.7.0.json").write_text(json.dumps(host), encoding="utf-8")
    return tmp_path


def test_every_case_has_a_row_whatever_its_result(hosts):
    assert result_table(hosts).splitlines() == [
        "| case | 0.7.0 (012345678) |",
        "|---|---|",
        "| a | 2 steps, 90 s on CPUs, control within 2e-07 |",
        "| b | fails: step: ValueError: a\\|b |",
        "| c | not run: too old |",
        "| d | not run: no card |",
        "| e | names `k.ey` after 9 s |",
        "| f | fails: step: ValueError: a\\|b |",
        "| all of these in one go | in parts |",
    ]


def test_results_of_two_commits_are_not_mixed(hosts, monkeypatch, capsys):
    monkeypatch.setattr(case_matrix, "nemo_rl_checkout", lambda: hosts)
    with pytest.raises(SystemExit):
        case_matrix.main(["--hosts", str(hosts), "--label", "0.7.0", "--commit", "fedcba98"])
    assert "0123456789abcdef, this is fedcba98: give another --label" in capsys.readouterr().err


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A NeMo-RL without code, a folder of results, and two cases whose recipe is not there."""
    root = tmp_path / "RL"
    for name in ("examples/run_grpo.py", "nemo_rl/__init__.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "nemo_rl" / "algorithms").mkdir()
    monkeypatch.setenv("NEMO_RL_ROOT", str(root))
    hosts = tmp_path / "hosts"
    hosts.mkdir()
    cases = "- {name: b, recipe: none.yaml}\n- {name: a, recipe: none.yaml}\n"
    (hosts / "cases.yaml").write_text(cases, encoding="utf-8")
    return tmp_path


def run(checkout, *arguments):
    return case_matrix.main(["--hosts", str(checkout / "hosts"), "--label", "v1", "--commit", "0123", *arguments])


@pytest.mark.slow
def test_several_at_a_time_are_recorded_in_the_order_of_the_cases_and_a_part_is_not_the_whole(checkout, capsys):
    assert run(checkout, "--only", "a", "--jobs", "1") == 1
    assert "| all of these in one go | in parts |" in result_table(checkout / "hosts")
    assert run(checkout, "--jobs", "2") == 1
    results = json.loads((checkout / "hosts" / "v1.json").read_text(encoding="utf-8"))
    assert list(results["cases"]) == ["b", "a"]
    assert all("none.yaml" in result["error"] for result in results["cases"].values())
    minutes = results["whole"]["minutes"]
    assert results["whole"] == {"minutes": minutes, "jobs": 2, "cores": os.cpu_count()}
    assert f"2 cases in {minutes} min, 2 at a time" in capsys.readouterr().err
    table = result_table(checkout / "hosts")
    assert f"| all of these in one go | {minutes} min, 2 at a time on" in table


@pytest.mark.slow
def test_a_case_that_check_refuses_says_why(checkout):
    (checkout / "none.yaml").write_text("{policy: {model_name: x}, loss_fn: {name: clipped_pg}}", encoding="utf-8")
    cases = f"- {{name: a, recipe: {checkout / 'none.yaml'}}}"
    (checkout / "hosts" / "cases.yaml").write_text(cases, encoding="utf-8")
    assert run(checkout, "--jobs", "1") == 1
    (result,) = json.loads((checkout / "hosts" / "v1.json").read_text(encoding="utf-8"))["cases"].values()
    assert result["error"].startswith(
        "validation: GM312 policy.megatron_cfg.enabled: null needs policy.dtensor_cfg.enabled"
    )


@pytest.mark.parametrize(
    ("option", "value", "message"), [("--only", "PPO", "begins with 'PPO'"), ("--jobs", "0", "--jobs is 0")]
)
def test_options_that_leave_no_case_are_refused(checkout, capsys, option, value, message):
    with pytest.raises(SystemExit):
        run(checkout, option, value)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: a, recipe: x}\n- {name: a, recipe: y}", "two cases are called 'a'"),
        ("- {name: a, recipe: x, rank: 2}", "case 'a': .*'rank'"),
    ],
)
def test_a_case_with_another_ones_name_or_an_unknown_key_is_refused(tmp_path, text, message):
    (tmp_path / "cases.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_cases(tmp_path / "cases.yaml")
