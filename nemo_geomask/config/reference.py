"""The field table of ``docs/loss_reference.md``, from the schema itself.

``python -m nemo_geomask.config.reference docs/loss_reference.md`` rewrites the table between its markers.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from nemo_geomask.config.loss import LossConfig
from nemo_geomask.errors import ConfigError

__all__ = ["between_markers", "render", "rewrite"]

_MARK = "fields"


def render() -> str:
    """Markdown table of every field: name, allowed values, default, meaning with formula, source."""
    rows = ["| field | values | default | meaning | source |", "|---|---|---|---|---|"]
    for name, field in LossConfig.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        meaning = str(field.description)
        if "formula" in extra:
            meaning += f"<br>`{extra['formula']}`"
        cells = (f"`{name}`", _values(name, field), _default(field.default), meaning, str(extra.get("source", "")))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def rewrite(text: str) -> str:
    """``text`` with the table between the markers replaced by the current one.

    Raises:
        ConfigError: the markers are missing.
    """
    return between_markers(text, _MARK, render())


def between_markers(text: str, mark: str, content: str) -> str:
    """``text`` with what stands between ``<!-- mark: begin -->`` and ``<!-- mark: end -->`` replaced by ``content``.

    Raises:
        ConfigError: the markers are missing.
    """
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise ConfigError(f"the page has no '{begin}' … '{end}' to put the table between")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def _values(name: str, field: FieldInfo) -> str:
    if name == "masks":
        return "list of masks"
    literals = [value for value in _literals(field.annotation) if isinstance(value, str)]
    optional = type(None) in get_args(field.annotation)
    if literals:
        return ", ".join([*(f"`{value}`" for value in literals), *(["`null`"] if optional else [])])
    if get_origin(field.annotation) is dict:
        return "mapping"
    kinds = {bool: "true, false", float: "number", str: "text"}
    named = (field.annotation, *get_args(field.annotation))
    base = next((text for kind, text in kinds.items() if kind in named), "mapping")
    limits = [f"{sign} {bound}" for limit in field.metadata for sign, bound in _limit(limit)]
    return " ".join([base, *limits]) + (", `null`" if optional else "")


def _literals(annotation: Any) -> list[Any]:
    found: list[Any] = []
    for argument in get_args(annotation):
        found += _literals(argument) if get_args(argument) else [argument]
    return found


def _limit(limit: Any) -> list[tuple[str, float]]:
    return [(sign, getattr(limit, key)) for key, sign in (("gt", ">"), ("ge", "≥")) if hasattr(limit, key)]


def _default(value: Any) -> str:
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(rewrite(page.read_text(encoding="utf-8")), encoding="utf-8")
