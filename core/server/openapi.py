"""`/openapi.json`: this server's API in the terms of OpenAPI 3.1, made from its routes and the bodies that they read.

`/docs` shows it to people. Source: the OpenAPI specification 3.1.
"""
from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

from pydantic import AliasChoices
from starlette.requests import Request
from starlette.responses import Response

from ..version import isthmus_version
from .adapters import LoadAdapter, UnloadAdapter
from .anthropic.body import CountRequest, MessagesRequest
from .context import Server
from .embeddings import EmbeddingRequest, OllamaEmbedBody
from .field_help import describe_fields
from .ollama.body import ChatBody, GenerateBody, ModelBody
from .protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    PinRequest,
    TokenizeRequest,
)
from .rerank import RerankRequest, ScoreRequest
from .responses.body import ResponsesRequest
from .stream import json_response

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest, "/generate": GenerateRequest,
    "/v1/responses": ResponsesRequest, "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/messages": MessagesRequest, "/v1/messages/count_tokens": CountRequest,
    "/api/chat": ChatBody, "/api/generate": GenerateBody, "/api/show": ModelBody,
    "/v1/embeddings": EmbeddingRequest, "/api/embed": OllamaEmbedBody, "/api/embeddings": OllamaEmbedBody,
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankRequest),
    **dict.fromkeys(("/score", "/v1/score"), ScoreRequest),
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), TokenizeRequest),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), DetokenizeRequest),
    **dict.fromkeys(("/load_lora_adapter", "/v1/load_lora_adapter"), LoadAdapter),
    **dict.fromkeys(("/unload_lora_adapter", "/v1/unload_lora_adapter"), UnloadAdapter),
    "/v1/sessions/{id}/pin": PinRequest}
STREAMED = frozenset(("/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages"))
# Fields whose bounds are the server's, and the bodies in which they are.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "min_tokens", "min_new_tokens")
SCORES = ("logprobs", "top_logprobs", "top_logprobs_num")
NOT_EMPTY = ("ChatRequest", "SamplingFields", "ResponsesRequest")
ONE_ANSWER = ("ResponsesRequest", "MessagesRequest", "CountRequest")
BOUNDED = (*NOT_EMPTY, "CompletionRequest", "GenerateRequest", "ChatBody", "GenerateBody")
VECTORS = ("EmbeddingRequest", "OllamaEmbedBody")
HIDDEN = ("/page/",)  # files of the chat page
SCHEMAS = "#/components/schemas/{model}"
ERROR = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type"], "properties": {
        "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]}}}}}


def describe(routes: Sequence[tuple[str, str, Any]], keys: bool, server: Server | None = None) -> dict[str, Any]:
    """The document for these (methods, path, handler). keys: whether the server asks for one. server: whose bounds hold
    beside those that bodies have everywhere."""
    refs, schemas = _schemas()
    if server is not None:
        schemas = _bounded(schemas, server)
    paths: dict[str, dict[str, Any]] = {}
    for methods, route, handler in routes:
        path = re.sub(r":\w+\}", "}", route)
        if not path.startswith(HIDDEN):
            for method in methods.split():
                paths.setdefault(path, {})[method.lower()] = _operation(method, path, handler, refs)
    lock = {"security": [{"key": []}]} if keys else {}
    return {"openapi": "3.1.0", "info": {"title": "Isthmus", "version": isthmus_version(),
                                         "description": "OpenAI's API, Anthropic's and Ollama's, and a native one."},
            "paths": paths, "components": {"schemas": {**schemas, "Error": ERROR}, "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"}}}, **lock}


@cache
def _schemas() -> tuple[dict[type[Body], dict[str, Any]], dict[str, Any]]:
    """A reference to the schema of each body, and the schemas by name."""
    from pydantic.json_schema import models_json_schema  # only who asks waits for it
    models = list(dict.fromkeys(BODIES.values()))
    refs, found = models_json_schema([(model, "validation") for model in models], ref_template=SCHEMAS)
    schemas = found.get("$defs", {})
    for model in _bodies(Body):
        properties = schemas.get(model.__name__, {}).get("properties", {})
        for alias in (field.validation_alias for field in model.model_fields.values()):
            names = alias.choices if isinstance(alias, AliasChoices) else []
            properties |= {str(name): properties[names[0]] for name in names[1:] if names[0] in properties}
    describe_fields(schemas)
    return {model: refs[model, "validation"] for model in models}, schemas


def _bounded(schemas: dict[str, Any], server: Server) -> dict[str, Any]:
    """With the bounds that this server and its model set. Where a limit of the answer is only a limit, none is told."""
    context, scores, size = map(server.info.get, ("max_model_len", "max_top_logprobs", "vector_size"))
    most = {**dict.fromkeys(LENGTHS, context), **dict.fromkeys(SCORES, scores), **dict.fromkeys(
        ("n", "best_of"), server.config.server.max_n), "dimensions": size}
    made = deepcopy(schemas)
    for model in (*BOUNDED, *VECTORS, *ONE_ANSWER[1:]):
        for field, about in made[model]["properties"].items():
            for kind in about.get("anyOf", [about]):
                if kind.get("type") != "integer" or field not in most or (
                        model not in (*BOUNDED, *VECTORS) and field != "n"):
                    continue
                if field.startswith("max_") and model in NOT_EMPTY:
                    kind["minimum"] = 1
                if most[field] is not None:
                    highest = 1 if field == "n" and model in ONE_ANSWER else most[field]
                    kind["maximum"] = min(kind.get("maximum", highest), highest)
                    kind.pop("exclusiveMaximum", None)
                if field == "dimensions" and size and not server.config.model.embedding_truncation:
                    kind["minimum"] = size
    return made


def _bodies(model: type[Body]) -> list[type[Body]]:
    """All that are derived from it."""
    return [each for child in model.__subclasses__() for each in (child, *_bodies(child))]


def _operation(method: str, path: str, handler: Any, refs: dict[type[Body], dict[str, Any]]) -> dict[str, Any]:
    doc = inspect.getdoc(handler) or f"{handler.__name__.replace('_', ' ')}."
    doc = re.sub(r"^`[A-Z]+ [^`]*`:? *", "", doc)
    content: dict[str, Any] = {"application/json": {}}
    if path in STREAMED:
        content["text/event-stream"] = {}
    made: dict[str, Any] = {
        "summary": doc[:1].upper() + re.split(r"(?<=[.?])\s", " ".join(doc.split()), maxsplit=1)[0][1:],
        "operationId": f"{method.lower()}{re.sub(r'[^0-9A-Za-z]+', '_', path).rstrip('_')}",
        "responses": {"200": {"description": "The answer.", "content": content}, "default": {
            "description": "An error, in the form of the API that was called.",
            "content": {"application/json": {"schema": {"$ref": SCHEMAS.format(model="Error")}}}}}}
    if names := re.findall(r"\{(\w+)\}", path):
        made["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                              for name in names]
    if method == "POST" and (model := BODIES.get(path)) is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": refs[model]}}}
    return made


async def document(server: Server, request: Request) -> Response:
    """This description of the API."""
    return json_response(describe(request.app.state.routes, bool(server.access.keys), server))
