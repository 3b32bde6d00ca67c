"""Files that readers find complete or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader finds all of it or what was there before; a link in its place is replaced.

    Args:
        path: the file, in a folder that exists.
        content: its bytes, or text that is written in UTF-8.

    Raises: OSError: the file can't be written, or a folder is in its place; then nothing is left of it.
    """
    # A name that nobody can foresee, created by this process alone: nothing is written through a planted link.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
