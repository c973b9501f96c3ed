"""openvino-genai's continuous batching with its prefix cache, in this process."""
from __future__ import annotations

import queue
import threading
import time

import numpy as np
import openvino
import openvino_genai
from openvino_genai.py_openvino_genai import GenerationStatus
from workloads import Timing


class OpenVino:
    """A thread takes what came and calls `step` while anything runs."""

    def __init__(self, model: str):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = 1, True  # GB
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 64, 2048
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {})
        self._asked: queue.Queue = queue.Queue()
        self._count = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def generate(self, prompt: list[int], max_tokens: int) -> Timing:
        answer: queue.Queue = queue.Queue()
        began = time.perf_counter()
        self._asked.put((prompt, max_tokens, answer))
        stamps, tokens = answer.get()
        if len(tokens) != max_tokens:
            raise RuntimeError(f"{len(tokens)} tokens instead of {max_tokens}")
        return Timing(stamps[0] - began, stamps[1] - began, tokens)

    def logprobs(self, prompt: list[int]) -> list[float]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.echo, config.logprobs, config.do_sample = 1, True, 1, False
        config.apply_chat_template = False
        self._count += 1
        handle = self._pipeline.add_request(self._count, _ids(prompt), config)
        values: list[float] = []
        while handle.get_status() == GenerationStatus.RUNNING or handle.can_read():
            if handle.can_read():
                for output in handle.read().values():
                    values += list(output.generated_log_probs)
            else:
                self._pipeline.step()
        return values[1:len(prompt)]

    def _serve(self) -> None:
        running: list[list] = []
        while True:
            while not running or not self._asked.empty():
                prompt, max_tokens, answer = self._asked.get()
                self._count += 1
                handle = self._pipeline.add_request(self._count, _ids(prompt), _greedy(max_tokens))
                running.append([handle, answer, [0.0, 0.0], []])
            self._pipeline.step()
            now, kept = time.perf_counter(), []
            for item in running:
                handle, answer, stamps, tokens = item
                while handle.can_read():
                    for output in handle.read().values():
                        tokens += list(output.generated_ids)
                        stamps[:] = stamps[0] or now, now
                if handle.get_status() == GenerationStatus.RUNNING:
                    kept.append(item)
                else:
                    answer.put((stamps, tokens))
            running = kept


def _ids(prompt: list[int]) -> openvino.Tensor:
    return openvino.Tensor(np.array([prompt], np.int64))


def _greedy(max_tokens: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = max_tokens
    config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
    return config
