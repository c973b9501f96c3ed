"""The chat page's files, without a browser: who gets them, under which policy, and that they load nothing else."""
from __future__ import annotations

import re

from isthmus.core.server.chat_page import POLICY, files, wants_page
from starlette.testclient import TestClient

from .fake_client import make_app

COST = 2  # seconds


def test_browsers_get_the_page_and_clients_the_list():
    http = TestClient(make_app(server={"api_key": "sekret"}).app)
    page = http.get("/", headers={"accept": "text/html,application/xhtml+xml"})
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == POLICY and "unsafe" not in POLICY
    assert http.get("/").status_code == 401, "what the list tells needs the key"
    listed = http.get("/", headers={"authorization": "Bearer sekret"})
    assert listed.json()["name"] == "Isthmus" and "/v1/chat/completions" in listed.json()["endpoints"]
    for name in files():
        if name != "/":
            assert http.get(name).status_code == 200
    assert http.get("/page/nothing.js").status_code == 401
    assert http.get("/page/nothing.js", headers={"authorization": "Bearer sekret"}).status_code == 404
    assert not wants_page("POST", "/", [(b"accept", b"text/html")])


def test_the_page_loads_its_own_files_alone_and_parses_no_text():
    for name, (content, headers) in files().items():
        assert headers["x-content-type-options"] == "nosniff"
        for word in (b"innerHTML", b"outerHTML", b"insertAdjacentHTML", b"document.write", b"eval(", b"http://"):
            assert word not in content, f"{name} has {word}"
    document = files()["/"][0].decode()
    asked = set(re.findall(r"(?:src|href)=\"([^\"#]+)\"", document)) - {"data:,"}
    assert {"page/chat.css", "page/chat.js"} <= asked and not any(":" in address for address in asked)
