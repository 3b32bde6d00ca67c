from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_geomask.errors import ArgumentError, ConfigError
from nemo_geomask.rehearsal import matrix
from nemo_geomask.rehearsal.matrix import read_cases, rewrite

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "docs" / "hosts"

pytest.importorskip("yaml")


def test_the_table_is_current():
    text = (ROOT / "docs" / "nemo_rl.md").read_text(encoding="utf-8")
    assert rewrite(text, HOSTS) == text, "run: make docs"


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


def test_a_row_a_case_whatever_came_of_it(hosts):
    text = rewrite("before\n<!-- hosts: begin -->\nold\n<!-- hosts: end -->\nafter", hosts)
    assert text.splitlines() == [
        "before",
        "<!-- hosts: begin -->",
        "| case | 0.7.0 (012345678) |",
        "|---|---|",
        "| a | 2 steps, 90 s on CPUs, control within 2e-07 |",
        "| b | fails: step: ValueError: a\\|b |",
        "| c | not run: too old |",
        "| d | not run: no card |",
        "| e | names `k.ey` after 9 s |",
        "| f | fails: step: ValueError: a\\|b |",
        "<!-- hosts: end -->",
        "after",
    ]


def test_results_of_two_commits_are_not_mixed(hosts, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "nemo_rl_checkout", lambda: hosts)
    with pytest.raises(SystemExit):
        matrix.main(["--hosts", str(hosts), "--label", "0.7.0", "--commit", "fedcba98"])
    assert "0123456789abcdef, this is fedcba98: say --label" in capsys.readouterr().err


def test_a_page_without_marks(hosts):
    with pytest.raises(ArgumentError, match="hosts: begin"):
        rewrite("nothing here", hosts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: a, recipe: x}\n- {name: a, recipe: y}", "two cases are called 'a'"),
        ("- {name: a, recipe: x, rank: 2}", "case 'a': .*'rank'"),
    ],
)
def test_a_mistake_in_the_cases(tmp_path, text, message):
    (tmp_path / "cases.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_cases(tmp_path / "cases.yaml")
