"""Files of a stranger's folder of runs: each ends a report or a resumed run with an error that names the file."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import zipfile

import pytest
import torch

pytest.importorskip("matplotlib", reason="the lab draws a plot (demo extra)")
pytest.importorskip("rich", reason="the lab prints a table (demo extra)")
pytest.importorskip("pyarrow", reason="runs are Parquet (demo extra)")

import pyarrow
import pyarrow.parquet as parquet

from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.checkpoint import find_checkpoint, write_checkpoint
from nemo_geomask.tools.lab.curve_files import MAX_ROWS
from nemo_geomask.tools.lab.run_store import Run

KEY = "nemo_geomask.tools.lab"
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
    arrays = {name: values for name, values in {**COLUMNS, **columns}.items() if values is not None}
    table = pyarrow.table(arrays)
    text = facts if isinstance(facts, str) else json.dumps(facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.replace_schema_metadata({KEY: text}), path, compression="zstd")


def report_error(folder, capsys):
    """Report on a folder, and return the error without its wrapping; there is no error but a single sentence."""
    assert main(["lab", "report", str(folder)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in error
    return error


FACTS_AND_ERRORS = {
    "list": ([1], "its facts: Input should be a valid dictionary"),
    "empty": ({}, "its facts.label: Field required"),
    "deep": ("[" * 100_000, "its facts are nested too deeply"),
    "nested": ('{"settings": ' * 200 + "{}" + "}" * 200, "its facts are nested too deeply, or too long"),
    "long": ({**FACTS, "machine": "x" * 1_000_000}, "its facts are nested too deeply, or too long"),
    "many": ({**FACTS, "extra": [0] * 100_000}, "its facts are nested too deeply, or too long"),
    "no JSON": ("{", "is not a run of the lab"),
    "digits": ('{"seed": ' + "1" * 5000 + "}", "is not a run of the lab"),
    "settings": ({**FACTS, "settings": 5}, "its facts.settings: Input should be a valid dictionary"),
    "seed": ({**FACTS, "seed": "x"}, "its facts.seed: Input should be a valid integer"),
    "large seed": ({**FACTS, "seed": 10**30}, "its facts.seed: Input should be"),
    "variant": ({**FACTS, "variant": [1]}, "its facts.variant: Input should be a valid string"),
    "label": ({**FACTS, "label": "x" * 5_000}, "its facts.label: String should have at most 1000 characters"),
    "surrogate": ({**FACTS, "label": "\ud800"}, "its facts.label: Input should be a valid string"),
    "position": ({**FACTS, "position": "first"}, "its facts.position: Input should be a valid integer"),
    "loss": ({**FACTS, "loss_fn": [1]}, "its facts.loss_fn: Input should be a valid dictionary"),
    "chance": ({**FACTS, "chance": math.nan}, "its facts.chance: Input should be"),
    "ranks": ({**FACTS, "ranks": "two"}, "its facts.ranks: Input should be a valid dictionary"),
    "versions": ({**FACTS, "versions": {"torch": []}}, "its facts.versions.torch: Input should be a valid string"),
}


@pytest.mark.parametrize(("facts", "expected"), FACTS_AND_ERRORS.values(), ids=FACTS_AND_ERRORS)
def test_facts_of_another_kind_are_said(tmp_path, capsys, facts, expected):
    path = tmp_path / "steps" / "x.parquet"
    write_run(path, facts)
    error = report_error(tmp_path, capsys)
    assert f"{path} is not a run of the lab" in error
    assert expected in error
    assert "move it elsewhere to go on without it" in error


COLUMNS_AND_ERRORS = {
    "strings": ({"reward": ["a", "b", "c"]}, "its column reward is string, not a number"),
    "lists": ({"reward": [[1.0], [2.0], []]}, "its column reward is list"),
    "timestamps": ({"reward": pyarrow.array([1, 2, 3], pyarrow.timestamp("s"))}, "its column reward is timestamp"),
    "dictionary": ({"reward": pyarrow.array(["a", "b", "a"]).dictionary_encode()}, "its column reward is dictionary"),
    "bools": ({"reward": [True, False, True]}, "its column reward is bool, not a number"),
    "structs": ({"reward": [{"a": 1}] * 3}, "its column reward is struct"),
    "no step": ({"step": None}, "it has no column step"),
    "other steps": ({"step": [1, 3, 2]}, "its steps are not 1, 2, 3 and so on"),
    "missing step": ({"step": [1, None, 3]}, "its column step lacks values"),
    "no rows": (
        {name: pyarrow.array([], pyarrow.int64()) for name in COLUMNS},
        "it is finished without a step",
    ),
    "many columns": ({f"metric{number}": [0.0] * 3 for number in range(2001)}, "columns, and the lab reads 2,000"),
    "many rows": (
        {name: pyarrow.array([0]).take(pyarrow.array([0] * (MAX_ROWS + 1))) for name in COLUMNS},
        f"it claims {MAX_ROWS + 1:,} rows",
    ),
    "many values": (
        {
            **{name: pyarrow.nulls(400_000, pyarrow.float32()) for name in COLUMNS},
            **{f"metric{number}": pyarrow.nulls(400_000, pyarrow.float32()) for number in range(20)},
        },
        "it claims 400,000 rows of 22 columns",
    ),
}


@pytest.mark.parametrize(("columns", "expected"), COLUMNS_AND_ERRORS.values(), ids=COLUMNS_AND_ERRORS)
def test_columns_of_another_kind_are_said(tmp_path, capsys, columns, expected):
    path = tmp_path / "steps" / "x.parquet"
    write_run(path, **columns)
    error = report_error(tmp_path, capsys)
    assert f"{path} is not a run of the lab" in error
    assert expected in error


def test_columns_of_one_name_are_said(tmp_path, capsys):
    (tmp_path / "steps").mkdir()
    table = pyarrow.table([[1], [0.1], [0.2]], names=["step", "reward", "reward"])
    parquet.write_table(table.replace_schema_metadata({KEY: json.dumps(FACTS)}), tmp_path / "steps" / "x.parquet")
    assert "it has several columns reward" in report_error(tmp_path, capsys)


def test_pages_of_more_values_than_the_footer_claims_are_said(tmp_path, capsys):
    """The footer of a short run behind the pages of a long one."""
    short, long = tmp_path / "short.parquet", tmp_path / "steps" / "x.parquet"
    zeros = {name: pyarrow.array([0]).take(pyarrow.array([0] * 900_000)) for name in COLUMNS}
    write_run(short)
    write_run(long, **zeros)
    footer_bytes = int.from_bytes(short.read_bytes()[-8:-4], "little") + 8
    long.write_bytes(long.read_bytes() + short.read_bytes()[-footer_bytes:])
    assert f"{long} is not a run of the lab" in report_error(tmp_path, capsys)


def make_fifo(path):
    os.mkfifo(path)


def make_sparse(path):
    with path.open("wb") as file:
        file.truncate(2**31)


def make_large_footer(path):
    path.write_bytes(b"PAR1" + bytes(100) + (2**31).to_bytes(4, "little") + b"PAR1")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (make_fifo, "is a FIFO, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a character device, not a regular file"),
        (lambda path: path.symlink_to(path.parent / "nowhere"), "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.touch(), "is not a run of the lab"),
        (make_sparse, "it has 2,147,483,648 bytes"),
        (make_large_footer, "it claims 2,147,483,648 bytes of metadata"),
    ],
    ids=["fifo", "device", "broken link", "folder", "empty", "sparse", "footer"],
)
def test_what_is_no_parquet_file_is_said(tmp_path, capsys, make, expected):
    path = tmp_path / "steps" / "x.parquet"
    path.parent.mkdir()
    make(path)
    error = report_error(tmp_path, capsys)
    assert str(path) in error
    assert expected in error


@pytest.mark.parametrize("text", ["[/red]", r"$\frac$", "[bold]", "$x", "_x"])
def test_texts_of_a_run_are_no_markup(tmp_path, capsys, text):
    write_run(
        tmp_path / "steps" / "x.parquet",
        {**FACTS, "label": text, "sampler": text, "precision": text, "error": text, "versions": {text: text}},
    )
    write_run(
        tmp_path / "steps" / "y.parquet",
        {**FACTS, "label": text, "seed": 2, "versions": {text: "another"}},
    )
    assert main(["lab", "report", str(tmp_path)]) == 0
    assert f"mismatch is {text} against" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("value", [1e308, -1e308, math.inf, -math.inf, math.nan, 1e-308])
def test_extreme_numbers_end_in_a_report(tmp_path, value):
    names = ("reward", "grad_norm", "step_seconds", "geomask/mismatch_abs", "geomask/kept_tokens", "geomask/weight_ess")
    for seed in (1, 2):
        values = [value, -value if math.isinf(value) else value] * 12
        columns = {"step": range(1, 25), "seed": [seed] * 24, "variant": [""] * 24, **dict.fromkeys(names, values)}
        write_run(tmp_path / "steps" / f"{seed}.parquet", {**FACTS, "seed": seed}, **columns)
    assert main(["lab", "report", str(tmp_path)]) == 0


@pytest.fixture
def run(tiny, tmp_path):
    """A run with an intact checkpoint of step 1, and no later one."""
    run = Run("gspo", tiny(), tmp_path)
    run.folder.mkdir(parents=True)
    write_checkpoint(run, 1, {"policy": {}})
    run.state_file.rename(run.previous_state_file)
    return run


FORMAT = b"nemo-geomask lab checkpoint, format 1\n"


def make_sparse_checkpoint(path):
    path.write_bytes(FORMAT)
    os.truncate(path, 2**31)


def make_compressed_checkpoint(path):
    buffer, packed = io.BytesIO(), io.BytesIO()
    torch.save({"run": "", "step": 2, "state": {"weights": torch.zeros(2**20)}}, buffer)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    payload = packed.getvalue()
    path.write_bytes(FORMAT + hashlib.sha256(payload).digest() + payload)


def test_a_checkpoint_of_other_objects_is_passed_over(run):
    """Its pickle calls ``bytearray``, which torch allows, and which can take any amount of memory."""
    write_checkpoint(run, 2, {"weights": bytearray(10)})
    checkpoint, warning = find_checkpoint(run)
    assert checkpoint.step == 1
    assert f"{run.state_file} does not hold the state of a run (ValueError)" in warning


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_sparse_checkpoint, "is larger than a checkpoint of this policy can be"),
        (make_compressed_checkpoint, "does not hold the state of a run (ValueError)"),
        (make_sparse, "is damaged, or another version of the lab wrote it"),
        (make_fifo, "is not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a file"),
        (lambda path: path.symlink_to(path.parent / "nowhere"), "can't be read (No such file or directory)"),
    ],
    ids=["sparse", "compressed", "other", "fifo", "device", "broken link"],
)
def test_a_checkpoint_that_is_none_is_passed_over(run, make, reason):
    make(run.state_file)
    checkpoint, warning = find_checkpoint(run)
    assert checkpoint.step == 1
    assert f"{run.state_file} {reason}" in warning
    run.previous_state_file.unlink()
    with pytest.raises(ConfigError, match="Remove state.pt there to train the run again from its first step"):
        find_checkpoint(run)
