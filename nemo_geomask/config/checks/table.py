"""The table of rules in ``docs/check.md``.

``python -m nemo_geomask.config.checks.table docs/check.md`` rewrites it between its markers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_geomask.config.checks.run import RULES
from nemo_geomask.config.reference import between_markers

__all__ = ["render", "rewrite"]

_MARK = "rules"


def render() -> str:
    """Markdown table of every rule."""
    rows = ["| rule | severity | finds | source |", "|---|---|---|---|"]
    rows += [f"| {rule.id} | {rule.severity} | {rule.title} | {rule.source} |" for rule in RULES]
    return "\n".join(rows)


def rewrite(text: str) -> str:
    """``text`` with the table between the markers replaced by the current one.

    Raises:
        ConfigError: the markers are missing.
    """
    return between_markers(text, _MARK, render())


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(rewrite(page.read_text(encoding="utf-8")), encoding="utf-8")
