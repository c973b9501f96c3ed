"""transformers on the same weights, in this process: no HTTP, no tokenizer, so any overhead counts for it, not against.

`generate`: one request at a time under a lock, as a simple server does. `batch`: one static batch, equal lengths.
`continuous`: its continuous-batching manager with paged attention.
"""
from __future__ import annotations

import asyncio
import queue
import threading
import time
from pathlib import Path

import torch
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.platforms.expand import expand
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer
from workloads import Timing


def load(path: Path, dtype: torch.dtype, attention: str = "sdpa") -> LlamaForCausalLM:
    """The GGUF's weights, dequantized, in a transformers model."""
    with open_checkpoint(path) as checkpoint:
        config = LlamaConfig(**{k: v for k, v in checkpoint.config.items() if k != "architectures"})
        model = LlamaForCausalLM(config)
        state = {name: torch.from_numpy(expand(checkpoint.tensor(name))) for name in checkpoint.names}
    missing, extra = model.load_state_dict(state, strict=False)
    assert not extra and set(missing) <= {"lm_head.weight"}, (missing, extra)
    model.tie_weights()
    model.set_attn_implementation(attention)
    return model.to(dtype).eval()


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

    def __init__(self, model: LlamaForCausalLM):
        self.model, self._lock = model, threading.Lock()

    def generate(self, prompt: list[int], max_tokens: int) -> Timing:
        began, clock = time.perf_counter(), _Clock()
        with self._lock, torch.inference_mode():
            ids = torch.tensor([prompt])
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens,
                                      min_new_tokens=max_tokens, do_sample=False, streamer=clock, pad_token_id=2)
        return Timing(clock.times[0] - began, clock.times[-1] - began, out[0, len(prompt):].tolist())

    def batch(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds for one static batch of prompts of equal length."""
        began, ids = time.perf_counter(), torch.tensor(prompts)
        with torch.inference_mode():
            self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens,
                                min_new_tokens=max_tokens, do_sample=False, pad_token_id=2)
        return time.perf_counter() - began


class Continuous:
    """transformers' continuous batching."""

    def __init__(self, model: LlamaForCausalLM, page_size: int = 16, pages: int = 4096, step_tokens: int = 512):
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=2, max_new_tokens=128)
        config = ContinuousBatchingConfig(num_blocks=pages, page_size=page_size, max_batch_tokens=step_tokens)
        self._manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
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

    def close(self) -> None:
        self._manager.stop(block=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
