"""The tables of the pages that say what the code says.

``python -m nemo_geomask.checks.pages docs`` rewrites them between their markers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from nemo_geomask.checks.objective import surrogate_parts
from nemo_geomask.checks.report import RULES
from nemo_geomask.config.fields import Recording
from nemo_geomask.config.loss import LossConfig
from nemo_geomask.config.plugins import PluginGroup
from nemo_geomask.config.strict import as_yaml
from nemo_geomask.errors import ArgumentError
from nemo_geomask.losses import PolicyLoss, available, build_loss
from nemo_geomask.records import COLUMNS

__all__ = ["TABLES", "between_marks", "columns", "fields", "markdown", "objectives", "recording", "rewrite", "rules"]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; a bar within a cell is one of the cell's."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *rows)]
    return "\n".join([f"| {lines[0]} |", "|---" * len(head) + "|", *(f"| {line} |" for line in lines[1:])])


def rules() -> str:
    """Markdown table of every rule."""
    return markdown(
        ("rule", "severity", "finds", "source"), ((rule.id, rule.severity, rule.title, rule.source) for rule in RULES)
    )


def fields() -> str:
    """Markdown table of every field: name, allowed values, default, meaning with formula, source."""
    rows = []
    for name, field in LossConfig.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        meaning = str(field.description)
        if "formula" in extra:
            meaning += f"<br>`{extra['formula']}`"
        rows.append((f"`{name}`", _values(name, field), _default(field.default), meaning, str(extra.get("source", ""))))
    return markdown(("field", "values", "default", "meaning", "source"), rows)


# What NeMo-RL's flags make of clipped_pg.
_FLAGS: tuple[Mapping[str, Any], ...] = (
    {"ratio_clip_c": 3.0},
    {"sequence_level_importance_ratios": True, "token_level_loss": False},
    {"use_cispo": True},
    {"disable_ppo_ratio": True},
    {"force_on_policy_ratio": True},
)


def objectives() -> str:
    """Markdown table of the package's objectives: per-token loss at its defaults, these, source."""
    own = [name for name, entries in available().items() if entries[0].distribution == "nemo-geomask"]
    losses: list[tuple[PolicyLoss, Mapping[str, Any]]] = []
    for name in own:
        losses += [(build_loss({"name": name}), {})]
        losses += [(build_loss({"name": name, **flags}), flags) for flags in _FLAGS if name == "clipped_pg"]
    rows = []
    for loss, flags in losses:
        variant = loss.variant
        name = f"`{loss.config.name}`" + "".join(f"<br>`{setting}`" for setting in _written(flags))
        options = {f"options.{key}": field.default for key, field in variant.options.model_fields.items()}
        defaults = _written({**variant.defaults, **variant.forces, **options})
        formulas = "<br>".join(f"`{part.formula}`" for part in surrogate_parts(loss))
        own_defaults = "<br>".join(f"`{setting}`" for setting in defaults) or "–"
        rows.append((name, formulas, own_defaults, "" if flags else variant.source))
    return markdown(("name", "ℓ", "own defaults", "source"), rows)


def _written(settings: Mapping[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        yield f"{key}: {f'{value:.4g}' if isinstance(value, float) else as_yaml(value)}"


def columns() -> str:
    """Markdown table of a record's columns."""
    rows = [
        (f"`{column.name}`", f"{column.kind}{'' if column.always else ' or null'}", column.definition)
        for column in COLUMNS
    ]
    return markdown(("column", "Arrow type", "what it holds"), rows)


def recording() -> str:
    """Markdown table of the settings under ``record``."""
    rows = []
    for name, field in Recording.model_fields.items():
        default = "needed" if field.is_required() else _default(field.default)
        rows.append((f"`{name}`", default, str(field.description)))
    return markdown(("key", "default", "meaning"), rows)


TABLES = {
    "check.md": {"rules": rules},
    "loss_reference.md": {"fields": fields, "objectives": objectives},
    "records.md": {"columns": columns, "settings": recording},
}
"""Tables by page and marker."""


def rewrite(page: str, text: str) -> str:
    """The text of one of :data:`TABLES`' pages, with what stands between its markers replaced by the current tables.

    Raises:
        ArgumentError: markers are missing.
    """
    for mark, table in TABLES[page].items():
        text = between_marks(text, mark, table(), page=page)
    return text


def between_marks(text: str, mark: str, table: str, *, page: str) -> str:
    """The text with ``table`` in place of what stands between ``<!-- mark: begin -->`` and ``<!-- mark: end -->``.

    Args:
        text: of a page.
        mark: the table's name.
        table: its lines.
        page: the page's name, for the error.

    Raises:
        ArgumentError: the markers are missing.
    """
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ArgumentError(f"{page} has no '{begin}' … '{end}' to put the table between")
    return f"{before}{begin}\n{table}\n{end}{after}"


def _values(name: str, field: FieldInfo) -> str:
    if name == "masks":
        return "list of masks"
    found = _literals(field.annotation)
    literals = [value for value in found if isinstance(value, str)]
    literals += [name for value in found if isinstance(value, PluginGroup) for name in value.built_in]
    optional = type(None) in get_args(field.annotation)
    if literals and bool in get_args(field.annotation):
        literals += ["true", "false"]
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
    for name in TABLES:
        file = Path(sys.argv[1], name)
        file.write_text(rewrite(name, file.read_text(encoding="utf-8")), encoding="utf-8")
