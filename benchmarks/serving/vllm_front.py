"""vLLM's front end on an engine that only pretends, for `front.py --peer`: its API server, chat template, tokenizer,
output processor, detokenizer and SSE, all in one process as they are, and tokens from a table.

    python vllm_front.py MODEL_FOLDER STEP_MS CONNECTIONS --port N      (in an environment that has vLLM)

The engine core is replaced where its client is made, so that neither ZMQ nor msgpack is in the figure, which favours
vLLM. MODEL_FOLDER has config.json, tokenizer.json and tokenizer_config.json; there are no weights.
"""
from __future__ import annotations

import asyncio
import random
import sys
import time
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient


class Pretended:
    """Stands for the client of an engine core: each step one token for every request."""

    def __init__(self, step_s: float):
        self.step_s, self.next = step_s, 0.0
        self.left: dict[str, int] = {}
        self.came = asyncio.Event()
        self.engine_ranks_managed, self.resources = [0], SimpleNamespace(engine_dead=False)
        rng = random.Random(0)
        self.tokens = [rng.randrange(1000) for _ in range(4096)]

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        self.left[request.request_id] = request.sampling_params.max_tokens
        self.came.set()

    async def abort_requests_async(self, ids: list[str]) -> None:
        for id in ids:
            self.left.pop(id, None)

    async def get_output_async(self) -> EngineCoreOutputs:
        while not self.left:
            self.came.clear()
            await self.came.wait()
        now = time.monotonic()
        await asyncio.sleep(max(0.0, self.next - now))
        self.next = max(now, self.next) + self.step_s
        outputs = []
        for at, (id, left) in enumerate(list(self.left.items())):
            last = left == 1
            token = self.tokens[(31 * at + left) % len(self.tokens)]
            outputs.append(EngineCoreOutput(id, [token], finish_reason=FinishReason.LENGTH if last else None))
            self.left[id] = left - 1
            if last:
                del self.left[id]
        return EngineCoreOutputs(outputs=outputs)

    def dp_engines_running(self) -> bool:
        return bool(self.left)

    def __getattr__(self, name: str) -> Any:
        async def answer(*args: Any, **more: Any) -> None:
            return None
        return answer if name.endswith("_async") else lambda *args, **more: None


def main() -> None:
    model, step_ms, connections, *rest = sys.argv[1:]
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *args, **more: Pretended(float(step_ms) / 1e3))
    sys.argv = ["vllm", "serve", model, "--served-model-name", "peer", "--load-format", "dummy", "--dtype", "bfloat16",
                "--max-num-seqs", connections, "--max-model-len", "256", "--disable-uvicorn-access-log", *rest]
    from vllm.entrypoints.cli.main import main as serve
    serve()


if __name__ == "__main__":
    main()
