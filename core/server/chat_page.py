"""`/` in a browser: a chat over this server's own API; `/docs` describes it. Their files load nothing from elsewhere.

Nothing is imported here that takes time: the page is there before the model is.
"""
from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources

TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
FOLDER = "/page/"
DOCUMENTS = {"chat.html": "/", "docs.html": "/docs"}
# Trusted Types: the browser itself refuses to make markup of a text.
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
          "trusted-types 'none'")
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
           "cache-control": "no-cache", "vary": "accept"}

Headers = Iterable[tuple[bytes, bytes]]


@cache
def files() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Path -> (bytes, headers) of every file of the pages."""
    found = {}
    for file in resources.files(__package__).joinpath("page").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind:
            path = DOCUMENTS.get(file.name, FOLDER + file.name)
            found[path] = (file.read_bytes(), {**HEADERS, "content-type": kind})
    return found


def wants_page(method: str, path: str, headers: Headers) -> bool:
    """Is a file of the pages asked for? At `/` only browsers get it: those who say that they take HTML."""
    if method not in ("GET", "HEAD") or path not in files():
        return False
    return path != "/" or any(name == b"accept" and b"text/html" in value.lower() for name, value in headers)
