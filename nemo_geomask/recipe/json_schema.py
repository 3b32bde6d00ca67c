"""JSON Schema of a recipe, for editors: ``loss_fn`` strict, everything else open.

An editor should report one precise problem at the key concerned. Therefore a condition (``if``) on ``preset`` or
``name`` selects the schema that applies; with ``anyOf`` an editor could only report that no alternative matches. Any
value may also be a reference, ``${other.key}``. The schema does not express which settings contradict each other;
``nemo-geomask check`` reports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.config.masks import RawMask

Schema = dict[str, Any]

# A reference ${…}, or ???, which marks a value that an inheriting recipe has to set.
_REFERENCE: Schema = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}


def recipe_schema(options: Mapping[str, type[BaseModel]], presets: Mapping[str, type[BaseModel]]) -> Schema:
    """Return the JSON Schema (draft 7) of a recipe.

    Args:
        options: model of ``loss_fn.options`` by objective. Editors suggest these objectives and accept other names.
        presets: model of each mask preset that another distribution provides, by the preset's name.

    Returns: the schema; that of the ``loss_fn`` block is ``$defs/LossConfig``.
    """
    raw = LossConfig.model_json_schema()
    definitions: dict[str, Schema] = raw.pop("$defs")
    models = {name: model.model_json_schema() for name, model in options.items()}
    block = {**_open_model(raw), "allOf": [_options_condition(name, model) for name, model in models.items()]}
    block["properties"]["name"]["anyOf"] = [{"enum": list(options)}, {"type": "string"}]
    for name, preset in presets.items():
        schema = preset.model_json_schema()
        definitions |= schema.pop("$defs", {}) | {preset.__name__: schema}
        schema["properties"]["preset"] = {"const": name}
    block["properties"]["masks"]["else"] = {"type": "array", "items": _mask_schema(definitions)}
    # Not a field of the loss, but a marker for inheritance; see read_recipe.
    block["properties"]["_override_"] = {"type": "boolean", "description": "true: replace the inherited block."}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "NeMo-RL recipe with a loss of nemo_geomask",
        "type": "object",
        "properties": {
            "defaults": {
                "description": "Recipes to inherit from, relative to this file.",
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            },
            "loss_fn": {"$ref": "#/$defs/LossConfig"},
        },
        "$defs": {"LossConfig": block, **{name: _open_model(schema) for name, schema in sorted(definitions.items())}},
    }


def _open_model(schema: Schema) -> Schema:
    """Return a pydantic model's schema without titles, with a reference allowed as the value of each property."""
    properties = {name: _open_property(value) for name, value in schema.get("properties", {}).items()}
    kept = {key: value for key, value in schema.items() if key not in ("title", "properties")}
    if "description" in kept:  # the docstring; only its first paragraph is for users
        kept["description"] = kept["description"].partition("\n\n")[0]
    return {**kept, "properties": properties}


def _open_property(schema: Schema) -> Schema:
    """Return a property's schema that allows references; its description includes the formula and the source."""
    notes = [str(schema[key]) for key in ("description", "formula") if schema.get(key)]
    notes += [f"Source: {schema['source']}."] if schema.get("source") else []
    outer: Schema = {"description": "\n".join(notes)} if notes else {}
    if "default" in schema:
        outer["default"] = schema["default"]
    limits = {
        key: value
        for key, value in schema.items()
        if key not in ("title", "description", "formula", "source", "default")
    }
    if "const" in limits:
        return {**outer, **limits}
    return {**outer, "if": _REFERENCE, "else": _single_schema(limits)}


def _single_schema(limits: Schema) -> Schema:
    """Return ``anyOf: [X, null]`` as one schema, and a choice without its type, so that a bad value is one problem."""
    match limits:
        case {"anyOf": [{"$ref": model}, {"type": "null"}]}:
            return {"if": {"type": "null"}, "else": {"$ref": model}}
        case {"anyOf": [{"if": plugin, "else": {"enum": values}}, {"type": "null"}]}:
            return {"if": plugin, "else": {"enum": [*values, None]}}
        case {"anyOf": [{"enum": values}, {"type": "null"}]}:
            return {"enum": [*values, None]}
        case {"anyOf": [{"type": json_type} as inner, {"type": "null"}]}:
            return {**inner, "type": [json_type, "null"]}
        case {"enum": values}:
            return {"enum": values}
        case _:
            return limits


def _mask_schema(definitions: Mapping[str, Schema]) -> Schema:
    """Return the schema of one mask: its preset selects one of the definitions."""
    presets = {
        schema["properties"]["preset"]["const"]: name
        for name, schema in definitions.items()
        if "preset" in schema.get("properties", {})
    }
    return {
        "type": "object",
        "properties": {
            "preset": {
                "description": "A rule by its paper's name, or module:attribute; without it, the raw form.",
                "if": {"type": "string", "pattern": ":"},
                "else": {"enum": list(presets)},
            }
        },
        "allOf": [
            *(
                {
                    "if": {"properties": {"preset": {"const": preset}}, "required": ["preset"]},
                    "then": {"$ref": f"#/$defs/{name}"},
                }
                for preset, name in presets.items()
            ),
            {"if": {"not": {"required": ["preset"]}}, "then": {"$ref": f"#/$defs/{RawMask.__name__}"}},
        ],
    }


def _options_condition(name: str, model: Schema) -> Schema:
    """Return the condition that applies the model of an objective's options when ``name`` selects the objective."""
    return {
        "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
        "then": {"properties": {"options": {"if": _REFERENCE, "else": {"type": "object", **_open_model(model)}}}},
    }
