"""On whose behalf and under which terms a request is served: tenant, cache domain, priority, hints for the cache."""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pydantic

from ..errors import RequestError, shown
from ..messages import CacheHint
from ..scheduler.request import cache_domain
from .access import sent_keys
from .errors import validation_error
from .protocol import TermFields

SESSION_HEADER = b"x-session-id"
TTFT_HEADER = b"x-slo-ttft-ms"  # Gateway API inference routers send it
TENANT_BYTES = 8


class Caller(NamedTuple):
    """Who asks: `tenant` "" where no key is asked for. session, ttft: what the headers say, None = nothing."""

    tenant: str = ""
    session: str | None = None
    ttft: float | None = None


@dataclass(frozen=True)
class Terms:
    """What all engine requests of one call share; fields of `Submit`. model: the adapter's name, "" without one."""

    domain: bytes = b""
    priority: int = 0
    tenant: str = ""
    ttft: float = 0.0
    hint: CacheHint | None = None
    adapter: int = 0
    model: str = ""


def tenant_of(key: bytes, secret: bytes) -> str:
    """A name for the holder of an API key that tells nothing of the key. `secret`: this server's own."""
    return hashlib.blake2b(key, digest_size=TENANT_BYTES, key=secret).hexdigest()


def caller_of(headers: list[tuple[bytes, bytes]], locked: bool, secret: bytes) -> Caller:
    """Who sent these headers. Raises the 400 for a header that is no session name or no number."""
    found = {}
    for header, name, read in ((SESSION_HEADER, "session_id", _text), (TTFT_HEADER, "ttft_target", _seconds)):
        values = [value for key, value in headers if key == header]
        if values:
            found[name] = _checked(header.decode(), name, read, values[-1])
    keys = sent_keys(headers) if locked else ()
    return Caller(tenant_of(keys[0], secret) if keys else "", found.get("session_id"), found.get("ttft_target"))


def _text(value: bytes) -> str:
    return value.decode("utf-8")


def _seconds(value: bytes) -> float:
    return float(value) / 1000


def _checked(header: str, name: str, read: Callable[[bytes], Any], value: bytes) -> Any:
    """A header's value under the rules of the field that it stands for."""
    try:
        return getattr(TermFields.model_validate({name: read(value)}), name)
    except pydantic.ValidationError as error:
        known = validation_error(error)
        message = f"the header {header}: {known.message}"
    except ValueError:
        expected = "text in UTF-8" if read is _text else "milliseconds"
        message = f"the header {header} is {shown(value.decode('latin-1'))}; expected {expected}"
    raise RequestError(message, param=header, code="invalid_value")


def terms(asked: TermFields, caller: Caller, isolate: bool = False) -> Terms:
    """The terms of a request; fields of the body win over headers. isolate: tenants share no cached pages.

    Sessions of different tenants are different, whatever their names.
    """
    session = asked.session_id if asked.session_id is not None else caller.session or ""
    wish = asked.ttft_target if asked.ttft_target is not None else caller.ttft or 0.0
    domain = cache_domain(salt=asked.cache_salt, tenant=caller.tenant if isolate else "")
    return Terms(domain, asked.priority or 0, caller.tenant, wish, _hint(asked, session, caller.tenant))


def _hint(asked: TermFields, session: str, tenant: str) -> CacheHint | None:
    hint = asked.cache_hint
    if hint is None:
        return CacheHint(session_name(session, tenant)) if session else None
    if hint.end_of_session and not session:
        raise _contradiction("end_of_session", "needs a session_id")
    if hint.end_of_session and hint.next_within:
        raise _contradiction("next_within", "contradicts end_of_session: nothing follows the last request")
    if hint.single_shot and (session or hint.next_within):
        raise _contradiction("single_shot", "contradicts session_id and next_within: nothing follows such a request")
    made = CacheHint(session_name(session, tenant), bool(hint.end_of_session), hint.next_within or 0.0,
                     bool(hint.single_shot))
    return None if made == CacheHint() else made


def session_name(session: str, tenant: str) -> str:
    """What the engine calls a tenant's session."""
    return f"{tenant}/{session}" if tenant and session else session


def _contradiction(field: str, why: str) -> RequestError:
    return RequestError(f"cache_hint.{field} {why}", param=f"cache_hint.{field}", code="invalid_value")
