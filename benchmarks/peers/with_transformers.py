"""transformers, in this process: no HTTP, no tokenizer, so any overhead counts for it, not against.

`OneAtATime`: `generate`, one request at a time under a lock, as a simple server does. `Continuous`: its
continuous-batching manager with paged attention.
"""
from __future__ import annotations

import asyncio
import queue
import threading
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer
from workloads import Timing


def load(path: str, attention: str = "sdpa") -> torch.nn.Module:
    """The GGUF's weights in bf16."""
    file = Path(path)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    model.set_attn_implementation(attention)
    return model.eval()


def logprobs(model: torch.nn.Module, prompt: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(-1)
    return logits.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()


class _Clock(BaseStreamer):
    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        pass


class OneAtATime:
    """`model.generate`, one request after the other."""

    def __init__(self, path: str):
        self.model, self._lock = load(path), threading.Lock()

    def logprobs(self, prompt: list[int]) -> list[float]:
        return logprobs(self.model, prompt)

    def generate(self, prompt: list[int], max_tokens: int) -> Timing:
        began, clock = time.perf_counter(), _Clock()
        with self._lock, torch.inference_mode():
            ids = torch.tensor([prompt])
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens,
                                      min_new_tokens=max_tokens, do_sample=False, streamer=clock, pad_token_id=2)
        return Timing(clock.times[0] - began, clock.times[-1] - began, out[0, len(prompt):].tolist())


class Continuous:
    """transformers' continuous batching."""

    def __init__(self, path: str, page_size: int = 16, pages: int = 4096, step_tokens: int = 512):
        self.model = load(path)
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=2, max_new_tokens=128)
        config = ContinuousBatchingConfig(num_blocks=pages, page_size=page_size, max_batch_tokens=step_tokens)
        self._manager = self.model.init_continuous_batching(generation_config=generation,
                                                            continuous_batching_config=config)
        self._manager.start()
        self._lock, self._count = threading.Lock(), 0
        self._loop = asyncio.new_event_loop()  # results are handed over in a running loop
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def generate(self, prompt: list[int], max_tokens: int) -> Timing:
        with self._lock:
            self._count += 1
            name = f"r{self._count}"
        events: queue.Queue = queue.Queue()

        async def listen() -> None:
            self._manager.register_result_handler(name, lambda out: events.put((time.perf_counter(), out)))

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result()
        began = time.perf_counter()
        self._manager.add_request(prompt, request_id=name, max_new_tokens=max_tokens, streaming=True, eos_token_id=-1)
        first = last = 0.0
        while True:
            now, out = events.get(timeout=600)
            if out.error:
                raise RuntimeError(out.error)
            if out.generated_tokens:
                first, last = first or now - began, now - began
            if out.is_finished():
                return Timing(first, last, list(out.generated_tokens))

    def logprobs(self, prompt: list[int]) -> list[float]:
        return logprobs(self.model, prompt)
