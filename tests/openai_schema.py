"""OpenAI's own description of its API, where it and the library that reads it are at hand."""
from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path

import pytest

SPEC = Path(__file__).resolve().parents[2] / "shared" / "data" / "openai_openapi" / "openapi.json"
needs_schema = pytest.mark.skipif(not SPEC.exists() or importlib.util.find_spec("jsonschema") is None,
                                  reason=f"OpenAI's description is not at {SPEC}, or jsonschema is not installed")


def modern(schema):
    """OpenAI mixes versions: `nullable` becomes what the schema language of today understands, and what a discriminator
    chooses among need not be tried in vain."""
    if isinstance(schema, list):
        return [modern(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: modern(value) for key, value in schema.items()}
    if schema.pop("nullable", False) is True:
        return {"anyOf": [schema, {"type": "null"}]}
    return schema


@cache
def components() -> dict:
    return modern(json.loads(SPEC.read_text())["components"])


@cache
def validator(name: str):
    """Of one of its schemas."""
    import jsonschema
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components()})


@cache
def _events() -> dict[str, str]:
    """Type of an event of a response's stream -> name of its schema."""
    schemas = components()["schemas"]
    names = (part["$ref"].rpartition("/")[2] for part in schemas["ResponseStreamEvent"]["anyOf"])
    return {schemas[name]["properties"]["type"]["enum"][0]: name for name in names}


def check_event(event: dict) -> None:
    """Raise for an event of a response's stream that has another form than OpenAI's. Only the schema of its type is
    tried: the whole list would take long, and say nothing."""
    validator(_events()[event["type"]]).validate(event)
