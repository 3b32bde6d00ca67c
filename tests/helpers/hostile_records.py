"""Hostile files in place of a record: each is a function that makes one, by the name of what is wrong with it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

from nemo_geomask.records.record_schema import arrow_schema

HUGE = 20_000_000
"""Number of tokens of the bombs: their tokens and masks decode to 100 MB, and to gigabytes in a survey."""


def _table(lengths, tokens=0, metadata=None):
    """Return a table whose columns are 0 except the lengths."""
    schema, rows = arrow_schema(), len(lengths)
    offsets = arrow.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    columns = []
    for field in schema:
        if not arrow.types.is_list(field.type):
            is_length = field.name == "length"
            numbers = lengths if is_length else np.arange(rows) if field.name == "row" else np.ones(rows)
            columns.append(arrow.array(np.asarray(numbers)).cast(field.type))
        elif field.name in ("tokens", "mask"):
            values = arrow.array(np.zeros(int(np.sum(lengths)), bool)).cast(arrow.int8()).cast(field.type.value_type)
            columns.append(arrow.ListArray.from_arrays(offsets, values))
        else:
            columns.append(arrow.nulls(rows, field.type))
    return arrow.Table.from_arrays(columns, schema=schema.with_metadata({**schema.metadata, **(metadata or {})}))


def _small(path: Path, **options) -> bytes:
    parquet.write_table(_table([3, 2]), path, **options)
    return path.read_bytes()


def _change(make: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(make(_small(path))) and None


ONE_PAGE = {"data_page_size": 2**30, "max_rows_per_page": 2**30}


def _bomb(compression: str, rows: int = 1, **options) -> Callable[[Path], None]:
    lengths = np.full(rows, HUGE // rows)
    return lambda path: parquet.write_table(_table(lengths), path, compression=compression, **options)


def _text_bomb(rows: int, size: int, **options) -> Callable[[Path], None]:
    """Return a maker of a bomb that has an environment with a long name in each row."""

    def make(path: Path) -> None:
        table = _table(np.ones(rows, int))
        index = table.schema.get_field_index("environment")
        names = arrow.DictionaryArray.from_arrays(arrow.array(np.zeros(rows, np.int32)), ["x" * size])
        table = table.set_column(index, arrow.field("environment", names.type), names)
        parquet.write_table(table, path, compression="zstd", **options)

    return make


def _varint(number: int, width: int = 0) -> bytes:
    """Return a number in Thrift's zigzag encoding, padded to a width."""
    value, encoded = number << 1, bytearray()
    while value or not encoded:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.extend([128] * (width - len(encoded)))
    encoded[-1] &= 127
    return bytes(encoded)


