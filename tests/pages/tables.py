"""Tables of the documentation that are made from the code: rules, fields, objectives, records, host patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from nemo_geomask.config.fields import Recording
from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.config.masks import RawMask
from nemo_geomask.config.plugins import PluginGroup
from nemo_geomask.config.presets import PRESETS, PUBLISHED_SETTINGS
from nemo_geomask.hosts.nemo_rl.host_patches import PATCH_GROUPS
from nemo_geomask.objectives.registry import LOSSES
from nemo_geomask.objectives.resolved_loss import resolve_loss
from nemo_geomask.records import COLUMNS
from nemo_geomask.tools.check import RULES
from nemo_geomask.tools.check.objective_text import surrogate_parts
from nemo_geomask.tools.shared.mismatch_switches import MismatchSwitch, mismatch_switches
from nemo_geomask.yaml_text import as_yaml
from tests.helpers.markdown import markdown_table


def rule_table() -> str:
    """Return the table of the rules of ``nemo-geomask check``."""
    return markdown_table(
        ("rule", "severity", "finds", "source"), ((rule.id, rule.severity, rule.title, rule.source) for rule in RULES)
    )


def field_table() -> str:
    """Return the table of the fields of ``loss_fn``: name, allowed values, default, meaning with formula, source."""
    rows = []
    for name, field in LossConfig.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        meaning = str(field.description)
        if "formula" in extra:
            meaning += f"<br>`{extra['formula']}`"
        rows.append(
            (f"`{name}`", _allowed_values(name, field), _default(field.default), meaning, str(extra.get("source", "")))
        )
    return markdown_table(("field", "values", "default", "meaning", "source"), rows)


# Flags of NeMo-RL that turn clipped_pg into another objective, each of which gets a row of its own.
_CLIPPED_PG_FLAGS: tuple[Mapping[str, Any], ...] = (
    {"ratio_clip_c": 3.0},
    {"sequence_level_importance_ratios": True, "token_level_loss": False},
    {"use_cispo": True},
    {"disable_ppo_ratio": True},
    {"force_on_policy_ratio": True},
)


def objective_table() -> str:
    """Return the table of the package's objectives: per-token loss at its defaults, the defaults, source."""
    names = [name for name, entries in LOSSES.available().items() if entries[0].distribution == "nemo-geomask"]
    cases: list[tuple[str, Mapping[str, Any]]] = []
    for name in names:
        cases.append((name, {}))
        cases += [(name, flags) for flags in _CLIPPED_PG_FLAGS if name == "clipped_pg"]
    rows = []
    for name, flags in cases:
        loss, _ = resolve_loss({"name": name, **flags})
        variant = loss.variant
        label = f"`{name}`" + "".join(f"<br>`{setting}`" for setting in _format_settings(flags))
        options = {f"options.{key}": field.default for key, field in variant.options.model_fields.items()}
        defaults = _format_settings({**variant.defaults, **variant.forces, **options})
        formulas = "<br>".join(f"`{part.formula}`" for part in surrogate_parts(loss))
        default_cell = "<br>".join(f"`{setting}`" for setting in defaults) or "–"
        rows.append((label, formulas, default_cell, "" if flags else variant.source))
    return markdown_table(("name", "ℓ", "defaults of this objective", "source"), rows)


def mask_field_table() -> str:
    """Return the table of the settings of a mask without a preset."""
    rows = []
    for name, field in RawMask.model_fields.items():
        default = "required" if field.is_required() else _default(field.default)
        rows.append((f"`{name}`", _allowed_values(name, field), default, str(field.description)))
    return markdown_table(("field", "values", "default", "meaning"), rows)


def preset_table() -> str:
    """Return the table of the mask presets: their settings, the raw rule, what they do, and published settings."""
    rows = []
    for name, model in PRESETS.items():
        published = PUBLISHED_SETTINGS[name]
        rule = model.model_validate(published.mask(name)).rule()
        keys = [key for key in model.model_fields if key not in ("preset", "label")]
        choices = {key: get_args(field.annotation) for key, field in model.model_fields.items()}
        parts = {key: choices.get(key, [getattr(rule, key)]) for key in ("log_ratio", "level", "statistic")}
        text = str(model.__doc__).split("\n\n")[0].replace("\n", " ")
        settings = ", ".join(_format_settings(published.settings))
        rows.append(
            (
                f"`{name} {{{', '.join(keys)}}}`",
                *map(", ".join, parts.values()),
                rule.when,
                text,
                f"`{settings}`, {published.source}",
            )
        )
    return markdown_table(("preset", "log-ratio", "level", "statistic", "`when`", "rule", "published settings"), rows)


