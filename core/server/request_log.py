"""One line for each answered request: what was asked of whom, how it ended and what it cost; its contents only where
the server's owner has asked for them."""
from __future__ import annotations

import json
import logging
import time
from typing import Any

from starlette.types import Scope

from .errors import error_code

log = logging.getLogger("isthmus.request")

GONE = 499       # the client hung up before there was an answer
MAX_WORD = 200   # characters of a path or id that the client chose


def log_request(scope: Scope, request_id: str, status: int | None, began: float, contents: bool = False) -> None:
    """Log a request that has ended: at level info when it was a POST, else (probes, metrics, pages) at level debug.

    began: when it arrived, by `time.perf_counter`. An endpoint that generates leaves its `Generation` in the state, one
    that fails its `RequestError`, of which only code and param are told: the message may quote the request. contents:
    also the beginnings of prompts and answers.
    """
    level = logging.INFO if scope["method"] == "POST" else logging.DEBUG
    if not log.isEnabledFor(level):
        return
    now, state = time.perf_counter(), scope.get("state", {})
    what = f"{scope['method']} {plain(scope['path'])} {status or GONE}"
    fields: dict[str, Any] = {}
    if (generation := state.get("generation")) is not None:
        usage = generation.usage()
        fields = {"id": plain(generation.id),
                  "finish": ",".join(sorted({choice.finish or "unfinished" for choice in generation.choices})),
                  "prompt": usage.prompt_tokens, "cached": usage.prompt_tokens_details.cached_tokens,
                  "output": usage.completion_tokens}
        if generation.first is not None:
            fields["ttft"] = Seconds(round(generation.first - began, 6))
        if contents:
            fields |= {"prompt_text": Quoted(generation.asked_text()), "output_text": Quoted(generation.said_text())}
    if (error := state.get("error")) is not None:
        fields |= {"code": error_code(error), **({"param": plain(error.param)} if error.param else {})}
    if ignored := state.get("ignored"):
        fields["ignored"] = plain(",".join(ignored))
    fields |= {"seconds": Seconds(round(now - began, 6)), "request": request_id}
    words = " ".join(f"{'time' if name == 'seconds' else name}={value}" for name, value in fields.items())
    log.log(level, "%s %s", what, words, extra={"what": what, "fields": {
        "method": scope["method"], "path": plain(scope["path"]), "status": status or GONE, **fields}})


class Seconds(float):
    """Shown as "0.125s"."""

    def __str__(self) -> str:
        return f"{self:.3f}s"


class Quoted(str):
    """Shown as a JSON string, on one line."""

    def __str__(self) -> str:
        return json.dumps(self[:], ensure_ascii=False)


def plain(text: str) -> str:
    """What a client chose, on one line and without blanks."""
    return text[:MAX_WORD].encode("unicode_escape").decode().replace(" ", "%20")
