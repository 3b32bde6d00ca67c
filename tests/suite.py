"""The suite's results, recorded by environment, and the table of them.

``pytest -p tests.suite …`` records what a run came to in ``docs/hosts/suite.yaml``; ``python -m tests.suite``
writes the table in ``docs/reference/rehearsals.md``.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from pathlib import Path

import yaml

from nemo_geomask.tools.shared.markdown import markdown_table, replace_marked_text

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "hosts" / "suite.yaml"
PAGE = ROOT / "docs" / "reference" / "rehearsals.md"

_PACKAGES = ("torch", "triton", "numpy", "transformers", "megatron-core")
_OUTCOMES = ("passed", "failed", "error", "skipped")


def environment() -> dict[str, str]:
    """Versions of Python and of what the tests lean on most; what is not installed has none."""
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def recorded() -> list[dict]:
    return yaml.safe_load(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Of the run that ends: a part of the suite is named by its arguments, and replaced when it is run again."""
    counts = {outcome: len(terminalreporter.stats.get(outcome, [])) for outcome in _OUTCOMES}
    part = " ".join([config.option.markexpr or "all", *(arg for arg in config.args if arg != "tests")])
    everything, here = recorded(), environment()
    of_here = next((entry for entry in everything if entry["environment"] == here), None)
    if of_here is None:
        of_here = {"environment": here, "parts": {}}
        everything.append(of_here)
    warnings = len(terminalreporter.stats.get("warnings", []))
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    of_here["parts"][part] = {"date": date, **counts, "warnings": warnings}
    RECORD.write_text(yaml.safe_dump(everything, sort_keys=False), encoding="utf-8")


def table(everything: list[dict]) -> str:
    """Markdown: a row a part of the suite in an environment."""
    columns = ("Python", *_PACKAGES, "tests", "passed", "failed", "skipped", "warnings", "date")
    rows = []
    for entry in everything:
        for part, found in entry["parts"].items():
            counts = (found["passed"], found["failed"] + found["error"], found["skipped"], found["warnings"])
            rows.append([*entry["environment"].values(), part, *map(str, counts), found["date"]])
    return markdown_table(columns, rows)


def rewrite(text: str) -> str:
    """The page with the current table."""
    return replace_marked_text(text, "suite", table(recorded()), page="rehearsals.md")


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
