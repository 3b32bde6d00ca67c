"""Number of values in a column's pages, from their headers, which is what decides how much memory decoding takes.

The file's metadata claim a number, too, but a decoder does not hold pages to it: a page of one kilobyte may decode to
gigabytes. Headers are in Thrift's compact protocol.

Source: https://github.com/apache/parquet-format, ``parquet.thrift``, ``PageHeader``.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["PageError", "count_values"]

_MAX_HEADER = 2**16
_FIRST_READ = 512
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
# Field of PageHeader that holds the page's own header, by the type of the page. Field 1 of it is the number of values.
_OWN_HEADER = {_DATA_PAGE: 5, _DICTIONARY_PAGE: 7, _DATA_PAGE_V2: 8}
_BYTES_A_VALUE, _BYTES_A_PAGE = 16, 4096
"""Upper bounds of a decompressed page, for numbers and booleans: 8 bytes of value and 2 numbers for the list."""
_BYTES_OF_TEXTS = 2**24
"""Largest number of bytes that the texts of a decompressed page take; writers end a page after a million or so."""


class PageError(ValueError):
    """A page header is damaged, or claims more than fits."""


def count_values(
    descriptor: int, start: int, end: int, max_values: int, max_pages: int, text_bytes: int = 0
) -> tuple[int, int]:
    """Return the number of values and of pages in a part of a file.

    Args:
        descriptor: the file.
        start, end: where the column's first page begins and where its last ends, in bytes.
        max_values: the largest number of values that the metadata claim.
        max_pages: the largest number of pages.
        text_bytes: the largest number of bytes of a text, for a column of texts.

    Raises: PageError: a header is damaged, or there are more values or pages.
    """
    values = pages = 0
    while start < end:
        header, length = _read_header(descriptor, start, end)
        page_fields = header.get(_OWN_HEADER.get(header.get(1, -1), -1))
        decompressed, compressed = (_size(header, field) for field in (2, 3))
        count = _size(page_fields, 1) if isinstance(page_fields, dict) else -1
        if min(compressed, decompressed, count) < 0:
            raise PageError(f"the page at byte {start} has no valid header")
        texts = min(text_bytes * count, _BYTES_OF_TEXTS)
        if count > max_values or decompressed > _BYTES_A_VALUE * count + _BYTES_A_PAGE + texts:
            raise PageError(f"the page at byte {start} claims {count:,} values in {decompressed:,} bytes")
        values += 0 if header[1] == _DICTIONARY_PAGE else count
        pages += 1
        if values > max_values or pages > max_pages:
            raise PageError(f"the pages before byte {start} hold {values:,} values in {pages:,} pages")
        start += length + compressed
    if start != end:
        raise PageError(f"a page ends at byte {start}, beyond its column, which ends at {end}")
    return values, pages


def _size(header: dict[int, Any], field: int) -> int:
    """Return a field that holds a size; -1 if it is not an integer."""
    value = header.get(field)
    return value if isinstance(value, int) else -1


def _read_header(descriptor: int, start: int, end: int) -> tuple[dict[int, Any], int]:
    """Return the fields of the page header at ``start``, and its length in bytes."""
    for size in (_FIRST_READ, _MAX_HEADER):
        data = os.pread(descriptor, min(size, end - start), start)
        try:
            return _read_struct(data, 0, 0)
        except IndexError:  # it is longer than what was read
            continue
    raise PageError(f"the page at byte {start} has no valid header")


def _read_struct(data: bytes, position: int, depth: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct, by number, and the position after it."""
    fields: dict[int, Any] = {}
    number = 0
    while (head := data[position]) != 0:
        position += 1
        type_code, step = head & 15, head >> 4
        if step:
            number += step
        else:
            number, position = _read_integer(data, position)
        value: Any
        match type_code:
            case 1 | 2:  # true, false
                value = type_code == 1
            case 3:  # a byte
                value, position = data[position], position + 1
            case 4 | 5 | 6:  # integers of 16, 32 and 64 bits
                value, position = _read_integer(data, position)
            case 8:  # bytes
                length, position = _read_varint(data, position)
                value, position = None, position + length
            case 12 if depth < 4:
                value, position = _read_struct(data, position, depth + 1)
            case _:  # page headers have no other types
                raise PageError(f"a page header has a field of type {type_code}")
        fields[number] = value
    return fields, position + 1


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise PageError("a page header has a number of more than 64 bits")


def _read_integer(data: bytes, position: int) -> tuple[int, int]:
    """Return an integer in zigzag encoding, and the position after it."""
    value, position = _read_varint(data, position)
    return (value >> 1) ^ -(value & 1), position
