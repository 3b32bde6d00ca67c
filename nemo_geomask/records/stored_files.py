"""Files of records on disk: complete from the moment they have their name, never written through a link.

A file is written under a random name that did not exist, gets its checksum, is forced to the disk, and is then linked
to its own name. Linking fails if the name is taken, so no two writers overwrite each other's file.

The checksum is in the file's own metadata: SHA-256 over all bytes, with zeros in place of the checksum itself. It is
checked before the file is decoded, and it covers the metadata, too. It tells damage, not forgery.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from nemo_geomask.records.record_schema import CHECKSUM_KEY, ORIGIN_KEY, RecordOrigin, require_arrow

_DIGITS = 64
_PREFIX = "sha256:"
PLACEHOLDER = f"{_PREFIX}{'0' * _DIGITS}"
"""Value of :data:`CHECKSUM_KEY` while a file is written."""
TAIL = 8
"""Bytes after the metadata: their length, 4 bytes little-endian, and the mark ``PAR1``."""
# Between key and value are the type and the length of the value.
_ENTRY = re.compile(re.escape(CHECKSUM_KEY.encode()) + rb".{2}" + _PREFIX.encode() + rb"([0-9a-f]{64})", re.DOTALL)
_CHUNK = 2**20
# File systems without hard links, such as those of object stores, answer one of these.
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK}


class FileIdentity(NamedTuple):
    """Numbers that tell a file from another under the same name."""

    inode: int
    modified: int
    size: int


class StoredFile(NamedTuple):
    """Name of a file in its folder, and its identity."""

    name: str
    identity: FileIdentity


def identify(status: os.stat_result) -> FileIdentity:
    """Return the identity of a file."""
    return FileIdentity(status.st_ino, status.st_mtime_ns, status.st_size)


@contextlib.contextmanager
def open_folder(directory: Path) -> Iterator[int]:
    """Create a folder if it does not exist, and yield a descriptor of it.

    Raises: OSError: it can't be created, or is a symbolic link or no folder.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if directory.is_symlink():
            message = "the folder is a symbolic link, which records are not written through; name what it leads to"
            raise OSError(error.errno, message, str(directory)) from None
        raise
    try:
        yield folder
    finally:
        os.close(folder)


def store_record(
    folder: int,
    name: str,
    schema: Any,
    tables: Iterable[Any],
    *,
    origin: RecordOrigin,
    may_replace: Callable[[FileIdentity], bool] = lambda identity: False,
    row_group_size: int | None = None,
    **options: Any,
) -> StoredFile:
    """Write tables as one file with a checksum.

    Args:
        folder: descriptor of the folder.
        name: name of the file, which ends in ``.parquet``. If it is taken by a file that must not be replaced, the
            file gets a random suffix before the ending.
        schema: schema of the tables.
        tables: the tables, each at least one row group.
        origin: what writes the file, for its metadata.
        may_replace: returns True if the file that has the name may be replaced.
        row_group_size: largest number of rows in a row group.
        options: options of ``pyarrow.parquet.ParquetWriter``.

    Raises: OSError: the file can't be written; nothing is left of it.
    """
    parquet = require_arrow("pyarrow.parquet")
    stem = name.removesuffix(".parquet")
    part = f".{stem}-{secrets.token_hex(8)}.part"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(part, flags, 0o666, dir_fd=folder), "w+b") as file:
            writer = parquet.ParquetWriter(file, schema, **options)
            try:
                for table in tables:
                    writer.write_table(table, row_group_size)
                writer.add_key_value_metadata({ORIGIN_KEY: json.dumps(asdict(origin)), CHECKSUM_KEY: PLACEHOLDER})
            finally:
                writer.close()
            file.flush()
            descriptor, size = file.fileno(), file.tell()
            start, footer = read_footer(descriptor, size)
            entry = find_checksum(footer)
            assert entry is not None
            position = start + entry[0]
            os.pwrite(descriptor, hash_without(descriptor, size, position).encode(), position)
            os.fsync(descriptor)
            identity = identify(os.fstat(descriptor))
        return StoredFile(_put_in_place(folder, part, name, may_replace), identity)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=folder)


def _put_in_place(folder: int, part: str, name: str, may_replace: Callable[[FileIdentity], bool]) -> str:
    """Give a complete file its name, or one with a random suffix if the name is taken; return its name."""
    if _link(folder, part, name):
        return name
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if may_replace(identify(status)):
            os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            return name
    other_name = f"{name.removesuffix('.parquet')}-{secrets.token_hex(4)}.parquet"
    if not _link(folder, part, other_name):
        raise FileExistsError(errno.EEXIST, "the name is taken", other_name)
    return other_name


def _link(folder: int, part: str, name: str) -> bool:
    """Give a file a second name; return False if that name is taken."""
    try:
        os.link(part, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            return False
    return True


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
