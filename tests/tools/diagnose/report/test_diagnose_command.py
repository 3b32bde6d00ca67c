"""The command: verdict, tables, JSON, exit status, and a run that is still going on."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from nemo_geomask.cli import main
from tests.evidence.diagnose.planted_causes import planted_step
from tests.evidence.diagnose.planted_logs import RunShape, write_step
from tests.helpers.logs import log_rows, write_log

SHAPE = RunShape(prompts=4, samples=3, length=40)


def write_steps(directory, steps, cause=None, strength=0.5, onset=1):
    directory.mkdir(exist_ok=True)
    for step in steps:
        planted = planted_step(0, step, cause if step >= onset else None, strength, shape=SHAPE)
        write_log(directory, step, list(log_rows(planted)))
    return directory


def test_a_healthy_run(tmp_path, capsys):
    run = str(write_steps(tmp_path / "run", range(1, 4)))
    assert main(["diagnose", run]) == 0
    brief = capsys.readouterr().out
    _, bias = brief.splitlines()  # its tools' replies are unique
    assert bias.startswith("  bias: ")
    assert "not testable" in bias
    assert main(["diagnose", run, "--brief"]) == 0
    assert capsys.readouterr().out == brief
    with pytest.raises(SystemExit) as exit_status:
        main(["diagnose", run, "--brief", "--full"])
    assert exit_status.value.code == 2
    capsys.readouterr()
    assert main(["diagnose", run, "--full"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(brief)
    assert out.startswith(f"{tmp_path / 'run'}: healthy: ")
    assert "Numbers, Δ = prev − gen" in out
    assert "By position" in out


def test_the_records_name_the_engines_where_the_cause_is_their_precision(tmp_path, capsys):
    for step in range(1, 10):
        planted = planted_step(0, step, "precision", 30.0, shape=SHAPE)
        planted.sequences["reward"][:] = 0.1 * step
        write_step(tmp_path, planted, sampler="vllm in fp8\x1b", trainer="bfloat16")
    assert main(["diagnose", str(tmp_path), "--full"]) in (1, 3)
    out = capsys.readouterr().out
    assert "numerics of the engines" in out
    assert r"; recorded: sampler vllm in fp8\x1b, trainer bfloat16)" in out
    assert "\n  trend: the reward rises from 0.2 in the first 3 steps to 0.8 in the last 3\n" in out
    columns = next(line for line in out.splitlines() if "drifting | broken" in line)
    assert columns.split()[:4] == ["all", "steps", "last", "3"]  # by which the verdict is


def test_the_worst_of_several_runs_decides(tmp_path, capsys):
    write_steps(tmp_path / "good", range(1, 4))
    write_steps(tmp_path / "bad", range(1, 5), "shifted", onset=3)
    assert main(["diagnose", str(tmp_path), "--brief"]) == 3
    bad, to_do, good = (line for line in capsys.readouterr().out.splitlines() if not line.startswith("  bias: "))
    assert "broken since step 3: log-probs shifted" in bad
    assert to_do.startswith("  to do: align prev_logprobs")
    assert "healthy" in good


def test_json_and_a_cache_elsewhere(tmp_path, capsys):
    write_steps(tmp_path / "run", (1, 2), "zero_logprobs")
    arguments = ["diagnose", str(tmp_path / "run"), "--json", "--cache", str(tmp_path / "cache")]
    assert main(arguments) == 3
    (output,) = json.loads(capsys.readouterr().out)
    assert (output["health"], output["cause"]["id"]) == ("broken", "zero_logprobs")
    assert len(list((tmp_path / "cache").rglob("*.parquet"))) == 2
    assert not (tmp_path / "run" / "geomask-records").exists()


def test_one_split_at_a_time_and_two_at_once(tmp_path, capsys):
    run = str(write_steps(tmp_path / "run", range(1, 4)))
    assert main(["diagnose", run, "--by", "probability", "--by", "turn,advantage"]) == 0
    _, first, *_, second = (text.splitlines()[0] for text in capsys.readouterr().out.split("\nBy"))
    assert (first, second) == (" probability (nats of surprise)", " turn (earlier turns) and advantage (sign)")
    assert main(["diagnose", run, "--by", "step", "--json"]) == 0
    (output,) = json.loads(capsys.readouterr().out)
    assert list(output["tables"]) == ["steps"]
    for wrong in ("tool", "turn,turn", "step,turn", "turn,length,reward"):
        assert main(["diagnose", run, "--by", wrong]) == 2
        assert f"--by {wrong}: give one or two of probability, position" in capsys.readouterr().err


AGENTS = ["math", "code", "\x1b[31mred\nnot a row", "swe"]
"""Names of the environments of four prompts; one would change the terminal's colour and begin a line."""