def _format_settings(settings: Mapping[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        yield f"{key}: {f'{value:.4g}' if isinstance(value, float) else as_yaml(value)}"


def record_column_table() -> str:
    """Return the table of a record's columns."""
    rows = [
        (f"`{column.name}`", f"{column.arrow_type}{'' if column.is_required else ' or null'}", column.definition)
        for column in COLUMNS
    ]
    return markdown_table(("column", "Arrow type", "content"), rows)


def record_setting_table() -> str:
    """Return the table of the settings under ``record``."""
    rows = []
    for name, field in Recording.model_fields.items():
        default = "required" if field.is_required() else _default(field.default)
        rows.append((f"`{name}`", default, str(field.description)))
    return markdown_table(("key", "default", "meaning"), rows)


def host_patch_table() -> str:
    """Return the table of the attributes of NeMo-RL that are replaced: when, which, why, and what would remove it."""
    rows = []
    for condition, group in PATCH_GROUPS.items():
        names = [f"`{module.removeprefix('nemo_rl.')}.{path}`" for module, path, _ in group.attributes]
        rows.append((f"*{condition}*", ", ".join(names), group.reason, group.upstream_change))
    return markdown_table(("while", "attributes of `nemo_rl`", "NeMo-RL", "a change that would remove it"), rows)


def switch_table() -> str:
    """Return the table of the settings that are known to make sampler and trainer disagree."""
    rows = [
        (
            *(f"`{switch.id}`", switch.group, f"`{switch.key}`", _conservative_value(switch), switch.title),
            *(switch.side, switch.cost, switch.since + (f", {switch.needs}" if switch.needs else "")),
            *("GPU" if switch.gpu else "any", switch.slower or "–", switch.source),
        )
        for switch in mismatch_switches()
    ]
    head = ("switch", "group", "key", "conservative", "decides", "side", "costs", "since", "on", "price", "source")
    return markdown_table(head, rows)


def _conservative_value(switch: MismatchSwitch) -> str:
    values = " or ".join(f"`{as_yaml(value)}`" for value in (switch.value, *switch.as_good))
    return ", with ".join([values, *(f"`{key}: {as_yaml(value)}`" for key, value in switch.also.items())])


def _allowed_values(name: str, field: FieldInfo) -> str:
    """Describe the allowed values of a field: its literals, or its type with bounds."""
    if name == "masks":
        return "list of masks"
    arguments = [*_leaf_arguments(field.annotation), *field.metadata]
    literals = [value for value in arguments if isinstance(value, str)]
    literals += [built_in for value in arguments if isinstance(value, PluginGroup) for built_in in value.built_in]
    is_optional = type(None) in get_args(field.annotation)
    if literals and bool in get_args(field.annotation):
        literals += ["true", "false"]
    if literals:
        return ", ".join([*(f"`{value}`" for value in literals), *(["`null`"] if is_optional else [])])
    if get_origin(field.annotation) is dict:
        return "mapping"
    type_names = {bool: "true, false", float: "number", str: "text"}
    types = (field.annotation, *get_args(field.annotation))
    type_name = next((text for type_, text in type_names.items() if type_ in types), "mapping")
    bounds = [f"{sign} {bound}" for constraint in field.metadata for sign, bound in _bounds(constraint)]
    return " ".join([type_name, *bounds]) + (", `null`" if is_optional else "")


def _leaf_arguments(annotation: Any) -> list[Any]:
    """Return the type arguments of an annotation that have no arguments themselves."""
    leaves: list[Any] = []
    for argument in get_args(annotation):
        leaves += _leaf_arguments(argument) if get_args(argument) else [argument]
    return leaves


def _bounds(constraint: Any) -> list[tuple[str, float]]:
    return [(sign, getattr(constraint, key)) for key, sign in (("gt", ">"), ("ge", "≥")) if hasattr(constraint, key)]


def _default(value: Any) -> str:
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"
