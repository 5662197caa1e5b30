"""JSON Schema of a pipeline file, for editors: completion, descriptions and mistakes while typing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from flowdflash.config.spec import InputSpec, PipelineSpec, Registered, Registry
from flowdflash.stage import KINDS

_REFERENCE = {"type": "string", "pattern": r"\$\{(vars\.|env:)", "description": "Filled in when the file is loaded."}


def json_schema(registry: Registry) -> dict[str, Any]:
    """Draft 2020-12 schema of the whole file; the options of a stage follow from its ``kind`` and ``type``."""
    definitions: dict[str, Any] = {"input": _input(), "inputs": _inputs()}
    branches = []
    for registered in registry.types():
        name = f"{registered.kind}.{registered.type}"
        definitions[name] = _stage(registered, name, definitions)
        chosen = {"kind": {"const": registered.kind}, "type": {"const": registered.type}}
        branches.append(
            {
                "if": {"type": "object", "properties": chosen, "required": ["kind", "type"]},
                "then": {"$ref": f"#/$defs/{name}"},
            }
        )
    definitions["stage"] = {
        "type": "object",
        "properties": {"kind": {"enum": list(KINDS), "description": "What the stage does."}},
        "allOf": [*(_types_of(kind, registry) for kind in KINDS), *branches],
    }
    top = _references_allowed(_model(PipelineSpec, "pipeline", definitions))
    top["properties"]["version"] = {"const": 1, "description": PipelineSpec.model_fields["version"].description}
    top["properties"]["vars"]["additionalProperties"] = {"type": ["string", "number", "boolean"]}
    top["properties"]["stages"]["additionalProperties"] = {"$ref": "#/$defs/stage"}
    top["properties"]["stages"].pop("propertyNames", None)
    top.pop("required", None)
    complete = {"additionalProperties": {"required": ["kind", "type"]}}
    top["if"] = {"required": ["extends"]}  # a base may bring what is not here
    top["else"] = {"required": ["version", "stages"], "properties": {"stages": complete}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "flowdflash pipeline",
        **top,
        "$defs": definitions,
    }


def _types_of(kind: str, registry: Registry) -> dict[str, Any]:
    names = [registered.type for registered in registry.types(kind)]
    return {
        "if": {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]},
        "then": {"properties": {"type": {"enum": names}}},
    }


def _stage(registered: Registered, name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    try:
        schema = _references_allowed(_model(registered.cls.Config, name, definitions))
    except Exception as error:  # an option of a plugin may be of a type that JSON Schema cannot describe
        reason = f"{type(error).__name__}: {error}"
        return {"type": "object", "description": f"{registered.summary} (options cannot be described: {reason})"}
    common: dict[str, Any] = {
        "kind": {"const": registered.kind},
        "type": {"const": registered.type, "description": f"{registered.summary} (from {registered.owner})"},
    }
    if registered.kind != "source":
        common["inputs"] = {"$ref": "#/$defs/inputs"}
    schema["properties"] = {**common, **schema.get("properties", {})}
    schema["required"] = ["kind", "type", *schema.get("required", [])]
    schema["description"] = registered.summary
    schema["title"] = name
    return schema


def _model(model: type[BaseModel], name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of a model; models nested in it go into ``definitions`` under its own name."""
    schema = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
    for inner, nested in schema.pop("$defs", {}).items():
        definitions[f"{name}.{inner}"] = _references_allowed(nested)
    return schema


def _input() -> dict[str, Any]:
    return _references_allowed(InputSpec.model_json_schema())


def _inputs() -> dict[str, Any]:
    one = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/input"}]}
    return {
        "description": "What the stage reads: a stage, stage.port, a mapping with 'from', or a list of these.",
        "anyOf": [*one["anyOf"], {"type": "array", "items": one}],
    }


def _references_allowed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a mapping whose values may also be a ``${...}``, and whose texts may look like numbers."""
    properties: Mapping[str, Any] = schema.get("properties", {})
    return {**schema, "properties": {key: _or_reference(value) for key, value in properties.items()}}


def _or_reference(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [*map(_or_reference, schema["anyOf"])]}
    if schema.get("type") == "string" and not schema.keys() & {"enum", "const", "pattern", "format"}:
        return {**schema, "type": ["string", "number", "boolean"]}
    if schema.get("type") in ("string", "object", "array", "null", None) and not schema.keys() & {"enum", "const"}:
        return schema
    about: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    narrowed = {key: value for key, value in schema.items() if key not in about}
    if narrowed.get("type") in ("integer", "number"):  # 1_000 and 1e-4 are texts to some editors
        spelled = {"type": "string", "pattern": r"^[-+0-9._eE]+$"}
        return {**about, "anyOf": [narrowed, spelled, _REFERENCE]}
    return {**about, "anyOf": [narrowed, _REFERENCE]}
