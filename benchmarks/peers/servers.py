"""Peers that are servers of their own, Isthmus among them: started for a round, asked over HTTP as clients would."""
from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
from isthmus.core.bench.servers import Started
from workloads import WORKLOADS, Figures, Timing


@dataclass(frozen=True)
class Asked:
    """How a server is asked for a completion. ids: prompt and answer as token ids; answers(event) -> (ids, cached)."""

    path: str
    fields: dict[str, Any]
    limit: str

    def body(self, prompt: list[int], max_tokens: int) -> str:
        return json.dumps({"prompt": prompt, self.limit: max_tokens, "temperature": 0, "ignore_eos": True,
                           "stream": True, **self.fields})

    def answers(self, event: dict[str, Any]) -> tuple[list[int], int | None]:
        choices = event.get("choices")
        if choices is None:  # llama-server's own form
            return event.get("tokens") or [], (event.get("timings") or {}).get("cache_n")
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        return (choices[0].get("token_ids") or [] if choices else []), details.get("cached_tokens")


OPENAI = Asked("/v1/completions", {"return_token_ids": True, "stream_options": {"include_usage": True}}, "max_tokens")
LLAMA = Asked("/completion", {"return_tokens": True, "cache_prompt": True}, "n_predict")


class Server:
    """A running server. close() ends it."""

    def __init__(self, command: str, asked: Asked, environment: dict[str, str] | None = None):
        self._started, self._asked = Started(command, environment=environment), asked
        self.ready_s = self._started.ready_s
        self._fields = {} if asked is LLAMA else {"model": self._model()}

    def _model(self) -> str:
        return self._get("/v1/models")["data"][0]["id"]

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._started.port, timeout=1800)

    def _get(self, path: str) -> dict[str, Any]:
        connection = self._connection()
        connection.request("GET", path)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def _post(self, path: str, body: str) -> http.client.HTTPResponse:
        connection = self._connection()
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read()!r}")
        return response

    def generate(self, prompt: list[int], max_tokens: int) -> Timing:
        """One streamed completion, greedy, end of text ignored."""
        body = self._asked.body(prompt, max_tokens)
        if self._fields:
            body = json.dumps(json.loads(body) | self._fields)
        began, first, last = time.perf_counter(), 0.0, 0.0
        tokens: list[int] = []
        cached = None
        for event in events(self._post(self._asked.path, body)):
            fresh, said = self._asked.answers(event)
            # llama-server keeps tokens back that end within a character, and tells only how many there were
            fresh = fresh or [prompt[-1]] * (event.get("tokens_predicted", 0) - len(tokens) if event.get("stop") else 0)
            if fresh:
                last = time.perf_counter() - began
                first = first or last
            tokens += fresh
            cached = said if said is not None else cached
        if len(tokens) != max_tokens:
            raise RuntimeError(f"{len(tokens)} tokens instead of {max_tokens}")
        return Timing(first, last, tokens, cached)

    def run(self, workload: str, seed: int) -> Figures:
        return WORKLOADS[workload](self.generate, seed)

    def logprobs(self, prompt: list[int]) -> list[float]:
        """Natural logarithms of the probabilities of every token but the first."""
        body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0, **self._fields}
        answer = json.loads(self._post("/v1/completions", json.dumps(body)).read())
        return answer["choices"][0]["logprobs"]["token_logprobs"][1:len(prompt)]

    def cpu_seconds(self) -> float:
        return self._started.cpu_seconds()

    def resident(self) -> int:
        return self._started.resident()

    def close(self) -> None:
        self._started.close()


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
    response.close()


def perplexity(running: Any, texts: list[list[int]]) -> float:
    """exp of the mean surprise of all tokens but the first of each text."""
    values = [value for text in texts for value in running.logprobs(text)]
    return math.exp(-sum(values) / len(values))


def busy_seconds() -> float:
    """Of all cores of the machine, so far, by anybody."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system