def write_environments(directory, steps, agents=AGENTS, cause="precision", strength=5.0):
    """Write NeMo-RL's logs of four prompts, of which the second alone has the cause."""
    directory.mkdir(exist_ok=True)
    for step in steps:
        planted = planted_step(0, step, None, 0.0, shape=SHAPE)
        changed = planted_step(0, step, cause, strength, shape=SHAPE)
        groups = planted.sequences["group"]
        is_changed = np.repeat(groups == 1, np.diff(planted.offsets))
        planted.tokens["prev"][is_changed] = changed.tokens["prev"][is_changed]
        planted.sequences["environment"] = np.array(agents, dtype=object)[groups]
        write_log(directory, step, list(log_rows(planted)))
    return directory


def test_by_environment(tmp_path, capsys):
    run = str(write_environments(tmp_path / "run", range(1, 4)))
    main(["diagnose", run, "--by", "environment"])
    title, header, *rows = capsys.readouterr().out.partition("\nBy environment")[2].splitlines()
    assert title == ""
    assert header.split()[:3] == ["tokens", "|Δ|", "against"]
    # In the order of the names, each in one line.
    assert [row.split()[0] for row in rows] == ["\\x1b[31mred\\nnot", "code", "math", "swe"]
    main(["diagnose", run, "--by", "environment", "--json"])
    (output,) = json.loads(capsys.readouterr().out)
    by_name = {row[""]: row for row in output["tables"]["environment"]}
    assert by_name["code"]["against expected"] > 2 * by_name["math"]["against expected"]
    assert sum(float(row["tokens"].rstrip("%")) for row in by_name.values()) == pytest.approx(100, abs=0.3)
    main(["diagnose", run, "--full"])
    assert "\nBy environment\n" in capsys.readouterr().out


def test_by_environment_needs_several(tmp_path, capsys):
    for name, agents in (("one", ["math"] * 4), ("none", [None] * 4)):
        run = str(write_environments(tmp_path / name, range(1, 4), agents))
        assert main(["diagnose", run, "--by", "environment"]) == 2
        assert "--by environment: not recorded (the names of NeMo-Gym's agents), or the same" in capsys.readouterr().err
        main(["diagnose", run, "--full"])
        assert "By environment" not in capsys.readouterr().out
    for wrong in ("environment,probability", "step,environment", "environment,environment"):
        assert main(["diagnose", run, "--by", wrong]) == 2
        assert "joined by a comma, or environment or step alone" in capsys.readouterr().err


def test_by_environment_against_another_run(tmp_path, capsys):
    """Environments of both runs are in one order, and those of the other run alone are left out."""
    this = write_environments(tmp_path / "this", range(1, 4), ["math", "code", "swe", "swe"])
    that = write_environments(tmp_path / "that", range(1, 4), ["math", "code", "a", "b"], cause=None, strength=0.0)
    main(["diagnose", str(this), "--against", str(that), "--by", "environment", "--json"])
    (output,) = json.loads(capsys.readouterr().out)
    by_name = {row[""]: row[f"against {that}"] for row in output["tables"]["environment"]}
    assert list(by_name) == ["code", "math", "swe"]
    assert by_name["math"] == pytest.approx(1.0)
    assert by_name["code"] > 2
    assert by_name["swe"] is None


