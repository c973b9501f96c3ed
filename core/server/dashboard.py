"""`/dashboard`: the numbers of `isthmus top` in a browser. One file, which loads nothing from anywhere."""
from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from .context import Server


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers: nothing but its own script and style runs, and it talks to this server alone."""
    html = resources.files(__package__).joinpath("dashboard.html").read_bytes()
    sources = {}
    for kind, tag in (("script-src", b"script"), ("style-src", b"style")):
        inside = re.search(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
        assert inside is not None
        sources[kind] = f"'sha256-{base64.b64encode(hashlib.sha256(inside[1]).digest()).decode()}'"
    policy = (f"default-src 'none'; script-src {sources['script-src']}; style-src {sources['style-src']}; "
              "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
    return html, {"content-security-policy": policy, "x-content-type-options": "nosniff",
                  "referrer-policy": "no-referrer", "cache-control": "no-cache"}


async def dashboard(server: Server, request: Request) -> Response:
    """The page, to everybody: it holds no number, and asks for the key before it asks for any."""
    html, headers = page()
    return Response(html, headers=headers, media_type="text/html; charset=utf-8")
