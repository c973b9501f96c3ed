"""One line for each answered request: what was asked of whom, how it ended and what it cost; never its contents."""
from __future__ import annotations

import logging
import time

from starlette.types import Scope

log = logging.getLogger("isthmus.request")

GONE = 499       # the client hung up before there was an answer
MAX_WORD = 200   # characters of a path or id that the client chose


def log_request(scope: Scope, request_id: str, status: int | None, began: float) -> None:
    """Log a request that has ended: at level info when it was a POST, else (probes, metrics, pages) at level debug.

    began: when it arrived, by `time.perf_counter`. An endpoint that generates leaves its `Generation` in the state.
    """
    level = logging.INFO if scope["method"] == "POST" else logging.DEBUG
    if not log.isEnabledFor(level):
        return
    now = time.perf_counter()
    words = [f"{scope['method']} {_plain(scope['path'])} {status or GONE}"]
    generation = scope.get("state", {}).get("generation")
    if generation is not None:
        usage = generation.usage()
        finish = ",".join(sorted({choice.finish or "unfinished" for choice in generation.choices}))
        words.append(f"id={_plain(generation.id)} finish={finish} prompt={usage.prompt_tokens} "
                     f"cached={usage.prompt_tokens_details.cached_tokens} output={usage.completion_tokens}")
        if generation.first is not None:
            words.append(f"ttft={generation.first - began:.3f}s")
    words.append(f"time={now - began:.3f}s request={request_id}")
    log.log(level, "%s", " ".join(words))


def _plain(text: str) -> str:
    """What a client chose, on one line and without blanks."""
    return text[:MAX_WORD].encode("unicode_escape").decode().replace(" ", "%20")
