"""What Ollama's clients ask about the models that are there. One is served, with its adapters."""
from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...errors import RequestError
from ...version import isthmus_version
from ..context import Server
from ..protocol import read as read_body
from ..stream import json_response
from .answer import chat, generate
from .body import ModelBody, plain_name

API_VERSION = "0.13.0"  # of Ollama, whose API has this form: its clients want one that is new enough
FAMILY = "model"  # clients look for FAMILY.context_length, whatever the family is called
HOST = 10  # the rank of a platform that computes on the host's processors; see `Manifest.rank`
FOR_EVER = "9999-12-31T23:59:59Z"


def tagged(name: str) -> str:
    """A model's name with a tag, as all have there."""
    return name if ":" in name else f"{name}:latest"


def digest(name: str) -> str:
    """The same for the same model; not of its weights, which would take long to read."""
    return hashlib.sha256(name.encode()).hexdigest()


def details(server: Server) -> dict[str, Any]:
    """`details` of a model: what is not known here is left empty."""
    info = server.info
    gguf = str(info.get("model_path", "")).endswith(".gguf")
    family, parameters = info.get("model_type", ""), info.get("parameters", 0)
    return {"parent_model": "", "format": "gguf" if gguf else "safetensors", "family": family,
            "families": [family] if family else [], "parameter_size": in_words(parameters) if parameters else "",
            "quantization_level": info.get("format", "").upper()}


def in_words(number: int) -> str:
    """134515008 -> "134.5M"."""
    unit, size = next(((unit, size) for unit, size in (("B", 10**9), ("M", 10**6)) if number >= size), ("K", 10**3))
    return f"{number / size:.1f}{unit}"


def entry(server: Server, model: str) -> dict[str, Any]:
    """A model in a list, or an adapter of it."""
    name = tagged(model)
    return {"name": name, "model": name, "size": int(server.info.get("weight_bytes") or 0), "digest": digest(name),
            "details": details(server)}


def since(server: Server) -> str:
    """When the server started."""
    return datetime.fromtimestamp(server.created, UTC).isoformat().replace("+00:00", "Z")


async def tags(server: Server, request: Request) -> Response:
    """`GET /api/tags`: the model and its adapters."""
    names = (server.model, *server.adapters.known)
    return json_response({"models": [entry(server, name) | {"modified_at": since(server)} for name in names]})


async def loaded(server: Server, request: Request) -> Response:
    """`GET /api/ps`: models that are loaded."""
    size = int(server.info.get("weight_bytes") or 0) + int(server.info.get("kv_bytes") or 0)
    on_host = server.info.get("platform_rank", 0) <= HOST
    more = {"expires_at": FOR_EVER, "size": size, "size_vram": 0 if on_host else size,
            "context_length": server.info.get("max_model_len", 0)}
    return json_response({"models": [entry(server, server.model) | more]})


async def version(server: Server, request: Request) -> Response:
    """`GET /api/version`: of the API, by which clients decide what they may ask for."""
    return json_response({"version": API_VERSION, "isthmus": isthmus_version()})


async def show(server: Server, request: Request) -> Response:
    """`POST /api/show`: what is known of a model."""
    asked = await server.read(request, lambda body: read_body(ModelBody, body))
    name = asked.model or asked.name
    if not name:
        raise RequestError("model is required", param="model", code="missing_required_parameter")
    server.require_model(plain_name(name))
    template = getattr(server.text.template, "source", None) or ""
    context = server.info.get("max_model_len", 0)
    return json_response({
        "modelfile": f"FROM {server.model}", "parameters": "", "template": template, "license": "",
        "modified_at": since(server), "details": details(server), "capabilities": capabilities(server),
        "model_info": {"general.architecture": FAMILY, "general.basename": server.model,
                       "general.parameter_count": server.info.get("parameters", 0),
                       f"{FAMILY}.context_length": context,
                       f"{FAMILY}.vocab_size": server.info.get("vocab_size", 0)}})


def capabilities(server: Server) -> list[str]:
    """What a model can do, in Ollama's words."""
    able = {"tools": server.parsers.format is not None, "thinking": server.parsers.reasoning is not None}
    return ["completion", *(word for word, can in able.items() if can)]


ROUTES = (
    ("POST", "/api/chat", chat),
    ("POST", "/api/generate", generate),
    ("GET", "/api/tags", tags),
    ("GET", "/api/ps", loaded),
    ("GET", "/api/version", version),
    ("POST", "/api/show", show),
)
