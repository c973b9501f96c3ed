"""The API's description in a browser."""
from __future__ import annotations

from .page_server import PageServer
from .test_chat_page import HELLO, browser, opened, shot  # noqa: F401

COST = 5  # seconds


def test_the_api_is_described_for_people(browser):  # noqa: F811
    with PageServer(HELLO) as server:
        browser.open(server.url + "docs")
        browser.until(lambda: browser.js("return document.querySelectorAll('details').length") > 30, "no paths")
        chat = "document.querySelector('details[data-path=\"/v1/chat/completions\"]')"
        browser.js(f"{chat}.open = true")
        shot(browser, "docs")
        rows = browser.js(f"return [...{chat}.querySelectorAll('tr')].map(r => r.innerText)")
        assert [row.split("\t")[0] for row in rows[1:4]] == ["messages *", "model", "stream"]
        assert all(len(row.split("\t")) == 3 and row.split("\t")[2] for row in rows), "each has a meaning"
        assert any(row == "temperature\tnumber\tHow random: 0 takes the likeliest token always. From 0 to 2." for row in
                   rows), rows
        assert any(row.startswith("cache_hint\tobject") and "end_of_session" in row for row in rows)
        text = browser.js("return document.querySelector('#list').textContent")
        assert "`" not in text and "92233720" not in text
        command = browser.js(f"return {chat}.querySelector('pre').textContent")
        assert command.startswith(f"curl {server.url}v1/chat/completions") and '"role":"user"' in command
        browser.press("embed")
        shown = "return [...document.querySelectorAll('details:not([hidden])')].map(d => d.dataset.path)"
        browser.until(lambda: set(browser.js(shown)) == {"/v1/embeddings", "/api/embed", "/api/embeddings"},
                      "the search finds others")
        assert browser.errors == []
