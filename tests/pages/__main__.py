"""Print the parts of the documentation that are made from the code: ``python -m tests.pages NAME``.

They are not committed. ``docs/conf.py`` puts each in the place of ``<!-- site: NAME -->``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.evidence.hosts import case_matrix, recipe_table
from tests.pages import api, command_line, metrics, peers, tables

SITE: Mapping[str, Callable[[], str]] = {
    "api": api.api_sections,
    "command_line": command_line.command_sections,
    "host_patches": tables.host_patch_table,
    "loss_fields": tables.field_table,
    "mask_fields": tables.mask_field_table,
    "metric_limits": metrics.limit_table,
    "metrics": metrics.metric_sections,
    "objectives": tables.objective_table,
    "peers": peers.peer_sections,
    "presets": tables.preset_table,
    "recipes": recipe_table.recipe_tables,
    "record_columns": tables.record_column_table,
    "record_settings": tables.record_setting_table,
    "rehearsals": case_matrix.result_table,
    "rules": tables.rule_table,
    "switches": tables.switch_table,
}
"""Function that returns each part, by the name in its marker."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pages", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part to print")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="write all parts there instead, one file each")
    options = parser.parse_args(arguments)
    if not {*options.names} <= {*SITE} or not (options.names or options.to):
        parser.error(f"name some of {', '.join(SITE)}, or --to FOLDER")
    for name in options.names:
        print(SITE[name](), end="\n\n")
    if options.to is not None:
        options.to.mkdir(parents=True, exist_ok=True)
        for name, part in SITE.items():
            (options.to / f"{name}.md").write_text(part() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
