"""JSON of the tools' ``--json`` output, in which numbers that are not finite are null, and JSON files written whole."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

JSON_VERSION = 1
"""Value of ``version`` in the JSON of every command.

It grows when a key is removed, renamed or gets another meaning. New keys may come under the same version.
"""


def replace_nonfinite(value: Any) -> Any:
    """Return a copy of nested mappings, lists and tuples with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any) -> str:
    """Return indented JSON text of a value, without a final newline; NaN and infinities become null."""
    return json.dumps(replace_nonfinite(value), ensure_ascii=False, indent=2, allow_nan=False)


def write_json_file(path: Path, value: Any) -> None:
    """Write a value as JSON so that a reader finds all of it or no file; a link in its place is replaced, not followed.

    Raises: OSError: the file can't be written, or a folder is in its place.
    """
    # A name that nobody can foresee, created by this process alone: nothing is written through a planted link.
    descriptor, partial = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
