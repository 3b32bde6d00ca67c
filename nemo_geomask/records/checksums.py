"""Checksum of a Parquet file in its own metadata: SHA-256 over all bytes, with zeros in place of the checksum itself.

It is checked before the file is decoded, and it covers the metadata, too. It tells damage, not forgery.
"""

from __future__ import annotations

import hashlib
import os
import re

from nemo_geomask.records.record_schema import CHECKSUM_KEY

__all__ = ["PLACEHOLDER", "Sha256", "find_checksum", "hash_without", "read_footer", "write_checksum"]

Sha256 = type(hashlib.sha256())
_DIGITS = 64
_PREFIX = "sha256:"
PLACEHOLDER = f"{_PREFIX}{'0' * _DIGITS}"
"""Value of :data:`CHECKSUM_KEY` while a file is written."""
TAIL = 8
"""Bytes after the metadata: their length, 4 bytes little-endian, and the mark ``PAR1``."""
# Between key and value are the type and the length of the value.
_ENTRY = re.compile(re.escape(CHECKSUM_KEY.encode()) + rb".{2}" + _PREFIX.encode() + rb"([0-9a-f]{64})", re.DOTALL)
_CHUNK = 2**20


def read_footer(descriptor: int, size: int) -> tuple[int, bytes]:
    """Return the offset and the bytes of a Parquet file's metadata; the caller has checked their length."""
    length = int.from_bytes(os.pread(descriptor, 4, size - TAIL), "little")
    start = size - TAIL - length
    return start, os.pread(descriptor, length, start)


def find_checksum(footer: bytes) -> tuple[int, str] | None:
    """Return where in the metadata the digits of the checksum begin, and the digits; None if there is no checksum."""
    matches = list(_ENTRY.finditer(footer))
    return (matches[-1].start(1), matches[-1][1].decode()) if matches else None


def hash_without(descriptor: int, size: int, position: int) -> str:
    """Return the SHA-256 of a file's bytes, with zeros in place of the checksum's digits at ``position``."""
    digest = hashlib.sha256()
    zeros = b"0" * _DIGITS
    for start, end in ((0, position), (position + _DIGITS, size)):
        for offset in range(start, end, _CHUNK):
            digest.update(os.pread(descriptor, min(_CHUNK, end - offset), offset))
        if start == 0:
            digest.update(zeros)
    return digest.hexdigest()


def write_checksum(descriptor: int, size: int, digest: str) -> None:
    """Put the digest of a file that holds :data:`PLACEHOLDER` in its place."""
    start, footer = read_footer(descriptor, size)
    entry = find_checksum(footer)
    assert entry is not None
    os.pwrite(descriptor, digest.encode(), start + entry[0])
