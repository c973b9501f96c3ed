"""mlx-lm on the host's processors, in this process, one request at a time."""
from __future__ import annotations

import threading
import time

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
from workloads import Timing


class Mlx:
    """model: a folder of safetensors, as the package reads no GGUF of every type."""

    def __init__(self, model: str):
        self._model, _ = load(model)
        self._lock = threading.Lock()

    def generate(self, prompt: list[int], max_tokens: int) -> Timing:
        began, first, tokens = time.perf_counter(), 0.0, []
        with self._lock:
            for token, _ in generate_step(mx.array(prompt), self._model, max_tokens=max_tokens):
                tokens.append(int(token))
                last = time.perf_counter() - began
                first = first or last
        return Timing(first, last, tokens)

    def logprobs(self, prompt: list[int]) -> list[float]:
        logits = self._model(mx.array([prompt]))[0, :-1].astype(mx.float32)
        chosen = mx.take_along_axis(logits, mx.array(prompt[1:])[:, None], 1)[:, 0]
        return (chosen - mx.logsumexp(logits, axis=-1)).tolist()
