"""JSON Schema of a recipe, for editors: ``loss_fn`` strict, everything else open.

Written so that an editor reports one precise problem at the key concerned: a condition on ``preset`` or ``name``
selects what applies, where a choice between alternatives could only say that none of them fits. Everything may also be
``${a.reference}``. What a schema can't say (settings at odds with each other) is left to ``nemo-geomask check``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from nemo_geomask.config.loss import LossConfig
from nemo_geomask.config.masks import RawMask

__all__ = ["recipe_schema"]

Schema = dict[str, Any]

# ${…}, or ??? for a value that a child has to give.
_REFERENCE: Schema = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}


def recipe_schema(options: Mapping[str, type[BaseModel]], presets: Mapping[str, type[BaseModel]]) -> Schema:
    """JSON Schema (draft 7) of a recipe.

    Args:
        options: objectives to offer, each with the model of its own settings; other names are allowed, too.
        presets: mask presets of other distributions.

    Returns: the schema, that of the ``loss_fn`` block under ``$defs/LossConfig``.
    """
    raw = LossConfig.model_json_schema()
    definitions: dict[str, Schema] = raw.pop("$defs")
    models = {name: model.model_json_schema() for name, model in options.items()}
    block = {**_model(raw), "allOf": [_options_of(name, model) for name, model in models.items()]}
    block["properties"]["name"]["anyOf"] = [{"enum": list(options)}, {"type": "string"}]
    for name, preset in presets.items():
        schema = preset.model_json_schema()
        definitions |= schema.pop("$defs", {}) | {preset.__name__: schema}
        schema["properties"]["preset"] = {"const": name}
    block["properties"]["masks"]["else"] = {"type": "array", "items": _mask(definitions)}
    # omegaconf's, see read_recipe.
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
        "$defs": {"LossConfig": block, **{name: _model(schema) for name, schema in sorted(definitions.items())}},
    }


def _model(schema: Schema) -> Schema:
    """A pydantic model's schema without its titles, each property open to references."""
    properties = {name: _property(value) for name, value in schema.get("properties", {}).items()}
    kept = {key: value for key, value in schema.items() if key not in ("title", "properties")}
    if "description" in kept:  # the docstring, of which the rest is for programmers
        kept["description"] = kept["description"].partition("\n\n")[0]
    return {**kept, "properties": properties}


def _property(schema: Schema) -> Schema:
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
    return {**outer, "if": _REFERENCE, "else": _plain(limits)}


def _plain(limits: Schema) -> Schema:
    """``anyOf: [X, null]`` as one schema, and a choice without its type, so that a wrong value is one problem."""
    match limits:
        case {"anyOf": [{"$ref": model}, {"type": "null"}]}:
            return {"if": {"type": "null"}, "else": {"$ref": model}}
        case {"anyOf": [{"if": plugin, "else": {"enum": values}}, {"type": "null"}]}:
            return {"if": plugin, "else": {"enum": [*values, None]}}
        case {"anyOf": [{"enum": values}, {"type": "null"}]}:
            return {"enum": [*values, None]}
        case {"anyOf": [{"type": kind} as inner, {"type": "null"}]}:
            return {**inner, "type": [kind, "null"]}
        case {"enum": values}:
            return {"enum": values}
        case _:
            return limits


def _mask(definitions: Mapping[str, Schema]) -> Schema:
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


def _options_of(name: str, model: Schema) -> Schema:
    return {
        "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
        "then": {"properties": {"options": {"if": _REFERENCE, "else": {"type": "object", **_model(model)}}}},
    }
