"""A record file that was damaged, or holds rows that contradict each other, is an error that names the file."""

import random

import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow as arrow
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from nemo_geomask.errors import DataError
from nemo_geomask.records.record_checks import open_record, read_origin
from nemo_geomask.records.record_schema import CHECKSUM_KEY, ORIGIN_KEY
from nemo_geomask.records.writer import StepRows, write_step

LENGTHS = torch.tensor([5, 3, 7, 2])
NAME = "step-0000004-driver.parquet"


def record(folder):
    generator = torch.Generator().manual_seed(3)
    logprobs = torch.randn(4, 7, generator=generator)
    values = {
        "row": torch.arange(4),
        "group": torch.tensor([0, 0, 1, 1]),
        "sample": torch.tensor([0, 1, 0, 1]),
        "prompt_length": torch.tensor([2, 2, 3, 0]),
        "turns": torch.ones(4, dtype=torch.int64),
        "sample_mask": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "tokens": torch.arange(28).view(4, 7),
        "mask": torch.ones(4, 7, dtype=torch.bool),
        "gen": logprobs,
        "removed.veto": logprobs > 0,
    }
    return write_step(folder, 4, StepRows(LENGTHS, values), masks=["veto"])


def read(path):
    with open_record(path) as file:
        return list(file.tables())


REGIONS = 20


@pytest.mark.parametrize("region", range(REGIONS))
def test_a_flipped_bit_anywhere_is_noticed(tmp_path, region):
    path = record(tmp_path)
    data = path.read_bytes()
    assert read(path)
    draw = random.Random(region)
    size = len(data) // REGIONS
    end = len(data) if region == REGIONS - 1 else (region + 1) * size
    for _ in range(12):
        position, bit = draw.randrange(region * size, end), draw.randrange(8)
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :])
        with pytest.raises(DataError, match=NAME):
            read(path)


@pytest.mark.parametrize("key", [CHECKSUM_KEY, ORIGIN_KEY])
def test_a_damaged_name_of_a_key_does_not_pass_for_a_file_of_an_earlier_version(tmp_path, key):
    path = record(tmp_path)
    data = path.read_bytes()
    assert data.count(key.encode()) == 1
    path.write_bytes(data.replace(key.encode(), key.replace("g", "f").encode()))
    with pytest.raises(DataError, match=NAME):
        read(path)


@pytest.mark.parametrize("kept", [0, 1, 4, 8, 12, 100, 2000, -1, -8, -200])
def test_a_truncated_file_is_named(tmp_path, kept):
    path = record(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=rf"{NAME}: can't be read as a record: it (is empty|does not end as Parquet)"):
        read(path)


def test_bytes_between_columns_are_covered(tmp_path):
    path = record(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:1000] + b"\0" + data[1000:])
    with pytest.raises(DataError, match=NAME):
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


@pytest.mark.parametrize(
    "origin",
    [b"[" * 990, b'{"writer": "driver", "id": "x", "started": 1.0, "first_step": 1' + b"0" * 400 + b"}", b"[]", b"{}"],
)
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


def permuted(table):
    return with_column("length", [3, 5, 7, 2])(table)


def null_token(table):
    values = table["gen"].to_pylist()
    values[2][3] = None
    return with_column("gen", values)(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (permuted, "row 0: length is 3, but tokens has 5 tokens"),
        (with_column("mask", [[True] * n for n in (5, 3, 6, 2)]), "row 2: length is 7, but mask has 6 tokens"),
        (with_column("gen", [[0.0] * n for n in (5, 3, 7, 3)]), "row 3: length is 2, but gen has 3 tokens"),
        (with_column("removed.veto", [[True] * 4, None, None, None]), "row 0: length is 5, but removed.veto has 4"),
        (with_column("row", [0, 1, 2, 1]), "row 3: row is 1, but must be another number in each row; .*two runs"),
        (with_column("row", [0, -1, 2, 1]), "row 1: row is -1, but must be at least 0"),
        (with_column("step", [4, 4, 4, 5]), "row 3: step is 5, but must be 4, as in the file's name"),
        (with_column("step", [9, 9, 9, 9]), "row 0: step is 9, but must be 4"),
        (with_column("prompt_length", [2, 4, 3, 0]), "row 1: prompt_length is 4, but must be at most length"),
        (with_column("sample_mask", [1, 1, float("nan"), 1]), "row 2: sample_mask is nan, but must be finite"),
        (with_column("sample_mask", [1, 1, 1, float("inf")]), "row 3: sample_mask is inf, but must be finite"),
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
        (with_column("environment", arrow.array([b"a"] * 4)), "column environment is binary, but records have string"),
        (with_column("removed.veto", [1, 2, 3, 4]), None),
        (lambda table: table.append_column("row", table["row"]), "has several columns named row"),
    ],
)
def test_rows_and_columns_that_contradict_the_schema_are_named(tmp_path, change, message):
    path = record(tmp_path)
    if message is None:
        change, message = with_column("removed.veto", arrow.array([1, 2, 3, 4])), "column removed.veto is int64"
    rewrite(path, change)
    with pytest.raises(DataError, match=rf"{NAME}: {message}"):
        read(path)


@pytest.mark.parametrize(
    "options",
    [{"use_dictionary": False}, {}, {"dictionary_pagesize_limit": 1, "data_page_size": 1, "write_batch_size": 1}],
    ids=["plain", "dictionary", "both"],
)
def test_texts_are_read_however_they_are_encoded(tmp_path, options):
    path = record(tmp_path)
    names = ["math", None, "code", "math"]
    rewrite(path, with_column("environment", names))
    parquet.write_table(parquet.read_table(path), path, **options)
    (table,) = read(path)
    assert table["environment"].to_pylist() == names
    assert len(table["environment"].combine_chunks().dictionary) == 2


def test_a_text_that_is_not_utf_8_is_named(tmp_path):
    reader = pytest.importorskip("nemo_geomask.tools.diagnose.record_reader", reason="diagnose decodes texts")
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


def test_columns_of_a_later_version_are_not_read(tmp_path):
    path = record(tmp_path)
    rewrite(path, lambda table: table.append_column("perplexity", arrow.array(["x"] * 4)))
    (table,) = read(path)
    assert "perplexity" not in table.column_names
    assert table.num_rows == 4
