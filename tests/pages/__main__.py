"""Write the parts of the documentation that are made from the code: ``python -m tests.pages``.

It replaces the tables of the committed pages between their markers. With ``--site FOLDER`` it writes the parts that are
not committed, one file each, which ``docs/conf.py`` puts in the place of ``<!-- site: NAME -->``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from nemo_geomask.tools.shared.markdown import replace_marked_text
from tests.evidence.hosts import case_matrix, recipe_table
from tests.pages import api, command_line, metrics, peers, tables

DOCS = Path(__file__).parents[2] / "docs"

COMMITTED: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "reference/loss_reference.md": {"fields": tables.field_table, "objectives": tables.objective_table},
    "reference/nemo_rl.md": {"patches": tables.host_patch_table},
    "reference/records.md": {"columns": tables.record_column_table, "settings": tables.record_setting_table},
}
"""Function that returns each table of a committed page, by page and marker."""

SITE: Mapping[str, Callable[[], str]] = {
    "api": api.api_sections,
    "command_line": command_line.command_sections,
    "metric_limits": metrics.limit_table,
    "metrics": metrics.metric_sections,
    "peers": peers.peer_sections,
    "recipes": recipe_table.recipe_tables,
    "rehearsals": case_matrix.result_table,
    "rules": tables.rule_table,
    "switches": tables.switch_table,
}
"""Function that returns each part of the site that is not committed, by the name in its marker."""


def update(page: str, text: str) -> str:
    """Return the text of a page of :data:`COMMITTED` with the current tables between its markers."""
    for mark, table in COMMITTED[page].items():
        text = replace_marked_text(text, mark, table(), page=page)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pages", description=__doc__)
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="write the parts of the site instead")
    folder = parser.parse_args().site
    if folder is None:
        for page in COMMITTED:
            path = DOCS / page
            path.write_text(update(page, path.read_text(encoding="utf-8")), encoding="utf-8")
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in SITE.items():
        (folder / f"{name}.md").write_text(part() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
