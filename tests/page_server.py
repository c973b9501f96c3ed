"""A server for tests of the chat page: its files, and answers that a test has planned, chunk by chunk."""
from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from isthmus.core.server.app import ROUTES
from isthmus.core.server.chat_page import files
from isthmus.core.server.openapi import describe

from .effort import SOON

INFO = {"served_model_name": "planned", "version": "1", "info": {
    "platform": "paper", "device": "a sheet", "dtype": "bf16", "max_model_len": 4096, "weight_bytes": 2**30,
    "kv_bytes": 2**20, "sampling_defaults": {"temperature": 0.25}, "report": []}}
USAGE = {"prompt_tokens": 96, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 80}}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def end(reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


class PageServer:
    """plans: one list of events for each answer, the last for all further ones; an event may be a `threading.Event`
    that is waited for, or (status, body) as the first: a refusal. health: what /health says, with its status. asked:
    bodies of requests."""

    def __init__(self, *plans: list[Any]):
        self.plans, self.asked, self.health = list(plans), [], (200, {"status": "ok"})
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                if self.path in files():
                    return self.reply(200, *files()[self.path])
                if self.path == "/openapi.json":
                    body = json.dumps(describe(ROUTES, False)).encode()
                    return self.reply(200, body, {"content-type": "application/json"})
                status, body = {"/v1/models": (200, {"data": [{"id": "planned"}]}), "/server_info": (200, INFO),
                                "/health": outer.health}.get(self.path, (404, {}))
                self.reply(status, json.dumps(body).encode(), {"content-type": "application/json"})

            def do_POST(self):
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                plan = outer.plans.pop(0) if len(outer.plans) > 1 else outer.plans[0]
                if isinstance(plan[0], tuple):
                    status, body = plan[0]
                    return self.reply(status, json.dumps(body).encode(), {"content-type": "application/json"})
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                try:
                    for event in plan:
                        if isinstance(event, threading.Event):
                            event.wait(SOON)
                            continue
                        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                        self.wfile.flush()
                    self.wfile.write(b"data: [DONE]\n\n")
                except OSError:
                    pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> PageServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
