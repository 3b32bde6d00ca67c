"""A record file that was damaged, or holds rows that contradict each other, is an error that names the file."""

import os
import random

import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow as arrow
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from nemo_geomask.errors import DataError, InputLimitError
from nemo_geomask.recipe.input_limits import InputLimits, use_limits
from nemo_geomask.records.record_checks import open_record, read_origin
from nemo_geomask.records.record_schema import CHECKSUM_KEY, ORIGIN_KEY
from nemo_geomask.records.step_table import StepRows
from tests.helpers.record_rows import step_rows, write_step

LENGTHS = torch.tensor([5, 3, 7, 2])
NAME = "step-0000004-driver.parquet"


def record(folder):
    logprobs = torch.randn(4, 7, generator=torch.Generator().manual_seed(3))
    values = {**step_rows().values, "gen": logprobs, "removed.veto": logprobs > 0}
    return write_step(folder, 4, StepRows(LENGTHS, values), masks=["veto"])


def read(path):
    with open_record(path) as file:
        return list(file.tables())


def test_a_flipped_bit_anywhere_is_noticed(tmp_path):
    path = record(tmp_path)
    data = path.read_bytes()
    assert read(path)
    draw = random.Random(0)
    for position in range(0, len(data), len(data) // 120):
        position = min(position + draw.randrange(len(data) // 120), len(data) - 1)
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << draw.randrange(8))]) + data[position + 1 :])
        with pytest.raises(DataError, match=NAME):
            read(path)


