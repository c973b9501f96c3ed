"""A headless Chromium, driven through ChromeDriver's HTTP interface (W3C WebDriver), for tests of pages."""
from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .effort import SOON

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that WebDriver gives elements
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
         "--window-size=1200,900")
KEYS = {"tab": "\ue004", "enter": "\ue007", "space": "\ue00d", "escape": "\ue00c"}


class Browser:
    """One tab. Everything a page logs as an error is in `errors`."""

    def __init__(self, folder: Path):
        driver, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
        if driver is None or chromium is None:
            pytest.skip("a browser is needed: packages chromium and chromium-driver")
        self._process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                         text=True)
        port = None
        while port is None:
            line = self._process.stdout.readline()
            assert line, "chromedriver ended"
            port = re.search(r"started successfully on port (\d+)", line)
        self._base = f"http://127.0.0.1:{port[1]}"
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"]}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": {
            "timeouts": {"script": 100_000},  # ms
            "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}})
        self._base += f"/session/{made['sessionId']}"

    def close(self) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._process.kill()
            self._process.stdout.close()
            self._process.wait()

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(self._base + path, None if body is None else json.dumps(body).encode(),
                                         {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=SOON) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.loads(error.read())["value"]["message"].splitlines()[0]) from None

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def js(self, script: str, *arguments: Any) -> Any:
        """What the script returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, css: str) -> str:
        return self.js("return document.querySelector(arguments[0])?.textContent ?? ''", css)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true value of `condition`."""
        for _ in range(int(SOON * 20)):
            if found := condition():
                return found
            time.sleep(0.05)
        raise AssertionError(f"{what}; the page says: {self.text('body')[:2000]}")

    def press(self, *keys: str) -> None:
        """Keys one after the other, by name or as text, to whatever has the focus."""
        letters = [letter for key in keys for letter in (KEYS.get(key) or key)]
        actions = [{"type": kind, "value": letter} for letter in letters for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def scheme(self, name: str) -> None:
        """"light" or "dark"."""
        media = [{"name": "prefers-color-scheme", "value": name}]
        self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": media}})

    def width(self, pixels: int) -> None:
        self._call("POST", "/window/rect", {"width": pixels, "height": 900})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    @property
    def errors(self) -> list[str]:
        """What the page logged since the last look: failed loads, refused sources, uncaught errors."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]
