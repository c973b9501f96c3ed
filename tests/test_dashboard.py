"""`/dashboard` in a browser, over the real server on the platform without a device."""
from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from isthmus.core.server.dashboard import page
from starlette.testclient import TestClient

from .browser import Browser
from .checkpoints import tiny_llama_gguf
from .fake_client import make_app
from .test_cli_serve import Serving

COST = 30  # seconds

SHOTS = os.environ.get("SCREENSHOTS")  # a folder, to look at


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture
def serving(tiny, tmp_path):
    with Serving(tiny, "--in-process", temporary=tmp_path, delay_ms=60) as server:
        yield server


@pytest.fixture
def locked(tiny, tmp_path):
    with Serving(tiny, "--in-process", "--api-key", "sekret", temporary=tmp_path) as server:
        yield server


def shot(browser: Browser, name: str) -> None:
    if SHOTS:
        browser.screenshot(Path(SHOTS) / f"{name}.png")


def test_numbers_come_and_go_on_coming(serving, browser):
    browser.open(f"http://{serving.address}/dashboard")
    browser.until(lambda: browser.text("#running") == "0", "no numbers")
    stream = serving.stream(240)  # takes 14 s
    browser.until(lambda: browser.text("#running") == "1", "a running request is not shown")
    speed = browser.until(lambda: float(browser.text("#generated").replace("–", "0").replace(",", "")), "no speed")
    assert 0 < speed < 1000
    browser.until(lambda: " ms, " in browser.text("#step"), "no time of a step")
    assert browser.js("return [...document.querySelectorAll('#table-step tr')].map(r => r.cells[0].textContent)") == [
        "schedule: plan, build the batch", "device: launch, wait for it", "finish: take in the result"]
    pages = browser.js("return [...document.querySelectorAll('#table-pages tr')].map(r => +r.cells[2].textContent"
                       ".replace(',', ''))")
    total = json.loads(serving.ask("GET", "/server_info").read())["stats"]["pages_total"]
    assert len(pages) == 5 and sum(pages) == total and pages[0] + pages[1] > 0
    assert browser.until(lambda: browser.js("return document.querySelectorAll('svg[role=img]').length") == 3,
                         "sparklines are missing")
    assert "now " in browser.js("return document.querySelector('#spark-tokens svg').getAttribute('aria-label')")
    stream.read()
    browser.until(lambda: browser.text("#running") == "0" and browser.text("#finished") == "1", "the end is not shown")
    assert browser.text("#state") == "healthy" and "tiny" in browser.text("#place").lower() + "tiny"
    assert browser.errors == []


def test_it_loads_nothing_from_anywhere_else(serving, browser):
    browser.open(f"http://{serving.address}/dashboard")
    browser.until(lambda: browser.text("#running") == "0", "no numbers")
    loaded = browser.js("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded and all(name.startswith(f"http://{serving.address}/server_info") for name in loaded), loaded


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_it_can_be_read_in_light_and_dark(serving, browser, scheme):
    browser.scheme(scheme)
    browser.open(f"http://{serving.address}/dashboard")
    browser.until(lambda: browser.text("#running") == "0", "no numbers")
    streams = [serving.stream(240) for _ in range(3)]
    browser.until(lambda: " ms, " in browser.text("#step"), "no time of a step")
    browser.until(lambda: browser.js("return past.tokens.length > 5"), "no history")
    shot(browser, scheme)
    low = [entry for entry in browser.js(CONTRASTS) if entry[1] < 4.5]
    assert not low, low
    for stream in streams:
        stream.close()


CONTRASTS = """
const light = (color) => {
  const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((v) => {
    v = v / 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (!/, 0\\)$/.test(color)) return color; }
  return "rgb(255, 255, 255)"; };
return [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility() && [...node.childNodes].some(
  (child) => child.nodeType === 3 && child.textContent.trim())).map((node) => {
  const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
  return [node.textContent.trim().slice(0, 30), (a + 0.05) / (b + 0.05)]; });
"""


def test_a_narrow_window_needs_no_scrolling_sideways(serving, browser):
    browser.width(420)
    try:
        browser.open(f"http://{serving.address}/dashboard")
        browser.until(lambda: browser.text("#running") == "0", "no numbers")
        shot(browser, "narrow")
        assert browser.js("return document.documentElement.scrollWidth <= innerWidth")
    finally:
        browser.width(1200)


def test_everything_can_be_done_with_the_keyboard(serving, browser):
    browser.open(f"http://{serving.address}/dashboard")
    browser.until(lambda: browser.text("#running") == "0", "no numbers")
    browser.press("tab")
    assert browser.js("return document.activeElement.id") == "interval"
    assert browser.js("return getComputedStyle(document.activeElement).outlineStyle") != "none"
    browser.press("tab")
    assert browser.js("return document.activeElement.id") == "pause"
    browser.press("space")
    assert browser.text("#pause") == "Go on" and browser.text("#state") == "paused"
    assert browser.js("return document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
    count = "return performance.getEntriesByType('resource').length"

    def still():  # an answer may be under way; while it is not paused it asks every second
        before = browser.js(count)
        time.sleep(1.5)
        return browser.js(count) == before
    browser.until(still, "it is not paused")
    before = browser.js(count)
    serving.stream(3).read()
    assert browser.js(count) == before
    browser.press("enter")
    browser.until(lambda: browser.text("#finished") == "1", "it does not go on")


def test_the_key_is_asked_for_and_kept_for_the_tab_alone(locked, browser):
    url = f"http://{locked.address}/dashboard"
    browser.open(url)
    browser.until(lambda: browser.js("return document.querySelector('#ask').open"), "the key is not asked for")
    assert browser.js("return document.activeElement.id") == "key"
    shot(browser, "key")
    browser.press("wrong", "enter")
    browser.until(lambda: browser.js("return !document.querySelector('#wrong').hidden"), "a wrong key is not told")
    browser.press("sekret", "enter")
    browser.until(lambda: browser.text("#running") == "0", "no numbers")
    assert browser.js("return !document.querySelector('#ask').open")
    browser.open(url)
    browser.until(lambda: browser.text("#running") == "0", "the key is forgotten")
    assert browser.js("return [localStorage.length, document.cookie]") == [0, ""]
    assert "sekret" not in browser.js("return document.documentElement.outerHTML")
    browser.js("document.querySelector('#forget').click()")
    browser.until(lambda: browser.js("return document.querySelector('#ask').open"), "the key is not forgotten")
    assert browser.js("return sessionStorage.length") == 0


def test_a_server_that_goes_away_is_told(serving, browser):
    browser.open(f"http://{serving.address}/dashboard")
    browser.until(lambda: browser.text("#running") == "0", "no numbers")
    serving.process.kill()
    browser.until(lambda: browser.text("#state") == "the server does not answer", "its end is not told")
    assert browser.js("return document.querySelector('#state').className") == "bad"


# ---- without a browser


def test_the_page_is_open_and_its_numbers_are_not():
    http = TestClient(make_app(server={"api_key": "sekret"}).app)
    answer = http.get("/dashboard")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert http.get("/server_info").status_code == 401
    assert http.post("/dashboard").status_code in (401, 405)
    assert http.get("/dashboard/").status_code == 401


def test_only_its_own_script_may_run():
    html, headers = page()
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/=]{44}'", policy["script-src"])
    assert policy["connect-src"] == "'self'" and "unsafe" not in headers["content-security-policy"]
    assert b"innerHTML" not in html and html.count(b"<script") == 1
    assert set(re.findall(rb"https?://[^\"' ]+", html)) == {b"http://www.w3.org/2000/svg"}