def footer(data):
    """Where the metadata of a file begin."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


DAMAGE = {
    "empty": (lambda data: b"", "it is empty"),
    "half": (lambda data: data[: len(data) // 2], "it does not end as Parquet does"),
    "without its last byte": (lambda data: data[:-1], "it does not end as Parquet does"),
    "without its first byte": (lambda data: data[1:], ""),
    "a byte more between columns": (lambda data: data[:1000] + b"\0" + data[1000:], ""),
    "text": (lambda data: b"step,row\n1,2\n" * 100, "it does not end as Parquet does"),
    "zeros": (lambda data: bytes(len(data)), "it does not end as Parquet does"),
    "footer longer than the file": (
        lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1",
        "it does not end as Parquet does",
    ),
    "footer of ones": (lambda data: data[: footer(data)] + b"\xff" * (len(data) - footer(data) - 8) + data[-8:], ""),
    "columns of zeros": (
        lambda data: data[:4] + bytes(footer(data) - 4) + data[footer(data) :],
        "do not match their che",
    ),
    # Not taken for a file of an earlier version, which has neither.
    "another checksum key": (lambda data: data.replace(CHECKSUM_KEY.encode(), b"nemo_feomask.checksum"), ""),
    "another origin key": (lambda data: data.replace(ORIGIN_KEY.encode(), b"nemo_feomask.origin"), ""),
}


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_named(tmp_path, change, message):
    path = record(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=f"{NAME}.*{message}"):
        read(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is a FIFO"),
        (os.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "is a character device"),
        (lambda path: path.symlink_to("nowhere"), "No such file"),
    ],
)
def test_what_is_no_file_is_named(tmp_path, make, message):
    make(tmp_path / NAME)
    with pytest.raises(DataError, match=f"{NAME}.*{message}"):
        read(tmp_path / NAME)


@pytest.mark.parametrize(
    ("limit", "value"),
    [("record_bytes", 100), ("footer_bytes", 100), ("row_group_tokens", 16), ("record_tokens", 16)],
)
def test_a_file_is_held_to_the_limits_before_it_is_decoded(tmp_path, limit, value):
    path = record(tmp_path)
    with use_limits(InputLimits(**{limit: value})), pytest.raises(InputLimitError, match=f"{NAME}.*limit {limit}"):
        read(path)


def test_a_small_file_may_not_claim_millions_of_tokens(tmp_path):
    lengths = torch.full((4,), 2**20)
    zeros = torch.zeros(4, 2**20, dtype=torch.int32)
    values = {**step_rows().values, "tokens": zeros, "mask": zeros.bool(), "gen": zeros}
    path = write_step(tmp_path, 4, StepRows(lengths, values))
    with use_limits(InputLimits(tokens_per_byte=1)), pytest.raises(InputLimitError, match="limit tokens_per_byte"):
        read(path)


def rewrite(path, change):
    """Write a changed table as an earlier version would: without a checksum."""
    table = change(parquet.read_table(path))
    metadata = {
        key: value
        for key, value in table.schema.metadata.items()
        if key.decode() not in (CHECKSUM_KEY, ORIGIN_KEY, "ARROW:schema")
    }
    parquet.write_table(table.replace_schema_metadata(metadata), path)


def test_a_file_of_an_earlier_version_is_read_and_has_no_checksum(tmp_path):
    path = record(tmp_path)
    with open_record(path) as file:
        assert file.has_checksum
        assert file.origin.writer == "driver"
        (expected,) = file.tables()
    rewrite(path, lambda table: table)
    with open_record(path) as file:
        assert not file.has_checksum
        assert file.origin is None
        (table,) = file.tables()
    assert table.to_pylist() == expected.to_pylist()


@pytest.mark.parametrize("origin", [b"[" * 990, b'{"writer": "driver", "started": "now"}', b"[]", b"{}"])
def test_a_hostile_origin_is_damage(tmp_path, origin):
    path = record(tmp_path)
    table = parquet.read_table(path)
    kept = {key: value for key, value in table.schema.metadata.items() if key != CHECKSUM_KEY.encode()}
    parquet.write_table(table.replace_schema_metadata({**kept, ORIGIN_KEY.encode(): origin}), path)
    assert read_origin(path) is None
    with pytest.raises(DataError, match="no valid nemo_geomask.origin"), open_record(path):
        pass


def with_column(name, values):
    def change(table):
        index = table.schema.get_field_index(name)
        field = table.schema.field(index)
        column = values if isinstance(values, arrow.Array) else arrow.array(values, field.type)
        # A required column may hold nulls once its field allows them.
        return table.set_column(index, arrow.field(name, column.type, metadata=field.metadata), column)

    return change


def null_token(table):
    values = table["gen"].to_pylist()
    values[2][3] = None
    return with_column("gen", values)(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_column("length", [3, 5, 7, 2]), "row 0: length is 3, but tokens has 5 tokens"),
        (with_column("mask", [[True] * n for n in (5, 3, 6, 2)]), "row 2: length is 7, but mask has 6 tokens"),
        (with_column("removed.veto", [[True] * 4, None, None, None]), "row 0: length is 5, but removed.veto has 4"),
        (with_column("row", [0, 1, 2, 1]), "row 3: row is 1, but must be another number in each row; .*two runs"),
        (with_column("row", [0, -1, 2, 1]), "row 1: row is -1, but must be at least 0"),
        (with_column("step", [4, 4, 4, 5]), "row 3: step is 5, but must be 4, as in the file's name"),
        (with_column("prompt_length", [2, 4, 3, 0]), "row 1: prompt_length is 4, but must be at most length"),
        (with_column("sample_mask", [1, 1, float("nan"), 1]), "row 2: sample_mask is nan, but must be finite"),
        (with_column("sample_mask", [-1, 1, 1, 1]), "row 0: sample_mask is -1.0, but must be finite and at least 0"),
        (with_column("group", [0, None, 1, 1]), "row 1: group is null, but every record has it"),
        (with_column("tokens", [[1] * 5, [1] * 3, None, [1] * 2]), "row 2: tokens is null"),
        (null_token, "row 2: gen has a token without a value"),
        (lambda table: table.drop_columns(["mask"]), "has no column mask, which every record has"),
        (with_column("row", arrow.array([0, 1, 2, 3], arrow.int64())), "column row is int64, but records have int32"),
        (
            lambda table: with_column("gen", compute.cast(table["gen"], arrow.list_(arrow.float64())).combine_chunks())(
                table
            ),
            r"column gen is list<.*double>, but records have list<.*float>",
        ),
        (with_column("environment", ["a", None, "", "b"]), "row 2: the size of environment is 0, but must be 1 to 128"),
        (with_column("environment", ["a", None, "b", "c" * 129]), "row 3: the size of environment is 129, but must be"),
        (with_column("environment", arrow.array([1, 2, 3, 4])), "column environment is int64, but records have string"),
        (with_column("removed.veto", arrow.array([1, 2, 3, 4])), "column removed.veto is int64"),
        (lambda table: table.append_column("row", table["row"]), "has several columns named row"),
    ],
)
def test_rows_and_columns_that_contradict_the_schema_are_named(tmp_path, change, message):
    path = record(tmp_path)
    rewrite(path, change)
    with pytest.raises(DataError, match=rf"{NAME}: {message}"):
        read(path)


@pytest.mark.parametrize("use_dictionary", [False, True])
def test_texts_are_read_however_they_are_encoded(tmp_path, use_dictionary):
    path = record(tmp_path)
    names = ["math", None, "code", "math"]
    rewrite(path, with_column("environment", names))
    parquet.write_table(parquet.read_table(path), path, use_dictionary=use_dictionary)
    (table,) = read(path)
    assert table["environment"].to_pylist() == names
    assert len(table["environment"].combine_chunks().dictionary) == 2


def test_a_text_that_is_not_utf_8_is_named(tmp_path):
    reader = pytest.importorskip("nemo_geomask.tools.diagnose.read.record_reader", reason="diagnose decodes texts")
    path = record(tmp_path)
    rewrite(path, with_column("environment", ["abcdefgh"] * 4))
    parquet.write_table(parquet.read_table(path), path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"abcdefgh", b"\xff\xfeabcdef"))
    with pytest.raises(DataError, match=rf"{NAME}: can't be read as a record: .*utf-8"):
        list(reader.read_blocks(path))


def test_a_row_number_that_an_earlier_row_group_has_is_named(tmp_path):
    path = record(tmp_path)
    rewrite(path, with_column("row", [0, 1, 2, 0]))
    table = parquet.read_table(path)
    parquet.write_table(table, path, row_group_size=1)
    with pytest.raises(DataError, match="row 3: row is 0, but must be another number"):
        read(path)


def test_columns_of_a_later_version_are_not_read_and_those_that_an_earlier_one_lacks_are_not_missed(tmp_path):
    path = record(tmp_path)
    rewrite(path, lambda table: table.append_column("perplexity", arrow.array(["x"] * 4)).drop_columns(["environment"]))
    (table,) = read(path)
    assert not {"perplexity", "environment"} & set(table.column_names)
    assert table.num_rows == 4