def _footer(data: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(data[-8:-4], "little")
    return data[: -8 - length], data[-8 - length : -8]


def _join(body: bytes, footer: bytes) -> bytes:
    return body + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _lying_bomb(claim: int, compression: str = "zstd") -> Callable[[Path], None]:
    """Return a maker of a bomb whose metadata claim few values; its pages say how many there are."""

    def make(path: Path) -> None:
        parquet.write_table(_table([HUGE]), path, compression=compression, write_statistics=False)
        body, footer = _footer(path.read_bytes())
        number = _varint(HUGE)
        path.write_bytes(_join(body, footer.replace(number, _varint(claim, len(number)))))

    return make


def _in_footer(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(data: bytes) -> bytes:
        body, footer = _footer(data)
        assert old in footer
        return _join(body, footer.replace(old, new))

    return _change(change)


def _many_groups(path: Path) -> None:
    table = _table([1000])
    with parquet.ParquetWriter(path, table.schema, compression="zstd") as writer:
        for _ in range(3000):
            writer.write_table(table)


def _wide_schema(path: Path) -> None:
    names = [f"removed.{number:05d}" for number in range(20_000)]
    table = arrow.table({name: arrow.nulls(1, arrow.list_(arrow.bool_())) for name in names})
    parquet.write_table(table.replace_schema_metadata(arrow_schema().metadata), path)


def _nested_schema(path: Path) -> None:
    value = arrow.array([1])
    for _ in range(200):
        value = arrow.StructArray.from_arrays([value], ["x"])
    parquet.write_table(_table([3]).append_column("deep", value), path)


def _sparse(path: Path) -> None:
    path.write_bytes(_small(path))
    data = path.read_bytes()
    with path.open("wb") as file:
        file.write(data[:4])
        file.seek(2**36)
        file.write(data[-600:])


def _socket(path: Path) -> None:
    # The path of a socket is short.
    folder = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(folder)


def _link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _link_to_record(path: Path) -> None:
    other = path.with_name("other.parquet")
    _small(other)
    path.symlink_to(other)


def _random(path: Path) -> None:
    body = np.random.default_rng(0).bytes(100_000)
    path.write_bytes(b"PAR1" + body + (50_000).to_bytes(4, "little") + b"PAR1")


def _flipped_header(path: Path) -> None:
    data = bytearray(_small(path))
    # The first page header: its sizes become huge.
    data[4:16] = b"\x15\x00\x15" + b"\xff" * 4 + b"\x0f" + bytes(data[12:16])
    path.write_bytes(data)


HOSTILE: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.touch(),
    "one byte": lambda path: path.write_bytes(b"P") and None,
    "the mark alone": lambda path: path.write_bytes(b"PAR1") and None,
    "the mark twice": lambda path: path.write_bytes(b"PAR1PAR1") and None,
    "zeros": lambda path: path.write_bytes(bytes(100_000)) and None,
    "random bytes between marks": _random,
    "text": lambda path: path.write_text("step,row\n1,2\n" * 1000) and None,
    "half": _change(lambda data: data[: len(data) // 2]),
    "without its last byte": _change(lambda data: data[:-1]),
    "without its first byte": _change(lambda data: data[1:]),
    "footer longer than the file": _change(lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1"),
    "footer of length 0": _change(lambda data: data[:-8] + bytes(4) + b"PAR1"),
    "negative footer length": _change(lambda data: data[:-8] + b"\xff\xff\xff\xffPAR1"),
    "footer of zeros": _change(lambda data: _join(_footer(data)[0], bytes(len(_footer(data)[1])))),
    "footer of ones": _change(lambda data: _join(_footer(data)[0], b"\xff" * len(_footer(data)[1]))),
    "encrypted": _change(lambda data: data[:-4] + b"PARE"),
    "another version": _in_footer(b"nemo_geomask.schema\x18\x011", b"nemo_geomask.schema\x18\x019"),
    "no version": _in_footer(b"nemo_geomask.schema", b"nemo_geomask.schemA"),
    "a list of a billion in the footer": _in_footer(b"\x19", b"\xf9\xff\xff\xff\xff\x0f"),
    "page header of ones": _flipped_header,
    "columns of zeros": _change(lambda data: data[:4] + bytes(len(_footer(data)[0]) - 4) + b"".join(
        (_footer(data)[1], data[-8:]))),
    "a FIFO": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a socket": _socket,
    "a link to a record": _link_to_record,
    "a link to nothing": _link_to("/nowhere/at/all"),
    "a link to /dev/zero": _link_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a folder": _link_to("/"),
    "64 GB of nothing": _sparse,
    "bomb: zstd": _bomb("zstd"),
    "bomb: gzip": _bomb("gzip"),
    "bomb: brotli": _bomb("brotli"),
    "bomb: dictionary": _bomb("none", use_dictionary=True),
    "bomb: many sequences": _bomb("zstd", rows=2_000_000, row_group_size=HUGE),
    "bomb: pages of format 2": _bomb("zstd", data_page_version="2.0"),
    "bomb: a name of 20 MB": _text_bomb(5, HUGE),
    "bomb: a name of 20 MB, not in a dictionary": _text_bomb(1, HUGE, use_dictionary=False),
    "bomb: a name of 4,000 bytes in a million rows": _text_bomb(1_000_000, 4000),
    "bomb: a million names in one page": _text_bomb(1_000_000, 128, use_dictionary=False, **ONE_PAGE),
    "bomb that claims 10 values": _lying_bomb(10),
    "bomb that claims a million values": _lying_bomb(1_000_000),
    "bomb that claims 0 values": _lying_bomb(0),
    "bomb without compression that claims 10 values": _lying_bomb(10, "none"),
    "3,000 row groups of 1,000 tokens": _many_groups,
    "20,000 columns": _wide_schema,
    "a column nested 200 deep": _nested_schema,
    "not a record": lambda path: parquet.write_table(arrow.table({"step": [1]}), path),
    "lists in place of numbers": lambda path: parquet.write_table(
        _table([3]).set_column(0, "step", arrow.array([[1]])), path
    ),
}  # fmt: skip
"""What makes each file; the argument is its path."""
LIMITS = {
    "64 GB of nothing": "record_bytes",
    "bomb: zstd": "row_group_tokens",
    "bomb: gzip": "row_group_tokens",
    "bomb: brotli": "row_group_tokens",
    "bomb: dictionary": "row_group_tokens",
    "bomb: pages of format 2": "row_group_tokens",
    "bomb: many sequences": "row_group_tokens",
    "3,000 row groups of 1,000 tokens": "footer_bytes",
    "20,000 columns": "footer_bytes",
}
"""Limit that the error names, of those that exceed one."""
