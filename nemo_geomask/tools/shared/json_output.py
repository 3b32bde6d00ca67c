"""JSON of the tools' ``--json`` output, in which numbers that are not finite are null, and JSON files written whole."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nemo_geomask.tools.shared.atomic_write import write_atomically

JSON_VERSION: Final = 1
"""Value of ``version`` in the JSON of every command.

It grows when a key is removed, renamed or gets another meaning. New keys may come under the same version.
"""

Number = float | None
"""Type of a number in JSON; one that is not finite is null."""
Interval = tuple[Number, Number]


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
    """Write a value as a JSON file; see :func:`~nemo_geomask.tools.shared.atomic_write.write_atomically`."""
    write_atomically(path, json.dumps(value))
