"""Picture of the report of ``diagnose``: ``python -m tests.pages.report_picture LOGS docs/evidence/report.svg``."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from nemo_geomask.cli import main as run_command

_LINES, _WIDTH = 9, 118


def report_picture(logs: str) -> str:
    """Return the first lines of the report on a run as an SVG."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_command(["diagnose", logs, "--full"])
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    console.print(Text("$ nemo-geomask diagnose records --full", style="bold"))
    text = printed.getvalue().replace(logs, "records")
    for line in text.splitlines()[:_LINES]:
        # The verdict is wrapped; a row of the table is cut.
        console.print(Text(line), overflow="ellipsis", no_wrap=line.startswith("  ") and not line.startswith("  to do"))
    svg = console.export_svg(title="")
    return re.sub(r"\s*@font-face \{.*?\n    \}", "", svg, flags=re.DOTALL)  # fonts from another host


def main() -> None:
    logs, path = sys.argv[1:]
    Path(path).write_text(report_picture(logs), encoding="utf-8")


if __name__ == "__main__":
    main()
