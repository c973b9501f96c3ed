"""Every error in the words of the API that was called: OpenAI's envelope
{"error": {"message", "type", "param", "code"}}, of which the last two may be null, Anthropic's or Ollama's."""
from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
import pydantic
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import SHOWN, EngineDead, EngineRestarting, EngineStopped, RequestError, cut, shown

log = logging.getLogger(__name__)

STATUS_CODES = {400: "invalid_request", 401: "invalid_api_key", 403: "forbidden", 404: "not_found",
                405: "method_not_allowed", 408: "request_timeout", 409: "conflict", 413: "request_too_large",
                415: "unsupported_media_type", 429: "overloaded", 431: "headers_too_large", 500: "internal_error",
                502: "bad_gateway", 503: "unavailable", 504: "timeout"}
ABORTED = "aborted"
ENGINE_DEAD = "engine_dead"
STOPPING = "server_stopping"
RESTARTING = "engine_restarting"
RESTART_S = 5  # seconds after which it may be there again
# Anthropic's words for statuses; of others the class decides.
ANTHROPIC_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                   413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
MAX_MESSAGE = 2000  # characters; whatever a message repeats of a request, the answer is short


class ErrorBody(msgspec.Struct):
    """The inner object of the envelope."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


def field_path(loc: tuple[Any, ...]) -> str:
    """A pydantic location as OpenAI writes it: ("messages", 0, "role") -> "messages[0].role". Keys are cut short."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part[:SHOWN]}" if path else part[:SHOWN]
    return path


def complaint(fault: Mapping[str, Any]) -> str:
    """What one of pydantic's faults demands of the value, in words that follow the field's name."""
    bounds = {"too_short": ("least", "min_length"), "too_long": ("most", "max_length")}
    if fault["type"] in bounds:
        word, key = bounds[fault["type"]]
        limit = fault["ctx"][key]
        return f"must hold at {word} {limit} entr{'y' if limit == 1 else 'ies'}"
    if fault["type"] in ("model_type", "model_attributes_type", "dict_type"):  # names classes of Python
        return "must be an object"
    return re.sub(r"^\w+ should ", "must ", fault["msg"].removeprefix("Value error, "))


def validation_error(error: pydantic.ValidationError) -> RequestError:
    """The first complaint of pydantic as a 400 that names the field and its value."""
    first = error.errors(include_url=False)[0]
    path = field_path(first["loc"])
    if first["type"] == "missing":
        return RequestError(f"{path} is required", param=path, code="missing_required_parameter")
    return RequestError(f"{path or 'the body'} {complaint(first)}; got {shown(first['input'])}",
                        param=path or None, code="invalid_value")


def as_request_error(error: Exception) -> RequestError:
    """Any exception as the error that the client is told; what nobody foresaw is logged and becomes a bare 500."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, pydantic.ValidationError):
        return validation_error(error)
    if isinstance(error, EngineStopped):
        return RequestError(str(error), status=503, code=STOPPING, kind="server_error")
    if isinstance(error, EngineRestarting):
        return RequestError(str(error), status=503, code=RESTARTING, kind="server_error", retry_after=RESTART_S)
    if isinstance(error, EngineDead):
        return RequestError(f"the engine is gone: {error}", status=503, code=ENGINE_DEAD, kind="server_error")
    if isinstance(error, HTTPException):
        return RequestError(error.detail, status=error.status_code)
    log.error("request failed", exc_info=error)
    return RequestError("internal server error; the server's log has the details", status=500,
                        code="internal_error", kind="server_error")


def leave(scope: MutableMapping[str, Any], error: RequestError) -> None:
    """Leave an error in the state of a request."""
    scope.setdefault("state", {})["error"] = error


def error_body(error: RequestError) -> ErrorBody:
    """The envelope's inner object."""
    return ErrorBody(cut(error.message, MAX_MESSAGE), error.kind, error.param and cut(error.param, MAX_MESSAGE),
                     error_code(error))


def error_code(error: RequestError) -> str | None:
    """OpenAI's word for the error."""
    return error.code or STATUS_CODES.get(error.status)


def encode_error(error: RequestError, scope: Mapping[str, Any] | None = None) -> bytes:
    """The whole envelope as JSON. scope: of the request, whose API decides the form; None = OpenAI's."""
    path = scope["path"] if scope else ""
    if path.startswith("/api/"):
        return msgspec.json.encode({"error": cut(error.message, MAX_MESSAGE)})
    if scope and speaks_anthropic(scope):
        kind = ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        inner = {"type": kind, "message": cut(error.message, MAX_MESSAGE)}
        return msgspec.json.encode({"type": "error", "error": inner,
                                    "request_id": scope.get("state", {}).get("request_id")})
    return msgspec.json.encode({"error": error_body(error)})


def speaks_anthropic(scope: Mapping[str, Any]) -> bool:
    """Is this a call of Anthropic's API? Its clients share `/v1/models` with OpenAI's, and say who they are."""
    path = scope["path"]
    return path == "/v1/messages" or path.startswith("/v1/messages/") or (
        path.startswith("/v1/models") and any(name == b"anthropic-version" for name, _ in scope["headers"]))


def error_headers(error: RequestError) -> dict[str, str]:
    """Headers that tell clients whether and when to try again, and how to log in."""
    headers = {}
    if error.status in (429, 503) and error.code != ENGINE_DEAD:  # which never comes back
        headers["Retry-After"] = str(max(1, round(error.retry_after or 1)))
    if error.code == ABORTED or error.status == 504:  # it would only take as long again
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 413:
        headers["Connection"] = "close"
    return headers


def error_response(error: Exception, scope: MutableMapping[str, Any],
                   headers: Mapping[str, str] | None = None) -> Response:
    """The HTTP answer to an exception, which is left in the request's state for the log."""
    known = as_request_error(error)
    leave(scope, known)
    return Response(encode_error(known, scope), known.status, {**error_headers(known), **(headers or {})},
                    "application/json")
