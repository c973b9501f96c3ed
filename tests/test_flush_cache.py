"""`/flush_cache` while requests run: the device of the null platform notices every page that changes hands too soon."""
from __future__ import annotations

import json
import threading

import pytest

from .checkpoints import tiny_llama_gguf
from .test_cli_serve import Serving

COST = 10  # seconds

PROMPTS = [f"{'the same beginning of all of them ' * 3}{i} {'and its own end ' * (i % 3)}" for i in range(12)]


def complete(server: Serving, prompt: str, tokens: int) -> tuple[str, int]:
    answer = server.ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": tokens, "temperature": 0,
                                                    "ignore_eos": True})
    body = json.loads(answer.read())
    assert answer.status == 200, body
    return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def stats(server: Serving) -> dict:
    return json.loads(server.ask("GET", "/server_info").read())["stats"]


@pytest.mark.parametrize("words", ([], ["--in-process"]))
def test_flushing_under_load_changes_no_answer(tmp_path, words):
    model = str(tiny_llama_gguf(tmp_path / "tiny.gguf"))
    with Serving(model, *words, temporary=tmp_path, delay_ms=1) as server:
        right = [complete(server, prompt, 20)[0] for prompt in PROMPTS]
        got: dict[int, list[str]] = {i: [] for i in range(len(PROMPTS))}
        stop, flushed, statuses = threading.Event(), [], set()

        def ask(i: int) -> None:
            for n in range(1000):
                if n >= 4 and len(flushed) > 10 and sum(flushed):
                    break
                got[i].append(complete(server, PROMPTS[i], 20)[0])

        def flush() -> None:
            while not stop.is_set():
                for method, path in (("POST", "/flush_cache"), ("GET", "/flush_cache?timeout=30")):
                    answer = server.ask(method, path)
                    statuses.add(answer.status)
                    flushed.append(json.loads(answer.read())["flushed_pages"])

        flusher = threading.Thread(target=flush)
        flusher.start()
        askers = [threading.Thread(target=ask, args=(i,)) for i in got]
        for thread in askers:
            thread.start()
        for thread in askers:
            thread.join()
        stop.set()
        flusher.join()
        assert all(len(texts) >= 4 and set(texts) == {right[i]} for i, texts in got.items())
        assert statuses == {200} and sum(flushed) > 0 and len(flushed) > 10
        left = stats(server)
        assert left["ownership_violations"] == 0 and left["finish_reasons"] == {
            "length": len(PROMPTS) + sum(map(len, got.values()))}
        assert left["pages_free"] + left["pages_cached"] == left["pages_total"]
        server.ask("POST", "/flush_cache").read()
        assert stats(server)["pages_free"] == left["pages_total"]
        assert complete(server, PROMPTS[0], 1)[1] == 0 and complete(server, PROMPTS[0], 1)[1] > 0
