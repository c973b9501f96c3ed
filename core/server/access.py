"""Who may ask for what: levels of paths, the keys that open them, and the names and web pages that are served."""
from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..config import ServerSettings
from ..errors import ConfigError, RequestError, shown
from .chat_page import wants_page

# Without a key: load balancers and process supervisors have none, and a browser asks for a page before it knows one.
OPEN_PATHS = frozenset({"/health", "/ready", "/dashboard"})
# They change something for everybody. The admin key opens them; without one the only API key does.
ADMIN_PATHS = frozenset({"/flush_cache"})
# They make the server read or write files that the caller names. Without an admin key they are off.
GUARDED_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter",
                           "/unload_lora_adapter"})
LOCAL_NAMES = frozenset({"localhost", "host.docker.internal"})  # no foreign server can be behind these
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_HOST = re.compile(r"(\[[0-9a-f:.%]+\]|[a-z0-9_.-]+)(?::\d{1,5})?")

Headers = list[tuple[bytes, bytes]]


def split_keys(setting: str | None) -> tuple[bytes, ...]:
    """The accepted keys of `--api-key`: one, or several separated by commas."""
    return tuple(key.strip().encode() for key in (setting or "").split(",") if key.strip())


def sent_keys(headers: Headers) -> list[bytes]:
    """Keys in `Authorization: Bearer` and `x-api-key` fields, as the bytes that were sent."""
    keys = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            keys.append(key.strip() if scheme.lower() == b"bearer" else b"")
    return keys


def authorized(headers: Headers, keys: tuple[bytes, ...]) -> bool:
    """Is every key that was sent, and at least one, an accepted one? Time does not tell how much of a key is right."""
    sent = sent_keys(headers)
    verdicts = [any([hmac.compare_digest(key, good) for good in keys]) for key in sent]
    return bool(verdicts) and all(verdicts)


def is_loopback(host: str) -> bool:
    """Is this address, or the name localhost, one that only this machine reaches?"""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_name(value: str) -> str | None:
    """The name or address in a `Host` field, in lower case and without port; None for what is no host."""
    match = _HOST.fullmatch(value.lower())
    return match[1].rstrip(".") if match else None


def is_address(name: str) -> bool:
    """Is it an IP address, which no name server can turn to another?"""
    try:
        ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Is a host name among these, of which *.example.com stands for all below it, and * for any?"""
    return any(pattern == "*" or name == pattern or (pattern.startswith("*.") and name.endswith(pattern[1:]))
               for pattern in patterns)


def check_origins(origins: tuple[str, ...]) -> None:
    """Raise `ConfigError` for an entry of `--cors-origins` that no browser would ever send."""
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and (not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
            raise ConfigError(f"--cors-origins: {shown(origin)} is not an origin such as https://app.example.com, or * "
                              "for every page")


def check_hosts(hosts: tuple[str, ...]) -> None:
    """Raise `ConfigError` for an entry of `--allowed-hosts` that is no host name."""
    for host in hosts:
        if host != "*" and host_name(host.removeprefix("*.")) != host.removeprefix("*.").lower():
            raise ConfigError(f"--allowed-hosts: {shown(host)} is not a host name such as llm.example.com, without "
                              "port, or *.example.com for all below it, or * for any")


@dataclass(frozen=True)
class Access:
    """The rules of one server. hosts: names that it answers to, () = any."""

    keys: tuple[bytes, ...] = ()
    admin_keys: tuple[bytes, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def refusal(self, scope: Any) -> RequestError | None:
        """Why this request is not let in; None if it is."""
        headers, path = scope["headers"], scope["path"]
        if (error := self._wrong_host(headers)) or (error := self._foreign_page(scope)):
            return error
        if path in OPEN_PATHS or wants_page(scope["method"], path, headers):
            return None
        guarded = path in GUARDED_PATHS
        admin = guarded or path in ADMIN_PATHS
        every = self.keys + self.admin_keys if self.keys or admin and self.admin_keys else ()
        if every and not authorized(headers, every):
            return RequestError("the API key is missing or wrong; send it as `Authorization: Bearer KEY`", status=401,
                                kind="authentication_error")
        if guarded and not self.admin_keys:
            return forbidden(f"{path} lets its caller name files of this machine, and is off; start the server with an "
                             "admin key (ISTHMUS_ADMIN_API_KEY) to use it with that", "endpoint_off")
        return self.not_admin(headers, path) if admin else None

    def is_admin(self, headers: Headers) -> bool:
        """May who sent these do what concerns everybody? Without an admin key who has the only API key may, or, where
        no key is asked for, everybody."""
        return authorized(headers, self.admin_keys) if self.admin_keys else len(self.keys) < 2

    def not_admin(self, headers: Headers, what: str) -> RequestError | None:
        """The 403 for `what` if that needs an administrator and the sender is none."""
        if self.is_admin(headers):
            return None
        way = "send the admin key" if self.admin_keys else ("the server has several API keys, and none for "
                                                            "administration: set ISTHMUS_ADMIN_API_KEY")
        return forbidden(f"{what} concerns everybody who uses this server; {way}", "admin_key_required")

    def _wrong_host(self, headers: Headers) -> RequestError | None:
        sent = [value for key, value in headers if key == b"host"]
        if not self.hosts or not sent:  # no browser leaves it out
            return None
        name = host_name(sent[0].decode("latin-1")) if len(sent) == 1 else None
        local = name is not None and (name in LOCAL_NAMES or name.endswith(".localhost") or is_address(name))
        if name is not None and (local or matches(name, self.hosts)):
            return None
        return forbidden(f"this server does not answer to the host name {shown(sent[0].decode('latin-1'))}; if it is "
                         "its own, start it with --allowed-hosts and that name", "host_not_allowed")

    def _foreign_page(self, scope: Any) -> RequestError | None:
        """Browsers let every page send simple requests anywhere, with no leave asked. That may cost nothing."""
        if scope["method"] in SAFE_METHODS and scope["path"] not in ADMIN_PATHS | GUARDED_PATHS:
            return None
        fields = {key: value.decode("latin-1") for key, value in scope["headers"]
                  if key in (b"origin", b"sec-fetch-site", b"host")}
        origin, site = fields.get(b"origin"), fields.get(b"sec-fetch-site")
        if site is not None:
            foreign = site not in ("same-origin", "none")
        else:
            foreign = origin is not None and urlsplit(origin).netloc.lower() != fields.get(b"host", "").lower()
        if not foreign or "*" in self.origins or origin in self.origins:
            return None
        page = f"the page {shown(origin)}" if origin else "another web page"
        return forbidden(f"the request comes from {page}; if that may use this server, start it with --cors-origins",
                         "origin_not_allowed")


def forbidden(message: str, code: str) -> RequestError:
    """A 403."""
    return RequestError(message, status=403, code=code, kind="permission_error")


def access_of(settings: ServerSettings, name: Callable[[], str] = socket.gethostname) -> Access:
    """The rules that the settings make. Raises `ConfigError` for one that is wrong. name: this machine's.

    Where no key is asked for and only this machine can connect, a web page could still reach the server through its
    visitor's browser, by a name of its own that it turns to 127.0.0.1: then unknown names are refused by default.
    """
    check_origins(settings.cors_origins)
    check_hosts(settings.allowed_hosts)
    hosts = tuple(host.lower() for host in settings.allowed_hosts)
    if not hosts and is_loopback(settings.host) and settings.api_key is None:
        hosts = (name().lower(),)
    return Access(split_keys(settings.api_key), split_keys(settings.admin_api_key), () if "*" in hosts else hosts,
                  settings.cors_origins)