def test_a_split_that_one_run_lacks_is_reported_and_shown_for_the_others(tmp_path, capsys):
    write_steps(tmp_path / "logs", range(1, 4))  # without staleness
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    for step in range(1, 4):
        write_step(recorded, planted_step(0, step, None, 0.0, shape=SHAPE))
    assert main(["diagnose", str(tmp_path), "--by", "staleness"]) == 0
    out = capsys.readouterr().out
    assert "--by staleness: not recorded (" in out
    assert "By staleness (steps)" in out
    assert main(["diagnose", str(tmp_path), "--by", "staleness", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert not first["tables"]["staleness"]
    assert second["tables"]["staleness"]
    assert main(["diagnose", str(tmp_path / "logs"), "--by", "staleness"]) == 2
    assert "--by staleness: not recorded (" in capsys.readouterr().err


def test_a_run_against_another_over_the_steps_of_both(tmp_path, capsys):
    that = write_steps(tmp_path / "that", range(1, 5))
    this = write_steps(tmp_path / "this", range(2, 7), "precision", 8.0)
    arguments = ["diagnose", str(this), "--against", str(that)]
    assert main([*arguments, "--json"]) == 1
    (output,) = json.loads(capsys.readouterr().out)
    assert (output["steps"], output["cause"]["id"], output["against"]["name"]) == ([2, 3, 4], "precision", str(that))
    # The other run may be below the folder that is diagnosed.
    assert main(["diagnose", str(tmp_path), "--against", str(that), "--brief"]) == 1
    output = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in output if line.startswith(str(tmp_path))] == [str(this)]
    assert main(["diagnose", str(that), "--against", str(that)]) == 2
    assert "the run can't be compared with itself" in capsys.readouterr().err
    assert main(["diagnose", str(this), "--against", str(tmp_path)]) == 2
    assert "holds several runs" in capsys.readouterr().err
    assert main(["diagnose", str(write_steps(tmp_path / "late", (9,))), "--against", str(that)]) == 2
    assert "no step in common with" in capsys.readouterr().err


def test_a_run_that_cannot_be_read_does_not_stop_the_others(tmp_path, capsys):
    good, bad, empty = write_steps(tmp_path / "good", range(1, 4)), tmp_path / "bad", tmp_path / "empty"
    for folder in (bad, empty):
        folder.mkdir()
    (bad / "train_data_step1.jsonl").write_text("{}\n")
    arguments = ["diagnose", *map(str, (bad, empty, good)), "--brief"]
    assert main(arguments) == 2
    first, *others = sorted(line for line in capsys.readouterr().out.splitlines() if not line.startswith("  bias: "))
    assert first.startswith(f"{bad}: not judged: {bad}/train_data_step1.jsonl:1: has no input_lengths")
    assert others[0].startswith(f"{empty}: not judged: holds neither records")
    assert others[1].startswith(f"{good}: healthy")
    assert main([*arguments, "--json"]) == 2
    output = json.loads(capsys.readouterr().out)
    assert [(one["run"], one["health"]) for one in output] == [
        (str(good), "healthy"),
        (str(empty), "unknown"),
        (str(bad), "unknown"),
    ]
    assert main(["diagnose", str(bad)]) == 2
    assert "has no input_lengths" in capsys.readouterr().err


def test_a_cache_in_the_log_folder_is_not_a_run(tmp_path, capsys):
    run = write_steps(tmp_path / "run", (1, 2))
    arguments = ["diagnose", str(run), "--brief", "--cache", str(run / "cache")]
    for _ in range(2):
        assert main(arguments) == 0
        assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["diagnose", str(run), "--brief"]) == 0
    assert main(["diagnose", str(run / "geomask-records"), "--brief"]) == 0
    assert f"{run / 'geomask-records'}: healthy" in capsys.readouterr().out


def test_the_output_on_the_page_is_the_commands(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[4] / "docs" / "how_to" / "diagnose.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- output: begin -->\n```text\n")[2].partition("\n\n…\n")[0]
    monkeypatch.chdir(tmp_path)
    for step in range(1, 13):
        cause = "stale_engine" if step >= 7 else None
        write_step(Path("results/stale"), planted_step(0, step, cause, 0.1, steps_since_onset=step - 6))
    assert main(["diagnose", "results/stale", "--full"]) == 3
    printed = capsys.readouterr().out
    assert len(shown.split()) > 100
    assert " ".join(printed.split()).startswith(" ".join(shown.split()))
