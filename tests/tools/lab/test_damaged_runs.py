"""Damaged and hostile files in a folder of runs end a report with one sentence that names the file."""

from __future__ import annotations

import json
import math
import os

import pytest

pytest.importorskip("matplotlib", reason="the lab draws a plot (demo extra)")
pytest.importorskip("pyarrow", reason="runs are Parquet (demo extra)")

import pyarrow
import pyarrow.parquet as parquet

from nemo_geomask.cli import main

FACTS = {
    "label": "gspo:none",
    "variant": "gspo-none",
    "position": 0,
    "seed": 1,
    "finished": True,
    "settings": {"policy": {"lr": 0.001}},
    "loss_fn": {"masks": []},
    "corrected": False,
    "chance": 0.2,
    "sampler": "copy",
    "precision": "float32",
    "ranks": {},
    "versions": {"torch": "2.13.0"},
}
COLUMNS = {"step": [1, 2, 3], "seed": [1, 1, 1], "variant": ["gspo:none"] * 3, "reward": [0.1, 0.2, 0.3]}


def write_run(path, facts=FACTS, **columns):
    """Write a run, whose facts may be JSON text already; None leaves a column out."""
    table = pyarrow.table({name: values for name, values in {**COLUMNS, **columns}.items() if values is not None})
    text = facts if isinstance(facts, str) else json.dumps(facts)
    parquet.write_table(table.replace_schema_metadata({"nemo_geomask.tools.lab": text}), path, compression="zstd")


def has_facts(facts):
    return lambda path: write_run(path, facts)


def has_columns(**columns):
    return lambda path: write_run(path, **columns)


def constant(value, count):
    return pyarrow.array([value]).take(pyarrow.array([0] * count))


def is_sparse(path):
    path.touch()
    os.truncate(path, 2**31)


DAMAGE = {
    "a list of facts": (has_facts([1]), "its facts: Input should be a valid dictionary"),
    "no facts": (has_facts({}), "its facts.label: Field required"),
    "facts without an end": (has_facts("[" * 100_000), ""),
    "nested facts": (has_facts('{"settings": ' * 200 + "{}" + "}" * 200), "its facts are nested too deeply, or too"),
    "a long fact": (has_facts({**FACTS, "machine": "x" * 1_000_000}), "its facts are nested too deeply, or too long"),
    "a fact of another type": (has_facts({**FACTS, "seed": "x"}), "its facts.seed: Input should be a valid integer"),
    "no chance": (has_facts({**FACTS, "chance": math.nan}), "its facts.chance: Input should be"),
    "strings": (has_columns(reward=["a", "b", "c"]), ""),
    "no steps": (has_columns(step=None), "it has no column step"),
    "steps out of order": (has_columns(step=[1, 3, 2]), "its steps are not 1, 2, 3 and so on"),
    "no rows": (has_columns(**{name: pyarrow.array([], pyarrow.int64()) for name in COLUMNS}), "finished without a"),
    "many rows": (has_columns(**{name: constant(0, 2_000_001) for name in COLUMNS}), "it claims 2,000,001 rows of 2"),
    "a FIFO": (os.mkfifo, "is a FIFO, not a regular file"),
    "a broken link": (lambda path: path.symlink_to(path.parent / "nowhere"), "No such file or directory"),
    "a folder": (lambda path: path.mkdir(), "Is a directory"),
    "an empty file": (lambda path: path.touch(), ""),
    "a sparse file": (is_sparse, "it has 2,147,483,648 bytes"),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_is_no_run_ends_the_report_with_its_name(tmp_path, capsys, damage, expected):
    path = tmp_path / "steps" / "x.parquet"
    path.parent.mkdir()
    damage(path)
    assert main(["lab", "report", str(tmp_path)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert str(path) in error
    assert expected in error
    assert "Traceback" not in error


@pytest.mark.parametrize("text", ["[/red]", r"$\frac$", "$x"])
def test_texts_of_a_run_are_no_markup(tmp_path, capsys, text):
    (tmp_path / "steps").mkdir()
    facts = {**FACTS, "label": text, "sampler": text, "precision": text, "error": text}
    write_run(tmp_path / "steps" / "x.parquet", facts)
    assert main(["lab", "report", str(tmp_path)]) == 0
    assert f"mismatch is {text} against" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_numbers_without_a_mean_end_in_a_report(tmp_path, value):
    (tmp_path / "steps").mkdir()
    names = ("reward", "grad_norm", "step_seconds", "geomask/mismatch_abs", "geomask/kept_tokens", "geomask/weight_ess")
    for seed in (1, 2):
        columns = {"step": range(1, 25), "seed": [seed] * 24, "variant": [""] * 24}
        columns |= dict.fromkeys(names, [value] * 24)
        write_run(tmp_path / "steps" / f"{seed}.parquet", {**FACTS, "seed": seed}, **columns)
    assert main(["lab", "report", str(tmp_path)]) == 0
